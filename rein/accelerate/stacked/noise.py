"""Random numbers of several agents.

On the CPU, each agent draws from its generator, as it would alone. On other devices, a call for each agent would take
most of the time, so the numbers of all agents are computed together from their seeds and counts.

Shapes: S learners, N environments of a learner, A action dimensions, B rows of a learner, M minibatches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rein.ops.random import hash_bits, stream_seed, uniform
from rein.ops.statistics import minibatches


class AgentNoise:
    """Noise of actions and order of minibatches of S agents."""

    def __init__(self, agents: Sequence[Any]) -> None:
        self.agents, self.device = agents, torch.device(agents[0].device)
        keys = [stream_seed(agent._root_seed, "population") for agent in agents]
        self._key_S = torch.tensor(keys, dtype=torch.int64, device=self.device)
        self._keys_by_count: dict[int, Tensor] = {}  # keys by their number

    def uniform(self, rows: int) -> Tensor:
        """Return uniform numbers in [0, 1), (S, N)."""
        if self.device.type != "cpu":
            return uniform(self._keys(rows), 2 * self._count())
        noise_SN = torch.empty(len(self.agents), rows, dtype=torch.float32, device=self.device)
        for agent, row_N in zip(self.agents, noise_SN.unbind(), strict=True):
            torch.rand(rows, generator=agent.generator, dtype=torch.float32, device=self.device, out=row_N)
        return noise_SN

    def normal(self, rows: int, actions: int) -> Tensor:
        """Return standard normal numbers, (S, N, A)."""
        if self.device.type != "cpu":  # Box & Muller 1958
            keys, count = self._keys(rows * actions), 2 * self._count()
            radius = (-2.0 * torch.log1p(-uniform(keys, count))).sqrt()
            return (radius * torch.cos(2.0 * math.pi * uniform(keys, count + 1))).unflatten(1, (rows, actions))
        noise_SNA = torch.empty(len(self.agents), rows, actions, dtype=torch.float32, device=self.device)
        for agent, row_NA in zip(self.agents, noise_SNA.unbind(), strict=True):
            like: dict[str, Any] = {"dtype": torch.float32, "device": self.device, "out": row_NA}
            torch.randn(row_NA.shape, generator=agent.generator, **like)
        return noise_SNA

    def orders(self, rows: int, count: int) -> Tensor:
        """Return a random split of the rows of each agent into `count` minibatches, (S, M, B // M) int64."""
        if self.device.type == "cpu":
            return torch.stack([minibatches(rows, count, agent.generator) for agent in self.agents])
        bits_SB = hash_bits(self._keys(rows), -1 - self.agents[0].updates)
        return bits_SB.argsort(1)[:, : rows // count * count].unflatten(1, (count, rows // count))

    def _keys(self, count: int) -> Tensor:
        """Return different keys for each agent, (S, count)."""
        if count not in self._keys_by_count:
            number_C = torch.arange(count, dtype=torch.int64, device=self._key_S.device)
            self._keys_by_count[count] = hash_bits(self._key_S.unsqueeze(1), number_C)
        return self._keys_by_count[count]

    def _count(self) -> int:
        """Return a number that grows with each vector step."""
        return self.agents[0].env_steps
