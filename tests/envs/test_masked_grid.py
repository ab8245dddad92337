"""Tests of the masked gridworld."""

from __future__ import annotations

import torch

from rein.envs import SimulatedEnvironment
from rein.testing import EnvironmentContract
from tests.envs.masked_grid import FREE, JUMPS, MaskedGrid


class TestMaskedGrid(EnvironmentContract):
    def make(self, num_envs, seed):
        return MaskedGrid(num_envs, seed=seed, max_episode_steps=5)


def test_mask_is_nonzero_for_jumps_to_free_cells() -> None:
    environment = MaskedGrid(64, seed=0)
    assert isinstance(environment.unwrapped, SimulatedEnvironment)
    observation = environment.reset()
    for (x, y, *_), mask in zip(observation["observation"].tolist(), observation["action_mask"].tolist(), strict=True):
        assert mask == [(x + dx, y + dy) in FREE for dx, dy in JUMPS]


def test_invalid_actions_are_counted_and_do_not_move() -> None:
    environment = MaskedGrid(256, seed=0, max_episode_steps=None)
    observation = environment.reset()
    action = observation["action_mask"].argmin(1)
    time_step = environment.apply_action(action)
    assert environment.invalid_actions == 256
    assert torch.equal(time_step.observation["observation"], observation["observation"])


def test_most_actions_are_invalid() -> None:
    mask = MaskedGrid(4096, seed=0).reset()["action_mask"].float()
    assert 0.55 < 1.0 - float(mask.mean()) < 0.65
    assert mask.sum(1).min() >= 1
    assert -2.0 < MaskedGrid(1).optimal_return < -1.5
