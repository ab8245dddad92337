"""Any logger takes down any loop, and changes none."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

import rein
from rein.loggers.attach import attach


class Notes:
    """Keeps what it is told; raises at the write or close of that number."""

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


def test_every_epoch_is_written_once_with_its_clocks_and_metrics() -> None:
    loop, notes = make(), Notes()
    attach(loop, notes)
    loop.run()
    assert [clocks["epochs"] for clocks, _ in notes.rows] == [1, 2, 3, 4, 5, 6]
    assert [clocks["iterations"] for clocks, _ in notes.rows] == [2, 4, 6, 8, 10, 12]
    assert [metrics for _, metrics in notes.rows] == [dict(record.metrics) for record in loop.state.history]
    assert notes.closed == 1
    loop.run(epochs=7)
    assert len(notes.rows) == 7 and notes.closed == 2


def test_filters_and_events_are_those_of_every_handler() -> None:
    loop, few, many = make(), Notes(), Notes()
    attach(loop, few, every=2)
    attach(loop, many, event="iteration_completed", every=3)
    loop.run()
    assert [clocks["epochs"] for clocks, _ in few.rows] == [2, 4, 6]
    assert [clocks["iterations"] for clocks, _ in many.rows] == [3, 6, 9, 12]
    assert many.rows[0][1] == {"loss": 2.0}  # of the epoch so far, its first iteration alone
    with pytest.raises(TypeError, match="unknown filter"):
        attach(loop, few, evry=2)
    with pytest.raises(ValueError, match="no event 'epoch_end'"):
        attach(loop, few, event="epoch_end")


def test_a_metric_that_a_later_handler_sets_is_written() -> None:
    loop, notes = make(), Notes()
    attach(loop, notes)

    @loop.epoch_ended
    def set_metric(state: rein.State) -> None:
        state.metrics["score"] = 10.0 * state.epoch

    loop.run()
    assert [metrics["score"] for _, metrics in notes.rows] == [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]


@pytest.mark.parametrize("options", [{"fails_at": 2}, {"fails_closing": True}])
def test_a_logger_that_fails_is_reported_once_and_the_run_is_as_without_it(
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
    assert len(notes.rows) == (1 if "fails_at" in options else 6) and len(other.rows) == 8


def test_an_epoch_that_a_handler_broke_is_written_when_it_has_ended() -> None:
    loop, notes = make(), Notes()
    attach(loop, notes)

    @loop.epoch_ended(once=3)
    def fail(state: rein.State) -> None:
        raise RuntimeError("once")

    with pytest.raises(RuntimeError, match="once"):
        loop.run()
    assert [clocks["epochs"] for clocks, _ in notes.rows] == [1, 2] and notes.closed == 1
    loop.run()
    assert [clocks["epochs"] for clocks, _ in notes.rows] == [1, 2, 3, 4, 5, 6]


def test_what_is_no_logger_is_refused_where_it_is_attached() -> None:
    with pytest.raises(TypeError, match=r"attach\(loop, str\): a logger has write"):
        attach(make(), "metrics.csv")  # type: ignore[arg-type]  # wrong on purpose
