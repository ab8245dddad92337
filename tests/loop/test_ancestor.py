"""Regression tests for bugs of an earlier loop."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from typing import Any

import pytest

import rein


def nothing(state: rein.State) -> None:
    return None


def test_halted_epoch_advances_without_a_handler_of_its_halt() -> None:
    """The earlier loop repeated the epoch unless a handler of `epoch_halted` halted it again."""
    loop = rein.Loop(nothing)
    loop.iteration_completed(once=3)(rein.State.halt_epoch)
    final = loop.run(epochs=3, iterations=5)
    assert [(record.epoch, record.iterations) for record in final.history] == [(1, 3), (2, 5), (3, 5)]
    assert (final.total_iterations, final.clocks.epochs) == (13, 3)


def test_metric_does_not_lag_one_iteration() -> None:
    loop, seen = rein.Loop(lambda state: {"loss": float(state.total_iterations + 1)}), []
    loop.metric("loss", "loss", "last")
    loop.iteration_completed(lambda state: seen.append((state.step_state["loss"], state.metrics["loss"])))
    loop.run(iterations=3)
    assert seen == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]


@pytest.mark.parametrize("reduce", ["sum", "mean", "min", "max", lambda total, value, count: (total or 0) + value])
def test_metric_does_not_leak_from_a_halted_epoch(reduce: Any) -> None:
    def last_of_three(halting: bool) -> float:
        loop = rein.Loop(lambda state: {"x": float(state.iteration + 1)})
        loop.metric("x", "x", reduce)
        if halting:
            loop.iteration_completed(once=2)(rein.State.halt_epoch)
        return loop.run(epochs=3, iterations=4).history[-1].metrics["x"]

    assert last_of_three(halting=True) == last_of_three(halting=False)


@pytest.mark.parametrize("event", ["epoch_completed", "epoch_ended"])
def test_metrics_survive_a_halt_at_the_end_of_an_epoch(event: str) -> None:
    loop = rein.Loop(lambda state: {"x": float(state.epoch)})
    loop.metric("x", "x")
    loop.event(event).attach(rein.State.halt_loop, once=2)
    final = loop.run(epochs=5, iterations=3)
    assert [(record.epoch, record.metrics["x"]) for record in final.history] == [(1, 1.0), (2, 2.0)]
    assert (final.metrics["x"], final.status) == (2.0, "halted")


@pytest.mark.slow
def test_memory_does_not_grow_over_many_short_epochs() -> None:
    """The earlier loop kept a dictionary per epoch. Memory is measured, because timing is unreliable in tests."""
    loop = rein.Loop(lambda state: {"x": 1.0})
    loop.metric("x", "x")
    loop.epoch_ended(every=100, unit="iterations")(nothing)
    tracemalloc.start()
    try:
        loop.run(epochs=1_100, iterations=1)
        before = tracemalloc.get_traced_memory()[0]
        loop.run(epochs=20_000, iterations=1)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(loop.state.history) == 1000
    assert grown < 50_000


def test_loop_is_garbage_collected() -> None:
    class Result:
        pass

    def use() -> tuple[weakref.ref[Any], ...]:
        loop = rein.Loop(lambda state: Result())
        loop.iteration_completed(every=2, unit="env_steps")(lambda state: loop.state.halt_epoch())
        loop.epoch_ended.observe(lambda loop, state: None)
        loop.metric("x", lambda state: 1.0)
        final = loop.run(iter(range(9)), epochs=2, iterations=3)
        return weakref.ref(loop), weakref.ref(final.step_state), weakref.ref(loop.epoch_ended)

    references = use()
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]
