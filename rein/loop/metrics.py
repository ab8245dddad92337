"""Accumulators over an epoch. Values stay tensors, on their device, until somebody reads them as floats."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from rein.loop.state import State

logger = logging.getLogger("rein")

Reduce = Callable[[Any, Any, int], Any]  # (accumulated or None, value, how many before it) -> accumulated


def ema(alpha: float) -> Reduce:
    """An exponential moving average: m <- alpha x + (1 - alpha) m, beginning with the first value."""
    if not 0.0 < alpha <= 1.0:
        raise ValueError(f"ema(alpha={alpha}): the weight of the newest value lies in (0, 1]")
    return lambda mean, value, count: value if count == 0 else alpha * value + (1 - alpha) * mean


def _add(total: Any, value: Any, count: int) -> Any:
    if count:
        return total + value
    # a sum of many float32 values is kept in float64 where the device has it
    if isinstance(value, Tensor) and value.device.type != "mps":
        return value.double()
    return value


def _extreme(of_tensors: Callable[[Tensor, Tensor], Tensor], of_numbers: Callable[..., Any]) -> Reduce:
    """NaN stays, whenever it came: Python's own `min` and `max` keep or lose it by the order of their arguments."""

    def reduce(best: Any, value: Any, count: int) -> Any:
        if count == 0:
            return value
        if isinstance(best, Tensor) and isinstance(value, Tensor):
            return of_tensors(best, value)
        return math.nan if best != best or value != value else of_numbers(best, value)

    return reduce


REDUCTIONS: dict[str, Reduce] = {
    "mean": _add,
    "sum": _add,
    "min": _extreme(torch.minimum, min),
    "max": _extreme(torch.maximum, max),
    "last": lambda _, value, count: value,
}


class Accumulator:
    """One metric over one epoch."""

    def __init__(self, name: str, source: str | Callable[[State], Any], reduce: str | Reduce) -> None:
        if isinstance(reduce, str) and reduce not in REDUCTIONS:
            raise ValueError(f"metric {name!r}: unknown reduce={reduce!r}; use {', '.join(REDUCTIONS)} or a function")
        if not isinstance(reduce, str) and not callable(reduce):
            raise TypeError(f"metric {name!r}: reduce={reduce!r} is neither a name nor a function")
        if not isinstance(source, str) and not callable(source):
            raise TypeError(f"metric {name!r}: give a key of the step's metrics or a function of the state")
        self.name = name
        self._source = source
        self._reduce = REDUCTIONS[reduce] if isinstance(reduce, str) else self._checked(reduce)
        self._averages = reduce == "mean"
        self.reported = False  # whether any step has reported it
        self.others: dict[str, None] = {}  # until then, what the steps report instead
        self._makes_new = reduce in ("mean", "sum", "min", "max")  # a tensor of its own, but for the first value
        self.zero()

    def _checked(self, reduce: Reduce) -> Reduce:
        """Have a user's `reduce` raise TypeError if it does not return a number."""

        def checked(accumulated: Any, value: Any, count: int) -> Any:
            result = reduce(accumulated, value, count)
            is_number = result.numel() == 1 if isinstance(result, Tensor) else isinstance(result, numbers.Real)
            if not is_number:
                raise TypeError(f"metric {self.name!r}: reduce returned {result!r:.100}; return one number")
            return result

        return checked

    def zero(self) -> None:
        """Forget; a new epoch begins."""
        self.accumulated: Any = None
        self.count = 0

    def update(self, state: State) -> None:
        """Take in this iteration's value, if the step reported one."""
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
                value = value.clone()  # what it was, whatever is written there later: a parameter, say
        elif not isinstance(value, int | float):
            value = self._number(value)
        self.accumulated = self._reduce(self.accumulated, value, self.count)
        self.count += 1

    def _scalar(self, value: Tensor) -> Tensor:
        if value.numel() != 1:
            raise ValueError(
                f"metric {self.name!r} has shape {tuple(value.shape)}; a metric is one number an iteration: "
                "reduce it first, for instance with a function that returns state.step_state....mean()"
            )
        return value.reshape(())

    def _number(self, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            what = f"{type(value).__name__} {value!r}"
            raise TypeError(f"metric {self.name!r}: a metric is one number an iteration, not {what:.100}") from None

    def warn_if_missing(self) -> None:
        """Warn, once, if no step has reported the metric although the steps report others."""
        if not self.reported and self.others:
            self.reported = True
            logger.warning(
                "metric %r: no step has reported %r so far; the steps report %s",
                self.name,
                self._source,
                ", ".join(self.others),
            )

    def read(self) -> Any:
        """The value so far, still on its device; NaN when nothing was reported."""
        if self.count == 0:
            return math.nan
        return self.accumulated / self.count if self._averages else self.accumulated


def lookup(step_state: Any, key: str) -> Any:
    """`key` of `step_state.metrics`, of `step_state` itself where that has no metrics; None where it is absent."""
    source = getattr(step_state, "metrics", step_state)
    if isinstance(source, Mapping):
        return source.get(key)
    return getattr(source, key, None)


def names_in(step_state: Any) -> Iterable[str]:
    """Return the keys that `lookup` finds in a step_state."""
    source = getattr(step_state, "metrics", step_state)
    return source if isinstance(source, Mapping) else getattr(source, "_fields", ())


class Frozen(Mapping[str, float]):
    """Metrics of a finished epoch: still tensors, each fetched when it is first read."""

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


def _check_name(name: Any) -> None:
    """Raises TypeError or ValueError for a name that no file could hold: an epoch of data would be lost for it."""
    if not isinstance(name, str):
        raise TypeError(f"a metric's name is a string, not {name!r}: give str(...) of it")
    if not name or "\0" in name or any("\ud800" <= character <= "\udfff" for character in name):
        raise ValueError(f"a metric cannot be called {name!r}: no file could hold it")


class Metrics(MutableMapping[str, Any]):
    """The metrics of this epoch by name: accumulated by the loop, computed when read, or assigned by a handler."""

    def __init__(self) -> None:
        self._accumulators: dict[str, Accumulator] = {}
        self._computed: dict[str, Callable[[], Any]] = {}
        self._assigned: dict[str, Any] = {}
        self.just_assigned: set[str] = set()  # since the latest step began; cleared by the loop
        self.updates: tuple[Callable[[State], None], ...] = ()  # what the loop calls after each step

    def accumulate(self, name: str, source: str | Callable[[State], Any], reduce: str | Reduce = "mean") -> None:
        """Accumulate `source` over each epoch. Raises ValueError where the name is taken."""
        self._check_free(name)
        self._accumulators[name] = Accumulator(name, source, reduce)
        self.updates = tuple(accumulator.update for accumulator in self._accumulators.values())

    def compute(self, name: str, read: Callable[[], Any]) -> None:
        """Have `read()` called whenever the metric is read; it keeps its own state."""
        self._check_free(name)
        self._computed[name] = read

    def _check_free(self, name: str) -> None:
        _check_name(name)
        if name in self._accumulators or name in self._computed:
            raise ValueError(f"the loop has a metric {name!r} already; choose another name")

    def zero(self) -> None:
        """A new epoch begins: accumulators start anew, what handlers assigned is gone."""
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
        raise KeyError(f"no metric {name!r} in this epoch; there are: {', '.join(self) or 'none'}")

    def __getitem__(self, name: str) -> float:
        return float(self._raw(name))

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._assigned:
            _check_name(name)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"metrics[{name!r}]: a metric is one number, not a tensor of shape {tuple(value.shape)}")
        self._assigned[name] = value.detach().clone() if isinstance(value, Tensor) else float(value)
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

    def freeze(self) -> Frozen:
        """Return the values as they are now, still on their devices; warn of metrics that no step reports."""
        for accumulator in self._accumulators.values():
            accumulator.warn_if_missing()
        return Frozen({name: self._raw(name) for name in self})

    def state_dict(self) -> dict[str, Any]:
        """What is accumulated and assigned; computed metrics belong to whoever computes them."""
        return {
            "accumulated": {a.name: {"value": a.accumulated, "count": a.count} for a in self._accumulators.values()},
            "assigned": dict(self._assigned),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; a metric that is new since then starts empty."""
        for name, accumulator in self._accumulators.items():
            saved = state["accumulated"].get(name)
            accumulator.zero()
            if saved is not None:
                accumulator.accumulated, accumulator.count = saved["value"], saved["count"]
        self._assigned = dict(state["assigned"])

    def __repr__(self) -> str:
        return f"Metrics({dict(self)})"
