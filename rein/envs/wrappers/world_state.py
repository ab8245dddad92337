"""Wrapper that gives critics the state of the whole multi-agent world.

Shapes: N rows, W worlds, A agents of a world, F features of an observation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.contract import agents_per_world
from rein.envs.wrappers.wrapper import Wrapper
from rein.networks.encoder import Flatten
from rein.protocols import Environment
from rein.spaces import CRITIC_OBSERVATION, visible, visible_space
from rein.types import Group, TimeStep, Tree


class WorldState(Wrapper):
    """Add the state of the world as `critic_observation`, for example for MAPPO (Yu et al. 2022).

    The state of a world is the concatenation of the flattened observations of its A agents, (A * F,) float32. Agents
    with a separate critic, such as PPO, give it to the critic only. The policy acts on the observation of its row, so
    that it can be executed by each agent alone.

    Observations become a Dict with the entries `observation` and `critic_observation`. To observations that are a Dict
    only `critic_observation` is added.

    Raises TypeError if the inner environment has no worlds.
    """

    saved_tensors = (("last", "_last"),)

    def __init__(self, inner: Environment) -> None:
        if getattr(inner, "worlds", None) is None:
            raise TypeError(f"WorldState: {inner!r} is not a multi-agent environment: it has no worlds")
        self.inner = inner
        self._agents = agents_per_world(inner)
        space = visible_space(inner.single_observation_space)
        flat: Any = spaces.flatten_space(space)
        low, high = (np.tile(bound.astype(np.float32), self._agents) for bound in (flat.low, flat.high))
        self._state_space = spaces.Box(low, high, dtype=np.float32)
        self._flatten = Flatten(space, inner.device)
        size = (inner.num_envs, flat.shape[0])
        self._last = torch.zeros(size, dtype=torch.float32, device=inner.device)  # (N, F) current observation

    @property
    def single_observation_space(self) -> spaces.Space[Any]:
        """Dict with the entries of the inner space, or `observation`, and `critic_observation` (A * F,) float32."""
        return self._with_state(self.inner.single_observation_space)

    @property
    def groups(self) -> Mapping[str, Group]:
        """Groups of the inner environment. Their observations have the entry `critic_observation`, too."""
        return {
            name: group._replace(observation_space=self._with_state(group.observation_space))
            for name, group in self.inner.groups.items()
        }

    def _with_state(self, space: spaces.Space[Any]) -> spaces.Dict:
        entries = space.spaces if isinstance(space, spaces.Dict) else {"observation": space}
        return spaces.Dict({**entries, CRITIC_OBSERVATION: self._state_space})

    def _begin(self, observation: Tree, mask: Tensor | None) -> Tree:
        self._last = self._flatten(visible(observation))
        return _joined(observation, self._state(self._last))

    def _step(self, action: Tree, mask: Tensor | None) -> TimeStep:
        time_step = self._step_inner(action, mask)
        now_NF = self._flatten(visible(time_step.observation))
        final_NF = self._flatten(visible(time_step.final_observation))
        # agents that had left have no final observation: their last one belongs to the final state
        final_NF = torch.where(time_step.valid[:, None], final_NF, self._last)
        self._last, state = now_NF, self._state(now_NF)
        ended_N = time_step.terminated | time_step.truncated
        final_state = torch.where(ended_N[:, None], self._state(final_NF), state)
        return time_step._replace(
            observation=_joined(time_step.observation, state),
            final_observation=_joined(time_step.final_observation, final_state),
        )

    def _state(self, flat_NF: Tensor) -> Tensor:
        """Return the states of the worlds of all rows, (N, A * F)."""
        return flat_NF.view(-1, self._agents * flat_NF.shape[1]).repeat_interleave(self._agents, 0)


def _joined(observation: Tree, state: Tensor) -> dict[str, Tree]:
    entries = observation if isinstance(observation, dict) else {"observation": observation}
    return {**entries, CRITIC_OBSERVATION: state}
