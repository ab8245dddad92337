"""Filters: each one on the event's own count and on every clock."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rein
from rein.loop.filters import NOT_GIVEN, UNITS


def firings(epochs: int, iterations: int, event: str = "iteration_completed", **filters: Any) -> list[int]:
    """Return the firings of the event, counted from 1, at which a filtered handler runs."""
    loop, log = rein.Loop(lambda state: None), []
    fired = itertools.count(1)
    now = [0]
    loop.event(event).attach(lambda state: now.__setitem__(0, next(fired)))
    loop.event(event).attach(lambda state: log.append(now[0]), **filters)
    loop.run(epochs=epochs, iterations=iterations)
    return log


HOLDS: dict[str, Callable[[int, int], bool]] = {
    "every": lambda n, every: every > 0 and n % every == 0,
    "once": lambda n, once: n == once,
    "before": lambda n, before: n < before,
    "after": lambda n, after: n > after,
}
COUNTS = {name: st.integers(name == "once", 16) for name in HOLDS}
UNIT = st.sampled_from([None, "iteration", "iterations"])


@given(st.fixed_dictionaries({}, optional=COUNTS).filter(bool), UNIT)
def test_firings_are_those_for_which_all_filters_hold(filters: dict[str, int], unit: str | None) -> None:
    count = {n: (n - 1) % 5 + 1 if unit == "iteration" else n for n in range(1, 16)}
    expected = [n for n in count if all(HOLDS[name](count[n], value) for name, value in filters.items())]
    assert firings(3, 5, unit=unit, **filters) == expected
    if unit != "iterations":  # the number of finished iterations
        assert firings(3, 5, "iteration_started", unit=unit, **filters) == expected


@pytest.mark.parametrize("never", [0, None])
@pytest.mark.parametrize("unit", [None, "env_steps", "iteration"])
def test_every_zero_or_none_means_never(never: int | None, unit: str | None) -> None:
    assert firings(2, 5, every=never, unit=unit) == []


def test_all_filters_must_hold() -> None:
    assert firings(5, 10, every=2, after=10, before=40) == list(range(12, 40, 2))
    assert firings(5, 10, every=2, when=lambda state: state.epoch == 2) == [12, 14, 16, 18, 20]
    assert firings(5, 10, once=30, when=lambda state: False) == []


def test_when_is_evaluated_at_every_firing() -> None:
    assert firings(2, 5, when=lambda state: state.total_iterations == 5) == [5]
    assert firings(1, 3, when=lambda state: np.bool_(True)) == [1, 2, 3]
    assert firings(1, 3, when=lambda state: torch.tensor(True)) == [1, 2, 3]


def test_unit_iteration_in_end_events_is_the_length_of_the_epoch() -> None:
    assert firings(2, 5, "epoch_ended", once=5, unit="iteration") == [1, 2]
    assert firings(2, 5, "epoch_ended", once=6, unit="iteration") == []


@pytest.mark.parametrize("event", ["iteration_started", "iteration_completed"])
def test_unit_iteration_restarts_after_a_halted_epoch(event: str) -> None:
    loop, log = rein.Loop(lambda state: None), []
    loop.event(event).attach(lambda state: log.append(state.epoch), every=1, unit="iteration")
    loop.event(event).attach(lambda state: log.append(-state.epoch), once=1, unit="iteration")
    loop.event(event).attach(rein.State.halt_epoch, every=2, unit="iteration")
    loop.run(epochs=3, iterations=5)
    assert log == [1, -1, 1, 2, -2, 2, 3, -3, 3]


def test_units_iterations_and_epochs_are_the_loop_clocks() -> None:
    assert firings(3, 5, "epoch_ended", every=5, unit="iterations") == [1, 2, 3]
    assert firings(3, 5, "epoch_ended", every=2, unit="epochs") == [2]
    assert firings(3, 5, "iteration_started", once=2, unit="epochs") == [11]
    assert firings(3, 5, "iteration_started", once=4, unit="iterations") == [5]


def crossings(
    advance: int, iterations: int, clock: str = "env_steps", tensor: bool = False, **filters: Any
) -> list[int]:
    """Return the clock values at which a handler runs, if the clock advances by `advance` per iteration."""
    amount = torch.tensor(advance) if tensor else advance
    loop, log = rein.Loop(lambda state: state.clocks.advance(**{clock: amount})), []
    loop.iteration_completed(unit=clock, **filters)(lambda state: log.append(getattr(state.clocks, clock)))
    loop.run(iterations=iterations)
    return log


@pytest.mark.parametrize("clock", ["env_steps", "vector_steps", "updates", "episodes"])
@pytest.mark.parametrize("tensor", [False, True])
def test_every_on_a_clock_runs_at_crossings(clock: str, tensor: bool) -> None:
    assert crossings(16, 26, clock, tensor, every=100) == [112, 208, 304, 400]
    assert crossings(64, 4, clock, tensor, every=100) == [128, 256]
    assert crossings(250, 3, clock, tensor, every=100) == [250, 500, 750], "once for several crossings"
    assert crossings(16, 10, clock, tensor, once=100) == [112]
    assert crossings(16, 10, clock, tensor, after=100, before=140) == [112, 128]
    assert crossings(16, 40, clock, tensor, every=100, after=112, before=400) == [208, 304]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 60))
def test_crossing_is_detected_once_for_any_amounts(amounts: list[int], every: int) -> None:
    loop, log = rein.Loop(lambda state: state.clocks.advance(env_steps=state.batch)), []
    loop.iteration_completed(every=every, unit="env_steps")(lambda state: log.append(state.clocks.env_steps))
    loop.run(amounts)
    values = list(itertools.accumulate(amounts))
    assert log == [new for old, new in itertools.pairwise([0, *values]) if new // every > old // every]


def test_crossing_rejected_by_another_filter_is_used_up() -> None:
    open_from = lambda value: lambda state: state.clocks.env_steps >= value  # noqa: E731  # short
    assert crossings(16, 20, every=100, when=open_from(128)) == [208, 304]
    assert crossings(16, 20, once=100, when=open_from(128)) == []
    assert crossings(16, 20, every=100, after=128) == [208, 304]


def test_seconds_can_be_fractions(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("rein.loop.state.time.perf_counter", lambda: now[0])
    loop, log = rein.Loop(lambda state: now.__setitem__(0, state.batch)), []
    loop.iteration_completed(every=0.5, unit="seconds")(lambda state: log.append(state.clocks.seconds))
    loop.iteration_completed(once=0.3, unit="seconds")(lambda state: log.append(-state.clocks.seconds))
    loop.run([0.2, 0.4, 0.6, 0.8, 1.0, 1.3])
    assert log == [-0.4, 0.6, 1.0]


def test_filter_on_a_clock_starts_at_the_clock_value_when_attached() -> None:
    loop, log = rein.Loop(lambda state: state.clocks.advance(env_steps=16)), []
    loop.run(iterations=10)
    loop.iteration_completed(every=100, unit="env_steps")(lambda state: log.append(state.clocks.env_steps))
    loop.iteration_completed(once=150, unit="env_steps")(lambda state: log.append("passed already"))
    loop.iteration_completed(once=170, unit="env_steps")(lambda state: log.append("reached later"))
    loop.run(epochs=2, iterations=10)
    assert log == ["reached later", 208, 304]


def test_filter_within_an_epoch_starts_at_the_iteration_when_attached() -> None:
    loop, log = rein.Loop(lambda state: None), []

    @loop.iteration_completed(once=3)
    def attach(state: rein.State) -> None:
        for once in (2, 4):
            loop.iteration_completed(once=once, unit="iteration")(
                lambda state, once=once: log.append((state.epoch, once))
            )

    loop.run(epochs=2, iterations=5)
    assert log == [(1, 4), (2, 2), (2, 4)]


def test_once_never_runs_if_attached_later() -> None:
    loop, log = rein.Loop(lambda state: None), []
    loop.run(epochs=5, iterations=2)
    loop.epoch_ended(once=3)(lambda state: log.append(state.epoch))
    loop.epoch_ended(once=7)(lambda state: log.append(state.epoch))
    loop.iteration_completed(once=10)(lambda state: log.append("total"))
    loop.run(epochs=8, iterations=2)
    assert log == [7]


def test_iteration_events_are_counted_without_handlers() -> None:
    loop, log = rein.Loop(lambda state: None), []
    loop.run(epochs=1, iterations=5)
    loop.iteration_started(every=4)(lambda state: log.append(("started", state.total_iterations + 1)))
    loop.iteration_completed(every=4)(lambda state: log.append(("completed", state.total_iterations)))
    loop.run(epochs=2, iterations=5)
    assert log == [("started", 8), ("completed", 8)]


def test_firing_of_a_skipped_step_is_counted() -> None:
    loop = rein.Loop(lambda state: None)
    log = []
    loop.iteration_started(once=3)(rein.State.halt_epoch)
    loop.iteration_started(once=3)(lambda state: log.append(state.epoch))
    final = loop.run(epochs=4, iterations=2)
    assert [record.status for record in final.history] == ["completed", "halted", "completed", "completed"]
    assert log == [2]


def test_filters_of_handlers_with_equal_names_have_separate_memory() -> None:
    loop, log = rein.Loop(lambda state: state.clocks.advance(env_steps=1)), []
    for every in (2, 3):
        loop.iteration_completed(every=every, unit="env_steps")(lambda state, n=every: log.append(n))
    loop.run(iterations=6)
    assert log == [2, 3, 2, 2, 3]


def test_predicate_can_be_a_wrapped_function() -> None:
    def of_the_state(function: Callable[[int], bool]) -> Callable[[rein.State], bool]:
        @functools.wraps(function)
        def wrapped(state: rein.State) -> bool:
            return function(state.epoch, limit=2)

        return wrapped

    @of_the_state
    def late(epoch: int, limit: int) -> bool:
        return epoch >= limit

    loop, log = rein.Loop(lambda state: None), []
    loop.epoch_ended(when=late)(lambda state: log.append(state.epoch))
    loop.run(epochs=3, iterations=1)
    assert log == [2, 3]


async def always_later(state: rein.State) -> bool:
    return True


NONSENSE = [
    ({"evry": 3}, TypeError, "epoch_ended(evry=...): unknown filter; the filters are every, once, before, after, when"),
    ({"every": -1}, ValueError, "epoch_ended(every=-1): `every` must be 1 or more, or 0 for never, got -1"),
    ({"every": 2.5}, ValueError, "epoch_ended(every=2.5): `every` counts whole firings; give an integer"),
    ({"every": "10"}, TypeError, "epoch_ended(every='10'): `every` must be a number, got '10'"),
    ({"every": True}, TypeError, "`every` must be a number, got True"),
    ({"every": float("nan")}, TypeError, "`every` must be a number, got nan"),
    ({"before": float("inf")}, TypeError, "`before` must be a number, got inf"),
    ({"once": 0}, ValueError, "`once` must be more than 0, got 0"),
    ({"once": None}, TypeError, "`once` must be a number, got None"),
    ({"after": -3}, ValueError, "`after` must be 0 or more, got -3"),
    ({"once": 1.5, "unit": "updates"}, ValueError, "`once` counts whole updates; give an integer"),
    ({"once": 0, "unit": "seconds"}, ValueError, "`once` must be more than 0, got 0"),
    ({"every": 3, "unit": "steps"}, ValueError, f"unknown unit 'steps'; the units are {', '.join(UNITS)}"),
    ({"every": 3, "unit": 7}, ValueError, "unknown unit 7"),
    ({"unit": "env_steps"}, ValueError, "`unit` needs one of every, once, before and after"),
    ({"when": lambda state: True, "unit": "epochs"}, ValueError, "`unit` needs one of"),
    ({"when": 3}, TypeError, "epoch_ended(when=3): a predicate must be a function of the state, got int"),
    ({"when": bool}, TypeError, "a predicate must be a function of the state, got the class bool"),
    (
        {"when": always_later},
        TypeError,
        "predicate always_later is asynchronous or a generator: calling it would run nothing",
    ),
]


@pytest.mark.parametrize(("filters", "error", "text"), NONSENSE, ids=lambda case: str(case).split(" at 0x")[0][:40])
def test_invalid_filter_raises_at_the_decorator(filters: dict[str, Any], error: type[Exception], text: str) -> None:
    loop = rein.Loop(lambda state: None)
    with pytest.raises(error, match=re.escape(text)):
        loop.epoch_ended(**filters)
    with pytest.raises(error, match=re.escape(text)):
        loop.epoch_ended.attach(lambda state: None, **filters)
    assert loop.epoch_ended.handlers == ()


def test_integers_of_any_type_are_accepted() -> None:
    for n in (3, 3.0, np.int64(3), np.float32(3)):
        assert firings(1, 7, every=n) == crossings(1, 7, every=n) == [3, 6]
    assert firings(1, 3, every=1e6) == []


def test_no_filter_gives_none() -> None:
    assert firings(1, 3, when=None) == firings(1, 3, when=None, unit=None) == [1, 2, 3]
    assert repr(NOT_GIVEN) == "not given"
