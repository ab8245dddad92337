"""How options of agents are checked, assigned in mid-run, and written down."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gymnasium.spaces import Space

from rein import foreign_names
from rein.networks.encoder import has_small_images
from rein.schedules import Schedule, as_schedule

if TYPE_CHECKING:
    from rein.agents.base.learner import Learner


def refuse_unknown(agent: object, options: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for an option that is neither in `known` nor a keyword argument of the agent's constructor."""
    own = inspect.signature(type(agent)).parameters.values()
    foreign_names.refuse_unknown(
        type(agent).__name__, {*options} - {*known}, {*known, *(p.name for p in own if p.kind is p.KEYWORD_ONLY)}
    )


def check_spaces(kind: str, given: Sequence[Any]) -> None:
    """Raise TypeError unless `given`, the positional arguments of the agent's constructor, begin with two spaces."""
    if len(given) >= 2 and all(isinstance(space, Space) for space in given[:2]):
        return
    how = f"{kind}(environment.single_observation_space, environment.single_action_space, ...)"
    if any(hasattr(value, "step") for value in given):
        how += " with environment = rein.envs.gymnasium.GymnasiumEnvironment(id, num_envs)"
    told = ", ".join(_told(value) for value in given) or "nothing"
    raise TypeError(f"{kind}: expected an observation space and an action space, got {told}; build it as {how}")


def _told(value: Any) -> str:
    return repr(value) if isinstance(value, str | Space) else f"a {type(value).__name__}"


def _checked(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap `__init__` of an agent so that arguments as other libraries take them raise a TypeError that explains."""
    parameters = inspect.signature(init).parameters
    takes_spaces = [*parameters][1:3] == ["observation_space", "action_space"]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    @functools.wraps(init)
    def checked(self: Any, *spaces: Any, **options: Any) -> None:
        kind = type(self)
        if kind.__init__ is checked:  # not called from the constructor of a subclass
            if takes_spaces:
                names = ("observation_space", "action_space")[len(spaces) :]
                check_spaces(kind.__name__, [*spaces, *(options[name] for name in names if name in options)])
            if not open_ended:
                foreign_names.refuse_unknown(kind.__name__, options, parameters.keys() - {"self"})
        init(self, *spaces, **options)

    return checked


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


def flag(agent: object, name: str, value: Any) -> bool:
    """The value; ValueError for what is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"{type(agent).__name__}({name}={value!r}): give True or False")
    return value


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
    try:
        schedule = as_schedule(value)
    except TypeError as error:
        raise TypeError(f"{type(agent).__name__}({name}={value!r}): {error}") from None
    if not schedule.bounds[0] >= 0.0:
        raise ValueError(f"{type(agent).__name__}({name}={value}): give 0 or more")
    return schedule


class Adjustable:
    """An option that may be assigned in mid-run, and is checked then as it was at first.

    What was assigned is no part of the agent's state: who resumes the run assigns it again, as a handler of it does.
    """

    def __init__(self, check: Callable[[object, str, Any], Any]) -> None:
        self._check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, agent: Any, owner: type | None = None) -> Any:
        """What it is now."""
        if agent is None:  # of the class, as for documentation
            return self
        if self._name not in agent.__dict__:
            raise AttributeError(f"{type(agent).__name__}.{self._name} is not there before its constructor has run")
        return agent.__dict__[self._name]

    def __set__(self, agent: Any, value: Any) -> None:
        """Raises ValueError where the check does."""
        value = self._check(agent, self._name, value)
        agent.__dict__[self._name] = value
        agent.__dict__.setdefault(f"_first_{self._name}", value)


class Scheduled(Adjustable):
    """An option that is a schedule, 0 or more at any time and `high` at most; a number may be assigned to it too.

    An `optional` one may be None.
    """

    def __init__(self, high: float = math.inf, *, optional: bool = False) -> None:
        self._high, self._optional = high, optional
        super().__init__(self._schedule)

    def _schedule(self, agent: object, name: str, value: Any) -> Schedule | None:
        if self._optional and value is None:
            return None
        schedule = not_negative(agent, name, value)
        if schedule.bounds[1] > self._high:
            raise ValueError(f"{type(agent).__name__}({name}={value!r}): give {self._high:g} or less")
        return schedule


def adjustable(agent: object) -> dict[str, Any]:
    """The options of an agent that may be assigned in mid-run, as they were when it was built, as JSON."""
    found = [(name, option) for cls in type(agent).__mro__ for name, option in vars(cls).items()]
    names = dict.fromkeys(name for name, option in found if isinstance(option, Adjustable))
    return {name: as_json(agent.__dict__.get(f"_first_{name}", getattr(agent, name))) for name in names}


OF_ONE_PROCESS = ("device", "guard", "micro_batch", "seed", "storage", "threads")  # may differ between processes


@foreign_names.explain(foreign_names.AGENT_METHODS)
class Configurable:
    """Base class of agents: checks the arguments of constructors, and assignments to options.

    Raises TypeError for unknown keyword arguments and for a class attribute that hides an option of a base class,
    AttributeError for an assignment to an option that is read only when the agent is built.
    """

    config: Any
    _options: dict[str, Any] = {}  # noqa: RUF012  # replaced, never changed
    observation_space: Any
    _built = False
    _compared = False

    def _compare_processes(self, learner: Learner, **more: Any) -> None:
        """Raise ValueError if data-parallel processes have different options; before they first exchange anything."""
        if not self._compared:
            options = {name: value for name, value in self.config.items() if name not in OF_ONE_PROCESS}
            learner.compare_processes({"agent": type(self).__name__, **options, **more})
            self._compared = True

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "__init__" in vars(cls):
            cls.__init__ = _checked(cls.__init__)  # type: ignore[method-assign]
        for base in cls.__mro__[1:]:
            for name, option in vars(base).items():
                if isinstance(option, Adjustable) and not isinstance(inspect.getattr_static(cls, name), Adjustable):
                    raise TypeError(
                        f"{cls.__name__}.{name} hides an option of {base.__name__}: give {name}= to its constructor"
                    )

    def _described_options(self) -> dict[str, Any]:
        """The options as JSON for `config`.

        `scale_images` is left out if files of versions without that option mean the same.
        """
        scaled = self._options.get("scale_images") and not has_small_images(self.observation_space)
        return {
            name: as_json(value) for name, value in self._options.items() if not (name == "scale_images" and scaled)
        }

    def __setattr__(self, name: str, value: Any) -> None:
        if self._built and name in self._options and name not in self.__dict__ and not hasattr(type(self), name):
            raise AttributeError(
                f"{type(self).__name__}.{name} is read when the agent is built, and would change nothing now: "
                f"give {name}= to its constructor"
            )
        super().__setattr__(name, value)


def as_json(option: Any) -> Any:
    """An option as it is written down: schedules and the like by their config, functions by their names."""
    if isinstance(option, float) and math.isinf(option):
        return str(option)
    if isinstance(config := getattr(option, "config", None), dict | float | int):  # schedules, noises
        return config
    if isinstance(option, functools.partial):
        given = {"arguments": as_json(option.args)} if option.args else {}
        given |= {name: as_json(value) for name, value in option.keywords.items()}
        return {"function": as_json(option.func), **given}
    if isinstance(option, numbers.Real) and not isinstance(option, bool | int | float):  # numpy's
        return int(option) if isinstance(option, numbers.Integral) else float(option)
    if isinstance(option, tuple | list):
        return [as_json(part) for part in option]
    return getattr(option, "__name__", type(option).__name__) if callable(option) else option
