"""The hyper-parameters that on-policy agents share."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from rein.learning.update import Guard, OptimizerFactory
from rein.networks.actor_critic import CoreFactory
from rein.schedules import Schedule, as_schedule


class OnPolicyOptions(TypedDict, total=False):
    """What every on-policy agent takes, besides its own; the defaults are those of `OnPolicyAgent`."""

    learning_rate: float | Schedule  # of the optimizer
    gamma: float  # discount factor
    rollout_steps: int  # vector steps between two rounds of learning
    value_coefficient: float  # weight of the value's loss
    entropy_coefficient: float | Schedule  # weight of the bonus for entropy
    max_grad_norm: float | None  # global norm that gradients are clipped to; None for no clipping
    hidden: Sequence[int]  # features of the hidden layers
    activation: str  # "tanh", "relu", "silu" or "gelu"
    shared: bool  # whether actor and critic look through one network
    core: CoreFactory | None  # recurrent part after the hidden layers: functools.partial(LSTM, features=64)
    squash: bool | str  # squash continuous actions into their bounds instead of clipping them; "ball": by their length
    log_std: float  # what the logarithm of a continuous action's standard deviation begins with
    state_dependent_std: bool  # whether that deviation is an output of the network, or else a parameter beside it
    normalize_observation: bool  # by the mean and deviation of all observations so far
    normalize_reward: bool  # divide rewards by the deviation of their discounted sum so far
    optimizer: OptimizerFactory | None  # functools.partial(torch.optim.RMSprop, alpha=0.99); Adam by default
    guard: Guard | None  # asked before every step of the optimizer with (metrics, gradients); False skips the step
    micro_batch: int | None  # rows whose gradient is computed at once: changes speed and memory, not the result
    threads: int  # cores that compute the gradients of micro-batches: changes speed alone
    compile: bool  # compile the loss: seconds at the first update, faster large ones
    precision: str  # of matrix products in the update: "float32" or "bfloat16"
    seed: int | None  # of everything random; None until `training_loop(seed=)` gives it
    device: torch.device | str  # where the networks are


# which of them make the networks, and which say how a step of the optimizer is made
SHAPE = ("hidden", "activation", "shared", "core", "normalize_observation", "squash", "log_std", "state_dependent_std")
HOW = ("max_grad_norm", "guard", "micro_batch", "threads", "compile", "precision")
DEFAULTS: OnPolicyOptions = {
    "learning_rate": 3e-4,
    "gamma": 0.99,
    "rollout_steps": 32,
    "value_coefficient": 0.5,
    "entropy_coefficient": 0.0,
    "max_grad_norm": 0.5,
    "hidden": (64, 64),
    "activation": "tanh",
    "shared": False,
    "core": None,
    "squash": False,
    "log_std": 0.0,
    "state_dependent_std": False,
    "normalize_observation": False,
    "normalize_reward": False,
    "optimizer": None,
    "guard": None,
    "micro_batch": None,
    "threads": 1,
    "compile": False,
    "precision": "float32",
    "seed": None,
    "device": "cpu",
}


def refuse_unknown(agent: object, options: Iterable[str], known: Iterable[str]) -> None:
    """TypeError for an option that is not among the `known` ones, which names them and the agent's own."""
    if unknown := sorted({*options} - {*known}):
        own = inspect.signature(type(agent)).parameters.values()
        names = sorted({*known, *(one.name for one in own if one.kind is one.KEYWORD_ONLY)})
        near = {close for name in unknown for close in difflib.get_close_matches(name, names, 1)}
        hint = f"; did you mean {', '.join(sorted(near))}?" if near else "."
        kind = type(agent).__name__
        raise TypeError(f"{kind}: there is no option {', '.join(unknown)}{hint} Its options are {', '.join(names)}")


def at_least_one(agent: object, name: str, count: float) -> int:
    """The count, a whole number; ValueError for less than 1 and for what is none. 1e6 is one."""
    return whole(agent, name, count, 1)


def whole(agent: object, name: str, count: Any, least: int = 0) -> int:
    """The count as an int; ValueError for less than `least` and for what is no whole number."""
    if not _is_number(count) or not math.isfinite(count) or count != int(count):
        raise ValueError(f"{type(agent).__name__}({name}={count!r}): give a whole number, {least} or more")
    if count < least:
        raise ValueError(f"{type(agent).__name__}({name}={count}): give {least} or more")
    return int(count)


def layers(agent: object, hidden: Any) -> tuple[int, ...]:
    """The features of hidden layers; ValueError for what is no sequence of whole numbers of 1 or more."""
    if not isinstance(hidden, Sequence) or isinstance(hidden, str):
        raise ValueError(f"{type(agent).__name__}(hidden={hidden!r}): give the features of each layer, as in (64, 64)")
    return tuple(whole(agent, "hidden", features, 1) for features in hidden)


def fraction(agent: object, name: str, value: float) -> float:
    """The value; ValueError for less than 0 or more than 1, and for what is no number."""
    if not _is_number(value) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{type(agent).__name__}({name}={value!r}): give a number from 0 to 1")
    return float(value)


def finite(agent: object, name: str, value: Any) -> Any:
    """The value, or None; ValueError for NaN and infinity, and for what is no number."""
    if value is None:
        return None
    if not _is_number(value) or not math.isfinite(value):
        raise ValueError(f"{type(agent).__name__}({name}={value!r}): give a finite number, or None")
    return float(value)


def above_zero(agent: object, name: str, value: Any) -> Any:
    """The value, or None; ValueError for 0 or less, for NaN and infinity, and for what is no number."""
    if value is None:
        return None
    if not _is_number(value) or not 0.0 < value < math.inf:
        raise ValueError(f"{type(agent).__name__}({name}={value!r}): give a number above 0")
    return float(value)


def _is_number(value: Any) -> bool:
    """Whether it is one, numpy's included, which sweeps are made of; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def not_negative(agent: object, name: str, value: float | Schedule) -> Schedule:
    """The value as a schedule; ValueError where it is ever below 0, or NaN."""
    schedule = as_schedule(value)
    if not schedule.bounds[0] >= 0.0:
        raise ValueError(f"{type(agent).__name__}({name}={value}): give 0 or more")
    return schedule


class Scheduled:
    """An option that is a schedule, 0 or more at any time; a number or a schedule may be assigned to it in mid-run.

    What was assigned is no part of the agent's state: who resumes the run assigns it again, as a handler of it does.
    """

    def __init__(self, high: float = math.inf) -> None:
        self._high = high

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, agent: Any, owner: type | None = None) -> Schedule:
        """The schedule."""
        if agent is None:
            return self  # type: ignore[return-value]  # of the class, as for documentation
        return agent.__dict__[self._name]

    def __set__(self, agent: Any, value: float | Schedule) -> None:
        """Raises ValueError where the value is ever below 0, above the highest there is, or NaN."""
        schedule = not_negative(agent, self._name, value)
        if schedule.bounds[1] > self._high:
            raise ValueError(f"{type(agent).__name__}({self._name}={value!r}): give {self._high:g} or less")
        agent.__dict__[self._name] = schedule
        agent.__dict__.setdefault(f"_first_{self._name}", schedule)


class Configurable:
    """Refuses what would silently be no option: a class's own that hides one, and one that nobody reads again."""

    _options: dict[str, Any]
    _built = False

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for base in cls.__mro__[1:]:
            for name, option in vars(base).items():
                if isinstance(option, Scheduled) and not isinstance(vars(cls).get(name, option), Scheduled):
                    raise TypeError(
                        f"{cls.__name__}.{name} hides an option of {base.__name__}: give {name}= to its constructor"
                    )

    def __setattr__(self, name: str, value: Any) -> None:
        if self._built and name in self._options and name not in self.__dict__ and not hasattr(type(self), name):
            raise AttributeError(
                f"{type(self).__name__}.{name} is read when the agent is built, and would change nothing now: "
                f"give {name}= to its constructor"
            )
        super().__setattr__(name, value)


def first(agent: object, name: str) -> Any:
    """What an option was when the agent was built, whatever has been assigned to it since."""
    return agent.__dict__.get(f"_first_{name}", getattr(agent, name))


def check_enough(agent: object, advantage: Tensor) -> None:
    """ValueError for one row alone, whose standardized advantage is 0: nothing would be learned from it."""
    if advantage.numel() < 2:
        name = type(agent).__name__
        raise ValueError(f"{name}(normalize_advantage=True): an update of one row; give it more, or turn that off")


def as_json(option: Any) -> Any:
    """An option as it is written down: schedules and the like by their config, functions by their names."""
    if isinstance(option, float) and math.isinf(option):
        return str(option)
    if isinstance(config := getattr(option, "config", None), dict | float | int):  # schedules, noises
        return config
    if isinstance(option, functools.partial):
        return {"function": option.func.__name__, **{name: as_json(value) for name, value in option.keywords.items()}}
    if isinstance(option, numbers.Real) and not isinstance(option, bool | int | float):  # numpy's
        return int(option) if isinstance(option, numbers.Integral) else float(option)
    if isinstance(option, tuple):
        return [as_json(part) for part in option]
    return getattr(option, "__name__", type(option).__name__) if callable(option) else option
