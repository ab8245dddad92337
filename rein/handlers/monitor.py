"""React to a metric that stops improving: end the run, reduce the learning rate, or call a function."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import attrs

from rein.loop import Loop
from rein.loop.checks import check_function, name_of
from rein.loop.state import State
from rein.schedules import Schedule

logger = logging.getLogger("rein")

Mode = Literal["min", "max"] | Callable[[float, float], bool]  # or whether (value, best) is an improvement


@attrs.define(eq=False)
class Improvement:
    """Tracks the best value of a metric, and the number of firings `since` the last improvement.

    A value is better if it is lower (`mode="min"`) or higher ("max") than the best value by more than `min_delta`. If
    `mode` is a function, a value is better if `mode(value, best)` is true. The first number is always better. NaN is
    never better. NaN before the first number is not counted; a warning is logged after `patience` of them.

    Raises ValueError if a number is out of range.
    """

    caller: ClassVar[str] = "Improvement"  # name of the function in messages

    metric: str
    patience: int  # firings without improvement that are allowed
    mode: Mode
    min_delta: float
    best: float | None = attrs.field(default=None, init=False)  # None before the first number
    since: int = attrs.field(default=0, init=False)
    missing: int = attrs.field(default=0, init=False)  # NaNs before the first number, in this process

    def __attrs_post_init__(self) -> None:
        if self.mode not in ("min", "max") and not callable(self.mode):
            raise ValueError(
                f'{self.caller}(mode={self.mode!r}): expected "min" (lower is better), "max" (higher is better) or a '
                "function of the value and the best value"
            )
        if not isinstance(self.patience, int) or self.patience < 0:
            raise ValueError(f"{self.caller}(patience={self.patience}): expected an integer of at least 0")
        if not self.min_delta >= 0:
            raise ValueError(
                f"{self.caller}(min_delta={self.min_delta}): expected at least 0; mode= gives the direction"
            )

    def compare(self, state: State) -> None:
        """Compare the current value of the metric with the best one, if it has a value."""
        value = state.metrics.get(self.metric)
        if value is None or (math.isnan(value) and state._left):  # `stop` ended the evaluation that sets it
            return
        if math.isnan(value) and self.best is None:
            self.missing += 1
            if self.missing == max(self.patience, 1):
                logger.warning("%s: %s has been NaN %d times", self.caller, self.metric, self.missing)
        elif self.best is None or (not math.isnan(value) and self._is_better(value, self.best)):
            self.best, self.since = value, 0
        else:
            self.since += 1

    def _is_better(self, value: float, best: float) -> bool:
        if callable(self.mode):
            return self.mode(value, best)
        return value < best - self.min_delta if self.mode == "min" else value > best + self.min_delta

    @property
    def exhausted(self) -> bool:
        """Whether the number of firings without improvement exceeds `patience`."""
        return self.best is not None and self.since > self.patience

    @property
    def config(self) -> dict[str, Any]:
        """Options as JSON."""
        mode = name_of(self.mode) if callable(self.mode) else self.mode
        return {"metric": self.metric, "patience": self.patience, "mode": mode, "min_delta": self.min_delta}

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the count."""
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.best, self.since = state["best"], state["since"]


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
        mode: "min" if lower values are better, "max" if higher values are better, or a function of a value and the best
            value that returns whether the value is better. `min_delta` does not apply to a function.
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
        mode: "min" if lower values are better, "max" if higher values are better, or a function of a value and the best
            value that returns whether the value is better. `min_delta` does not apply to a function.
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
