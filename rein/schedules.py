"""Schedules of learning rates, exploration rates and coefficients.

A schedule is a function of one clock, `env_steps` or `updates`, from 0 to its horizon. It has no state, so a resumed
run gets the same values, and it does not depend on the length of the run.

Example:
    >>> epsilon = linear(1.0, 0.05, env_steps=100_000)
    >>> epsilon(env_steps=50_000)
    0.525
    >>> epsilon(env_steps=200_000)
    0.05
    >>> warm_up = piecewise(linear(0.0, 1e-3, updates=500), cosine(1e-3, 0.0, updates=9_500))
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import attrs

CLOCKS = ("env_steps", "updates")  # clocks that agents count

_CURVES = {  # functions of start, end and p, the finished fraction of the steps in [0, 1)
    "constant": lambda start, end, p: start,
    "linear": lambda start, end, p: start + (end - start) * p,
    "exponential": lambda start, end, p: start * (end / start) ** p,
    "cosine": lambda start, end, p: start + (end - start) * 0.5 * (1.0 - math.cos(math.pi * p)),
}


@attrs.frozen
class Segment:
    """One curve from `start` to `end` in `steps` counts, or a constant without an end if `steps` is None."""

    curve: str
    start: float
    end: float
    steps: float | None

    def __attrs_post_init__(self) -> None:
        call = f"{self.curve}({self.start}, {self.end})"
        if self.curve not in _CURVES:
            raise ValueError(f"unknown curve {self.curve!r}; the curves are {', '.join(_CURVES)}")
        if not (math.isfinite(self.start) and math.isfinite(self.end)):
            raise ValueError(f"{call}: the values of a schedule must be finite")
        if self.curve == "exponential" and self.start * self.end <= 0.0:
            raise ValueError(
                f"{call}: an exponential schedule cannot reach or cross 0; end at a small number, or use linear"
            )
        if self.steps is not None and (self.steps < 1 or self.steps % 1 != 0):
            raise ValueError(f"{call}: the horizon is {self.steps}; give a whole number of at least 1")

    def __call__(self, count: float) -> float:
        """Return the value `count` steps after the start of the segment."""
        return self.start if self.steps is None else _CURVES[self.curve](self.start, self.end, count / self.steps)


@attrs.frozen(repr=False)
class Schedule:
    """Segments on one clock, followed by the end value of the last one. Created by the functions of this module."""

    clock: str | None  # None for a constant
    segments: tuple[Segment, ...]

    def __attrs_post_init__(self) -> None:
        if self.clock not in (None, *CLOCKS):
            raise ValueError(f"unknown clock {self.clock!r}; use {' or '.join(CLOCKS)}")
        for place, segment in enumerate(self.segments[:-1]):
            if segment.steps is None:
                raise ValueError(f"segment {place} of {len(self.segments)} never ends; give it a horizon")

    def __call__(self, *, env_steps: int | None = None, updates: int | None = None) -> float:
        """Return the value at these counts. Raises ValueError if the count of the schedule's clock is missing."""
        if self.clock is None:
            return self.segments[0].start
        count = env_steps if self.clock == "env_steps" else updates
        if count is None:
            raise ValueError(f"this schedule depends on {self.clock}; call it with {self.clock}=")
        over = 0.0
        for segment in self.segments:
            if segment.steps is None or count - over < segment.steps:
                return segment(count - over)
            over += segment.steps
        return self.segments[-1].end

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest value of the schedule."""
        ends = [value for segment in self.segments for value in (segment.start, segment.end)]
        return min(ends), max(ends)

    @property
    def config(self) -> float | dict[str, Any]:
        """The schedule as JSON, from which `as_schedule` builds it again; a number if it is constant."""
        if self.clock is None:
            return self.segments[0].start
        return {"clock": self.clock, "segments": [attrs.asdict(segment) for segment in self.segments]}

    def __repr__(self) -> str:
        """Return the call that builds the schedule."""
        ends = [f"{s.start}" if s.curve == "constant" else f"{s.start}, {s.end}" for s in self.segments]
        horizons = ["" if s.steps is None else f", {self.clock}={s.steps}" for s in self.segments]
        parts = [f"{s.curve}({a}{b})" for s, a, b in zip(self.segments, ends, horizons, strict=True)]
        return parts[0] if len(parts) == 1 else f"piecewise({', '.join(parts)})"


def constant(value: float, **horizon: float) -> Schedule:
    """Constant value. With a horizon (`env_steps=` or `updates=`), it can be followed by other parts in `piecewise`."""
    if horizon:
        return _single("constant", value, value, horizon)
    return Schedule(None, (Segment("constant", float(value), float(value), None),))


def linear(start: float, end: float, **horizon: float) -> Schedule:
    """Linear schedule: `start + (end - start) * p`, with p the finished fraction of the horizon.

    The horizon is `env_steps=` or `updates=`. Raises ValueError unless it is a whole number of at least 1.
    """
    return _single("linear", start, end, horizon)


def exponential(start: float, end: float, **horizon: float) -> Schedule:
    """Exponential schedule: `start * (end / start)^p`. `start` and `end` must have the same sign and not be 0."""
    return _single("exponential", start, end, horizon)


def cosine(start: float, end: float, **horizon: float) -> Schedule:
    """Cosine schedule: `start + (end - start) * (1 - cos(pi * p)) / 2`.

    Source: Loshchilov & Hutter 2017 (SGDR), equation 5 without restarts.
    """
    return _single("cosine", start, end, horizon)


def piecewise(*parts: Schedule) -> Schedule:
    """Concatenate schedules. Each begins at the end of the horizon of the previous one.

    All must use the same clock, and only the last may have no horizon.
    """
    clocks = sorted({part.clock for part in parts if part.clock is not None})
    if len(clocks) != 1:
        raise ValueError(f"piecewise(...): its parts use {clocks or 'no clock'}; give parts with one common clock")
    return Schedule(clocks[0], tuple(segment for part in parts for segment in part.segments))


def as_schedule(value: float | Schedule | Mapping[str, Any]) -> Schedule:
    """Return a schedule from a number, a schedule, or the `config` of a schedule."""
    if isinstance(value, Schedule):
        return value
    if isinstance(value, Mapping):
        return Schedule(value["clock"], tuple(Segment(**segment) for segment in value["segments"]))
    if isinstance(value, numbers.Real):  # includes numpy scalars
        return constant(float(value))
    raise TypeError(f"expected a number or a schedule of rein.schedules, such as linear or cosine, got {value!r}")


def _single(curve: str, start: float, end: float, horizon: Mapping[str, float]) -> Schedule:
    """Return a schedule of one segment on the clock in `horizon`."""
    if len(horizon) != 1:
        raise ValueError(
            f"{curve}(...) needs one horizon, env_steps= or updates=; given: {', '.join(horizon) or 'none'}"
        )
    ((clock, steps),) = horizon.items()
    return Schedule(clock, (Segment(curve, float(start), float(end), steps),))
