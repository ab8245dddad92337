"""Rows in a CSV file: whole, readable by others, and mended after a kill."""

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


def test_it_is_a_logger_and_a_row_is_in_the_file_when_write_returns(path: Path) -> None:
    logger = CSVLogger(path)
    assert isinstance(logger, Logger)
    assert not path.exists()
    for epoch in (1, 2):
        logger.write({"epochs": epoch, "seconds": 0.5}, {"loss": 0.1 * epoch})
        assert read(path)[-1] == {"epochs": str(epoch), "seconds": "0.5", "loss": repr(0.1 * epoch)}
    logger.close()
    logger.close()
    assert len(read(path)) == 2


def test_numbers_come_back_exactly_and_nan_and_infinity_as_such(path: Path) -> None:
    values = [0.1, 1 / 3, -1e-300, 12345678901234567, math.nan, math.inf, -math.inf]
    logger = CSVLogger(path)
    for value in values:
        logger.append({"a": 1, "value": value})
    logger.close()
    assert [float(row["value"]) for row in read(path)] == pytest.approx(values, rel=0, abs=0, nan_ok=True)
    np.testing.assert_array_equal(np.genfromtxt(path, delimiter=",", names=True)["value"], values)


@pytest.mark.parametrize("torn", [b"3,0.", b'3,"', b"3"])
def test_a_torn_last_line_is_cut_and_nothing_else(path: Path, torn: bytes) -> None:
    first = CSVLogger(path)
    for epoch in (1, 2):
        first.append({"epoch": epoch, "loss": 0.5})
    first.close()
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    second = CSVLogger(path)
    second.append({"epoch": 3, "loss": 0.25})
    second.close()
    assert path.read_bytes() == whole + b"3,0.25\n"


def test_a_torn_header_is_begun_anew_and_a_long_torn_line_is_cut_too(path: Path) -> None:
    path.parent.mkdir()
    for content in (b"epo", b"epoch\n" + b"1" * 200_000):
        path.write_bytes(content)
        logger = CSVLogger(path)
        logger.append({"epoch": 1})
        logger.close()
        assert path.read_bytes() == b"epoch\n1\n"


def test_a_column_that_appears_later_is_empty_in_the_rows_before_and_after(path: Path) -> None:
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


def test_any_name_and_text_is_one_cell_of_one_line(path: Path) -> None:
    row = {"a,b": "x,y", 'say "loss"': 'z"', "two\nlines": "p\nq", "häufig": "ü"}
    logger = CSVLogger(path)
    for _ in range(2):
        logger.append(row)
    logger.close()
    assert len(path.read_bytes().splitlines()) == 3
    kept = {name.replace("\n", " "): text.replace("\n", " ") for name, text in row.items()}
    assert read(path) == [kept, kept]


def test_a_metric_with_the_name_of_a_clock_takes_another(path: Path) -> None:
    logger = CSVLogger(path)
    logger.write({"seconds": 1.5}, {"seconds": 7.0, "loss": 2.0})
    logger.close()
    assert read(path) == [{"seconds": "1.5", "seconds_metric": "7.0", "loss": "2.0"}]


def test_it_goes_on_after_close(path: Path) -> None:
    logger = CSVLogger(path)
    for epoch in (1, 2, 3):
        logger.append({"epoch": epoch})
        logger.close()
    assert path.read_text() == "epoch\n1\n2\n3\n"


ROWS = "iterations,epochs,loss\n10,1,0.5\n20,2,0.5\n30,3,0.5\n"


@pytest.mark.parametrize(
    ("there", "clocks", "stays"),
    [
        (ROWS, (20, 2), 3),
        (ROWS, (25, 2), 3),
        (ROWS, (5, 0), 1),  # the header alone
        (ROWS, (30, 3), 4),
        (ROWS + "40,", (20, 2), 3),  # a torn line
        (ROWS, (30, 2), 3),  # the epoch was open at its last iteration: its end comes again
        (ROWS + "5,1,0.5\n15,2,0.5\n", (10, 1), 5),  # an earlier run was further
        (ROWS + "15,2,0.5\n", (10, 1), 4),
        (ROWS + "by hand\n40,4,0.5\n", (10, 1), 5),
        (ROWS + ',,"\n40,4,0.5\n', (10, 1), 5),
        (ROWS.replace("iterations", "steps"), (10, 1), 4),
        (ROWS.replace("epochs", "other"), (10, 9), 2),
        ("", (10, 1), 0),
    ],
)
def test_a_run_that_goes_on_cuts_the_newer_rows_at_the_end_alone(
    path: Path, there: str, clocks: tuple[int, int], stays: int
) -> None:
    path.parent.mkdir()
    path.write_text(there)
    logger = CSVLogger(path)
    logger.go_on({"env_steps": 0, "iterations": clocks[0], "epochs": clocks[1]})
    logger.close()
    assert path.read_text() == "".join(there.splitlines(keepends=True)[:stays])


def test_a_run_that_goes_on_makes_no_file_and_says_what_it_cuts(path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    assert caplog.messages == [f"{path}: 2 row(s) newer than iteration 20, where the run goes on, were cut"]


def with_files(monkeypatch: pytest.MonkeyPatch, write: Any) -> None:
    """Have the module's files write as `write(file, data)` does."""
    kind = type("Odd", (io.FileIO,), {"write": write})
    real = module.open_file
    monkeypatch.setattr(module, "open_file", lambda p, mode="rb", **k: kind(p, "a+") if "a" in mode else real(p, mode))


def test_short_writes_are_finished(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_files(monkeypatch, lambda file, data: io.FileIO.write(file, bytes(data)[:2]))
    logger = CSVLogger(path)
    logger.append({"epoch": 1, "loss": 0.125})
    logger.close()
    assert path.read_text() == "epoch,loss\n1,0.125\n"


def test_a_row_that_a_full_disk_tore_is_cut_by_the_next_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
