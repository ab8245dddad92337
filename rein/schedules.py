"""Numbers that change over a run: learning rates, exploration rates, coefficients.

A schedule is a function of the counts of one clock, `env_steps` or `updates`, from 0 to its horizon: it holds no state,
so a resumed run reads the same values, and it never needs to know how long a run will be.

    epsilon = linear(1.0, 0.05, env_steps=100_000)
    epsilon(env_steps=50_000)       # 0.525
    epsilon(env_steps=100_000)      # 0.05, exactly, and ever after

    warm_up = piecewise(linear(0.0, 1e-3, updates=500), cosine(1e-3, 0.0, updates=9_500))
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import attrs

CLOCKS = ("env_steps", "updates")  # those that an agent counts by itself

_CURVES = {  # start, end, and p: the part of the steps that is over, in [0, 1)
    "constant": lambda start, end, p: start,
    "linear": lambda start, end, p: start + (end - start) * p,
    "exponential": lambda start, end, p: start * (end / start) ** p,
    "cosine": lambda start, end, p: start + (end - start) * 0.5 * (1.0 - math.cos(math.pi * p)),
}


@attrs.frozen
class Segment:
    """One curve from `start` to `end` in `steps` counts; for ever where `steps` is None."""

    curve: str
    start: float
    end: float
    steps: float | None

    def __attrs_post_init__(self) -> None:
        call = f"{self.curve}({self.start}, {self.end})"
        if self.curve not in _CURVES:
            raise ValueError(f"unknown curve {self.curve!r}; the curves are {', '.join(_CURVES)}")
        if not (math.isfinite(self.start) and math.isfinite(self.end)):
            raise ValueError(f"{call}: a schedule's values are finite numbers")
        if self.curve == "exponential" and self.start * self.end <= 0.0:
            raise ValueError(f"{call}: a constant ratio cannot reach or cross 0; end at a small number, or use linear")
        if self.steps is not None and (self.steps < 1 or self.steps % 1 != 0):
            raise ValueError(f"{call}: the horizon is {self.steps}; it is a whole number, at least 1")

    def __call__(self, count: float) -> float:
        """The value `count` steps after the segment's beginning."""
        return self.start if self.steps is None else _CURVES[self.curve](self.start, self.end, count / self.steps)


@attrs.frozen(repr=False)
class Schedule:
    """Segments one after another on one clock; stays at the last one's end. Made by the functions of this module."""

    clock: str | None  # None: the same at any time
    segments: tuple[Segment, ...]

    def __attrs_post_init__(self) -> None:
        if self.clock not in (None, *CLOCKS):
            raise ValueError(f"unknown clock {self.clock!r}; a schedule runs on {' or '.join(CLOCKS)}")
        for place, segment in enumerate(self.segments[:-1]):
            if segment.steps is None:
                raise ValueError(f"segment {place} of {len(self.segments)} never ends: give it a horizon")

    def __call__(self, *, env_steps: int | None = None, updates: int | None = None) -> float:
        """The value at these counts; ValueError where the count of the schedule's own clock is not given."""
        if self.clock is None:
            return self.segments[0].start
        count = env_steps if self.clock == "env_steps" else updates
        if count is None:
            raise ValueError(f"this schedule runs on {self.clock}: call it with {self.clock}=")
        over = 0.0
        for segment in self.segments:
            if segment.steps is None or count - over < segment.steps:
                return segment(count - over)
            over += segment.steps
        return self.segments[-1].end

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest value that it ever takes."""
        ends = [value for segment in self.segments for value in (segment.start, segment.end)]
        return min(ends), max(ends)

    @property
    def config(self) -> float | dict[str, Any]:
        """What `as_schedule` makes an equal schedule of, as JSON: a number where it is constant."""
        if self.clock is None:
            return self.segments[0].start
        return {"clock": self.clock, "segments": [attrs.asdict(segment) for segment in self.segments]}

    def __repr__(self) -> str:
        """The call that builds it."""
        ends = [f"{s.start}" if s.curve == "constant" else f"{s.start}, {s.end}" for s in self.segments]
        horizons = ["" if s.steps is None else f", {self.clock}={s.steps}" for s in self.segments]
        parts = [f"{s.curve}({a}{b})" for s, a, b in zip(self.segments, ends, horizons, strict=True)]
        return parts[0] if len(parts) == 1 else f"piecewise({', '.join(parts)})"


def constant(value: float, **horizon: float) -> Schedule:
    """The same value for ever; with a horizon (`env_steps=` or `updates=`) a part for the middle of `piecewise`."""
    if horizon:
        return _single("constant", value, value, horizon)
    return Schedule(None, (Segment("constant", float(value), float(value), None),))


def linear(start: float, end: float, **horizon: float) -> Schedule:
    """From `start` to `end` in a straight line: start + (end - start) * p, where p of the horizon is over.

    The horizon is `env_steps=` or `updates=`: a whole number, at least 1; anything else is a ValueError.
    """
    return _single("linear", start, end, horizon)


def exponential(start: float, end: float, **horizon: float) -> Schedule:
    """From `start` to `end` by a constant ratio: start * (end / start)^p. Both of one sign, neither 0."""
    return _single("exponential", start, end, horizon)


def cosine(start: float, end: float, **horizon: float) -> Schedule:
    """From `start` to `end` along half a cosine: start + (end - start) * (1 - cos(pi * p)) / 2.

    Source: Loshchilov & Hutter 2017 (SGDR), equation 5 without restarts.
    """
    return _single("cosine", start, end, horizon)


def piecewise(*parts: Schedule) -> Schedule:
    """Schedules one after another, each beginning at the end of the horizon of the one before.

    All run on one clock; only the last may be without a horizon.
    """
    clocks = sorted({part.clock for part in parts if part.clock is not None})
    if len(clocks) != 1:
        raise ValueError(f"piecewise(...): its parts run on {clocks or 'no clock'}; they share one clock")
    return Schedule(clocks[0], tuple(segment for part in parts for segment in part.segments))


def as_schedule(value: float | Schedule | Mapping[str, Any]) -> Schedule:
    """A schedule from a number, a schedule, or the `config` of one."""
    if isinstance(value, Schedule):
        return value
    if isinstance(value, Mapping):
        return Schedule(value["clock"], tuple(Segment(**segment) for segment in value["segments"]))
    if isinstance(value, numbers.Real):  # numpy's too
        return constant(float(value))
    raise TypeError(f"a schedule is a number, or made by linear, cosine, ... of rein.schedules; this is {value!r}")


def _single(curve: str, start: float, end: float, horizon: Mapping[str, float]) -> Schedule:
    """A schedule of one segment on the one clock that `horizon` names."""
    if len(horizon) != 1:
        raise ValueError(
            f"{curve}(...) needs one horizon, env_steps= or updates=; given: {', '.join(horizon) or 'none'}"
        )
    ((clock, steps),) = horizon.items()
    return Schedule(clock, (Segment(curve, float(start), float(end), steps),))
