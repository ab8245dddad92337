"""Q-learning: random streams, saved states, counts, and hyperparameters that change."""

from __future__ import annotations

import copy

import pytest
import torch
from gymnasium import spaces

from rein.agents.q_learning import QLearning
from rein.ops.exploration import epsilon_greedy
from rein.ops.random import generator
from rein.testing.stateful import first_difference
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


def test_exploring_policy_does_not_advance_the_agents_generator():
    one, other = make(epsilon=1.0), make(epsilon=1.0)
    drawn(one.policy(deterministic=False))
    assert drawn(one) == drawn(other)


def test_exploring_policy_stream_differs_from_the_agents():
    agent = make(epsilon=1.0)
    stream = generator(0, "agent")
    expected_of_agent = [epsilon_greedy(agent.q_values(EVERYWHERE), 1.0, stream).tolist() for _ in range(3)]
    drawn_by_policy = drawn(agent.policy(deterministic=False))
    assert drawn_by_policy != expected_of_agent
    assert drawn_by_policy != drawn(agent)


def test_exploring_policy_stream_depends_only_on_the_seed():
    agent = make(epsilon=1.0)
    first = drawn(agent.policy(deterministic=False))
    assert drawn(agent.policy(deterministic=False)) == first
    assert drawn(make(seed=1, epsilon=1.0).policy(deterministic=False)) != first


@pytest.mark.parametrize("seed", [3, None])
def test_policy_after_loading_matches_policy_before_saving(seed):
    saved, loaded = make(seed, epsilon=0.5), make(seed=8, epsilon=0.5)
    loaded.load_state_dict(saved.state_dict())
    assert drawn(loaded.policy(deterministic=False)) == drawn(saved.policy(deterministic=False))


def test_loaded_state_is_copied():
    saved, loaded = make(), make(seed=1)
    learn(saved, [0, 1], [2, 3], [1.0, 2.0])
    pending = transition([2, 3], [0, 1], [3.0, 4.0])
    saved.record_observation(pending)  # not yet learned
    state = saved.state_dict()
    loaded.load_state_dict(state)
    before = copy.deepcopy(loaded.state_dict())
    for tensor in (state["table"], state["generator"], pending.reward, pending.observation, pending.valid):
        tensor.zero_()
    assert first_difference(before, loaded.state_dict()) is None
    loaded.optimize_model()
    assert loaded.q_values(torch.tensor([2]))[0, 0] != before["table"][2, 0]


def test_assigned_learning_rate_applies_from_the_next_update():
    agent = make(learning_rate=0.5)
    for rate in (0.5, 0.125, 1.0):
        agent.learning_rate = rate
        before = agent.q_values(torch.tensor([4]))[0, 1].item()
        learn(agent, [4], [1], [8.0])
        assert agent.q_values(torch.tensor([4]))[0, 1].item() == pytest.approx(before + rate * (8.0 - before))


def test_loading_a_state_keeps_the_options():
    agent = make(learning_rate=0.5)
    learn(agent, [4], [1], [8.0])
    agent.load_state_dict(make(learning_rate=0.25, epsilon=0.9, gamma=0.1).state_dict())
    assert agent.config == make(learning_rate=0.5).config
    before = agent.q_values(torch.tensor([4]))[0, 1].item()
    learn(agent, [4], [1], [8.0])
    assert agent.q_values(torch.tensor([4]))[0, 1].item() == pytest.approx(before + 0.5 * (8.0 - before))


def test_invalid_rows_count_as_env_steps_but_are_not_learned():
    agent = make()
    before = agent.q_values(torch.tensor([1]))
    learn(agent, [0, 1, 2], [0, 0, 0], [5.0, 5.0, 5.0], valid=[True, False, False])
    assert agent.env_steps == 3
    assert torch.equal(agent.q_values(torch.tensor([1])), before)
