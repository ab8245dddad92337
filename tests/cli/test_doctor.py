"""`rein doctor`: what there is here, and whether it works."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

from rein.cli import doctor, main
from rein.store.verify import Problem, Report

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_versions_extras_and_what_works_are_told(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.tempfile, "tempdir", str(tmp_path))
    main(["doctor"])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    first = [words[0] for words in shown if words]
    for name in ("rein", "Python", "machine", "torch", "products", "h5py", "numpy", "gymnasium"):
        assert name in first
    assert set(PROJECT["optional-dependencies"]) <= {*first}
    assert [" ".join(words[:2]) for words in shown[-3:]] == ["training works:", "files work:", "checkpoints work:"]
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_said(capsys, monkeypatch):
    def version(package: str) -> str:
        if package == "imageio-ffmpeg":
            raise importlib.metadata.PackageNotFoundError(package)
        return "7.8.9"

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    monkeypatch.setattr(doctor, "check", lambda path: [])
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in lines if line.startswith("video")] == [
        "video        imageio 7.8.9, imageio-ffmpeg missing"
    ]


def test_extras_of_other_packages_are_looked_into_and_other_pythons_are_not(monkeypatch):
    asked = {
        "rein": ['gymnasium[box]; extra == "box"', "numpy>=1", 'wandb; extra == "wandb"'],
        "gymnasium": [
            'new; python_version >= "99.1" and extra == "box"',
            'old; python_version < "99.1" and extra == "box"',
        ],
    }
    monkeypatch.setattr(doctor.importlib.metadata, "requires", asked.get)
    assert list(doctor._needed("rein", "box")) == ["old"]
    assert list(doctor._requirements("rein", None)) == [("numpy", [])]


def test_a_file_that_is_not_whole_ends_with_status_1(capsys, monkeypatch):
    damaged = Report(1, 1, 1, 1, [Problem(Path("some.h5"), "is damaged")])
    monkeypatch.setattr(doctor, "verify_run", lambda path: damaged)
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert shown.err == "rein: some.h5: is damaged\n"
    assert "training works: " in shown.out and "files work" not in shown.out


def test_it_takes_nothing_more(capsys):
    main(["doctor", "--help"])
    assert capsys.readouterr().out.startswith("usage: rein doctor: ")
    with pytest.raises(SystemExit):
        main(["doctor", "please"])
    assert "takes nothing more, not please" in capsys.readouterr().err
