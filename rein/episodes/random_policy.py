"""Random policy, a baseline for other policies.

Shapes: N environments, A one action.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.agents.base.action_noise import random_action, random_choices
from rein.ops.random import generator, restore
from rein.ops.trees import checked_device, leaves
from rein.spaces import children, mask_of, visible
from rein.spaces.conversion import tensor_dtype
from rein.types import Tree


class RandomPolicy:
    """Policy that samples actions uniformly from a space, within the `action_mask` of observations if there is one.

    Example::

        rein.evaluate(RandomPolicy(environment.single_action_space, seed=0), environment, episodes=100)

    Actions are drawn from a separate generator on `device`, so a seed determines them.

    Raises ValueError for a Box without finite bounds, and TypeError for a space whose values are not tensors.
    """

    def __init__(self, space: spaces.Space[Any], seed: int, *, device: torch.device | str = "cpu") -> None:
        self.space, self.device = space, checked_device(device)
        self._generator = generator(seed, "policy", device=self.device)
        # raise now if the space cannot be sampled
        _draw(space, torch.zeros(0, dtype=torch.float32, device="cpu"), None, generator(0, "policy"))

    def select_action(self, observation: Tree) -> tuple[Tree, dict[str, Tensor]]:
        """Return actions (N, *A) for observations (N, ...)."""
        return _draw(self.space, observation, mask_of(observation), self._generator), {}

    def reset(self, mask: Tensor | None = None) -> None:
        """Do nothing: the policy has no memory."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generator."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        restore(self._generator, state["generator"])


def _draw(space: spaces.Space[Any], observation: Tree, mask: Tree | None, rng: torch.Generator) -> Tree:
    inner = children(space)
    if inner is not None:
        masks = mask or {}
        return {key: _draw(part, observation, masks.get(key), rng) for key, part in inner.items()}
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Box):
        raise TypeError(
            f"{space}: unsupported space; expected Box, Discrete, MultiDiscrete, MultiBinary, or Dict or Tuple of these"
        )
    if mask is not None:
        return random_choices(space, mask.to(rng.device), rng).to(tensor_dtype(space))
    if isinstance(space, spaces.MultiDiscrete):
        return _integers(space, space.start, space.nvec, observation, rng)
    if isinstance(space, spaces.MultiBinary):
        return _integers(space, 0, 2, observation, rng)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.bool_):
        return _integers(space, 0, 2, observation, rng)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.integer):
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        return _integers(space, low, high - low + 1.0, observation, rng)
    return random_action(space, visible(observation), rng)  # the mask may belong to another component


def _integers(space: spaces.Space[Any], low: Any, count: Any, observation: Tree, rng: torch.Generator) -> Tensor:
    """Return integers (N, *A), uniform over the `count` values from `low`."""
    rows, device = len(next(leaf for _, leaf in leaves(observation))), rng.device
    u = torch.rand((rows, *(space.shape or ())), generator=rng, device=device, dtype=torch.float64)
    low, count = (torch.as_tensor(bound, dtype=torch.float64, device=device) for bound in (low, count))
    return (low + (u * count).floor_()).to(tensor_dtype(space))
