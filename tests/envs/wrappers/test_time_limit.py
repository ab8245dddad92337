"""Tests of TimeLimit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rein.envs.gridworld import Gridworld
from rein.envs.wrappers.rewards import ScaleReward
from rein.envs.wrappers.time import TimeLimit
from rein.testing.stateful import first_difference

TARGETS = [(2, 4), (0, 1), (4, 4), (3, 2)]


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_time_limit_equals_the_option_of_gridworld(limit: int) -> None:
    around = TimeLimit(Gridworld(16, TARGETS, seed=0), limit)
    within = Gridworld(16, TARGETS, seed=0, max_episode_steps=limit)
    assert torch.equal(around.reset(), within.reset())
    terminated = 0
    for k in range(60):
        action = torch.arange(16).add(k * k).remainder(4)
        one, other = around.apply_action(action), within.apply_action(action)
        assert first_difference(one, other) is None
        assert torch.equal(around.episode_seeds, within.episode_seeds)
        terminated += int((one.terminated & ~one.truncated).sum())
    assert terminated or limit == 1  # some episodes terminate


def test_only_truncated_environments_are_reset(clockwork: Any) -> None:
    limited = TimeLimit(clockwork(8), 4)
    limited.reset()
    cut = 0
    for _ in range(30):
        before_N, step = limited.episode_seeds, limited.apply_action(torch.ones(8, 2))
        length_N = step.final_observation[:, 1]
        ended_N = step.terminated | step.truncated
        assert torch.equal(step.observation[:, 1], torch.where(ended_N, 0, length_N))
        assert torch.equal(before_N != limited.episode_seeds, ended_N)
        assert step.truncated[length_N == 4].all()
        assert (length_N <= 4).all()
        cut += int((step.truncated & ~step.terminated).sum())
    assert cut > 20


def test_environment_without_reset_where_raises(
    whole_clockwork: Any,
) -> None:
    message = r"TimeLimit: Clockwork has no reset_where\(\); set a limit when you build the environment"
    for environment in (whole_clockwork(2), ScaleReward(whole_clockwork(2), 2.0)):
        with pytest.raises(TypeError, match=message):
            TimeLimit(environment, 5)


def test_limit_below_one_raises(clockwork: Any) -> None:
    with pytest.raises(ValueError, match=r"TimeLimit\(max_episode_steps=0\): give 1 or more"):
        TimeLimit(clockwork(2), 0)


def test_rows_that_are_not_stepped_do_not_count(clockwork: Any) -> None:
    environment = TimeLimit(clockwork(2), 3)
    environment.reset()
    for k in range(12):
        step = environment.apply_action_where(torch.zeros(2, 2), torch.tensor([True, k % 2 == 1]))
        assert step.valid.tolist() == [True, k % 2 == 1]
        assert (step.terminated | step.truncated).tolist() == [k % 3 == 2, k % 6 == 5]
