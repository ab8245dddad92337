"""Regression tests for bugs of an earlier loop, and for behavior that its tests checked."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from typing import Any

import pytest

import rein


def nothing(state: rein.State) -> None:
    return None


def counted(loop: rein.Loop) -> dict[str, int]:
    """Return the number of firings of each event of a loop, counted by handlers."""
    counts = dict.fromkeys(loop.events, 0)
    for name in loop.events:
        loop.on(name)(lambda state, name=name: counts.__setitem__(name, counts[name] + 1))
    return counts


# ------------------------------------------------------------------ earlier bugs


def test_halted_epoch_advances_without_a_handler_of_its_halt() -> None:
    """The earlier loop repeated the epoch unless a handler of `epoch_halted` halted it again."""
    loop = rein.Loop(nothing)
    loop.iteration_completed(once=3)(rein.State.halt_epoch)
    final = loop.run(epochs=3, iterations=5)
    assert [(record.epoch, record.iterations) for record in final.history] == [(1, 3), (2, 5), (3, 5)]
    assert (final.total_iterations, final.clocks.epochs) == (13, 3)


def test_halt_does_not_skip_later_handlers() -> None:
    """The earlier loop skipped them, including a checkpoint attached after an early stop."""
    loop, log = rein.Loop(nothing), []

    @loop.epoch_completed
    def early_stop(state: rein.State) -> None:
        state.halt_loop("no better")

    @loop.epoch_completed
    def checkpoint(state: rein.State) -> None:
        log.append("attached after the early stop")

    loop.epoch_ended(lambda state: log.append("the epoch ends"))
    loop.run(epochs=3, iterations=1)
    assert log == ["attached after the early stop", "the epoch ends"]


def test_every_event_fires_in_some_run() -> None:
    """In the earlier loop, handlers of `halted` and `completed` were never called."""
    completes = rein.Loop(nothing, epochs=1, iterations=1)
    halts = rein.Loop(nothing, epochs=1, iterations=1)
    halts.epoch_started(rein.State.halt_loop)
    fails = rein.Loop(lambda state: 1 / 0, epochs=1, iterations=1)
    counts = {name: counted(loop) for name, loop in (("c", completes), ("h", halts), ("f", fails))}
    completes.run()
    halts.run()
    with pytest.raises(ZeroDivisionError):
        fails.run()
    assert {name for fired in counts.values() for name, n in fired.items() if n} == set(completes.events)


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


# ------------------------------------------------------------------ behavior that stays


def test_firing_counts_of_five_epochs_of_ten_iterations() -> None:
    loop = rein.Loop(nothing)
    counts = counted(loop)
    loop.run(epochs=5, iterations=10)
    assert counts == {
        "started": 1,
        "epoch_started": 5,
        "iteration_started": 50,
        "iteration_completed": 50,
        "epoch_completed": 5,
        "epoch_halted": 0,
        "epoch_ended": 5,
        "completed": 1,
        "halted": 0,
        "failed": 0,
    }


def test_halting_every_epoch_halts_all_epochs() -> None:
    loop = rein.Loop(nothing)
    counts = counted(loop)
    loop.iteration_completed(rein.State.halt_epoch)
    loop.run(epochs=5, iterations=10)
    assert (counts["epoch_halted"], counts["epoch_completed"], counts["iteration_completed"]) == (5, 0, 5)


def test_firing_is_counted_once_for_any_number_of_handlers() -> None:
    loop, seen = rein.Loop(nothing), []
    loop.epoch_ended(every=1)(nothing)
    loop.epoch_ended(every=1)(nothing)
    loop.epoch_ended(lambda state: seen.append((state.counts["epoch_ended"], state.total_iterations)))
    loop.run(epochs=2, iterations=10)
    assert seen == [(1, 10), (2, 20)]


def test_step_state_assigned_by_a_handler_persists() -> None:
    loop = rein.Loop(lambda state: state.step_state)

    @loop.epoch_started(after=1)
    def count(state: rein.State) -> None:
        (number,) = state.step_state["counter"]
        state.step_state = {"counter": (number + 1,)}

    assert loop.run(epochs=5, iterations=10, init={"counter": (0,)}).step_state == {"counter": (4,)}


def test_second_run_continues_epoch_numbers() -> None:
    loop, seen = rein.Loop(nothing), []
    loop.run(epochs=3, iterations=1)
    loop.epoch_started(lambda state: seen.append(state.epoch))
    loop.run(epochs=8, iterations=1)
    assert seen == [4, 5, 6, 7, 8]


def test_equal_steps_give_equal_metrics() -> None:
    def metrics() -> list[dict[str, float]]:
        loop = rein.Loop(lambda state: {"x": (state.total_iterations * 7919) % 13})
        loop.metric("x", "x")
        return [dict(record.metrics) for record in loop.run(epochs=3, iterations=11).history]

    assert metrics() == metrics()
