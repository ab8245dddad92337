"""Files from anybody: whatever stands in them, with a hash that is right, reading them is a StoreError at worst."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from rein.errors import StoreError
from rein.store.format import image, parse, scan
from rein.store.format.files import USER_BLOCK, user_block, write_whole
from rein.store.hdf5 import HDF5Store
from rein.store.reader import open_run
from rein.testing.store import assert_equal, make_trajectory
from rein.types import Trajectory

NAME = "000001-000002.h5"


@pytest.fixture
def given() -> list[Trajectory]:
    return [make_trajectory(epoch, steps=300) for epoch in (1, 2)]


@pytest.fixture
def path(tmp_path: Path, given: list[Trajectory]) -> Path:
    store = HDF5Store(tmp_path / "run")
    for trajectory in given:
        store.append(trajectory)
    store.close()
    return store.path


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: Any) -> None:
    """As if another process had written the files."""
    monkeypatch.setattr(scan, "_known", {})
    monkeypatch.setattr(scan, "is_own", lambda block: False)


def seal(path: Path, content: bytes) -> Path:
    path.write_bytes(user_block(len(content) - USER_BLOCK, hashlib.sha256(content[USER_BLOCK:]).hexdigest()))
    with path.open("ab") as file:
        file.write(content[USER_BLOCK:])
    return path


def changed(path: Path, change: Callable[[Any], None]) -> Path:
    """The file with something changed by HDF5, and a right hash again."""
    with h5py.File(path, "r+") as file:
        change(file)
    return seal(path, path.read_bytes())


def read_all(path: Path) -> Any:
    run = open_run(path)
    for name in run.fields:
        run.field(name)
    run.transitions()[:16]
    return [run.trajectory(epoch) for epoch in run.epochs["number"]]


def test_a_file_is_parsed_in_a_child_and_not_here(path, given, monkeypatch):
    monkeypatch.setattr(h5py, "File", lambda *a, **k: pytest.fail("HDF5's parser was asked in this process"))
    assert_equal(read_all(path), given)


def test_a_trusted_file_is_parsed_here_and_reads_the_same(path, given, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a child was started"))
    run = open_run(path, trusted=True)
    assert_equal([run.trajectory(epoch) for epoch in (1, 2)], given)


@pytest.mark.parametrize("locking", [None, True, False, "best-effort"])
def test_a_file_that_somebody_holds_open_is_read(path, given, locking):
    with h5py.File(path / "trajectories" / NAME, "r", locking=locking):
        run = open_run(path, trusted=True)
        assert_equal([run.trajectory(epoch) for epoch in (1, 2)], given)


def test_what_this_process_wrote_itself_is_parsed_here_and_what_was_changed_since_in_a_child(
    path, given, monkeypatch, tmp_path
):
    monkeypatch.setattr(scan, "is_own", image.is_own)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a child was started"))
        assert_equal(read_all(path), given)
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(a) or popen(*a, **k))
    changed(path / "trajectories" / NAME, link("entry/new", np.arange(3)))
    assert_equal(read_all(path), given)
    assert len(started) == 1


def test_what_this_process_wrote_is_remembered_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(image, "_composed", {})
    monkeypatch.setattr(image, "_REMEMBERED", 3)
    blocks = [bytes(image.compose(lambda file, n=n: file.attrs.update(n=n))[:USER_BLOCK]) for n in range(5)]
    assert [image.is_own(block) for block in blocks] == [False] * 2 + [True] * 3


def test_one_child_scans_all_files_and_each_of_them_once(tmp_path, monkeypatch):
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(a) or popen(*a, **k))
    store = HDF5Store(tmp_path / "run", max_epochs=1)
    for epoch in range(1, 6):
        store.append(make_trajectory(epoch))
    store.flush()
    for _ in range(2):
        assert len(open_run(store.path).files) == 5
    assert len(started) == 1
    store.append(make_trajectory(6))
    store.close()
    assert len(open_run(store.path).files) == 6 and len(started) == 2


def link(name: str, target: Any) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        if name in file:
            del file[name]
        file[name] = target

    return change


def external(file: Any) -> None:
    del file["entry/trajectory/reward"]
    where = [(os.environ["REIN_OUTSIDE"], 0, 600 * 3 * 4)]
    file["entry/trajectory"].create_dataset("reward", (600, 3), "f4", external=where)


def virtual(file: Any) -> None:
    layout = h5py.VirtualLayout((600, 3), "f4")
    layout[:] = h5py.VirtualSource(os.environ["REIN_OUTSIDE"], "x", (600, 3))
    del file["entry/trajectory/reward"]
    file["entry/trajectory"].create_virtual_dataset("reward", layout)


def replaced(name: str, **options: Any) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        del file[name]
        file.create_dataset(name, **options)

    return change


def loop(file: Any) -> None:
    file["entry/trajectory/again"] = file["entry/trajectory"]


def many(file: Any) -> None:
    group = file["entry/trajectory"]
    for depth in range(20):  # a tree of 2 ** 20 paths, in a few groups
        inner = group.create_group(f"group{depth}")
        group["other"] = inner
        group = inner
    group["x"] = np.zeros((600, 3), np.float32)


def wrong_row(file: Any) -> None:
    file["entry/epochs/first_row"][1] = 10**9


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "external link": (link("entry/trajectory/reward", h5py.ExternalLink("/etc/passwd", "/x")), "link to elsewhere"),
    "external link to a group": (link("entry", h5py.ExternalLink("/etc/passwd", "/x")), "link to elsewhere"),
    "soft link": (link("entry/trajectory/soft", h5py.SoftLink("/entry/trajectory/soft")), "link to elsewhere"),
    "external data": (external, "in other files"),
    "virtual data": (virtual, "in other files"),
    "a loop": (loop, "more groups and datasets"),
    "many links": (many, "more groups and datasets"),
    "a terabyte that is not there": (
        replaced("entry/trajectory/reward", shape=(2**38, 3), dtype="f4", chunks=(2**20, 3)),
        "chunks of",
    ),
    "a terabyte of nothing": (
        replaced("entry/trajectory/reward", shape=(2**38, 3), dtype="f4"),
        "offset|outside|shape",
    ),
    "a bomb": (
        replaced("entry/trajectory/reward", data=np.zeros((6 << 20, 3), "f8"), compression="gzip", chunks=(1 << 20, 3)),
        "times as large as the file",
    ),
    "another filter": (
        replaced("entry/trajectory/action", data=np.zeros((600, 3), int), compression="lzf"),
        "compressed in a way",
    ),
    "text of any length": (replaced("entry/trajectory/action", data=["a"], dtype=h5py.string_dtype()), "type|shape"),
    "a compound": (replaced("entry/trajectory/action", data=np.zeros((600, 3), "i4,f4")), "type"),
    "a field of other rows": (replaced("entry/trajectory/action", data=np.zeros((599, 3), int)), "does not fit"),
    "a row outside": (wrong_row, "do not lie one after the other"),
    "a column of text": (replaced("entry/epochs/length", data=np.array([b"a", b"b"])), "is no column"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_rein_does_not_write_is_refused_and_nothing_outside_is_opened(path, tmp_path, monkeypatch, what):
    outside = tmp_path / "outside.h5"
    with h5py.File(outside, "w") as file:
        file["x"] = np.zeros((600, 3), np.float32)
    os.utime(outside, (1, 1))
    monkeypatch.setenv("REIN_OUTSIDE", str(outside))
    change, reason = CHANGES[what]
    file = changed(path / "trajectories" / NAME, change)
    with pytest.raises(StoreError, match=rf"{NAME}: is not laid out as a file of trajectories: .*({reason})"):
        read_all(path)
    assert outside.stat().st_atime == 1 or os.statvfs(outside).f_flag & os.ST_NOATIME
    assert file.stat().st_size < 64 << 20


def test_a_file_that_is_cut_in_its_metadata_or_no_hdf5_at_all_is_named(path):
    file = path / "trajectories" / NAME
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:USER_BLOCK] + b"no HDF5 " * 100, whole[:USER_BLOCK]):
        seal(file, content)
        with pytest.raises(StoreError, match=f"{NAME}: is not laid out as a file of trajectories"):
            read_all(path)


def test_chunks_that_cannot_be_decoded_are_named(path):
    file = path / "trajectories" / NAME
    layout = scan.layouts([file], trusted=False)[0]
    offset, length = layout["trajectory"]["action"].pieces[0, :2].tolist()
    content = bytearray(file.read_bytes())
    content[offset : offset + length] = bytes(length)
    seal(file, bytes(content))
    with pytest.raises(StoreError, match=f"{NAME}: cannot be decoded"):
        open_run(path).field("action")


SLEEP = "import time; time.sleep(1e6)"
PARSERS = {
    "dies": ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", r"HDF5's parser died of it \(SIGSEGV\)"),
    "spins": ("while True: pass", "took more than"),
    "spends its time": (
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 2))\nwhile True: pass",
        "too much time or memory",
    ),
    "says nothing": ("print('[]', flush=True)\n" + SLEEP, "is not laid out .* says nothing"),
    "says nonsense": (
        "print('{', flush=True)\n" + SLEEP,
        "is not laid out .* cannot be understood",
    ),
    "says too much": ("while True: print('x' * 100000, end='')", "more parts than a file of trajectories has"),
    "ends": ("raise SystemExit(3)", "ended with status 3; trusted=True"),
    "lies": (
        """
        import json
        reward = ["dataset", {"shape": [600, 3], "dtype": "<f4", "offset": 1 << 30}]
        groups = {name: ["group", {"reward": reward}] for name in ("epochs", "episodes", "trajectory")}
        print(json.dumps({"found": groups}), flush=True)
        """,
        "lies outside the file",
    ),
}


@pytest.mark.parametrize("what", PARSERS)
def test_a_parser_that_fails_is_an_error_of_the_file_and_leaves_no_process(path, tmp_path, monkeypatch, what):
    program, reason = PARSERS[what]
    (tmp_path / "parser.py").write_text(textwrap.dedent(program))
    monkeypatch.setattr(parse, "__file__", str(tmp_path / "parser.py"))
    monkeypatch.setattr(scan, "_SECONDS", 1.0 if what == "spins" else 1e6)
    children, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: children.append(popen(*a, **k)) or children[-1])
    with pytest.raises(StoreError, match=f"{NAME}: .*{reason}"):
        read_all(path)
    assert len(children) == 1 and children[0].returncode is not None


def test_a_scan_has_limits_and_opens_no_second_file(path, tmp_path):
    """The child's own: asked of the program that it is."""
    program = Path(parse.__file__).read_text(encoding="utf-8")
    program = program.replace("    with h5py.File(path", "    _probe()\n    with h5py.File(path")
    probe = f"""
def _probe():
    soft = resource.getrlimit(resource.RLIMIT_AS)[0], resource.getrlimit(resource.RLIMIT_CPU)[0]
    assert 0 < soft[0] < 4 << 30 and 0 < soft[1] < 60, soft
    try:
        bytearray(2 << 30)
    except MemoryError:
        pass
    else:
        raise AssertionError("2 GiB were to be had")
    _allow_files(False)
    try:
        open({str(path / "run.json")!r}, "w")
    except OSError as error:
        assert error.errno == 24
    else:
        raise AssertionError("a file was opened")
    finally:
        _allow_files(True)

"""
    (tmp_path / "probing.py").write_text(program.replace("def describe", probe + "\ndef describe"))
    command = [sys.executable, str(tmp_path / "probing.py")]
    question = f'["{path / "trajectories" / NAME}"]\n'
    answer = subprocess.run(command, input=question, capture_output=True, text=True, check=True).stdout
    assert answer.startswith('{"found": ')


def mutant(whole: bytes, draw: random.Random) -> bytes:
    """A few bytes in HDF5's metadata, changed; between them lie the data, where nothing is parsed."""
    content = bytearray(whole)
    for _ in range(draw.randrange(1, 4)):
        content[draw.randrange(USER_BLOCK, len(content))] = draw.randrange(256)
    return bytes(content)


@pytest.mark.parametrize("count", [25, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_mutants_with_a_right_hash_do_no_more_than_raise(tmp_path, count):
    """In files of mostly metadata; each is opened as a part of one run, and the first bad one is named."""
    store = HDF5Store(tmp_path / "run")
    store.append(make_trajectory(1, steps=2, num_envs=1))
    store.close()
    whole = (store.path / "trajectories" / "000001-000001.h5").read_bytes()
    draw, refused = random.Random(0), 0
    path = tmp_path / "000001-000001.h5"
    for _ in range(count):
        write_whole(path, seal(tmp_path / "sealed", mutant(whole, draw)).read_bytes())
        try:
            read_all(path)
        except StoreError as error:
            refused += 1
            assert str(path) in str(error)
        except ValueError as error:  # nothing is wrong with it but that a name is another
            assert "no field" in str(error) or "there is no" in str(error)
    assert 0 < refused < count
    print(f"mutants of trajectories with a right hash: {count}, {refused} refused, the others without harm")
