"""Tests of the masked gridworld."""

from __future__ import annotations

from rein.testing import EnvironmentContract
from tests.envs.masked_grid import MaskedGrid


class TestMaskedGrid(EnvironmentContract):
    def make(self, num_envs, seed):
        return MaskedGrid(num_envs, seed=seed, max_episode_steps=5)
