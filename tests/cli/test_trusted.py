"""Files that hold more than readers allow for: `--trusted` on the command line."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from rein.cli import main
from rein.store.format import image, scan
from rein.store.hdf5 import HDF5Store
from rein.testing.store import make_trajectory


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run of somebody else's, and no room for any data."""
    store = HDF5Store(tmp_path / "run")
    store.append(make_trajectory(1, steps=10))
    store.close()
    for module, name, value in (
        (image, "_composed", {}),
        (scan, "_known", {}),
        (scan, "_ROOM", 0),
        (scan, "_GROWTH", 0),
    ):
        monkeypatch.setattr(module, name, value)
    return str(store.path)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with contextlib.suppress(SystemExit):  # the run is made up, and `verify` finds that out too
        main(words)
    captured = capsys.readouterr()
    return captured.out + captured.err


@pytest.mark.parametrize("command", ["show", "verify"])
def test_without_it_the_error_says_how_and_with_it_there_is_none(
    command: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--trusted) reads it" in told(capsys, command, path)
    for words in ((command, "--trusted", path), (command, path, "--trusted"), ("--trusted", command, path)):
        text = told(capsys, *words)
        assert "episodes" in text and "trusted" not in text


def test_it_holds_for_that_command_alone(path: str) -> None:
    main(["show", path, "--trusted"])
    scan._known.clear()
    with pytest.raises(SystemExit, match="1"):
        main(["show", path])


def test_debug_gives_the_traceback_of_every_command(path: str) -> None:
    with pytest.raises(scan.StoreError):
        main(["show", path, "--debug"])
