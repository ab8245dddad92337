"""Loggers that block, raise or end their thread: training continues, and rows are written exactly once."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rein
from rein.handlers.loggers import Histogram, Image, Video
from rein.handlers.loggers.attach import attach
from rein.handlers.loggers.csv import CSVLogger

MODULE = sys.modules["rein.handlers.loggers.attach"]  # the package exports a function of this name


class Blocking:
    """Logger whose `write` waits for an event. It records the epochs that it has written."""

    def __init__(self, free: bool = False) -> None:
        self.entered, self.free = threading.Event(), threading.Event()
        self.epochs: list[float] = []
        if free:
            self.free.set()

    def write(self, clocks: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        self.entered.set()
        self.free.wait()
        self.epochs.append(clocks["epochs"])

    def close(self) -> None: ...


class Other(Blocking):
    """Logger of another class, which has its own thread."""


class Raising(Blocking):
    def __init__(self, error: BaseException) -> None:
        super().__init__(free=True)
        self.error = error

    def write(self, clocks: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        if clocks["epochs"] == 3:
            raise self.error
        super().write(clocks, metrics)


def make(epochs: int = 6) -> rein.Loop:
    loop = rein.Loop(lambda state: {"loss": float(state.total_iterations)}, iterations=2, epochs=epochs)
    loop.metric("loss", "loss")
    return loop


def test_run_continues_while_logger_blocks() -> None:
    loop, logger, other = make(), Blocking(), Other(free=True)
    attach(loop, logger)
    attach(loop, other)

    @loop.completed
    def check(state: rein.State) -> None:
        assert logger.entered.wait(60)
        assert state.epoch == 6 and logger.epochs == [], "all epochs have ended, and no row is written"
        logger.free.set()

    loop.run()
    assert logger.epochs == other.epochs == [1, 2, 3, 4, 5, 6]


def test_end_of_run_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(MODULE, "PATIENCE", 0.05)
    loop, logger, other = make(), Blocking(), Other(free=True)
    attach(loop, logger)
    attach(loop, other)
    assert loop.run().status == "completed"
    assert [record.getMessage() for record in caplog.records if "6 row(s)" in record.getMessage()] != []
    assert loop.run(epochs=7).status == "completed"
    assert other.epochs == [1, 2, 3, 4, 5, 6, 7]
    logger.free.set()


@pytest.mark.parametrize("error", [OSError("the network is gone"), SystemExit(3)])
def test_failed_logger_loses_only_its_own_rows(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    loop, logger, other = make(), Raising(error), Raising(error)
    attach(loop, logger)
    attach(loop, other, event="completed")  # in the same thread
    loop.run()
    assert logger.epochs == [1, 2, 4, 5, 6] and other.epochs == [6]
    reports = [record for record in caplog.records if "row(s)" in record.getMessage()]
    assert len(reports) == 1 and "1 row(s)" in reports[0].getMessage()


def test_rows_beyond_the_limit_are_lost_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(MODULE, "CALLS", 4)
    loop, logger = make(epochs=10), Blocking()
    loop.epoch_started(once=2)(lambda state: None if logger.entered.wait(60) else pytest.fail("was not called"))
    attach(loop, logger)
    loop.completed(lambda state: logger.free.set())
    loop.run()
    assert logger.epochs == [1, 2, 3, 4]
    assert "6 row(s)" in caplog.text


@pytest.mark.parametrize("every", [1, 2])
def test_group_is_in_exactly_one_row_if_a_finished_run_continues(tmp_path: Path, every: int) -> None:
    loop = make(epochs=3)
    attach(loop, CSVLogger(tmp_path / "rows.csv"), every=2)
    saved: dict[str, Any] = {}
    loop.epoch_ended(every=every)(lambda state: state.request(lambda state: saved.update(loop.state_dict())))
    loop.run()
    again = make(epochs=4)
    attach(again, CSVLogger(tmp_path / "rows.csv"), every=2)
    again.load_state_dict(saved)
    again.run()
    rows = np.genfromtxt(tmp_path / "rows.csv", delimiter=",", names=True)
    expected = [(2, 1.5), (3, 4.5), (4, 6.5)] if every == 1 else [(2, 1.5), (4, 5.5)]
    assert list(zip(rows["epochs"], rows["loss"], strict=True)) == expected


def killed_at(epoch: int, path: Path) -> dict[str, Any]:
    """Return the state of a run that is killed in `epoch`, while its logger still writes the rows of epochs before."""
    loop, logger, saved = make(), Held(path, epoch - 2), {}
    attach(loop, logger)

    def save(state: rein.State) -> None:
        assert logger.blocked.wait(60)
        saved.update(json.loads(json.dumps(loop.state_dict())))
        logger.killed.set()

    loop.epoch_ended(once=epoch)(lambda state: state.request(save))
    loop.run()
    return saved


class Held(CSVLogger):
    """CSV logger that writes `rows` rows, and the others never: they are lost with the process."""

    def __init__(self, path: Path, rows: int) -> None:
        super().__init__(path)
        self.left, self.blocked, self.killed = rows, threading.Event(), threading.Event()

    def write(self, clocks: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        if self.left <= 0:
            self.blocked.set()
            self.killed.wait()
            return
        self.left -= 1
        super().write(clocks, metrics)


@pytest.mark.parametrize("epoch", [2, 3, 5])
def test_resumed_run_writes_rows_that_were_waiting_when_it_was_killed(epoch: int, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole.csv", tmp_path / "broken.csv"
    loop = make()
    attach(loop, Held(whole, 100))
    loop.run()
    saved = killed_at(epoch, broken)
    assert len(broken.read_text().splitlines()) - 1 == epoch - 2 if epoch > 2 else not broken.exists()
    again = make()
    attach(again, Held(broken, 100))
    again.load_state_dict(saved)
    again.run()

    def rows(path: Path) -> list[list[str]]:
        return [line.split(",")[4:6] for line in path.read_text().splitlines()]

    assert rows(broken) == rows(whole)


class Kinds(Blocking):
    """Logger of all kinds of values except videos."""

    def __init__(self) -> None:
        super().__init__(free=True)
        self.values: list[tuple[float, str, Any]] = []

    def write_text(self, clocks: Mapping[str, float], name: str, value: Any) -> None:
        self.values.append((clocks["iterations"], name, value))

    write_histogram = write_image = write_text


def test_log_passes_values_to_every_logger_that_supports_them(caplog: pytest.LogCaptureFixture) -> None:
    loop, logger, other = make(epochs=2), Kinds(), Blocking(free=True)
    attach(loop, logger)
    attach(loop, other)
    weights = torch.tensor([1.0, torch.nan, 3.0])

    @loop.epoch_ended
    def log(state: rein.State) -> None:
        state.log("notes", f"epoch {state.epoch}")
        state.log("weights", Histogram(weights))
        state.log("frame", Image(np.zeros((2, 3, 3), np.uint8)))
        state.log("film", Video(np.zeros((4, 2, 3, 3), np.uint8), fps=10))
        weights.zero_()

    loop.run()
    assert [(step, name) for step, name, _ in logger.values] == [
        (step, name) for step in (2, 4) for name in ("notes", "weights", "frame")
    ]
    assert logger.values[0][2] == "epoch 1"
    assert logger.values[1][2].values.tolist() == [1.0, 3.0], "a copy, without NaN"
    skipped = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert sum("write_video" in message for message in skipped) == 2 and len(skipped) == 5, "once per logger and kind"


def test_media_beyond_the_limit_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "BYTES", 100)
    loop, logger = make(epochs=1), Kinds()
    attach(loop, logger)
    loop.started(lambda state: state.log("large", Image(np.zeros((20, 20), np.uint8))))
    loop.started(lambda state: state.log("small", Image(np.zeros((5, 5), np.uint8))))
    loop.run()
    assert [name for _, name, _ in logger.values] == ["small"]


@pytest.mark.parametrize("value", [None, np.zeros(3)])
def test_log_refuses_values_of_other_types(value: Any) -> None:
    loop = make()
    attach(loop, Kinds())
    loop.epoch_ended(lambda state: state.log("score", value))
    with pytest.raises(TypeError, match="Histogram"):
        loop.run()


def test_media_check_shape_and_dtype() -> None:
    assert Image(torch.tensor([[0.0, 0.5], [1.0, 2.0]])).pixels.tolist() == [[0, 128], [255, 255]]
    assert Video([np.zeros((2, 3, 3), np.uint8)] * 4).frames.shape == (4, 2, 3, 3)
    for wrong in (np.zeros((3, 2, 2), np.uint8), np.zeros((2, 2), np.int64), np.zeros((2, 2, 2, 3), np.uint8)):
        with pytest.raises(ValueError, match="Image"):
            Image(wrong)
    for frames, fps in (([], 30), (np.zeros((1, 2, 2), np.uint8), 0), (np.zeros((2, 2), np.uint8), 30)):
        with pytest.raises(ValueError, match="Video"):
            Video(frames, fps=fps)


@pytest.mark.parametrize("value", [3, np.float32(3.0), torch.tensor([3.0])])
def test_logged_number_is_a_metric_of_the_epoch(value: Any) -> None:
    loop = make(epochs=1)
    attach(loop, logger := Kinds())
    loop.iteration_completed(lambda state: state.log("score", value))
    assert loop.run().history[-1].metrics["score"] == 3.0
    assert logger.values == []


def test_log_without_loggers_does_nothing() -> None:
    loop = make(epochs=1)
    loop.epoch_ended(lambda state: state.log("anything", "text"))
    assert loop.run().status == "completed"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rein-Kinds")]


def test_thread_ends_with_the_run() -> None:
    loop = make()
    attach(loop, Other(free=True))
    loop.run()
    assert "rein-Other" not in {thread.name for thread in threading.enumerate() if thread.is_alive()}
