"""Tests of ClipAction."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rein.envs.gridworld import Gridworld
from rein.envs.wrappers.actions import ClipAction
from rein.testing.stateful import first_difference


def test_actions_within_the_bounds_do_not_change(clockwork: Any) -> None:
    plain, clipped = clockwork(4), ClipAction(clockwork(4))
    plain.reset()
    clipped.reset()
    for _ in range(12):
        action = torch.rand(4, 2) * torch.tensor([4.0, 5.0]) - torch.tensor([2.0, 0.0])
        assert first_difference(plain.apply_action(action), clipped.apply_action(action)) is None


def test_actions_out_of_bounds_are_clipped(clockwork: Any) -> None:
    environment, wild = ClipAction(clockwork(2)), torch.tensor([[-9.0, 9.0], [1.0, -0.5]])
    environment.reset()
    total_N = environment.apply_action(wild).final_observation[:, 2]
    assert total_N.tolist() == [-2.0 + 5.0, 1.0 + 0.0]
    assert wild.tolist() == [[-9.0, 9.0], [1.0, -0.5]]


def test_action_space_is_unbounded(clockwork: Any) -> None:
    space = ClipAction(clockwork(2)).single_action_space
    assert space.shape == (2,)
    assert space.contains(torch.tensor([-1e30, 1e30]).numpy())


def test_discrete_actions_raise() -> None:
    with pytest.raises(TypeError, match=r"ClipAction: actions in Discrete\(4\); they must be a Box"):
        ClipAction(Gridworld())
