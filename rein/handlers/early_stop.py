"""End a run when a metric stops improving."""

from __future__ import annotations

from typing import Any

import attrs

from rein.handlers.improvement import Improvement, Mode
from rein.loop import Loop
from rein.loop.state import State


def early_stop(
    loop: Loop,
    metric: str,
    *,
    mode: Mode,
    patience: int = 3,
    min_delta: float = 0.0,
    event: str = "epoch_ended",
    name: str | None = None,
    **filters: Any,
) -> None:
    """Halt the loop when `metric` has not improved at `patience` + 1 consecutive firings of `event`.

    Example::

        early_stop(loop, "evaluation_return", mode="max", patience=4, every=5)

    Attach it after the handler that sets the metric, with the same filters. Firings before the metric has a value are
    not counted. The best value and the count are saved as
    the part `name`, so a resumed run continues to count. A resumed run that was stopped halts again: to continue it,
    increase `patience` or set `loop.parts[name].since = 0`.

    Args:
        loop: Loop to halt.
        metric: Name of the metric.
        mode: "min" if lower values are better, "max" if higher values are better.
        patience: Number of consecutive firings without improvement that are allowed.
        min_delta: A value improves the metric if it is better than the best value by more than this. NaN never improves
            it. NaN before the first number is not counted; a warning is logged after `patience` of them.
        event: Name of the event.
        name: Name of the part. Default: `early_stop/<metric>`.
        **filters: Filters of the event, such as `every=10`.

    Raises:
        ValueError: If a number is out of range, or if the loop already owns a part `name`. At the end of the first
            epoch, if the metric is unknown and resembles another one.
    """
    attach = loop.event(event)(**filters)
    loop.metrics.read_by(f"early_stop(loop, {metric!r})", metric)
    part = loop.own(name or f"early_stop/{metric}", EarlyStop(metric, patience, mode, min_delta))
    attach(part.check)
    loop.started.attach(part.halt_if_exhausted)


@attrs.define(eq=False)
class EarlyStop(Improvement):
    """State of `early_stop`."""

    caller = "early_stop"

    def check(self, state: State) -> None:
        """Compare the current value with the best one, and halt if patience is exhausted. Handler of the event."""
        self.compare(state)
        self.halt_if_exhausted(state)

    def halt_if_exhausted(self, state: State) -> None:
        """Halt if patience is exhausted, in this run or in the run that it resumes. Handler of `started`."""
        if self.exhausted and state.status == "running":  # the last evaluation may end in `completed`
            state.halt_loop(
                f"{self.metric} has not improved {self.since} times in a row; its best value is {self.best:.5g}"
            )
