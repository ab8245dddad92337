"""Contract checks of actions, observations and time steps, and whether an environment can be reset or stepped.

`check_time_step` reads every value and is meant to run once. `check_rows` checks only shapes and dtypes, and can run at
every step.

Shapes: N environments, O one observation, A one action.
"""

from __future__ import annotations

import functools
import inspect
import logging
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.errors import EnvironmentContractError, text_of
from rein.ops.trees import leaves, map_tree
from rein.spaces import children, tensors_of
from rein.spaces.conversion import layout, tensor_dtype
from rein.types import TimeStep, Transition, Tree

logger = logging.getLogger("rein")

_Method = TypeVar("_Method", bound=Callable[..., Any])

# steps from one check of Boxes to the next: a prime, so that checks reach all steps of episodes of most equal lengths
_BOX_STEPS = 17

_COLUMNS = {"reward": torch.float32, "terminated": torch.bool, "truncated": torch.bool, "valid": torch.bool}

SUCCESS = ("is_success", "success")  # entries of infos that report success, in order of preference

CLOSED = "closed"  # value of `_ended` of an environment


def checked_num_envs(num_envs: Any, who: str = "") -> int:
    """Return `num_envs` as an int; NumPy integers are accepted. Error messages name `who`.

    Raises TypeError if it is not an integer and ValueError if it is less than 1.
    """
    argument = f"num_envs={num_envs!r}"
    return checked_count(f"{who}({argument})" if who else argument, num_envs)


def checked_count(argument: str, value: Any) -> int:
    """Return `value` as an int; errors begin with `argument`.

    Raises TypeError if it is not an integer and ValueError if it is less than 1.
    """
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{argument}: give an integer, 1 or more") from None
    if count < 1:
        raise ValueError(f"{argument}: give 1 or more")
    return count


def agents_per_world(environment: Any) -> int:
    """Return the number of agents in a multi-agent world. It is 1 if the environment has no worlds."""
    worlds = getattr(environment, "worlds", None)
    return 1 if worlds is None else environment.num_envs // worlds


def check_rows(time_step: TimeStep, num_envs: int) -> None:
    """Check shapes and dtypes of a TimeStep. Reads no values, so it does not wait for the device.

    Raises EnvironmentContractError.
    """
    _check_columns(time_step, num_envs)
    for name in ("observation", "final_observation"):
        value = getattr(time_step, name)
        for path, leaf in ((name, value),) if isinstance(value, Tensor) else leaves(value, name):
            if not isinstance(leaf, Tensor) or leaf.shape[:1] != (num_envs,):
                _fail(path, f"a tensor of {num_envs} rows", leaf)


def check_rows_of(method: str, value_N: Any, num_envs: int, dtype: torch.dtype) -> None:
    """Check that the seeds or the mask passed to `method` have the shape (N,) and the dtype. Raises ValueError."""
    if not isinstance(value_N, Tensor) or value_N.shape != (num_envs,) or value_N.dtype is not dtype:
        raise ValueError(f"{method}: expected {dtype} of shape ({num_envs},), got {_describe(value_N)}")


def check_transition(transition: Transition | None, num_envs: int) -> None:
    """Check shapes and dtypes of a transition that a handler has replaced. Raises EnvironmentContractError."""
    if not isinstance(transition, Transition):
        raise EnvironmentContractError(
            f"step_state.transition: expected a rein.Transition, got {_describe(transition)}"
        )
    _check_columns(transition, num_envs, "step_state.transition.")


def _check_columns(record: TimeStep | Transition, num_envs: int, prefix: str = "") -> None:
    for name, dtype in _COLUMNS.items():
        value_N = getattr(record, name)
        if not isinstance(value_N, Tensor) or value_N.shape != (num_envs,) or value_N.dtype is not dtype:
            _fail(f"{prefix}{name}", f"{str(dtype).removeprefix('torch.')} of shape ({num_envs},)", value_N)


def check_time_step(
    time_step: TimeStep, num_envs: int, observation_space: spaces.Space[Any], *, finite: bool = True
) -> None:
    """Check everything that the contract requires of a TimeStep. Reads values, so it waits for the device.

    `finite=False` accepts NaN and infinity in rewards and observations. Raises EnvironmentContractError with the field,
    the row, and the expected and received values.
    """
    if not isinstance(time_step, TimeStep):
        raise EnvironmentContractError(f"apply_action: expected a rein.TimeStep, got {_describe(time_step)}")
    check_rows(time_step, num_envs)
    check_observation(time_step.observation, num_envs, observation_space, finite=finite)
    check_observation(time_step.final_observation, num_envs, observation_space, "final_observation", finite=finite)
    if finite:
        _check_values("reward", time_step.reward, time_step.reward.isfinite(), "a finite number")
    for path, value in leaves(time_step.info, "info"):
        if not isinstance(value, Tensor) or value.shape[:1] != (num_envs,):
            _fail(path, f"a tensor of {num_envs} rows", value)
    ended_N = time_step.terminated | time_step.truncated
    for (path, final), (_, next_) in zip(
        leaves(time_step.final_observation, "final_observation"), leaves(time_step.observation), strict=True
    ):
        ended = ended_N.reshape(-1, *[1] * (final.ndim - 1))
        same = (final == next_) | (final != final) | (next_ != next_)  # NaN does not equal itself
        _check_values(path, final, same | ended, "the observation, because no episode ended in this row")


def check_observed(time_step: TimeStep, observation_space: spaces.Space[Any], step: int) -> None:
    """Check the values of the observations of vector step `step`, if they are on the host. See `check_range`."""
    check_range(time_step.observation, observation_space, step=step)
    if time_step.final_observation is not time_step.observation:
        check_range(time_step.final_observation, observation_space, "final_observation", step)


def check_observation(
    observation: Tree,
    num_envs: int,
    observation_space: spaces.Space[Any],
    field: str = "observation",
    *,
    finite: bool = True,
) -> None:
    """Check structure, shapes, dtypes and values of an observation `(N, *O)`.

    Integers must be in the range of the space. Floats must be finite unless `finite=False`. Raises
    EnvironmentContractError.
    """
    _check_tree(observation, num_envs, observation_space, field, tensor_dtype, finite)


def check_range(value: Tree, space: spaces.Space[Any], field: str = "observation", step: int = 1) -> None:
    """Check that values (N, ...) on the host are in their space. Fast enough for every step.

    An index out of range would select a wrong entry of a table or a one-hot vector. A value outside of a Box is logged
    once for each space, and Boxes are checked in every 17th step only. Values on another device are skipped, because
    reading them would wait for the device.

    Args:
        value: tensor or dictionary of tensors.
        space: space of one value.
        field: name of the value in error messages.
        step: number of the vector step.

    Raises:
        EnvironmentContractError: with the index of the environment, the value and the space of a Discrete,
            MultiDiscrete or MultiBinary value.
    """
    for part in (parts := _bounded(space)):
        in_box = isinstance(part.space, spaces.Box)
        if in_box and step % _BOX_STEPS != 1:
            continue
        try:
            leaf = functools.reduce(operator.getitem, part.path, value)
            if not leaf.is_cpu or not leaf.numel():
                continue
        except (KeyError, TypeError, AttributeError):
            _fail(field, f"tensors of {space}", value)
        if in_box:
            array = leaf.numpy()
            if array.shape[1:] == part.low.shape and ((array < part.low) | (array > part.high)).any():
                _warn_outside(array, part, ".".join((field, *part.path)))
                _bounded_parts[id(space)] = space, [other for other in parts if other is not part]  # warn once
            continue
        lowest, highest = torch.aminmax(leaf)
        if int(lowest) < part.low or int(highest) > part.high:  # bounds may differ by element
            _check_range(leaf, part.space, ".".join((field, *part.path)))


class _Bounded(NamedTuple):
    """One tensor of an observation with bounds, which are arrays for a Box, and otherwise valid for all elements."""

    path: tuple[str, ...]
    space: spaces.Space[Any]
    low: Any
    high: Any


_bounded_parts: dict[int, tuple[spaces.Space[Any], list[_Bounded]]] = {}  # by id: spaces are not hashable


def _bounded(space: spaces.Space[Any]) -> list[_Bounded]:
    """Return the tensors of a space whose values can be out of range, from a cache."""
    bounded = _bounded_parts.get(id(space))
    if bounded is None:
        if len(_bounded_parts) >= 64:
            _bounded_parts.clear()
        parts = []
        for path, part in tensors_of(space):
            if not isinstance(part, spaces.Box):
                low, high = _range(part)
                parts.append(_Bounded(path, part, int(np.max(low)), int(np.min(high)) - 1))
            elif not _is_full(part):
                dtype = layout(part)[1]
                parts.append(_Bounded(path, part, part.low.astype(dtype), part.high.astype(dtype)))
        bounded = _bounded_parts[id(space)] = space, parts
    return bounded[1]


def _is_full(space: spaces.Box) -> bool:
    """Return whether a Box contains all values of its dtype."""
    if space.dtype.kind in "fb":
        low, high = (-np.inf, np.inf) if space.dtype.kind == "f" else (False, True)
    else:
        low, high = np.iinfo(space.dtype.name).min, np.iinfo(space.dtype.name).max
    return bool((space.low == low).all() and (space.high == high).all())


def _warn_outside(array: np.ndarray[Any, Any], part: _Bounded, field: str) -> None:
    """Log the first value outside of a Box."""
    row, *place = np.argwhere((array < part.low) | (array > part.high))[0].tolist()
    at, box = f" at {place}" if place else "", " ".join(str(part.space).split())  # NumPy breaks long bounds into lines
    message = "%s, environment %d%s: %s is outside of %s; correct the bounds, or clip observations (logged once)"
    logger.warning(message, field, row, at, array[(row, *place)], box)


def _check_range(value: Tensor, space: spaces.Space[Any], field: str) -> None:
    if value.shape[1:] != space.shape:
        _fail(field, f"a tensor of shape {(len(value), *(space.shape or ()))}", value)
    is_inside = torch.from_numpy(~outside(value, space))
    _check_values(field, value, is_inside, f"a value of {space}", "environment")


def outside(value: Tensor, space: spaces.Space[Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return booleans (N, ...): True for values out of range of a Discrete, MultiDiscrete or MultiBinary space.

    The bounds of a Box are not checked. `value` is copied if it is not on the host.
    """
    array = value.numpy(force=True)
    if isinstance(space, spaces.Box):
        return np.zeros(array.shape, np.bool_)
    low, high = _range(space)
    return (array < low) | (array >= high)


def _range(space: spaces.Space[Any]) -> tuple[Any, Any]:
    """Return the bounds of a Discrete, MultiDiscrete or MultiBinary space. The upper bound is exclusive."""
    if isinstance(space, spaces.Discrete):
        return int(space.start), int(space.start) + int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        low = space.start.astype(np.int64)
        return low, low + space.nvec.astype(np.int64)
    return 0, 2


def check_action(action: Tree, num_envs: int, action_space: spaces.Space[Any]) -> None:
    """Check structure, shapes, kinds of dtype and values of an action `(N, *A)`. Bounds of a Box are not checked.

    Raises EnvironmentContractError.
    """
    _check_tree(action, num_envs, action_space, "action", lambda _: None, True)


def _check_tree(value: Tree, rows: int, space: spaces.Space[Any], field: str, dtype_of: Any, finite: bool) -> None:
    inner = children(space)
    if inner is None:
        _check_leaf(value, rows, space, field, dtype_of(space), finite)
        return
    if not isinstance(value, Mapping) or set(value) != set(inner):
        _fail(field, f"a dictionary with the keys {sorted(inner)}", value)
    for key, child in inner.items():
        _check_tree(value[key], rows, child, f"{field}.{key}", dtype_of, finite)


def _check_leaf(
    value: Any, rows: int, space: spaces.Space[Any], field: str, dtype: torch.dtype | None, finite: bool
) -> None:
    shape = (rows, *layout(space)[0])
    wanted = tensor_dtype(space)
    if not isinstance(value, Tensor) or value.shape != shape:
        _fail(field, f"a tensor of shape {shape}", value)
    if dtype is not None and value.dtype is not dtype:
        _fail(field, f"{dtype} for {space}", value)
    if wanted.is_floating_point != value.dtype.is_floating_point:
        _fail(field, f"{'floating-point numbers' if wanted.is_floating_point else 'integers'} for {space}", value)
    if value.is_floating_point():
        if finite:
            _check_values(field, value, value.isfinite(), "finite numbers")
    else:
        _check_range(value, space, field)


def _check_values(field: str, value: Tensor, ok: Tensor, expected: str, unit: str = "row") -> None:
    wrong = (~ok).nonzero().tolist()
    if wrong:
        row, *place = wrong[0]
        at = f" at {place}" if place else ""
        got = value[tuple(wrong[0])].tolist()
        raise EnvironmentContractError(f"{field}, {unit} {row}{at}: expected {expected}, got {got}")


def _fail(field: str, expected: str, got: Any) -> NoReturn:
    raise EnvironmentContractError(f"{field}: expected {expected}, got {_describe(got)}")


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dictionary with the keys {sorted(map(str, value))}"
    return f"{type(value).__name__} {value!r}"


def where_rows(mask_N: Tensor, tree: Tree, other: Tree) -> Tree:
    """Return the rows of `tree` (N, ...) where `mask_N` is True, and those of `other` elsewhere."""
    return map_tree(lambda a, b: torch.where(mask_N.reshape(-1, *[1] * (a.ndim - 1)), a, b), tree, other)


def restored(state: Mapping[str, Any], name: str, like: Tensor) -> Tensor:
    """Return a copy of `state[name]` with the dtype and device of `like`. Raises ValueError if the shapes differ."""
    value = state[name]
    if value.shape != like.shape:
        raise ValueError(f"{name}: the state has shape {tuple(value.shape)}, this object {tuple(like.shape)}")
    return value.to(like, copy=True)


def options_of(environment: Any) -> dict[str, Any]:
    """Return the constructor options of an environment, which keeps them as attributes, as JSON values."""
    names = [name for name in _option_names(type(environment)) if name != "inner"]
    if missing := [name for name in names if not hasattr(environment, name)]:
        raise TypeError(f"{type(environment).__name__}: keep the options {missing} as attributes of the same names")
    return {name: _plain(getattr(environment, name)) for name in names}


def passes_keywords_on(cls: type) -> bool:
    """Return whether the constructor of a class has keyword arguments of its base class."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _option_names(cls: type) -> list[str]:
    """Return the option names of the constructor, and those of base classes while it passes keyword arguments on."""
    names: dict[str, None] = {}
    for kind in cls.__mro__:
        if "__init__" in vars(kind):
            named = [*inspect.signature(kind.__init__).parameters.values()][1:]  # type: ignore[misc]
            names |= dict.fromkeys(p.name for p in named if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
            if not passes_keywords_on(kind):
                break
    return [*names]


def _plain(value: Any) -> Any:
    """Return an option as a JSON value."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, torch.device) else value


def representation(environment: Any, *options: str, inner: Any = None) -> str:
    """Return the `repr` of an environment: type, options and spaces. Spaces equal to those of `inner` are left out."""
    spaces_ = {name: getattr(environment, f"single_{name}") for name in ("observation_space", "action_space")}
    shown = [
        f"{name}={' '.join(repr(space).split())}"  # NumPy breaks long bounds into lines
        for name, space in spaces_.items()
        if inner is None or space != getattr(inner, f"single_{name}")
    ]
    return f"{type(environment).__name__}({', '.join([*options, *shown])})"


def ends_episodes(method: _Method) -> _Method:
    """Decorator of a method that steps or resets environments one by one: after an exception, `reset` must be called.

    Some of the environments may have been stepped, and would be stepped twice. The attribute `_ended` of the object
    becomes the text of the exception.
    """

    @functools.wraps(method)
    def guarded(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except BaseException as error:  # raised again
            self._ended = text_of(error)
            raise

    return cast(Any, guarded)  # type checkers see the method


def check_open(name: str, method: str, ended: str | None) -> None:
    """Raise RuntimeError if an environment is closed. `ended` is its attribute, see `ends_episodes`."""
    if ended is CLOSED:
        raise RuntimeError(f"{name}: the environment is closed, so {method}() cannot be called; build a new one")


def check_begun(name: str, method: str, begun: bool, ended: str | None) -> None:
    """Raise RuntimeError if an environment cannot be stepped. `ended` is its attribute, see `ends_episodes`."""
    check_open(name, method, ended)
    if not begun or ended is not None:
        reason = "" if ended is None else f"; its episodes ended with an error ({ended})"
        raise RuntimeError(f"{name}: call reset() before {method}(){reason}")
