"""End a run at a value of a clock or of a metric."""

from __future__ import annotations

import math
from collections.abc import Callable

from rein.errors import hints
from rein.loop import Loop
from rein.loop.state import CLOCKS, State


def stop_at(
    loop: Loop,
    metric: str | None = None,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    event: str = "epoch_ended",
    **clocks: float,
) -> None:
    """Halt the loop when a clock or a metric reaches a value. With several rules, the first one reached ends the run.

    Example::

        stop_at(loop, env_steps=1_000_000)
        stop_at(loop, "episode_return_100", at_least=475)

    The limit of a clock replaces the default limit of one epoch; `epochs=` of the loop or of `run` still holds. A
    metric does not replace the default limit, because it may never reach its value.

    Clocks are read after every iteration and every epoch; reading a clock that holds a tensor copies it to the host.
    The metric is read when `event` fires; no value and NaN never reach a bound. A resumed run that has reached a value
    halts in `started`. The limits of clocks are in `state.limits`, which `state.remaining` and `progress` use.

    Raises:
        TypeError: If the metric is not given with exactly one bound.
        ValueError: If a clock is unknown or a limit is not above 0. At the end of the first epoch, if the metric is
            unknown and resembles another one.
    """
    if metric is None and not clocks:
        raise TypeError(
            "stop_at(loop, ...): pass a clock such as env_steps=1_000_000, or a metric with at_least= or at_most="
        )
    if (at_least is not None) + (at_most is not None) != (metric is not None):
        raise TypeError("stop_at(loop, metric, ...): pass a metric together with exactly one of at_least= and at_most=")
    for clock, limit in clocks.items():
        if clock not in CLOCKS:
            raise ValueError(f"stop_at({clock}={limit!r}): unknown clock{hints().suggestion(clock, list(CLOCKS))}")
        if not limit > 0:
            raise ValueError(f"stop_at({clock}={limit!r}): expected a limit above 0")
    if metric is not None and at_least is not None:
        _stop_at_metric(loop, metric, f">= {at_least}", lambda value: value >= at_least, event)
    if metric is not None and at_most is not None:
        _stop_at_metric(loop, metric, f"<= {at_most}", lambda value: value <= at_most, event)
    for clock, limit in clocks.items():
        _stop_at_clock(loop, clock, limit)


def _stop_at_clock(loop: Loop, clock: str, limit: float) -> None:
    if limit < math.inf:
        loop.state.limits[clock] = min(limit, loop.state.limits.get(clock, math.inf))
        if loop.epochs_by_default:
            loop.epochs = None

    # `epochs` advances in the end events of an epoch, and a part may advance its clock there
    @loop.on("started", "iteration_completed", "epoch_ended")
    def stop_at_clock(state: State) -> None:
        if getattr(state.clocks, clock) >= limit:
            state.halt_loop(f"{clock} has reached {limit:,}")


def _stop_at_metric(loop: Loop, metric: str, bound: str, reached: Callable[[float], bool], event: str) -> None:
    loop.metrics.read_by(f"stop_at(loop, {metric!r})", metric)
    rule = f"stop_at/{metric} {bound}"  # key of state.memory: reason of the halt

    @loop.event(event)
    def stop_at_metric(state: State) -> None:
        value = state.metrics.get(metric, math.nan)
        if reached(value):
            state.memory[rule] = f"{metric} has reached {value:,.5g}, which is {bound}"
            state.halt_loop(state.memory[rule])

    @loop.started
    def halt_if_reached(state: State) -> None:
        if rule in state.memory:
            state.halt_loop(state.memory[rule])
