"""Clipping of the change of values in PPO."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

import rein
from tests.agents.steps import practice

SPACES = spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(2)


def change(value_clip: float | None) -> Tensor:
    """Return the largest change of a value in an update whose targets are far away."""
    settings: Any = {"rollout_steps": 8, "minibatches": 2, "update_epochs": 20, "optimizer": torch.optim.SGD}
    agent = rein.PPO(*SPACES, seed=0, hidden=(16,), value_clip=value_clip, learning_rate=0.01, **settings)
    observation = torch.ones(32, 2)
    before = agent.select_action(observation)[1]["value"]
    practice(agent, observation, lambda action: torch.full((32,), 100.0), 8)
    assert agent.updates == 40
    return (agent.select_action(observation)[1]["value"] - before).abs().max()


def test_values_move_at_most_one_step_beyond_the_clip_range() -> None:
    assert 0.1 < change(0.1) < 0.15 < 0.4 < change(None)
    assert torch.equal(change(1e6), change(None))


@pytest.mark.parametrize(
    ("name", "value"), [("clip_range_vf", 0.2), ("clip_vloss", True), ("vf_clip_param", 10.0), ("clip_value", 0.2)]
)
def test_names_of_other_libraries_suggest_value_clip(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match="use value_clip"):
        rein.PPO(*SPACES, **{name: value})
