"""Tests of FrameSkip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rein.envs.wrappers.time import FrameSkip


def actions(steps: int, num_envs: int) -> Tensor:
    return torch.rand(steps, num_envs, 2, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("skip", [1, 2, 3, 4, 10])
def test_frame_skip_equals_repeated_steps_with_summed_rewards(clockwork: Any, skip: int) -> None:
    environment, given = FrameSkip(clockwork(4), skip), actions(30, 4)
    environment.reset()
    steps = [(environment.episode_seeds, environment.apply_action(action)) for action in given]
    ends = 0
    for i in range(4):
        plain = clockwork(4)  # only environment i is compared
        plain.reset()
        for action, (seeds, whole) in zip(given, steps, strict=True):
            assert plain.episode_seeds[i] == seeds[i]
            reward, part = 0.0, None
            for _ in range(skip):
                part = plain.apply_action(action)
                reward += part.reward[i]
                if part.terminated[i] or part.truncated[i]:
                    ends += 1
                    break
            assert whole.reward[i] == reward
            for name in ("observation", "terminated", "truncated", "final_observation", "valid"):
                assert torch.equal(getattr(whole, name)[i], getattr(part, name)[i]), f"{name}, environment {i}"
            assert whole.info["step"][i] == part.info["step"][i]
    assert ends > 20


def test_environment_without_apply_action_where_raises(whole_clockwork: Any) -> None:
    with pytest.raises(TypeError, match=r"FrameSkip: Clockwork has no apply_action_where\(\); repeat the action"):
        FrameSkip(whole_clockwork(2), 4)


def test_skip_below_one_raises(clockwork: Any) -> None:
    with pytest.raises(ValueError, match=r"FrameSkip\(skip=0\)"):
        FrameSkip(clockwork(2), 0)
