"""Attaching loggers to loops."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import rein
from rein.handlers.loggers.attach import attach
from rein.handlers.loggers.csv import CSVLogger


class Notes:
    """Logger that keeps its rows, and raises in a chosen write or in close."""

    def __init__(self, fails_at: int = 0, fails_closing: bool = False) -> None:
        self.rows: list[tuple[dict[str, float], dict[str, float]]] = []
        self.closed = 0
        self.written = 0
        self.fails_at, self.fails_closing = fails_at, fails_closing

    def write(self, clocks: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        self.written += 1
        if self.written == self.fails_at:
            raise OSError("the network is gone")
        self.rows.append((dict(clocks), dict(metrics)))

    def close(self) -> None:
        self.closed += 1
        if self.fails_closing:
            raise OSError("the network is gone")


def make() -> rein.Loop:
    loop = rein.Loop(lambda state: {"loss": float(state.total_iterations)}, iterations=2, epochs=6)
    loop.metric("loss", "loss")
    return loop


def test_every_epoch_is_written_once() -> None:
    loop, notes = make(), Notes()
    attach(loop, notes)
    loop.run()
    assert [clocks["epochs"] for clocks, _ in notes.rows] == [1, 2, 3, 4, 5, 6]
    assert [clocks["iterations"] for clocks, _ in notes.rows] == [2, 4, 6, 8, 10, 12]
    assert [metrics for _, metrics in notes.rows] == [dict(record.metrics) for record in loop.state.history]
    assert notes.closed == 1
    loop.run(epochs=7)
    assert len(notes.rows) == 7 and notes.closed == 2


def test_filters_and_event_select_the_rows() -> None:
    loop, few, many = make(), Notes(), Notes()
    attach(loop, few, every=2)
    attach(loop, many, event="iteration_completed", every=3)
    loop.run()
    assert [clocks["epochs"] for clocks, _ in few.rows] == [2, 4, 6]
    assert [clocks["iterations"] for clocks, _ in many.rows] == [3, 6, 9, 12]
    assert many.rows[0][1] == {"loss": 2.0}  # the epoch so far: its first iteration
    with pytest.raises(TypeError, match="unknown filter"):
        attach(loop, few, evry=2)
    with pytest.raises(ValueError, match="no event 'epoch_end'"):
        attach(loop, few, event="epoch_end")


def test_every_writes_means_over_the_epochs_since_the_last_row() -> None:
    loop, recorders = make(), {every: Notes() for every in (1, 2, 3)}
    for every, notes in recorders.items():
        attach(loop, notes, every=every)
    loop.run()
    means = [0.5, 2.5, 4.5, 6.5, 8.5, 10.5]  # means of losses 0 and 1, 2 and 3, ...
    assert [record.metrics["loss"] for record in loop.state.history] == means
    for every, notes in recorders.items():
        expected = [sum(means[n : n + every]) / every for n in range(0, 6, every)]
        assert [metrics["loss"] for _, metrics in notes.rows] == expected


def test_means_skip_missing_values_and_keep_last_running_means() -> None:
    scores = {1: 2.0, 2: math.nan, 3: 4.0, 4: math.nan, 5: math.nan, 6: math.nan}
    loop, notes = make(), Notes()
    attach(loop, notes, every=3)

    @loop.epoch_ended
    def score(state: rein.State) -> None:
        state.metrics["score"] = scores[state.epoch]
        state.metrics["score_100"] = float(state.epoch)
        if state.epoch == 2:
            state.metrics["rare"] = 7.0

    loop.run()
    (_, first), (_, second) = notes.rows
    assert (first["score"], first["score_100"], first["rare"]) == (3.0, 3.0, 7.0)
    assert math.isnan(second["score"]) and second["score_100"] == 6.0 and "rare" not in second


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"every": 2, "after": 2}, [5.5, 9.5]),  # epochs 3 and 4, 5 and 6
        ({"every": 2, "when": lambda state: state.epoch != 3}, [1.5, 6.5, 9.5]),
        ({"every": 4, "unit": "iterations"}, [1.5, 5.5, 9.5]),
        ({"once": 4}, [6.5]),
        ({"when": lambda state: state.epoch in (2, 5)}, [2.5, 8.5]),
    ],
)
def test_means_include_only_epochs_that_pass_the_other_filters(filters: dict[str, Any], expected: list[float]) -> None:
    loop, notes = make(), Notes()
    attach(loop, notes, **filters)
    loop.run()
    assert [metrics["loss"] for _, metrics in notes.rows] == expected


@pytest.mark.parametrize("saved_at", [3, 4, 5])
def test_resumed_run_writes_the_same_rows(saved_at: int) -> None:
    rows = []
    for broken in (False, True):
        loop, notes, second = make(), Notes(), Notes()
        attach(loop, notes, every=3)
        attach(loop, second, event="epoch_completed", every=2)
        if broken:
            first = make()
            for every, event in ((3, "epoch_ended"), (2, "epoch_completed")):
                attach(first, Notes(), event=event, every=every)
            first.epoch_ended(once=saved_at)(lambda state, first=first: first.interrupt())
            first.run()
            loop.load_state_dict(json.loads(json.dumps(first.state_dict())))
        loop.run()
        rows.append([(clocks["epochs"], metrics) for clocks, metrics in notes.rows + second.rows])
    assert rows[1] == [row for row in rows[0] if row[0] > saved_at] != []


class Refusing(Notes):
    """Logger that refuses some of its writes."""

    def __init__(self, refused: set[int]) -> None:
        super().__init__()
        self.refused = refused

    def write(self, clocks: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        self.fails_at = self.written + 1 if self.written + 1 in self.refused else 0
        super().write(clocks, metrics)


@pytest.mark.parametrize(("refused", "kept"), [({1}, 5), ({2, 3, 5}, 3), ({2, 3, 4}, 1)])
def test_refused_row_does_not_stop_the_others(refused: set[int], kept: int, caplog: pytest.LogCaptureFixture) -> None:
    """After three refused rows in a row the logger is not called again."""
    loop, notes = make(), Refusing(refused)
    attach(loop, notes)
    loop.run()
    assert len(notes.rows) == kept
    assert f"{6 - kept} row(s) of this run are lost" in caplog.text
    assert caplog.text.count("the run continues") == 1


@pytest.mark.parametrize("options", [{"fails_at": 2}, {"fails_closing": True}])
def test_failing_logger_is_reported_once_and_does_not_affect_the_run(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    alone, loop, notes, other = make(), make(), Notes(**options), Notes()
    attach(loop, notes)
    attach(loop, other)
    alone.run()
    with caplog.at_level(logging.ERROR):
        loop.run()
        loop.run(epochs=8)
    alone.run(epochs=8)
    assert len(caplog.records) == 1
    assert "logger Notes failed" in caplog.text and "the network is gone" in caplog.text
    assert (loop.state.status, loop.state.step_state) == (alone.state.status, alone.state.step_state)
    assert len(notes.rows) == (7 if "fails_at" in options else 6) and len(other.rows) == 8


def test_epoch_with_a_failed_handler_is_written_by_the_next_run() -> None:
    loop, notes = make(), Notes()
    attach(loop, notes)

    failures = [RuntimeError("once")]

    @loop.epoch_ended(once=3)
    def fail(state: rein.State) -> None:
        if failures:
            raise failures.pop()

    with pytest.raises(RuntimeError, match="once"):
        loop.run()
    assert [clocks["epochs"] for clocks, _ in notes.rows] == [1, 2] and notes.closed == 1
    loop.run()
    assert [clocks["epochs"] for clocks, _ in notes.rows] == [1, 2, 3, 4, 5, 6]


def scored(loop: rein.Loop, *events: str) -> Any:
    """Fire `loop.scored` on these events, with a metric that counts the firings."""
    event = loop.define("scored")

    @loop.on(*events)
    def score(state: rein.State) -> None:
        state.memory["scores"] = state.memory.get("scores", 0) + 1
        state.metrics["score"] = float(state.memory["scores"])
        event.fire(state)


@pytest.mark.parametrize(("event", "epochs"), [("completed", 6), ("started", 7)])
def test_row_outside_an_epoch_contains_current_metrics(event: str, epochs: int) -> None:
    loop, notes = make(), Notes()
    if event == "started":
        loop.run()
    scored(loop, event)
    attach(loop, notes, event="scored")
    loop.run(epochs=epochs)
    assert [(clocks["epochs"], metrics) for clocks, metrics in notes.rows] == [(6, {"loss": 10.5, "score": 1.0})]


@pytest.mark.parametrize("ends", ["completed", "halted"])
def test_row_at_the_end_contains_metrics_of_later_handlers(ends: str) -> None:
    loop, notes = make(), Notes()
    attach(loop, notes, event=ends)
    loop.on(ends)(lambda state: state.metrics.update(score=7.0))
    if ends == "halted":
        loop.epoch_ended(once=6)(lambda state: loop.stop("enough"))
    loop.run()
    assert [(clocks["epochs"], metrics) for clocks, metrics in notes.rows] == [(6, {"loss": 10.5, "score": 7.0})]


def test_row_outside_an_epoch_contains_only_current_metrics() -> None:
    loop, notes = make(), Notes()
    scored(loop, "epoch_ended", "completed")
    attach(loop, notes, event="scored", every=2)
    loop.run(epochs=3)
    loop.run(epochs=5)
    assert [(clocks["epochs"], metrics["loss"], metrics["score"]) for clocks, metrics in notes.rows] == [
        (2, 1.5, 1.5),  # mean of epochs 1 and 2
        (3, 4.5, 3.0),  # incomplete group of epoch 3
        (3, 4.5, 4.0),  # current metrics at the end of the first run
        (5, 7.5, 5.5),  # mean of epochs 4 and 5
    ]


class Describing(Notes):
    """Logger that records the calls of `describe` and `finish`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def describe(self, settings: Mapping[str, Any]) -> None:
        self.calls.append(dict(settings))

    def finish(self, status: str) -> None:
        self.calls.append((status, self.closed))


class Part:
    config: Mapping[str, Any] = {"gamma": 0.9, "sizes": [3, 4], "schedule": {"to": 0.1}, "none": None}


def test_describe_is_called_once_with_settings() -> None:
    loop, logger = make(), Describing()
    attach(loop, logger)
    loop.own("part", Part())
    loop.run()
    loop.run(epochs=8)
    described, *ends = logger.calls
    assert ends == [("completed", 0), ("completed", 1)], "before each close"
    expected = {"part.gamma": 0.9, "part.sizes.0": 3, "part.sizes.1": 4, "part.schedule.to": 0.1, "epochs": 6}
    assert described.items() >= expected.items()
    assert described["versions.rein"] == rein.__version__ and described["part.type"].endswith("Part")


@pytest.mark.parametrize("status", ["completed", "halted", "interrupted", "failed"])
def test_finish_receives_the_status(status: str) -> None:
    loop, logger = make(), Describing()
    attach(loop, logger)

    @loop.iteration_completed(once=5)
    def end(state: rein.State) -> None:
        if status == "failed":
            raise RuntimeError("out of order")
        if status != "completed":
            (loop.stop if status == "halted" else loop.interrupt)("enough")

    if status == "failed":
        with pytest.raises(RuntimeError, match="out of order"):
            loop.run()
    else:
        loop.run()
    assert logger.calls[1:] == [(status, 0)] and logger.closed == 1


class Resuming(Notes):
    """Logger that records the calls of `go_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.resumed_at: list[tuple[float, int]] = []

    def go_on(self, clocks: Mapping[str, float]) -> None:
        self.resumed_at.append((clocks["iterations"], self.written))


def test_go_on_is_called_before_rows_of_a_loaded_run() -> None:
    first, loop, logger = make(), make(), Resuming()
    scored(loop, "started")
    attach(loop, logger)
    attach(loop, logger, event="scored")
    begun = first.state_dict()
    loop.load_state_dict(begun)
    loop.run(epochs=1)
    assert logger.resumed_at == [], "a new run has no earlier rows"
    first.run(epochs=4)
    loop.load_state_dict(first.state_dict())
    loop.run(epochs=5)
    loop.run(epochs=6)
    assert logger.resumed_at == [(8, 2), (8, 2)] and [clocks["epochs"] for clocks, _ in logger.rows[2:]] == [4, 5, 5, 6]


def test_csv_rows_of_a_resumed_run(tmp_path: Path) -> None:
    def record(path: Path) -> rein.Loop:
        loop = make()
        attach(loop, CSVLogger(path))
        attach(loop, CSVLogger(path), event="iteration_completed", every=3)
        return loop

    def rows(path: Path) -> list[list[str]]:
        return [line.split(",")[4:6] for line in path.read_text().splitlines()]

    whole, broken = tmp_path / "whole.csv", tmp_path / "broken.csv"
    record(whole).run()
    loop = record(broken)
    saved = {}
    loop.epoch_ended(once=3)(lambda state: state.request(lambda state: saved.update(loop.state_dict())))
    loop.run(epochs=5)
    loop.run(epochs=5)  # nothing is removed in the same process
    assert rows(broken) == rows(whole)[: len(rows(broken))] and rows(broken)[-1] == ["10", "5"]
    resumed = record(broken)
    resumed.load_state_dict(saved)
    resumed.run()
    assert rows(broken) == rows(whole)


def test_loops_sharing_a_csv_file_keep_each_others_rows(tmp_path: Path) -> None:
    loops = make(), make()
    for loop, number in zip((*loops, *loops), (5, 2, 6, 3), strict=True):
        if not loop.state.epoch:
            attach(loop, CSVLogger(tmp_path / "both.csv"))
        loop.run(epochs=number)
    epochs = [line.split(",")[5] for line in (tmp_path / "both.csv").read_text().splitlines()]
    assert epochs == ["epochs", *"12345", *"12", *"6", *"3"]


def test_object_without_write_is_rejected() -> None:
    with pytest.raises(TypeError, match=r"attach\(loop, str\): a logger needs the methods write"):
        attach(make(), "metrics.csv")  # type: ignore[arg-type]  # wrong on purpose
