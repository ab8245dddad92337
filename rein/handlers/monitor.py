"""Do something about a metric that no longer improves; by itself, lower the learning rate."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from rein.functions import check_function
from rein.improvement import Improvement, Mode
from rein.loop import Loop
from rein.schedules import Schedule
from rein.types import State

logger = logging.getLogger("rein")


def monitor(
    loop: Loop,
    metric: str,
    action: Callable[[State], None],
    *,
    mode: Mode,
    patience: int = 3,
    min_delta: float = 0.0,
    event: str = "epoch_ended",
    name: str | None = None,
    **filters: Any,
) -> None:
    """Call `action(state)` at the (`patience` + 1)-th firing in a row at which `metric` has not improved.

    A value improves the metric if it is lower (`mode="min"`) or higher ("max") than the best so far by more than
    `min_delta`. The first number always does, and NaN never does. NaN before the first number does not count, and a
    warning is logged after `patience` of them. After the action the count begins anew, and the best value stays: while
    nothing improves, `action` is called at every (`patience` + 1)-th firing. Attach `monitor` after the handler that
    sets the metric, with the same filters. The best value and the count belong to the part `name` (`monitor/<metric>`
    by default), so a resumed run continues to count.

    Raises ValueError for numbers out of range, and if the loop owns a part of that name. Raises TypeError if `action`
    is not a function. Raises KeyError at a firing if the metric does not exist; the message lists the metrics.
    """
    check_function("monitor(...)", "callback", action)
    attach = loop.event(event)(**filters)
    attach(loop.own(name or f"monitor/{metric}", Monitor(metric, patience, mode, min_delta, action)).check)


def reduce_learning_rate(
    loop: Loop,
    of: Any,
    metric: str,
    *,
    mode: Mode,
    factor: float = 0.1,
    patience: int = 3,
    minimum: float = 0.0,
    min_delta: float = 0.0,
    event: str = "epoch_ended",
    name: str | None = None,
    **filters: Any,
) -> None:
    """Multiply the learning rate of an agent or an optimizer by `factor` when `metric` has not improved; see `monitor`.

        reduce_learning_rate(loop, agent, "evaluation_return", mode="max", factor=0.5, minimum=1e-5, every=5)

    It is never lowered below `minimum`. An optimizer's groups of parameters have a rate each. What was reduced is the
    part `<name>/rate` of the loop, next to the monitor `name` (`reduce_learning_rate/<metric>` by default), and holds
    in a resumed run, whatever the agent or the optimizer was built with there.

    Raises TypeError for what has no learning rate or one that follows a schedule, ValueError for numbers out of range,
    and what `monitor` raises.
    """
    rate = LearningRate(of, factor, minimum)
    name = name or f"reduce_learning_rate/{metric}"
    options: dict[str, Any] = {"patience": patience, "mode": mode, "min_delta": min_delta, "event": event, **filters}
    monitor(loop, metric, rate.reduce, name=name, **options)
    loop.own(f"{name}/rate", rate)
    loop.started.attach(rate.restore)


@attrs.define(eq=False)
class Monitor(Improvement):
    """What `monitor` remembers: `since` counts from the last action too."""

    asked_by = "monitor"

    action: Callable[[State], None]

    def check(self, state: State) -> None:
        """Look at this firing's value, and act where patience has run out; a handler."""
        self.look(state)
        if self.exhausted:
            self.since = 0
            self.action(state)


@attrs.define(eq=False)
class LearningRate:
    """The learning rate of an agent (`learning_rate`) or of each group of an optimizer (`param_groups`).

    What is assigned to an agent is no part of its state, nor is the rate of every optimizer: once `reduced`, what it is
    when a checkpoint is taken is kept here.
    """

    of: Any
    factor: float
    minimum: float
    reduced: int = 0  # times
    loaded: list[float] | None = None  # until the run begins

    def __attrs_post_init__(self) -> None:
        if not 0 < self.factor < 1:
            raise ValueError(f"reduce_learning_rate(factor={self.factor}): give a number between 0 and 1")
        if not 0 <= self.minimum < math.inf:
            raise ValueError(f"reduce_learning_rate(minimum={self.minimum}): give 0 or more")
        if not hasattr(self.of, "learning_rate") and not hasattr(self.of, "param_groups"):
            kind = type(self.of).__name__
            raise TypeError(f"reduce_learning_rate(loop, {kind}): give an agent with a learning_rate, or an optimizer")
        self.read()

    def read(self) -> list[float]:
        """As they are now. Raises TypeError for a schedule."""
        if hasattr(self.of, "param_groups"):
            return [float(group["lr"]) for group in self.of.param_groups]
        rate = self.of.learning_rate
        if isinstance(rate, Schedule):
            if rate.clock is not None:
                kind = type(self.of).__name__
                raise TypeError(
                    f"reduce_learning_rate: {kind}.learning_rate follows a schedule over {rate.clock} already; "
                    "give it a number"
                )
            rate = rate()
        return [float(rate)]

    def write(self, rates: list[float]) -> None:
        """Assign them."""
        if hasattr(self.of, "param_groups"):
            for group, rate in zip(self.of.param_groups, rates, strict=True):
                group["lr"] = rate
        else:
            (self.of.learning_rate,) = rates

    def reduce(self, state: State) -> None:
        """Multiply by the factor what is above the minimum."""
        before = self.read()
        after = [min(rate, max(rate * self.factor, self.minimum)) for rate in before]
        if after != before:
            self.write(after)
            self.reduced += 1
            logger.info("learning rate %s in epoch %d", ", ".join(f"{rate:.3g}" for rate in after), state.epoch)

    def restore(self, state: State) -> None:
        """Assign what was loaded; a handler of `started`, when everything else has been loaded and set up."""
        if self.loaded is not None:
            self.write(self.loaded)
            self.loaded = None

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        return {"factor": self.factor, "minimum": self.minimum}

    def state_dict(self) -> dict[str, Any]:
        """How often it was reduced, and to what; None where it never was."""
        rates = self.read() if self.loaded is None else self.loaded
        return {"reduced": self.reduced, "rates": rates if self.reduced else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; it is assigned when the run begins."""
        self.reduced, self.loaded = state["reduced"], state["rates"]
        if self.loaded is not None and len(self.loaded) != len(self.read()):
            raise ValueError(
                f"rates: {len(self.loaded)} groups of parameters were saved, and here are {len(self.read())}"
            )
