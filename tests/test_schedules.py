from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rein.schedules import Schedule, as_schedule, constant, cosine, exponential, linear, piecewise

RAMPS = [linear, exponential, cosine]
Ramp = Callable[..., Schedule]
positive = st.floats(1e-6, 1e6)
horizons = st.integers(1, 10**12)


@pytest.mark.parametrize("ramp", RAMPS)
@given(start=positive, end=positive, horizon=horizons)
def test_schedule_starts_and_ends_exactly_and_stays_at_end(ramp: Ramp, start: float, end: float, horizon: int) -> None:
    schedule = ramp(start, end, env_steps=horizon)
    assert schedule(env_steps=0) == start
    assert schedule(env_steps=horizon) == end
    assert schedule(env_steps=horizon + 1) == schedule(env_steps=horizon * 1000) == end


@pytest.mark.parametrize("ramp", RAMPS)
@given(start=positive, end=positive, counts=st.lists(st.integers(0, 1000), min_size=2))
def test_schedule_is_monotonic_between_its_bounds(ramp: Ramp, start: float, end: float, counts: list[int]) -> None:
    schedule = ramp(start, end, updates=1000)
    low, high = schedule.bounds
    values = [schedule(updates=count) for count in sorted(counts)]
    rounding = 1e-12 * high
    assert all(low - rounding <= value <= high + rounding for value in values)
    sign = 1 if end >= start else -1
    assert all(sign * (b - a) >= -rounding for a, b in itertools.pairwise(values))


def test_midpoint_is_arithmetic_or_geometric_mean() -> None:
    half = {"env_steps": 50}
    assert linear(1.0, 9.0, env_steps=100)(**half) == pytest.approx(5.0)  # arithmetic
    assert exponential(1.0, 9.0, env_steps=100)(**half) == pytest.approx(3.0)  # geometric
    assert cosine(1.0, 9.0, env_steps=100)(**half) == pytest.approx(5.0)


def test_exponential_has_constant_ratio_and_cosine_flat_ends() -> None:
    decay = exponential(1.0, 0.01, updates=10)
    ratios = [decay(updates=k + 1) / decay(updates=k) for k in range(10)]
    assert ratios == pytest.approx([ratios[0]] * 10)
    curve = cosine(1.0, 0.0, updates=1000)
    middle = curve(updates=499) - curve(updates=501)
    assert curve(updates=0) - curve(updates=2) < middle / 100
    assert curve(updates=998) - curve(updates=1000) < middle / 100


def test_exponential_accepts_negative_values() -> None:
    assert exponential(-1.0, -9.0, updates=2)(updates=1) == pytest.approx(-3.0)


def test_schedule_uses_its_clock_only() -> None:
    schedule = linear(1.0, 0.0, updates=10)
    assert schedule(updates=5, env_steps=10**9) == schedule(updates=5)
    with pytest.raises(ValueError, match="depends on updates; call it with updates="):
        schedule(env_steps=5)


def test_constant_needs_no_count() -> None:
    assert constant(0.3)() == constant(0.3)(env_steps=10**12) == 0.3


def test_piecewise_concatenates_parts() -> None:
    warm_up, hold, decay = linear(0.0, 1.0, updates=10), constant(1.0, updates=5), cosine(1.0, 0.2, updates=20)
    whole = piecewise(warm_up, hold, decay)
    assert [whole(updates=k) for k in range(10)] == [warm_up(updates=k) for k in range(10)]
    assert {whole(updates=k) for k in range(10, 16)} == {1.0}
    assert [whole(updates=15 + k) for k in range(30)] == [decay(updates=k) for k in range(30)]
    assert whole.bounds == (0.0, 1.0)


def test_piecewise_may_be_nested_and_end_in_constant() -> None:
    inner = piecewise(linear(1.0, 0.5, env_steps=10), linear(0.5, 0.1, env_steps=10))
    outer = piecewise(inner, constant(0.7))
    assert [outer(env_steps=k) for k in range(20)] == [inner(env_steps=k) for k in range(20)]
    assert outer(env_steps=20) == outer(env_steps=10**9) == 0.7


@pytest.mark.parametrize(
    "schedule",
    [
        constant(0.1),
        linear(1, 0, env_steps=1e6),
        exponential(1.0, 0.1, updates=7),
        piecewise(constant(1.0, updates=5), linear(0.0, 1.0, updates=3), cosine(1.0, 0.0, updates=5), constant(0.5)),
    ],
)
def test_config_and_repr_rebuild_schedule(schedule: Schedule) -> None:
    assert as_schedule(json.loads(json.dumps(schedule.config, allow_nan=False))) == schedule
    assert eval(repr(schedule)) == schedule


def test_as_schedule_accepts_numbers_and_schedules() -> None:
    ready = linear(1.0, 0.0, updates=3)
    assert as_schedule(ready) is ready
    assert as_schedule(1)() == 1.0
    with pytest.raises(TypeError, match="expected a number or a schedule"):
        as_schedule("0.1")


@pytest.mark.parametrize("horizon", [0, -1, 0.5, 10.5, float("nan"), float("inf")])
def test_invalid_horizon_raises(horizon: float) -> None:
    with pytest.raises(ValueError, match=r"linear\(1.0, 0.0\): the horizon is .*; give a whole number of at least 1"):
        linear(1.0, 0.0, env_steps=horizon)


def test_unknown_or_missing_clock_raises() -> None:
    with pytest.raises(ValueError, match="unknown clock 'episodes'; use env_steps or updates"):
        linear(1.0, 0.0, episodes=10)
    with pytest.raises(ValueError, match="needs one horizon, env_steps= or updates=; given: none"):
        linear(1.0, 0.0)
    with pytest.raises(ValueError, match="given: env_steps, updates"):
        cosine(1.0, 0.0, env_steps=10, updates=10)


def test_invalid_values_raise() -> None:
    for start, end in ((1.0, 0.0), (0.0, 1.0), (-1.0, 1.0)):
        with pytest.raises(ValueError, match="cannot reach or cross 0"):
            exponential(start, end, updates=10)
    with pytest.raises(ValueError, match="must be finite"):
        constant(float("nan"))


def test_incompatible_parts_raise() -> None:
    with pytest.raises(ValueError, match=r"use \['env_steps', 'updates'\]; give parts with one common clock"):
        piecewise(linear(1.0, 0.0, updates=10), linear(1.0, 0.0, env_steps=10))
    with pytest.raises(ValueError, match="segment 0 of 2 never ends"):
        piecewise(constant(1.0), linear(1.0, 0.0, env_steps=10))
    with pytest.raises(ValueError, match="use no clock"):
        piecewise()


def test_config_with_unknown_curve_raises() -> None:
    segment = {"curve": "wavy", "start": 1.0, "end": 0.0, "steps": 10}
    with pytest.raises(ValueError, match="unknown curve 'wavy'; the curves are constant, linear"):
        as_schedule({"clock": "updates", "segments": [segment]})
