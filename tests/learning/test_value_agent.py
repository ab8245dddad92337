"""Value-based agents: exploration and frame replay."""

from __future__ import annotations

import pytest
import torch
from gymnasium import spaces

import rein
from rein.envs.wrappers.observations import FrameStack
from rein.replay.frames import FrameReplay, PrioritizedFrameReplay
from rein.testing.stateful import first_difference

SMALL = {"hidden": (8,), "batch_size": 8, "capacity": 60, "learning_starts": 20, "train_frequency": 4, "seed": 0}
BOTH = pytest.mark.parametrize("kind", [rein.DQN, rein.IQN])


def trained(kind, **options):
    environment = FrameStack(rein.envs.Gridworld(num_envs=2, seed=0, max_episode_steps=7, observation="vector"), 4)
    spaces_ = environment.single_observation_space, environment.single_action_space
    agent = kind(*spaces_, **{**SMALL, "update_to_data": 0.25, **options})
    loop = rein.training_loop(agent, environment, seed=0, epochs=2, iterations=40)
    loop.run()
    return agent


@pytest.mark.default_cases("options0-DQN", "options1-IQN")
@BOTH
@pytest.mark.parametrize("options", [{}, {"prioritized": True, "n_step": 3}])
def test_frame_replay_does_not_change_learning(kind, options):
    agent, frames = trained(kind, **options), trained(kind, frame_stack=4, **options)
    assert agent.updates == frames.updates > 0
    assert first_difference(dict(agent.networks.state_dict()), dict(frames.networks.state_dict())) is None
    assert type(frames.replay) is (PrioritizedFrameReplay if options else FrameReplay)
    assert len(frames.replay) == len(agent.replay)


def test_prioritized_frame_replay_uses_the_agents_options():
    replay = trained(rein.DQN, frame_stack=4, prioritized=True, priority_alpha=0.3).replay
    assert (replay.priorities.alpha, replay.capacity) == (0.3, 60)


@BOTH
def test_frame_stack_requires_stacked_observations(kind):
    with pytest.raises(ValueError, match="frame_stack=4"):
        kind(spaces.Box(0.0, 1.0, (84, 84, 3)), spaces.Discrete(2), frame_stack=4)


@BOTH
def test_temperature_replaces_epsilon(kind):
    how = {**SMALL, "learning_starts": 0, "epsilon": 0.0}
    greedy, soft = (
        kind(spaces.Box(0.0, 1.0, (1,)), spaces.Discrete(3, start=5), **how, temperature=temperature)
        for temperature in (None, 0.5)
    )
    observation = torch.ones(4000, 1)
    value_A = soft.networks.online(observation[:1])[0].detach()
    assert greedy.select_action(observation)[0].unique().tolist() == [5 + int(value_A.argmax())]
    found_A = soft.select_action(observation)[0].bincount(minlength=8)[5:] / 4000
    assert torch.allclose(found_A, (value_A / 0.5).softmax(0), atol=0.04)
