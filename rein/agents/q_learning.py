"""Tabular Q-learning for N environments at once.

Shapes: N environments, S states, A actions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from rein.agents.base.agent import Agent
from rein.agents.base.value_agent import EpsilonGreedy
from rein.ops.exploration import epsilon_greedy
from rein.ops.values import mask_values, share_of_duplicates, step_toward_, td_target
from rein.options import in_unit_interval, option
from rein.schedules import Schedule
from rein.spaces import mask_of, visible, visible_space
from rein.types import Transition, Tree


class QLearning(EpsilonGreedy, Agent):
    """Tabular Q-learning (Watkins & Dayan 1992; Sutton & Barto 2018, section 6.5).

    Update::

        Q(s, a) <- Q(s, a) + learning_rate * (r + gamma * max_a' Q(s', a') - Q(s, a))

    The term `gamma * max_a' Q(s', a')` is left out if s' is terminal. Each update uses the last recorded transition.
    `rein.ops.values.step_toward_` describes the update if several environments are in the same state. `table` (S, A) is
    initialized uniformly on [-0.1, 0.1). The row of a state is the row-major index of its observation.

    The observation space must be Discrete or MultiDiscrete, the action space Discrete. Action masks are supported: the
    observation space is then a Dict of that space and `action_mask`, and maxima are over valid actions.
    """

    learning_rate: float | Schedule = option(
        default=0.1, check=in_unit_interval, help="step size from 0 to 1; a number or a schedule"
    )
    gamma: float = option(default=0.99)
    epsilon: float | Schedule = option(default=0.1)

    @classmethod
    def check_spaces(cls, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        """Raise ValueError unless observations are Discrete or MultiDiscrete and actions Discrete."""
        super().check_spaces(observation_space, action_space)
        if not isinstance(space := visible_space(observation_space), spaces.Discrete | spaces.MultiDiscrete):
            raise ValueError(f"the observation space is {space}; a table needs Discrete or MultiDiscrete observations")

    def build(self, generator: torch.Generator) -> None:
        """Build the table."""
        self._row = _RowIndex(visible_space(self.observation_space), self.device)  # type: ignore[arg-type]
        shape = self._row.states, int(self.action_space.n)
        self.table = torch.empty(shape, dtype=torch.float32, device=self.device)
        self.table.uniform_(-0.1, 0.1, generator=self.generator)
        self._cells = self.table.view(-1)
        self._count = torch.zeros(self.table.numel(), dtype=torch.int64, device=self.device)  # zero between updates
        self._share = torch.empty(0, dtype=torch.float64, device="cpu")
        self._share_key = (0.0, 0)  # see _shares

    def act(self, observation: Tree, explore: bool | float) -> Tensor:
        """Return greedy or epsilon-greedy actions (N,) for observations (N,) or (N, K)."""
        return self.choose(self.table.index_select(0, self._row(visible(observation))), explore, mask_of(observation))

    def explore_by(self, value_NA: Tensor, mask_NA: Tensor | None) -> Tensor:
        """Return epsilon-greedy action indices (N,)."""
        return epsilon_greedy(value_NA, self._epsilon(), self.generator, mask_NA)

    def update(self, batch: Transition) -> dict[str, Any]:
        """Update the table. The metric `td_error` is the mean absolute error of valid rows before the update."""
        action_N = batch.action - self.first_action if self.first_action else batch.action
        cell_N = torch.add(action_N, self._row(visible(batch.observation)), alpha=self.table.shape[1])
        next_value_N = self.q_values(batch.next_observation).amax(dim=1)
        target_N = td_target(batch.reward, batch.terminated, next_value_N, self.gamma)
        share = self._shares(target_N.numel())
        error_N = step_toward_(self._cells, cell_N, target_N, batch.valid, share, self._count)
        self.updates += 1
        td_error = error_N.abs().sum() / batch.valid.count_nonzero().clamp(min=1)
        return {"td_error": td_error, "epsilon": self._epsilon()}

    def q_values(self, observation: Tree) -> Tensor:
        """Return a copy of the action values (N, A). Those of masked actions are below all others."""
        return mask_values(self.table.index_select(0, self._row(visible(observation))), mask_of(observation))

    def _shares(self, rows: int) -> Tensor:
        """Return `share_of_duplicates`, cached until the learning rate or the number of rows changes."""
        key = self.learning_rate(**self.counts), rows  # type: ignore[operator]
        if self._share_key != key:
            self._share = share_of_duplicates(*key, self.device)
            self._share_key = key  # type: ignore[arg-type]
        return self._share

    def _epsilon(self) -> float:
        return self.epsilon(**self.counts)  # type: ignore[operator]


class _RowIndex:
    """Maps an observation to its row of the table: the row-major index, counted from the `start` of each dimension."""

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete, device: torch.device) -> None:
        if isinstance(space, spaces.Discrete):
            sizes, start = [int(space.n)], [int(space.start)]
        else:
            sizes, start = space.nvec.reshape(-1).tolist(), space.start.reshape(-1).tolist()
        strides = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
        self.states = math.prod(sizes)
        self._shape = space.shape or ()
        self._first = sum(s * stride for s, stride in zip(start, strides, strict=True))
        self._stride = torch.tensor(strides, dtype=torch.int64, device=device)

    def __call__(self, observation: Tensor) -> Tensor:
        if observation.shape[1:] != self._shape:
            expected = ", ".join(["N", *map(str, self._shape)])
            raise ValueError(f"QLearning: expected observations of shape ({expected}), got {tuple(observation.shape)}")
        if self._shape:
            observation = (observation.flatten(1) * self._stride).sum(dim=1)
        return observation - self._first if self._first else observation
