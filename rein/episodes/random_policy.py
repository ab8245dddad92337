"""Acting at random: what other policies are compared with.

Shapes: N environments, A one action.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.agents.base.exploration import random_action
from rein.envs.base.spaces import tensor_dtype
from rein.networks.encoder import children
from rein.ops.random import generator, restore
from rein.ops.trees import checked_device, leaves
from rein.types import Tree


class RandomPolicy:
    """Takes every action of a space with the same probability, whatever it observes.

        rein.evaluate(RandomPolicy(environment.single_action_space, seed=0), environment, episodes=100)

    It draws from a generator of its own on `device`: under a seed it always says the same.

    Raises ValueError for a Box without finite bounds, TypeError for a space that is no tensor.
    """

    def __init__(self, space: spaces.Space[Any], seed: int, *, device: torch.device | str = "cpu") -> None:
        self.space, self.device = space, checked_device(device)
        self._generator = generator(seed, "policy", device=self.device)
        _draw(
            space, torch.zeros(0, dtype=torch.float32, device="cpu"), generator(0, "policy")
        )  # or say now that it cannot be drawn from

    def select_action(self, observation: Tree) -> tuple[Tree, dict[str, Tensor]]:
        """An action (N, *A) for an observation (N, ...)."""
        return _draw(self.space, observation, self._generator), {}

    def reset(self, mask: Tensor | None = None) -> None:
        """Nothing to forget: an action depends on nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Its generator."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        restore(self._generator, state["generator"])


def _draw(space: spaces.Space[Any], observation: Tree, drawn: torch.Generator) -> Tree:
    inner = children(space)
    if inner is not None:
        return {key: _draw(part, observation, drawn) for key, part in inner.items()}
    if isinstance(space, spaces.MultiDiscrete):
        return _integers(space, space.start, space.nvec, observation, drawn)
    if isinstance(space, spaces.MultiBinary):
        return _integers(space, 0, 2, observation, drawn)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.bool_):
        return _integers(space, 0, 2, observation, drawn)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.integer):
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        return _integers(space, low, high - low + 1.0, observation, drawn)
    if not isinstance(space, spaces.Discrete | spaces.Box):
        raise TypeError(f"{space}: not a tensor; Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple of them are")
    return random_action(space, observation, drawn)


def _integers(space: spaces.Space[Any], low: Any, count: Any, observation: Tree, drawn: torch.Generator) -> Tensor:
    """(N, *A) of the `count` integers from `low` on."""
    rows, device = len(next(leaf for _, leaf in leaves(observation))), drawn.device
    u = torch.rand((rows, *(space.shape or ())), generator=drawn, device=device, dtype=torch.float64)
    low, count = (torch.as_tensor(bound, dtype=torch.float64, device=device) for bound in (low, count))
    return (low + (u * count).floor_()).to(tensor_dtype(space))
