"""Tests of observation_history: the window of a transition ends in the observation in which the action was selected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rein
from rein.envs.gridworld import Gridworld
from rein.envs.wrappers.observations import observation_history


def expected(step_N: torch.Tensor, length: int) -> torch.Tensor:
    """Return the windows (N, L, 1) at step `step_N` of episodes whose observation is the step."""
    return torch.stack([(step_N - back).clamp(min=0) for back in range(length - 1, -1, -1)], 1)[:, :, None]


@pytest.mark.parametrize("length", [1, 2, 3, 8])
def test_transitions_contain_consecutive_windows(scripted: Any, listening: Any, length: int) -> None:
    environment = observation_history(scripted([2, 3, 7], truncates={1}), length)
    agent, store = listening(environment), rein.MemoryStore()
    loop = rein.training_loop(agent, environment, store, epochs=2, iterations=10)
    loop.run()
    for transition in agent.transitions:
        step_N = transition.reward - 1  # the reward is the number of the next step
        assert torch.equal(transition.observation, expected(step_N, length))
        assert torch.equal(transition.next_observation, expected(step_N + 1, length))
    recorded = torch.stack([transition.observation for transition in agent.transitions])
    stored = torch.cat([torch.as_tensor(t.fields["observation"]) for t in store.trajectories])
    assert torch.equal(recorded, stored)


def test_discrete_observations_become_feature_vectors() -> None:
    environment = observation_history(Gridworld(4, seed=0), 3)  # four numbers from 0 to 4
    start = environment.reset()
    assert start.shape == (4, 3, 20)
    assert start.dtype is torch.float32
    assert (start.sum(2) == 4).all()
