"""Metrics accumulated over an epoch. Values stay tensors on their device until they are read as floats."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rein.errors import hints
from rein.loop.state import State
from rein.ops.trees import Read

logger = logging.getLogger("rein")

Source = str | Callable[[State], Any]  # key of the step's metrics, or function of the state
Reduce = Callable[[Any, Any, int], Any]  # (accumulated or None, value, number of earlier values) -> accumulated


def ema(alpha: float) -> Reduce:
    """Return a reduction for an exponential moving average, m <- alpha x + (1 - alpha) m, from the first value on."""
    if not 0.0 < alpha <= 1.0:
        raise ValueError(f"ema(alpha={alpha}): the weight of the newest value must be in (0, 1]")
    return lambda mean, value, count: value if count == 0 else alpha * value + (1 - alpha) * mean


def _add(total: Any, value: Any, count: int) -> Any:
    if count:
        return total + value
    # sum in float64 if the device supports it: many float32 terms lose precision
    if isinstance(value, Tensor) and value.device.type != "mps":
        return value.double()
    return value


def _extreme(of_tensors: Callable[[Tensor, Tensor], Tensor], of_numbers: Callable[..., Any]) -> Reduce:
    """Return a reduction that keeps NaN. Python's `min` and `max` keep or drop NaN depending on the argument order."""

    def reduce(best: Any, value: Any, count: int) -> Any:
        if count == 0:
            return value
        if isinstance(best, Tensor) and isinstance(value, Tensor):
            return of_tensors(best, value)
        return math.nan if best != best or value != value else of_numbers(best, value)

    return reduce


def _collect(values: Any, value: Any, count: int) -> list[Any]:
    values = values if count else []
    values.append(value)
    return values


def _copied(accumulated: Any) -> Any:
    """Return a list as a copy, because further values are appended to it. Other values are never changed."""
    return [*accumulated] if isinstance(accumulated, list) else accumulated


def _median(values: list[Any]) -> Tensor:
    """Return the median, the mean of the two middle values if their number is even; NaN if one is NaN."""
    device = next((value.device for value in values if isinstance(value, Tensor)), None)
    if device is None:
        return torch.tensor(values, dtype=torch.float64, device="cpu").quantile(0.5)
    return torch.stack([torch.as_tensor(value, dtype=torch.float32, device=device) for value in values]).quantile(0.5)


REDUCTIONS: dict[str, Reduce] = {
    "mean": _add,
    "sum": _add,
    "min": _extreme(torch.minimum, min),
    "max": _extreme(torch.maximum, max),
    "last": lambda _, value, count: value,
    "median": _collect,
}


class Accumulator:
    """Accumulator of one metric over one epoch."""

    def __init__(
        self, name: str, source: Source, reduce: str | Reduce, weight: Callable[[State], float] | None
    ) -> None:
        if isinstance(reduce, str) and reduce not in REDUCTIONS:
            raise ValueError(f"metric {name!r}: unknown reduce={reduce!r}; use {', '.join(REDUCTIONS)} or a function")
        if not isinstance(reduce, str) and not callable(reduce):
            raise TypeError(f"metric {name!r}: reduce must be a name or a function, got {reduce!r}")
        if not isinstance(source, str) and not callable(source):
            raise TypeError(f"metric {name!r}: source must be a key of the step's metrics or a function of the state")
        if weight is not None and reduce != "mean":
            raise ValueError(f"metric {name!r}: weight= needs reduce='mean', not {reduce!r}")
        self.name = name
        self._source = source
        self._reduce = REDUCTIONS[reduce] if isinstance(reduce, str) else self._checked(reduce)
        self._averages, self._weight = reduce == "mean", weight
        self.reported = False  # whether any step has reported it
        self.others: dict[str, None] = {}  # other names that the steps report until then
        # whether a reduction returns a new tensor, except for the first value
        self._makes_new = reduce in ("mean", "sum", "min", "max")
        self.zero()

    def _checked(self, reduce: Reduce) -> Reduce:
        """Wrap a custom `reduce`: raise TypeError if it does not return a number."""

        def checked(accumulated: Any, value: Any, count: int) -> Any:
            result = reduce(accumulated, value, count)
            is_number = result.numel() == 1 if isinstance(result, Tensor) else isinstance(result, numbers.Real)
            if not is_number:
                raise TypeError(f"metric {self.name!r}: reduce returned {result!r:.100}; return one number")
            return result

        return checked

    def zero(self) -> None:
        """Reset for a new epoch."""
        self.accumulated: Any = None
        self.count = 0  # of values
        self.divisor = 0.0  # of a mean: the sum of the weights

    def update(self, state: State) -> None:
        """Accumulate the value of this iteration, if the step reported one."""
        value = self._source(state) if callable(self._source) else lookup(state.step_state, self._source)
        if value is None:
            if not self.reported:
                self.others.update(dict.fromkeys(names_in(state.step_state)))
            return
        self.reported = True
        if isinstance(value, Tensor):
            value = value.detach()
            if value.ndim:
                value = self._scalar(value)
            if self.count == 0 or not self._makes_new:
                value = value.clone()  # the tensor may be written to later, for example if it is a parameter
        elif not isinstance(value, int | float):
            value = self._number(value)
        weight = 1.0 if self._weight is None else float(self._weight(state))
        self.accumulated = self._reduce(self.accumulated, value if self._weight is None else value * weight, self.count)
        self.count, self.divisor = self.count + 1, self.divisor + weight

    def _scalar(self, value: Tensor) -> Tensor:
        if value.numel() != 1:
            raise ValueError(
                f"metric {self.name!r} has shape {tuple(value.shape)}; a metric must be one number per iteration: "
                "reduce it first, for example with a function that returns state.step_state....mean()"
            )
        return value.reshape(())

    def _number(self, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            got = f"{type(value).__name__} {value!r}"
            raise TypeError(f"metric {self.name!r}: expected one number per iteration, got {got:.100}") from None

    def warn_if_missing(self) -> None:
        """Warn once if no step has reported the metric although steps report others."""
        if not self.reported and self.others:
            self.reported = True
            logger.warning(
                "metric %r: no step has reported %r so far; the steps report %s",
                self.name,
                self._source,
                ", ".join(self.others),
            )

    def read(self) -> Any:
        """Return the value so far, on its device; NaN if nothing was reported, or if all weights are zero."""
        if self.count == 0 or (self._averages and self.divisor == 0.0):
            return math.nan
        if isinstance(self.accumulated, list):
            return _median(self.accumulated)
        return self.accumulated / self.divisor if self._averages else self.accumulated


def lookup(step_state: Any, key: str) -> Any:
    """Return `key` of `step_state.metrics`, or of `step_state` if it has no metrics; None if it is absent."""
    source = getattr(step_state, "metrics", step_state)
    if isinstance(source, Mapping):
        return source.get(key)
    return getattr(source, key, None)


def names_in(step_state: Any) -> Iterable[str]:
    """Return the keys that `lookup` finds in a step_state."""
    source = getattr(step_state, "metrics", step_state)
    return source if isinstance(source, Mapping) else getattr(source, "_fields", ())


class Frozen(Mapping[str, float]):
    """Metrics of a finished epoch. Values stay tensors until they are first read."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> float:
        value = self._values[name]
        if not isinstance(value, float):
            value = self._values[name] = float(value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(dict(self))


def _is_number(value: Any) -> bool:
    """Return whether an accumulator accepts a value."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _check_name(name: Any) -> None:
    """Raise TypeError or ValueError for a name that files cannot store."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a metric must be a string, got {name!r}: pass str(...)")
    if not name or "\0" in name or any("\ud800" <= character <= "\udfff" for character in name):
        raise ValueError(f"invalid name of a metric, {name!r}: files cannot store it")


class Metrics(MutableMapping[str, Any]):
    """Metrics of the current epoch by name: accumulated by the loop, computed when read, or assigned by a handler."""

    def __init__(self) -> None:
        self._accumulators: dict[str, Accumulator] = {}
        self._computed: dict[str, Callable[[], Any]] = {}
        self._assigned: dict[str, Any] = {}
        # names of the step's metrics so far: whether `report` has added them; None if it was not called
        self._reported: dict[str, bool] | None = None
        self.just_assigned: set[str] = set()  # since the current step began; cleared by the loop
        self._declared: set[str] = set()  # names that handlers will assign, perhaps not in every epoch
        self._readers: dict[str, str] = {}  # name -> the option that names it
        self._unchecked: list[str] = []  # names in `_readers` since the last epoch has ended
        self._seen: set[str] = set()  # names of the epochs that have ended
        self.updates: tuple[Callable[[State], None], ...] = ()  # called by the loop after each step

    def accumulate(
        self,
        name: str,
        source: Source,
        reduce: str | Reduce = "mean",
        weight: Callable[[State], float] | None = None,
    ) -> None:
        """Accumulate `source` over each epoch. Raises ValueError if the name is taken."""
        self._check_free(name)
        self._accumulators[name] = Accumulator(name, source, reduce, weight)
        self._set_updates()

    def report(self) -> None:
        """Accumulate all other numbers among the metrics of the steps, too: means, from the first step with them.

        Values that are not one number, and names that end in `_per_learner`, are not metrics of an epoch.
        """
        self._reported = {}
        self._set_updates()

    def _set_updates(self) -> None:
        finders = () if self._reported is None else (self._find_new,)
        self.updates = (*finders, *(accumulator.update for accumulator in self._accumulators.values()))

    def _find_new(self, state: State) -> None:
        """Accumulate numbers that the steps report for the first time. Raises ValueError if a name is taken."""
        reported, metrics = self._reported, state.step_state.metrics
        if reported is None or not metrics or metrics.keys() <= reported.keys():
            return
        for name, value in metrics.items():
            if name in reported or value is None:
                continue
            is_new = name not in self._accumulators and not str(name).endswith("_per_learner") and _is_number(value)
            if is_new:
                self.accumulate(name, name)
                self._accumulators[name].update(state)
            reported[name] = is_new

    def compute(self, name: str, read: Callable[[], Any]) -> None:
        """Call `read()` whenever the metric is read. The function keeps its own state."""
        self._check_free(name)
        self._computed[name] = read

    def declare(self, *names: str) -> None:
        """Announce metrics that a handler will assign, perhaps not in every epoch."""
        self._declared.update(names)

    def read_by(self, reader: str, name: str) -> None:
        """Check the name of a metric that an option of a handler or a store refers to.

        When the first epoch has ended, an unknown name raises ValueError if it resembles a known one or is the name of
        another library. Otherwise, a warning is logged then and when the run has ended without the metric. Known names
        are those of the metrics so far and those that were declared.
        """
        self._readers[name] = reader
        self._unchecked.append(name)

    def _check_free(self, name: str) -> None:
        _check_name(name)
        if name in self._accumulators or name in self._computed:
            raise ValueError(f"the loop already has a metric {name!r}; choose another name")

    def zero(self) -> None:
        """Start a new epoch: reset the accumulators and remove assigned values."""
        for accumulator in self._accumulators.values():
            accumulator.zero()
        self._assigned.clear()
        self.just_assigned.clear()

    def _raw(self, name: str) -> Any:
        if name in self._assigned:
            return self._assigned[name]
        if name in self._accumulators:
            return self._accumulators[name].read()
        if name in self._computed:
            return self._computed[name]()
        raise KeyError(f"no metric {name!r} in this epoch; the metrics are: {', '.join(self) or 'none'}")

    def __getitem__(self, name: str) -> float:
        return float(self._raw(name))

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._assigned:
            _check_name(name)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"metrics[{name!r}]: a metric must be one number, got a tensor of shape {tuple(value.shape)}"
            )
        try:
            self._assigned[name] = value.detach().clone() if isinstance(value, Tensor) else float(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"metrics[{name!r}] = {value!r:.100}: a metric must be one number; use state.log(name, text) for "
                "loggers, or state.memory for other values"
            ) from None
        self.just_assigned.add(name)

    def __delitem__(self, name: str) -> None:
        del self._assigned[name]

    def __contains__(self, name: object) -> bool:
        return name in self._accumulators or name in self._computed or name in self._assigned

    def __iter__(self) -> Iterator[str]:
        yield from self._accumulators
        yield from self._computed
        yield from (n for n in self._assigned if n not in self._accumulators and n not in self._computed)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def reads(self) -> Iterator[Read]:
        """Yield the values on a device, so that they are read together with others."""
        for accumulator in self._accumulators.values():
            if isinstance(accumulator.accumulated, Tensor) and not accumulator.accumulated.is_cpu:
                yield [accumulator.accumulated], lambda copy, owner=accumulator: setattr(owner, "accumulated", copy)

    def freeze(self) -> Frozen:
        """Return the current values, still on their devices. Warn about metrics that no step reports."""
        for accumulator in self._accumulators.values():
            accumulator.warn_if_missing()
        self._seen.update(self)
        unchecked, self._unchecked = self._unchecked, []
        self._check_readers(unchecked, raises=True)
        return Frozen({name: self._raw(name) for name in self})

    def warn_of_unseen(self) -> None:
        """Warn of metrics that options refer to, that were not announced and that no epoch of the run has had."""
        self._check_readers([name for name in self._readers if name not in self._unchecked])

    def _check_readers(self, names: Sequence[str], raises: bool = False) -> None:
        metric_names = self._seen | self._declared if names else set()
        for name in names:
            if name in metric_names:
                continue
            listed = ", ".join(sorted(metric_names)) or "none"
            if raises and (similar := hints().similar_metric(name, metric_names)):
                raise ValueError(
                    f"{self._readers[name]}: no metric {name!r}; did you mean {similar!r}? The metrics are {listed}"
                )
            message = "%s: no epoch has had a metric %r so far; the metrics are %s"
            logger.warning(message, self._readers[name], name, listed)

    def state_dict(self) -> dict[str, Any]:
        """Return accumulated and assigned values. Computed metrics are saved by their source."""
        return {
            "accumulated": {
                a.name: {"value": _copied(a.accumulated), "count": a.count, "divisor": a.divisor}
                for a in self._accumulators.values()
            },
            "assigned": dict(self._assigned),
            "reported": [name for name, added in (self._reported or {}).items() if added],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. Metrics without a saved value start empty."""
        for name in state.get("reported", ()):
            if self._reported is not None and name not in self._accumulators:
                self._reported[name] = True
                self.accumulate(name, name)
        for name, accumulator in self._accumulators.items():
            saved = state["accumulated"].get(name)
            accumulator.zero()
            if saved is not None:
                accumulator.accumulated, accumulator.count = _copied(saved["value"]), saved["count"]
                accumulator.divisor = saved["divisor"]
        self._assigned = dict(state["assigned"])

    def __repr__(self) -> str:
        return f"Metrics({dict(self)})"
