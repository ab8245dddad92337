"""React to a metric that stops improving, for example by reducing the learning rate."""

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
    """Call `action(state)` when `metric` has not improved at `patience` + 1 consecutive firings of `event`.

    After the action the count restarts and the best value is kept: while nothing improves, `action` is called at every
    (`patience` + 1)-th firing. Attach `monitor` after the handler that sets the metric, with the same filters. Firings
    before the metric has a value are not counted. The best value and the count are saved as the part `name`, so a
    resumed run continues to count.

    Args:
        loop: Loop to attach to.
        metric: Name of the metric.
        action: Function of the state.
        mode: "min" if lower values are better, "max" if higher values are better.
        patience: Number of consecutive firings without improvement that are allowed.
        min_delta: A value improves the metric if it is better than the best value by more than this. The first number
            always improves it, NaN never. NaN before the first number is not counted; a warning is logged after
            `patience` of them.
        event: Name of the event.
        name: Name of the part. Default: `monitor/<metric>`.
        **filters: Filters of the event, such as `every=10`.

    Raises:
        ValueError: If a number is out of range, or if the loop already owns a part `name`. At the end of the first
            epoch, if the metric is unknown and resembles another one.
        TypeError: If `action` is not a function.
    """
    check_function("monitor(...)", "callback", action)
    loop.metrics.read_by(f"monitor(loop, {metric!r})", metric)
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
    """Multiply the learning rates of an agent or an optimizer by `factor` when `metric` stops improving.

    Example::

        reduce_learning_rate(loop, agent, "evaluation_return", mode="max", factor=0.5, minimum=1e-5, every=5)

    All rates are reduced: `learning_rate`, `actor_learning_rate` and `temperature_learning_rate` of an agent, and the
    rate of each parameter group of an optimizer. A rate never falls below `minimum`. The other options are those of
    `monitor`. The loop owns the reduced rates as the part `<name>/rate` and the monitor as `name` (default:
    `reduce_learning_rate/<metric>`). A resumed run uses the reduced rates and ignores the rates that the agent or the
    optimizer was created with.

    Raises:
        TypeError: If `of` has no learning rate, or if a rate follows a schedule.
        ValueError: If a number is out of range.
    """
    rate = LearningRate(of, factor, minimum)
    name = name or f"reduce_learning_rate/{metric}"
    options: dict[str, Any] = {"patience": patience, "mode": mode, "min_delta": min_delta, "event": event, **filters}
    monitor(loop, metric, rate.reduce, name=name, **options)
    loop.own(f"{name}/rate", rate)
    loop.started.attach(rate.restore)


@attrs.define(eq=False)
class Monitor(Improvement):
    """State of `monitor`. `since` also counts from the last action."""

    caller = "monitor"

    action: Callable[[State], None]

    def check(self, state: State) -> None:
        """Compare the current value with the best one, and act if patience is exhausted. Handler of the event."""
        self.compare(state)
        if self.exhausted:
            self.since = 0
            self.action(state)


@attrs.define(eq=False)
class LearningRate:
    """Learning rates of an agent (`learning_rate`, `actor_learning_rate`, ...) or of an optimizer's parameter groups.

    Learning rates assigned to an agent are not part of its state. After the first reduction, a checkpoint stores the
    current rates here.
    """

    of: Any
    factor: float
    minimum: float
    reduced: int = 0  # number of reductions
    loaded: list[float] | None = None  # assigned when the run starts

    def __attrs_post_init__(self) -> None:
        if not 0 < self.factor < 1:
            raise ValueError(f"reduce_learning_rate(factor={self.factor}): expected a number between 0 and 1")
        if not 0 <= self.minimum < math.inf:
            raise ValueError(f"reduce_learning_rate(minimum={self.minimum}): expected a finite number of at least 0")
        self.read()

    def read(self) -> list[float]:
        """Return the current rates. Raises TypeError if there is none, or if one follows a schedule."""
        if hasattr(self.of, "param_groups"):
            return [float(group["lr"]) for group in self.of.param_groups]
        names, kind = self._names(), type(self.of).__name__
        if not names:
            raise TypeError(f"reduce_learning_rate(loop, {kind}): pass an agent with a learning_rate, or an optimizer")
        return [_number(f"{kind}.{name}", getattr(self.of, name)) for name in names]

    def _names(self) -> list[str]:
        """Return the attributes of an agent that are learning rates. A rate of None follows `learning_rate`."""
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
        """Multiply the rates above the minimum by the factor."""
        before = self.read()
        after = [min(rate, max(rate * self.factor, self.minimum)) for rate in before]
        if after != before:
            self.write(after)
            self.reduced += 1
            logger.info("learning rate %s in epoch %d", ", ".join(f"{rate:.3g}" for rate in after), state.epoch)

    def restore(self, state: State) -> None:
        """Assign the loaded rates. Handler of `started`, after all parts are loaded and set up."""
        if self.loaded is not None:
            self.write(self.loaded)
            self.loaded = None

    @property
    def config(self) -> dict[str, Any]:
        """Options as JSON."""
        return {"factor": self.factor, "minimum": self.minimum}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of reductions and the current rates, None if they were never reduced."""
        rates = self.read() if self.loaded is None else self.loaded
        return {"reduced": self.reduced, "rates": rates if self.reduced else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`. The rates are assigned when the run starts."""
        self.reduced, self.loaded = state["reduced"], state["rates"]
        if self.loaded is not None and len(self.loaded) != len(self.read()):
            raise ValueError(
                f"reduce_learning_rate: the checkpoint has {len(self.loaded)} learning rates and "
                f"{type(self.of).__name__} has {len(self.read())}; create it with the options of the saved run. "
                "Checkpoints of earlier versions have one rate"
            )


def _number(name: str, rate: Any) -> float:
    if isinstance(rate, Schedule):
        if rate.clock is not None:
            raise TypeError(
                f"reduce_learning_rate: {name} already follows a schedule over {rate.clock}; set it to a number"
            )
        rate = rate()
    return float(rate)
