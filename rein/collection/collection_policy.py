"""Policy that selects actions for some of the environments.

Shapes: N environments, R of them, C features of a carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rein.agents.base.action_noise import OrnsteinUhlenbeck
from rein.agents.base.agent import Agent
from rein.agents.base.policies import load_parameters, parameters_of, snapshot
from rein.ops.random import generator
from rein.types import Tree


class CollectionPolicy:
    """Policy that selects exploring actions for some of the environments, with the parameters of an agent.

    The policy has its own generator, and a carry and exploration noise for each environment. Schedules are those of the
    agent.

    Args:
        agent: agent that learns.
        num_envs: number of environments N.
        copies: whether the policy has a copy of the parameters. Otherwise it shares the modules of the agent. In both
            cases `refresh` must be called after the agent has learned.
        epsilon: probability of a random action in each environment (N,), for agents with action values. By default the
            environments explore as the agent does.

    Raises:
        TypeError: if the agent is not a `rein.Agent`, or if it does not support `epsilon`.
    """

    def __init__(self, agent: Any, num_envs: int, *, copies: bool, epsilon: Tensor | None = None) -> None:
        if not isinstance(agent, Agent):
            raise TypeError(
                f"{type(agent).__name__} cannot act for a part of the environments; use a subclass of rein.Agent"
            )
        if epsilon is not None and not hasattr(agent, "explore_by"):
            raise TypeError(f"epsilon: {type(agent).__name__} does not explore with random actions; remove it")
        self._agent, self._num_envs, self._copies, self._epsilon = agent, num_envs, copies, epsilon
        self._copy = snapshot(agent, shared=[getattr(agent, "exploration", None)])
        self._copy.generator = generator(agent._root_seed, "collection", agent.env_steps, device=agent.device)
        self._copy.carry, self._carry = None, None  # (R, C) and (N, C)
        noise = getattr(agent, "noise", None)
        self._noise = _Noise(noise, num_envs) if isinstance(noise, OrnsteinUhlenbeck) else None
        if self._noise is not None:
            vars(self._copy)["noise"] = self._noise
        self.refresh()

    def refresh(self) -> None:
        """Use the current parameters of the agent from now on."""
        if self._copies:
            load_parameters(self._copy, parameters_of(self._agent))
        else:
            vars(self._copy).update({name: getattr(self._agent, name) for name in parameters_of(self._agent)})

    @torch.no_grad()
    def select_action(self, observation: Tree, rows: Sequence[int]) -> tuple[Tree, dict[str, Tree]]:
        """Return exploring actions (R, ...) and extras for the observations (R, ...) of the environments `rows`."""
        acting = self._copy
        acting.env_steps, acting.updates = self._agent.env_steps, self._agent.updates
        if self._carry is not None:
            acting.carry = self._carry[rows]
        if self._noise is not None:
            self._noise.rows = rows
        if self._epsilon is None or acting.env_steps < getattr(acting, "learning_starts", 0):
            action, extras = acting.select_action(observation)
        else:
            action, extras = acting.act(observation, self._epsilon[rows]), {}
        carry = getattr(acting, "_next_carry", None)
        carry = acting.carry if carry is None else carry
        if carry is not None:
            if self._carry is None:
                self._carry = carry.new_zeros(self._num_envs, carry.shape[1])
            self._carry[rows], acting.carry = carry, None
        return action, extras

    def begin_episodes(self, rows: Sequence[int]) -> None:
        """Zero the carry and reset the noise of the environments `rows`."""
        if self._carry is not None:
            self._carry[rows] = 0.0
        if self._noise is not None:
            self._noise.begin_episodes(rows)


class _Noise:
    """Ornstein-Uhlenbeck noise of the environments `rows`."""

    def __init__(self, noise: OrnsteinUhlenbeck, num_envs: int) -> None:
        self.rows: Sequence[int] = ()
        self._of = [OrnsteinUhlenbeck(noise.theta, noise.amount, noise.mu) for _ in range(num_envs)]

    def __call__(self, action_RA: Tensor, generator: torch.Generator, **counts: int) -> Tensor:
        """Return the next noise (R, A)."""
        actions = zip(self.rows, action_RA.split(1), strict=True)
        return torch.cat([self._of[row](action_1A, generator, **counts) for row, action_1A in actions])

    def begin_episodes(self, rows: Sequence[int]) -> None:
        """Restart the random walks of the environments `rows`."""
        for row in rows:
            self._of[row].reset(torch.ones(1, dtype=torch.bool, device="cpu"))
