"""`rein doctor`: versions, extras and checks."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

from rein.cli import doctor, main
from rein.store.verify import Problem, Report

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_doctor_prints_versions_extras_and_results(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.tempfile, "tempdir", str(tmp_path))
    main(["doctor"])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    first = [words[0] for words in shown if words]
    for name in ("rein", "Python", "machine", "torch", "matmul", "h5py", "numpy", "gymnasium"):
        assert name in first
    assert set(PROJECT["optional-dependencies"]) <= {*first}
    assert [" ".join(words[:2]) for words in shown[-3:]] == ["training: ok,", "files: ok,", "checkpoints: ok,"]
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_are_listed(capsys, monkeypatch):
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


def test_nested_extras_and_python_versions_are_resolved(monkeypatch):
    requirements = {
        "rein": ['gymnasium[box]; extra == "box"', "numpy>=1", 'wandb; extra == "wandb"'],
        "gymnasium": [
            'new; python_version >= "99.1" and extra == "box"',
            'old; python_version < "99.1" and extra == "box"',
        ],
    }
    monkeypatch.setattr(doctor.importlib.metadata, "requires", requirements.get)
    assert list(doctor._needed("rein", "box")) == ["old"]
    assert list(doctor._requirements("rein", None)) == [("numpy", [])]


def test_damaged_file_exits_with_status_1(capsys, monkeypatch):
    damaged = Report(1, 1, 1, 1, [Problem(Path("some.h5"), "is damaged")])
    monkeypatch.setattr(doctor, "verify_run", lambda path: damaged)
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert shown.err == "rein: some.h5: is damaged\n"
    assert "training: ok" in shown.out and "files: ok" not in shown.out


def test_doctor_takes_no_arguments(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["doctor", "--help"])
    assert capsys.readouterr().out.startswith("usage: rein doctor")
    with pytest.raises(SystemExit, match="1"):
        main(["doctor", "please"])
    assert "please" in capsys.readouterr().err
