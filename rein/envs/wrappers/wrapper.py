"""Base class of wrappers, which forwards all calls to the inner environment.

A wrapper has the optional methods `reset_where`, `apply_action_where`, `state_dict` and `load_state_dict` if the inner
environment has them. Test for them with `hasattr`.

Shapes: N environments, O one observation, A one action.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any, TypeVar, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.contract import options_of, representation, restored
from rein.envs.host.episode_inputs import Options
from rein.types import Group, TimeStep, Tree

_Method = TypeVar("_Method", bound=Callable[..., Any])


def where_inside(method: _Method) -> _Method:
    """Decorator: the wrapper has the method only if the inner environment has a method of that name.

    It is used for `state_dict` and `load_state_dict`. An environment without a state begins new episodes when a run
    resumes, and its wrappers must do the same.
    """
    return cast(Any, _WhereInside(method))  # type checkers see the method


class _WhereInside:
    def __init__(self, method: Any) -> None:
        self._method, self.__doc__ = method, method.__doc__

    def __get__(self, wrapper: Any, owner: Any = None) -> Any:
        if wrapper is None:
            return self._method
        getattr(wrapper.inner, self._method.__name__)  # raises the AttributeError of the inner environment
        return MethodType(self._method, wrapper)


def _of_inner(name: str, text: str) -> Any:
    """Return a property that has the value of the inner environment."""
    return property(operator.attrgetter(f"inner.{name}"), doc=text)


class Wrapper:
    """Base class of wrappers. By default every method forwards to the inner environment.

    A wrapper overrides `_begin` for the observations of resets, `_step` for actions, and the spaces that it changes. It
    keeps its constructor options as attributes of the same names, or overrides `config`. A wrapper with a state
    declares its tensors in `saved_tensors`, or overrides `state_dict` and `load_state_dict` with the decorator
    `where_inside`.
    """

    inner: Any  # an Environment, which may have optional methods
    saved_tensors: Sequence[tuple[str, str]] = ()  # name in the state, and attribute
    num_envs: int = _of_inner("num_envs", "Number of environments N.")
    device: torch.device = _of_inner("device", "Device of observations and actions.")
    seed: int | None = _of_inner(
        "seed", "Random seed of all environments; None until given or drawn at the first reset."
    )
    replayable: bool = _of_inner(
        "replayable", "Whether the seed and the actions of an episode reproduce it bit for bit."
    )
    worlds: int = _of_inner(
        "worlds", "Number of multi-agent worlds. Raises AttributeError if the inner environment has no worlds."
    )
    episode_seeds: Tensor = _of_inner("episode_seeds", "(N,) int64: seeds of the current episodes; -1 if unknown.")

    def _begin(self, observation: Tree, mask: Tensor | None) -> Tree:
        """Convert the observation of the inner environment after a reset where `mask` (N,) is True; None for all."""
        return observation

    def _step(self, action: Tree, mask: Tensor | None) -> TimeStep:
        """Step the environments where `mask` (N,) is True; None for all."""
        return self._step_inner(action, mask)

    def _step_inner(self, action: Tree, mask: Tensor | None) -> TimeStep:
        return self.inner.apply_action(action) if mask is None else self.inner.apply_action_where(action, mask)

    @property
    def config(self) -> dict[str, Any]:
        """Constructor options, as JSON values."""
        return self._config(**options_of(self))

    def _config(self, **options: Any) -> dict[str, Any]:
        kind = type(self.inner)
        inner = {"type": f"{kind.__module__}.{kind.__qualname__}", "config": self.inner.config}
        return {**options, "inner": inner}

    @property
    def unwrapped(self) -> Any:
        """Innermost environment."""
        return unwrapped(self.inner)

    @property
    def single_observation_space(self) -> spaces.Space[Any]:
        """Observation space of one environment."""
        return self.inner.single_observation_space

    @property
    def single_action_space(self) -> spaces.Space[Any]:
        """Action space of one environment."""
        return self.inner.single_action_space

    @property
    def steps_separately(self) -> bool:
        """Whether `apply_action_where` costs less than stepping all environments."""
        return getattr(self.inner, "steps_separately", False)

    @property
    def groups(self) -> Mapping[str, Group]:
        """Groups of agents of the inner environment. Raises AttributeError if it has no worlds.

        If the wrapper changes a space, the spaces of all groups are those of the rows, with their padding.
        """
        inner, own_spaces = self.inner, (self.single_observation_space, self.single_action_space)
        if own_spaces == (inner.single_observation_space, inner.single_action_space):
            return inner.groups
        return {name: Group(group.rows, *own_spaces) for name, group in inner.groups.items()}

    @property
    def awaits_reset(self) -> bool:
        """Whether the inner environment must be reset before the next step."""
        return getattr(self.inner, "awaits_reset", False)

    def reset(self, seed: int | None = None) -> Tree:
        """Begin the next episode of every environment, from episode 0 if `seed` is given. Returns the observation."""
        return self._begin(self.inner.reset(seed), None)

    @property
    def episode_options(self) -> list[dict[str, Any] | None] | None:
        """Options with which the current episodes began; None if none were set."""
        return getattr(self.inner, "episode_options", None)

    @where_inside
    def set_options(
        self, options: Options | Sequence[Options | None] | None, environments: Iterable[int] | None = None
    ) -> None:
        """Set the reset options of the next episodes. Raises AttributeError if the inner environment has none."""
        self.inner.set_options(options, environments)

    def reset_to(self, episode_seeds: Tensor, options: Sequence[Options | None] | None = None) -> Tree:
        """Begin the episodes with these seeds (N,), for a replay. Later episodes are seeded as usual."""
        more = () if options is None else (options,)
        return self._begin(self.inner.reset_to(episode_seeds, *more), None)

    @property
    def reset_where(self) -> Callable[[Tensor], Tree]:
        """`reset_where(mask)` of `PartlyResettable`. Raises AttributeError if the inner environment lacks it."""
        inner = self.inner.reset_where
        return lambda mask: self._begin(inner(mask), mask)

    def apply_action(self, action: Tree) -> TimeStep:
        """Step every environment with actions `(N, *A)`."""
        return self._step(action, None)

    @property
    def apply_action_where(self) -> Callable[[Tree, Tensor], TimeStep]:
        """`apply_action_where(action, mask)` of `PartlySteppable`. Raises AttributeError if the inner one lacks it."""
        getattr(self.inner, "apply_action_where")  # noqa: B009  # raises the AttributeError of the inner environment
        return self._step

    def render(self, index: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return an RGB frame (height, width, 3) of one environment, if the inner environment renders."""
        return self.inner.render(index)

    def reseed(self, seed: int) -> None:
        """Set the random seed. Raises RuntimeError after the first reset."""
        self.inner.reseed(seed)

    def close(self) -> None:
        """Close the inner environment. A second call does nothing."""
        self.inner.close()

    @where_inside
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner environment and the wrapper. Raises AttributeError without an inner state."""
        inner, own = self.inner.state_dict(), {name: getattr(self, attribute) for name, attribute in self.saved_tensors}
        return {"inner": inner, **own} if own else inner

    @where_inside
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. Raises ValueError for another shape or number of environments."""
        own = [(attribute, restored(state, name, getattr(self, attribute))) for name, attribute in self.saved_tensors]
        self.inner.load_state_dict(state["inner"] if own else state)
        for attribute, tensor in own:
            setattr(self, attribute, tensor)

    def __repr__(self) -> str:
        return representation(self, repr(self.inner), inner=self.inner)


def unwrapped(environment: Any) -> Any:
    """Return the environment inside all wrappers, or the environment itself if it is not a wrapper."""
    while isinstance(environment, Wrapper):
        environment = environment.inner
    return environment


def require(wrapper: str, environment: Any, method: str, instead: str) -> None:
    """Raise TypeError, with the advice `instead`, unless the environment inside all wrappers has `method`."""
    inside = unwrapped(environment)
    if not hasattr(inside, method):
        raise TypeError(f"{wrapper}: {type(inside).__name__} has no {method}(); {instead}")


def may_hold(mask_N: Tensor) -> bool:
    """Return whether `mask_N` can be True anywhere. Always True on a GPU, because reading the mask would wait."""
    return mask_N.device.type != "cpu" or bool(mask_N.any())
