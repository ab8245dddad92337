"""Options of agents. One declaration defines the keyword argument, default, check, help text and run.json entry.

Example::

    from rein.options import in_unit_interval, layers, not_negative, option

    class MyAgent(rein.Agent):
        gamma: float = option(default=0.99, check=in_unit_interval, help="discount factor")
        learning_rate: float | Schedule = option(default=1e-3, check=not_negative, help="step size of Adam")
        hidden: Sequence[int] = option(default=(64, 64), check=layers, fixed=True, help="units of each hidden layer")

A check receives the given value and returns the value to store, or raises ValueError with a message that explains what
to do. Checks run when the agent is built and at every assignment.

An option whose type contains `Schedule` accepts a number or a schedule and is stored as a `Schedule`. Its check runs on
the smallest and the largest value of the schedule. Options with `fixed=True` cannot be assigned after the agent is
built.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from rein import errors
from rein.schedules import as_schedule

Check = Callable[[Any], Any]


def option(
    *, default: Any = attrs.NOTHING, help: str | None = None, check: Check | None = None, fixed: bool = False
) -> Any:
    """Declare an option of an agent.

    Args:
        default: Default value. An option without a default is required.
        help: One line for the class documentation and the command line. If None, it is inherited from the option of
            the same name in a base class or in `SHARED`, as are the type, and `check` and `fixed` if they are not
            given. A new option then has an empty text.
        check: Function that returns the value to store, or raises ValueError or TypeError.
        fixed: Whether the option can only be set when the agent is built.
    """
    return attrs.field(default=default, kw_only=True, metadata={"help": help, "check": check, "fixed": fixed})


def at_least_one(value: Any) -> int:
    """Return a whole number of 1 or more as an int. Floats such as 1e6 are accepted."""
    return _whole(value, 1)


def at_least_two(value: Any) -> int:
    """Return a whole number of 2 or more as an int."""
    return _whole(value, 2)


def not_below_zero(value: Any) -> int:
    """Return a whole number of 0 or more as an int. Floats such as 1e6 are accepted."""
    return _whole(value, 0)


def in_unit_interval(value: Any) -> float:
    """Return a number from 0 to 1 as a float."""
    if not _is_number(value) or not 0.0 <= value <= 1.0:
        raise ValueError("give a number from 0 to 1")
    return float(value)


def finite(value: Any) -> float:
    """Return a finite number as a float."""
    if not _is_number(value) or not math.isfinite(value):
        raise ValueError("give a finite number")
    return float(value)


def not_negative(value: Any) -> float:
    """Return a finite number of 0 or more as a float."""
    if not _is_number(value) or not 0.0 <= value < math.inf:
        raise ValueError("give 0 or more")
    return float(value)


def above_zero(value: Any) -> float:
    """Return a finite number above 0 as a float."""
    if not _is_number(value) or not 0.0 < value < math.inf:
        raise ValueError("give a number above 0")
    return float(value)


def flag(value: Any) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        raise ValueError("give True or False")
    return value


def layers(value: Any) -> tuple[int, ...]:
    """Return the number of units of each hidden layer as a tuple."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError("give the units of each layer, for example (64, 64)")
    return tuple(at_least_one(units) for units in value)


def one_of(*choices: Any) -> Check:
    """Return a check that accepts only these values."""

    def check(value: Any) -> Any:
        if value not in choices:
            raise ValueError(f"give {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}")
        return value

    return check


def _whole(value: Any, least: int) -> int:
    if not _is_number(value) or not math.isfinite(value) or value != int(value):
        raise ValueError(f"give a whole number, {least} or more")
    if value < least:
        raise ValueError(f"give {least} or more")
    return int(value)


def _is_number(value: Any) -> bool:
    """Return whether the value is a Python or NumPy real number. True and False do not count as numbers."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _shared(help: str, check: Check | None = None, *, fixed: bool = False) -> dict[str, Any]:
    return {"help": help, "check": check, "fixed": fixed}


# Options of several agents without a common base class that declares them.
SHARED = {
    "actor": _shared(
        "factory (observation_space, action_space, generator) of a custom actor; forward(observation) returns the "
        "outputs of the policy",
        fixed=True,
    ),
    "actor_frequency": _shared("update the actor at every n-th update", at_least_one, fixed=True),
    "actor_learning_rate": _shared("learning rate of the actor; None for learning_rate", not_negative),
    "core": _shared(
        "factory of a recurrent layer after the hidden layers, such as functools.partial(LSTM, features=64)", fixed=True
    ),
    "critic": _shared(
        "factory (observation_space, action_space, generator) of a custom critic, called once for each critic; "
        "forward(observation, action) returns the value; forward(observation) the values of all Discrete actions",
        fixed=True,
    ),
    "critics": _shared("number of critics", at_least_one, fixed=True),
    "double": _shared("select next actions with the online network (van Hasselt et al. 2016)", flag, fixed=True),
    "dueling": _shared("split action values into state value and advantages (Wang et al. 2016)", flag, fixed=True),
    "epsilon": _shared("probability of a random action; a number or a schedule", in_unit_interval),
    "gae_lambda": _shared("GAE lambda: 0 uses one-step TD errors, 1 uses full returns", in_unit_interval),
    "gamma": _shared("discount factor", in_unit_interval),
    "huber": _shared(
        "error at which the Huber loss becomes linear; None for the squared error", above_zero, fixed=True
    ),
    "initial_temperature": _shared("initial alpha if it is learned", above_zero, fixed=True),
    "layer_norm": _shared("apply layer normalization before each activation", flag, fixed=True),
    "minibatches": _shared("minibatches per pass, one update each", at_least_one),
    "network": _shared(
        "factory (observation_space, action_space, generator) of a custom Q-network; forward(observation) returns "
        "the values of all actions",
        fixed=True,
    ),
    "normalize_advantage": _shared("standardize the advantages of each update", flag),
    "normalize_reward": _shared(
        "divide rewards by the standard deviation of their running discounted sum", flag, fixed=True
    ),
    "rollout_steps": _shared("vector steps per rollout", at_least_one, fixed=True),
    "target_entropy": _shared(
        "target entropy in nats; None for minus the number of action dimensions, or log(A) / 2 for A discrete actions",
        finite,
        fixed=True,
    ),
    "temperature": _shared("fixed entropy weight alpha; None to learn it", above_zero, fixed=True),
    "temperature_learning_rate": _shared("learning rate of alpha; None for learning_rate", not_negative),
    "update_epochs": _shared("passes over a rollout", at_least_one),
}


def checked(agent: object, field: attrs.Attribute[Any], value: Any) -> Any:
    """Check the value of an option and return the value to store.

    Raises ValueError or TypeError with the class, the option, the given value and what to do.
    """
    check: Check | None = field.metadata["check"]
    rejected = value
    if value is None and "None" in str(field.type):
        return None
    try:
        if "Schedule" not in str(field.type):
            return value if check is None else check(value)
        schedule = as_schedule(value)  # type: ignore[arg-type]
        for rejected in schedule.bounds if check else ():  # in errors: a recipe may have made the schedule
            check(rejected)  # type: ignore[misc]
        return schedule
    except (TypeError, ValueError) as error:
        raise type(error)(f"{type(agent).__name__}({field.name}={rejected!r}): {error}") from None


def declared(cls: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """Return the attrs fields of an agent class: the spaces and the options, with their checks.

    attrs calls this with all annotated names of the class body. Names without `option(...)` stay ordinary attributes.
    """
    options = [
        field for field in fields if "help" in field.metadata or field.name in ("observation_space", "action_space")
    ]
    return [_with_check(cls, field) if "help" in field.metadata else field for field in options]


def _with_check(cls: type, field: attrs.Attribute[Any]) -> attrs.Attribute[Any]:
    if field.metadata["help"] is None:
        bases = (options_of(base).get(field.name) for base in cls.__mro__[1:] if attrs.has(base))
        inherited = next((option for option in bases if option is not None), None)
        defaults = SHARED.get(field.name, _shared("")) if inherited is None else inherited.metadata
        own = {name: value for name, value in field.metadata.items() if value}
        field = field.evolve(metadata={**defaults, **own}, type=field.type if inherited is None else inherited.type)

    def convert(value: Any, agent: object, field: attrs.Attribute[Any]) -> Any:
        return checked(agent, field, value)

    def assign(agent: object, field: attrs.Attribute[Any], value: Any) -> Any:
        if field.metadata["fixed"] and "env_steps" in vars(agent):
            raise AttributeError(
                f"{type(agent).__name__}.{field.name} cannot be changed after the agent is built: "
                f"pass {field.name}= to its constructor"
            )
        return checked(agent, field, value)

    return field.evolve(converter=attrs.Converter(convert, takes_self=True, takes_field=True), on_setattr=assign)  # type: ignore[call-arg]


def refuse_hidden(cls: type) -> None:
    """Raise TypeError if an attribute of the class or of a mixin hides an option of a base class."""
    declaring = {name: kind for kind in reversed(cls.__mro__) for name in vars(kind).get("__annotations__", ())}
    for kind in cls.__mro__[:-1]:
        for name in options_of(cls).keys() & vars(kind).keys():
            if cls.__mro__.index(kind) < cls.__mro__.index(declaring[name]):
                raise TypeError(
                    f"{cls.__name__}.{name} hides an option of {declaring[name].__name__}: declare {name} with "
                    f"option(default=...), or pass {name}= to the constructor"
                )


def options_of(cls: type) -> dict[str, attrs.Attribute[Any]]:
    """Return the declared options of an agent class, by name."""
    return {field.name: field for field in attrs.fields(cls) if "help" in field.metadata}


def refuse_unknown(cls: type, names: Iterable[str]) -> None:
    """Raise TypeError for unknown options. The message translates option names of other libraries."""
    option_names = options_of(cls).keys()
    errors.refuse_unknown(cls.__name__, {*names} - {*option_names, "env", "action_space"}, option_names)


def as_json(value: Any) -> Any:
    """Return an option as JSON. Schedules and noise are represented by their config, functions by their names."""
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    if isinstance(config := getattr(value, "config", None), dict | float | int):
        return config
    if isinstance(value, functools.partial):
        arguments = {"arguments": as_json(value.args)} if value.args else {}
        arguments |= {name: as_json(part) for name, part in value.keywords.items()}
        return {"function": as_json(value.func), **arguments}
    if isinstance(value, numbers.Real) and not isinstance(value, bool | int | float):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, tuple | list):
        return [as_json(part) for part in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return getattr(value, "__name__", None) or (type(value).__name__ if callable(value) else str(value))


def document(cls: type) -> None:
    """Append the options to the docstring of a class and set its signature."""
    types = {field.name: field.type for field in attrs.fields(cls)}
    parameters = [*inspect.signature(cls.__init__).parameters.values()][1:]
    cls.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(annotation=types.get(parameter.name, Any)) for parameter in parameters]
    )
    lines = [
        f"    {name}: {field.metadata['help'] and field.metadata['help'] + '. '}Default: {_shown(field.default)}"
        for name, field in options_of(cls).items()
    ]
    cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or cls.__name__)}\n\nOptions:\n" + "\n".join(lines)


def _shown(default: Any) -> str:
    return "required" if default is attrs.NOTHING else repr(default)
