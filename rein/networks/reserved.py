"""Reserved entries of Dict observations: `action_mask` and `critic_observation`.

`action_mask` is nonzero for each valid action. `critic_observation` is seen by critics only. Both are removed before
the encoder. A single remaining entry counts as the observation itself.

Shapes: B rows, F features of an observation, A actions, C features of a critic observation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gymnasium import spaces
from torch import Tensor

from rein.ops.trees import map_tree

Tree = Any  # a Tensor, or a (nested) dictionary of tensors

ACTION_MASK, CRITIC_OBSERVATION = "action_mask", "critic_observation"
RESERVED = frozenset((ACTION_MASK, CRITIC_OBSERVATION))


class Inputs(NamedTuple):
    """Inputs of a network whose observations have reserved entries."""

    features: Tensor  # (B, F), or images
    action_mask: Tree | None = None  # (B, A) bool, or a dictionary of masks; None if every action is valid
    critic: Tensor | None = None  # (B, C), features of the critic observation


Features = Tensor | Inputs  # result of `Preprocessor`


def inputs_of(x: Tensor | Inputs) -> Inputs:
    """Return inputs unchanged, and a tensor of features as inputs without reserved entries."""
    return x if isinstance(x, Inputs) else Inputs(x)


def mask_of(observation: Tree) -> Tree | None:
    """Return the action mask (N, A) bool of observations, or a dictionary of masks; None without a mask."""
    if not isinstance(observation, dict) or ACTION_MASK not in observation:
        return None
    return map_tree(_as_bool, observation[ACTION_MASK])


def _as_bool(mask: Tensor) -> Tensor:
    return mask != 0


def entry(space: spaces.Space[Any], name: str) -> spaces.Space[Any] | None:
    """Return the space of a reserved entry; None if the observations have no such entry."""
    return space.spaces.get(name) if isinstance(space, spaces.Dict) else None


def visible_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the space of observations without their reserved entries.

    Raises ValueError if the observations have no other entry.
    """
    if not isinstance(space, spaces.Dict) or not RESERVED & space.spaces.keys():
        return space
    others = {name: part for name, part in space.spaces.items() if name not in RESERVED}
    if not others:
        raise ValueError(
            f"the observation space is {space}, which has only reserved entries ({', '.join(sorted(space.spaces))}): "
            "add an entry for the observation itself"
        )
    return next(iter(others.values())) if len(others) == 1 else spaces.Dict(others)


def visible(observation: Tree) -> Tree:
    """Return observations without their reserved entries."""
    if not isinstance(observation, dict) or not RESERVED & observation.keys():
        return observation
    others = {name: part for name, part in observation.items() if name not in RESERVED}
    return next(iter(others.values())) if len(others) == 1 else others
