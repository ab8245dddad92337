from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest

from rein.handlers.timing import timing
from rein.loop import Loop
from rein.loop.state import State

module = sys.modules["rein.handlers.timing"]
PHASES = ("iteration_started", "halfway", "iteration_completed")
RATES = {"iterations_per_second", "env_steps_per_second", "updates_per_second"}


class Clock:
    """Clock that the test controls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def make(clock: Clock) -> Loop:
    """Return a loop whose step takes 2 s and fires `halfway` after the first."""

    def step(state: State) -> None:
        clock.passes(1)
        loop.emit("halfway")
        clock.passes(1)
        state.clocks.advance(env_steps=4, updates=2)

    loop = Loop(step, epochs=3, iterations=5)
    loop.define("halfway")
    return loop


def times_by_epoch(loop: Loop) -> list[dict[str, float]]:
    """Return a list that collects the times of each epoch."""
    seen: list[dict[str, float]] = []
    loop.epoch_ended(lambda state: seen.append({name: state.times.get(name, 0.0) for name in PHASES}))
    return seen


def test_phases_are_summed_per_epoch(clock: Clock) -> None:
    loop = make(clock)
    timing(loop)
    seen = times_by_epoch(loop)
    loop.run()
    assert seen == [{"iteration_started": 0.0, "halfway": 5.0, "iteration_completed": 5.0}] * 3


@pytest.mark.parametrize("attached_first", [True, False])
def test_phase_includes_the_handlers_of_its_event(clock: Clock, attached_first: bool) -> None:
    loop = make(clock)
    if attached_first:
        timing(loop)
    loop.halfway(lambda state: clock.passes(10))
    loop.iteration_started(lambda state: clock.passes(0.5))
    if not attached_first:
        timing(loop)
    seen = times_by_epoch(loop)
    loop.run()
    assert seen == [{"iteration_started": 2.5, "halfway": 55.0, "iteration_completed": 5.0}] * 3


def test_phases_exclude_time_between_epochs_and_runs(clock: Clock) -> None:
    loop = make(clock)
    timing(loop)
    seen = times_by_epoch(loop)
    loop.on("started", "epoch_started", "epoch_completed", "epoch_ended")(lambda state: clock.passes(100))
    loop.run(epochs=1)
    clock.passes(1000)
    loop.run(epochs=2)
    assert seen == [{"iteration_started": 0.0, "halfway": 5.0, "iteration_completed": 5.0}] * 2


def test_events_defined_later_are_timed(clock: Clock) -> None:
    loop = Loop(lambda state: loop.emit("halfway"), iterations=5)
    timing(loop)
    loop.define("halfway")
    loop.iteration_started(lambda state: clock.passes(1))
    loop.halfway(lambda state: clock.passes(2))
    final = loop.run()
    assert {name: final.times[name] for name in PHASES} == {
        "iteration_started": 5.0,
        "halfway": 10.0,
        "iteration_completed": 0.0,
    }


def test_times_of_a_resumed_epoch_include_the_part_before_the_interruption(clock: Clock) -> None:
    first, second = make(clock), make(clock)
    timing(first)
    timing(second)

    @first.iteration_completed(once=8)
    def interrupt(state: State) -> None:
        first.interrupt()

    first.run()
    saved = first.state_dict()
    clock.passes(1000)
    second.load_state_dict(saved)
    seen, rates = times_by_epoch(second), []
    second.epoch_ended(lambda state: rates.append(state.metrics["env_steps_per_second"] * state.times["epoch"]))
    second.run()
    assert seen == [{"iteration_started": 0.0, "halfway": 5.0, "iteration_completed": 5.0}] * 2
    assert rates == pytest.approx([20, 20])


def test_rates_are_counts_per_second_of_the_epoch(clock: Clock) -> None:
    loop, seen = make(clock), []
    loop.epoch_ended(lambda state: seen.append((dict(state.metrics), state.times["epoch"])))  # attached before timing
    timing(loop)

    @loop.iteration_completed
    def halt_third_epoch_early(state: State) -> None:
        if state.epoch == 3 and state.iteration == 2:
            state.halt_epoch()

    final = loop.run()
    for (rates, seconds), iterations in zip(seen, (5, 5, 2), strict=True):
        assert rates["iterations_per_second"] * seconds == pytest.approx(iterations)
        assert rates["env_steps_per_second"] * seconds == pytest.approx(4 * iterations)
        assert rates["updates_per_second"] * seconds == pytest.approx(2 * iterations)
    assert [set(record.metrics) for record in final.history] == [RATES] * 3
    assert not final.memory


def test_epoch_without_measurable_time_has_no_rates(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr("rein.loop.state.time", SimpleNamespace(perf_counter=lambda: clock.now))
    loop = Loop(lambda state: state.clocks.advance(env_steps=4), iterations=5, epochs=2)
    timing(loop)
    metrics = loop.run().history[-1].metrics
    assert metrics.keys() == RATES
    assert all(math.isnan(metrics[name]) for name in RATES)


def test_partly_timed_epoch_has_the_rate_of_iterations_only(clock: Clock) -> None:
    first, second = make(clock), make(clock)

    @first.iteration_completed(once=2)
    def interrupt(state: State) -> None:
        first.interrupt()

    first.run()
    timing(second)
    second.load_state_dict(first.state_dict())
    names = [set(record.metrics) for record in second.run().history]
    assert names[0] == {"iterations_per_second"}
    assert names[1] == RATES


def test_timing_a_loop_twice_raises() -> None:
    loop = Loop(lambda state: None)
    timing(loop)
    with pytest.raises(ValueError, match="already timed"):
        timing(loop)


@pytest.mark.parametrize("phases", [False, True])
def test_phases_are_optional_metrics(clock: Clock, phases: bool) -> None:
    loop = make(clock)
    timing(loop, phases=phases)
    loop.run()
    metrics = loop.state.history[-1].metrics
    expected = {"seconds_halfway": 5.0, "seconds_iteration_completed": 5.0} if phases else {}
    assert {name: metrics[name] for name in metrics if name.startswith("seconds_") and metrics[name]} == expected
