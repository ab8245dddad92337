"""The ancestor's history, without its bug B2: the window of a transition ends in the observation that was acted on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rein
from rein.envs.gridworld import Gridworld
from rein.envs.wrappers.observations import observation_history


def expected(step_N: torch.Tensor, length: int) -> torch.Tensor:
    """The window (N, L, 1) of episodes whose observation is their step, where that is `step_N`."""
    return torch.stack([(step_N - back).clamp(min=0) for back in range(length - 1, -1, -1)], 1)[:, :, None]


@pytest.mark.parametrize("length", [1, 2, 3, 8])
def test_what_is_recorded_is_window_of_s_t_a_t_r_t_and_window_of_s_t_plus_1(
    scripted: Any, listening: Any, length: int
) -> None:
    environment = observation_history(scripted([2, 3, 7], truncates={1}), length)
    agent, store = listening(environment), rein.MemoryStore()
    loop = rein.training_loop(agent, environment, store, epochs=2, iterations=10)
    loop.run()
    for transition in agent.transitions:
        step_N = transition.reward - 1  # the reward is the step after it
        assert torch.equal(transition.observation, expected(step_N, length))
        assert torch.equal(transition.next_observation, expected(step_N + 1, length))
    recorded = torch.stack([transition.observation for transition in agent.transitions])
    stored = torch.cat([torch.as_tensor(t.fields["observation"]) for t in store.trajectories])
    assert torch.equal(recorded, stored)


def test_the_second_transition_is_s1_a1_s2_which_the_ancestor_stored_as_s0_a1_s2(scripted: Any, listening: Any) -> None:
    environment = observation_history(scripted([9]), 1)
    agent = listening(environment)
    rein.train(agent, environment, epochs=1, iterations=2)
    second = agent.transitions[1]
    assert (second.observation.item(), second.next_observation.item()) == (1.0, 2.0)


def test_a_history_is_tiled_with_the_first_observation(scripted: Any) -> None:
    environment = observation_history(Gridworld(8, seed=0, observation="vector"), 5)
    start = environment.reset()
    assert start.shape == (8, 5, 6)
    assert torch.equal(start, start[:, :1].expand(8, 5, 6))
    assert start.shape[1:] == environment.single_observation_space.shape


def test_observations_of_any_kind_become_vectors_of_features() -> None:
    environment = observation_history(Gridworld(4, seed=0), 3)  # four numbers from 0 to 4
    start = environment.reset()
    assert start.shape == (4, 3, 20)
    assert start.dtype is torch.float32
    assert (start.sum(2) == 4).all()
