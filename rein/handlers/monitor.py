"""Do something about a metric that no longer improves; by itself, lower the learning rate."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from rein.handlers.improvement import Improvement, Mode
from rein.loop import Loop
from rein.loop.checks import check_function
from rein.loop.state import State
from rein.schedules import Schedule

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
    """Multiply the learning rates of an agent or an optimizer by `factor` when `metric` has not improved.

        reduce_learning_rate(loop, agent, "evaluation_return", mode="max", factor=0.5, minimum=1e-5, every=5)

    All rates are lowered: `learning_rate`, `actor_learning_rate` and `temperature_learning_rate` of an agent, and the
    rate of each parameter group of an optimizer. A rate never falls below `minimum`. The other options are those of
    `monitor`. The loop owns the reduced rates as the part `<name>/rate`, next to the monitor `name`
    (`reduce_learning_rate/<metric>` by default). A resumed run uses the reduced rates and ignores the rates that the
    agent or the optimizer was built with.

    Raises TypeError if `of` has no learning rate or if a rate follows a schedule, ValueError for numbers out of range,
    and the errors of `monitor`.
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
    """All learning rates of an agent (`learning_rate`, `actor_learning_rate`, ...) or of an optimizer's groups.

    Rates that were assigned to an agent are not part of its state. After the first reduction, a checkpoint keeps the
    current rates here.
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
        self.read()

    def read(self) -> list[float]:
        """Return the current rates. Raises TypeError if there is none, or if one follows a schedule."""
        if hasattr(self.of, "param_groups"):
            return [float(group["lr"]) for group in self.of.param_groups]
        names, kind = self._names(), type(self.of).__name__
        if not names:
            raise TypeError(f"reduce_learning_rate(loop, {kind}): give an agent with a learning_rate, or an optimizer")
        return [_number(f"{kind}.{name}", getattr(self.of, name)) for name in names]

    def _names(self) -> list[str]:
        """Return the attributes of an agent that are learning rates; a rate of None follows `learning_rate`."""
        names = [name for name in dir(self.of) if name.endswith("learning_rate") and not name.startswith("_")]
        return [name for name in names if getattr(self.of, name) is not None]

    def write(self, rates: list[float]) -> None:
        """Assign the rates, in the order of `read`."""
        if hasattr(self.of, "param_groups"):
            for group, rate in zip(self.of.param_groups, rates, strict=True):
                group["lr"] = rate
        else:
            for name, rate in zip(self._names(), rates, strict=True):
                setattr(self.of, name, rate)

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
                f"reduce_learning_rate: the checkpoint has {len(self.loaded)} learning rates and "
                f"{type(self.of).__name__} has {len(self.read())}: build it with the options of the saved run, or the "
                "checkpoint is of an earlier version, which kept one rate"
            )


def _number(name: str, rate: Any) -> float:
    if isinstance(rate, Schedule):
        if rate.clock is not None:
            raise TypeError(
                f"reduce_learning_rate: {name} follows a schedule over {rate.clock} already; give it a number"
            )
        rate = rate()
    return float(rate)
