"""CSV files: whole rows, readable by other programs, repaired after a kill."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rein.handlers.loggers import csv as module
from rein.handlers.loggers.csv import CSVLogger
from rein.protocols import Logger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made/metrics.csv"


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_row_is_in_the_file_when_write_returns(path: Path) -> None:
    logger = CSVLogger(path)
    assert isinstance(logger, Logger)
    assert not path.exists()
    for epoch in (1, 2):
        logger.write({"epochs": epoch, "seconds": 0.5}, {"loss": 0.1 * epoch})
        assert read(path)[-1] == {"epochs": str(epoch), "seconds": "0.5", "loss": repr(0.1 * epoch)}
    logger.close()
    logger.close()
    assert len(read(path)) == 2


def test_numbers_are_read_back_exactly(path: Path) -> None:
    values = [0.1, 1 / 3, -1e-300, 12345678901234567, math.nan, math.inf, -math.inf]
    logger = CSVLogger(path)
    for value in values:
        logger.append({"a": 1, "value": value})
    logger.close()
    assert [float(row["value"]) for row in read(path)] == pytest.approx(values, rel=0, abs=0, nan_ok=True)
    np.testing.assert_array_equal(np.genfromtxt(path, delimiter=",", names=True)["value"], values)


@pytest.mark.parametrize("incomplete", [b"3,0.", b'3,"', b"3"])
def test_only_an_incomplete_last_line_is_removed(path: Path, incomplete: bytes) -> None:
    first = CSVLogger(path)
    for epoch in (1, 2):
        first.append({"epoch": epoch, "loss": 0.5})
    first.close()
    whole = path.read_bytes()
    path.write_bytes(whole + incomplete)
    second = CSVLogger(path)
    second.append({"epoch": 3, "loss": 0.25})
    second.close()
    assert path.read_bytes() == whole + b"3,0.25\n"


def test_incomplete_header_and_long_incomplete_line_are_removed(path: Path) -> None:
    path.parent.mkdir()
    for content in (b"epo", b"epoch\n" + b"1" * 200_000):
        path.write_bytes(content)
        logger = CSVLogger(path)
        logger.append({"epoch": 1})
        logger.close()
        assert path.read_bytes() == b"epoch\n1\n"


def test_new_column_is_empty_in_other_rows(path: Path) -> None:
    logger = CSVLogger(path)
    logger.append({"epoch": 1, "b": 0.5})
    logger.append({"c": 7.0, "epoch": 2, "b": 0.25, "a": 8.0})
    logger.append({"epoch": 3, "b": 1.0})
    assert path.read_text() == "epoch,b,c,a\n1,0.5,,\n2,0.25,7.0,8.0\n3,1.0,,\n"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    logger.close()
    again = CSVLogger(path)
    again.append({"a": 1.0, "d": 2.0})
    again.close()
    assert path.read_text().splitlines()[0] == "epoch,b,c,a,d"
    assert read(path)[-1] == {"epoch": "", "b": "", "c": "", "a": "1.0", "d": "2.0"}
    assert {len(row) for row in csv.reader(path.read_text().splitlines())} == {5}


def test_special_characters_stay_in_one_cell(path: Path) -> None:
    row = {"a,b": "x,y", 'say "loss"': 'z"', "two\nlines": "p\nq", "häufig": "ü"}
    logger = CSVLogger(path)
    for _ in range(2):
        logger.append(row)
    logger.close()
    assert len(path.read_bytes().splitlines()) == 3
    kept = {name.replace("\n", " "): text.replace("\n", " ") for name, text in row.items()}
    assert read(path) == [kept, kept]


def test_metric_with_the_name_of_a_clock_is_renamed(path: Path) -> None:
    logger = CSVLogger(path)
    logger.write({"seconds": 1.5}, {"seconds": 7.0, "loss": 2.0})
    logger.close()
    assert read(path) == [{"seconds": "1.5", "seconds_metric": "7.0", "loss": "2.0"}]


ROWS = "iterations,epochs,loss\n10,1,0.5\n20,2,0.5\n30,3,0.5\n"


@pytest.mark.parametrize(
    ("content", "clocks", "kept"),
    [
        (ROWS, (20, 2), 3),
        (ROWS, (25, 2), 3),
        (ROWS, (5, 0), 1),  # only the header
        (ROWS, (30, 3), 4),
        (ROWS + "40,", (20, 2), 3),  # a incomplete line
        (ROWS, (30, 2), 3),  # the epoch was open at its last iteration, so its end is written again
        (ROWS + "5,1,0.5\n15,2,0.5\n", (10, 1), 5),  # rows of an earlier run with higher clocks
        (ROWS + "15,2,0.5\n", (10, 1), 4),
        (ROWS + "by hand\n40,4,0.5\n", (10, 1), 5),
        (ROWS + ',,"\n40,4,0.5\n', (10, 1), 5),
        (ROWS.replace("iterations", "steps"), (10, 1), 4),
        (ROWS.replace("epochs", "other"), (10, 9), 2),
        ("", (10, 1), 0),
    ],
)
def test_go_on_removes_only_newer_rows_at_the_end(path: Path, content: str, clocks: tuple[int, int], kept: int) -> None:
    path.parent.mkdir()
    path.write_text(content)
    logger = CSVLogger(path)
    logger.go_on({"env_steps": 0, "iterations": clocks[0], "epochs": clocks[1]})
    logger.close()
    assert path.read_text() == "".join(content.splitlines(keepends=True)[:kept])


def test_go_on_creates_no_file_and_logs_removed_rows(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = CSVLogger(path)
    logger.go_on({"iterations": 20, "epochs": 2})
    assert not path.parent.exists()
    for epoch in (1, 2, 3, 4):
        logger.append({"iterations": 10 * epoch, "epochs": epoch})
    assert not caplog.records
    logger.go_on({"iterations": 20, "epochs": 2})
    logger.append({"iterations": 25, "epochs": 3})
    logger.close()
    assert path.read_text() == "iterations,epochs\n10,1\n20,2\n25,3\n"
    assert caplog.messages == [f"{path}: removed 2 row(s) newer than iteration 20, from which the run continues"]


def with_files(monkeypatch: pytest.MonkeyPatch, write: Any) -> None:
    """Make the module write to files with `write(file, data)`."""
    kind = type("Odd", (io.FileIO,), {"write": write})
    real = module.open_file
    monkeypatch.setattr(module, "open_file", lambda p, mode="rb", **k: kind(p, "a+") if "a" in mode else real(p, mode))


def test_short_writes_are_completed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_files(monkeypatch, lambda file, data: io.FileIO.write(file, bytes(data)[:2]))
    logger = CSVLogger(path)
    logger.append({"epoch": 1, "loss": 0.125})
    logger.close()
    assert path.read_text() == "epoch,loss\n1,0.125\n"


def test_next_row_removes_a_row_cut_by_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(file: io.FileIO, data: Any) -> int:
        if b"2," in bytes(data):
            io.FileIO.write(file, bytes(data)[:3])
            raise OSError(28, "No space left on device")
        return io.FileIO.write(file, data)

    with_files(monkeypatch, fill)
    logger = CSVLogger(path)
    logger.append({"epoch": 1, "loss": 0.5})
    with pytest.raises(OSError, match="No space"):
        logger.append({"epoch": 2, "loss": 0.5})
    logger.append({"epoch": 3, "loss": 0.5})
    logger.close()
    assert path.read_text() == "epoch,loss\n1,0.5\n3,0.5\n"
