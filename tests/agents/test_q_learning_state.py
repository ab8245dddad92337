"""Q-learning: random streams, saved states, counts, and hyperparameters that change."""

from __future__ import annotations

import pytest
import torch
from gymnasium import spaces

from rein.agents.q_learning import QLearning
from rein.ops.exploration import epsilon_greedy
from rein.ops.random import generator
from rein.types import Transition

STATES, ACTIONS = 6, 4
EVERYWHERE = torch.arange(600) % STATES


def make(seed: int | None = 0, **options) -> QLearning:
    return QLearning(spaces.Discrete(STATES), spaces.Discrete(ACTIONS), seed=seed, **options)


def transition(observation, action, reward, *, valid=None) -> Transition:
    observation = torch.tensor(observation)
    valid = torch.ones(len(observation), dtype=torch.bool) if valid is None else torch.tensor(valid)
    ended, going = torch.ones_like(valid), torch.zeros_like(valid)
    reward = torch.tensor(reward, dtype=torch.float32)
    return Transition(observation, torch.tensor(action), reward, ended, going, observation, valid, {})


def learn(agent: QLearning, *what, **options) -> None:
    agent.record_observation(transition(*what, **options))
    agent.optimize_model()


def drawn(actor, times: int = 3):
    return [actor.select_action(EVERYWHERE)[0].tolist() for _ in range(times)]


def test_exploring_policy_stream_differs_from_the_agents():
    agent = make(epsilon=1.0)
    stream = generator(0, "agent")
    expected_of_agent = [epsilon_greedy(agent.q_values(EVERYWHERE), 1.0, stream).tolist() for _ in range(3)]
    drawn_by_policy = drawn(agent.policy(deterministic=False))
    assert drawn_by_policy != expected_of_agent
    assert drawn_by_policy != drawn(agent)


def test_loading_a_state_keeps_the_options():
    agent = make(learning_rate=0.5)
    learn(agent, [4], [1], [8.0])
    agent.load_state_dict(make(learning_rate=0.25, epsilon=0.9, gamma=0.1).state_dict())
    assert agent.config == make(learning_rate=0.5).config
    before = agent.q_values(torch.tensor([4]))[0, 1].item()
    learn(agent, [4], [1], [8.0])
    assert agent.q_values(torch.tensor([4]))[0, 1].item() == pytest.approx(before + 0.5 * (8.0 - before))
