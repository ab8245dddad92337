"""Tests of rein.files, which opens the untrusted files of runs."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

import rein
from rein import files as safe
from rein.errors import StoreError

STORES = Path(rein.__file__).parent / "store"


def test_regular_file_is_opened(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    assert safe.read_file(tmp_path / "file") == b"content"
    with pytest.raises(FileNotFoundError):
        safe.read_file(tmp_path / "none")


@pytest.mark.skipif(os.name != "posix", reason="needs links and pipes")
@pytest.mark.parametrize("mode", ["rb", "a+b", "wb"])
def test_links_pipes_folders_and_large_files_raise(tmp_path, mode):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "broken").symlink_to("nothing")
    os.mkfifo(tmp_path / "pipe")
    reasons = {"link": "symbolic link", "broken": "symbolic link", "pipe": "regular file", ".": "regular file"}
    for name, reason in {**reasons, "file": "at most 3"}.items():
        with pytest.raises(OSError, match=reason):
            safe.open_file(tmp_path / name, mode, limit=3)
    assert (tmp_path / "file").read_bytes() == b"content"
    assert not (tmp_path / "nothing").exists()


def test_linked_folder_inside_run_raises(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "best").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert safe.inside(tmp_path / "link", "checkpoints") == tmp_path / "link" / "checkpoints"  # the user gave the link
    with pytest.raises(StoreError, match="symbolic link"):
        safe.inside(tmp_path / "run", "checkpoints", "best")


@pytest.mark.parametrize("depth", [200, 5_000, 1_000_000])
@pytest.mark.parametrize("ends", ["[]", ('{"a":', "}")], ids=["lists", "objects"])
def test_deeply_nested_json_raises(depth, ends):
    text = ends[0] * depth + ("1" if ends[0] != "[" else "") + ends[1] * depth
    with pytest.raises(ValueError, match="nested"):
        safe.decode_json(text)


def test_stores_use_open_file():
    opens = set()
    for path in STORES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", None))
                plain_open = isinstance(node.func, ast.Name) and name == "open"
                if plain_open or name in ("read_bytes", "read_text", "write_bytes", "write_text"):
                    opens.add(path.name)
    assert opens == set(), "use rein.files.open_file"
