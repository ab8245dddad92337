"""Policies of value-based agents: probability of random actions, and no side effects on the agent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

import rein
from rein.testing.stateful import copy_state, first_difference

N, ACTIONS, FIRST = 4000, 4, 5
BOX, DISCRETE = spaces.Box(0.0, 1.0, (3,)), spaces.Discrete(ACTIONS, start=FIRST)

Make = Callable[..., Any]
AGENTS: dict[str, Make] = {
    kind.__name__: functools.partial(kind, BOX, DISCRETE, hidden=(8,), seed=0, epsilon=0.5)
    for kind in (rein.DQN, rein.IQN, rein.PQN, rein.RecurrentDQN)
}
AGENTS["QLearning"] = functools.partial(rein.QLearning, spaces.Discrete(6), DISCRETE, seed=0, epsilon=0.5)
ALL = pytest.mark.parametrize("make", AGENTS.values(), ids=AGENTS.keys())


def seen(agent: Any) -> Tensor:
    """Return N equal observations."""
    observation = torch.tensor(3) if isinstance(agent, rein.QLearning) else torch.tensor([0.1, 0.9, 0.4])
    return observation.expand(N, *observation.shape)


def acts(agent: Any, policy: Any) -> Tensor:
    return policy.select_action(seen(agent))[0]


def share_of_non_greedy_actions(agent: Any, policy: Any) -> float:
    """Return the share of non-greedy actions."""
    policy.reset()
    return float((acts(agent, policy) != acts(agent, agent.policy())).double().mean())


@ALL
def test_epsilon_is_the_probability_of_random_actions(make: Make) -> None:
    agent = make()
    for epsilon in (0.0, 0.1, 1.0):
        for deterministic in (True, False):
            policy = agent.policy(deterministic, epsilon=epsilon)
            assert share_of_non_greedy_actions(agent, policy) == pytest.approx(epsilon * (1 - 1 / ACTIONS), abs=0.03)
    assert acts(agent, agent.policy(epsilon=1.0)).unique().tolist() == [FIRST + action for action in range(ACTIONS)]


@ALL
def test_default_policy_is_greedy_or_explores_like_the_agent(make: Make) -> None:
    agent = make()
    assert share_of_non_greedy_actions(agent, agent.policy()) == 0.0
    agent.env_steps = 100_000  # after the warm-up
    exploring = agent.policy(deterministic=False)
    exploring.reset()
    for actor in (agent, exploring):
        assert (acts(agent, actor) != acts(agent, agent.policy())).double().mean() == pytest.approx(0.375, abs=0.03)


@ALL
def test_policy_has_a_separate_random_stream(make: Make) -> None:
    agent = make()
    before = copy_state(agent.state_dict())
    one, other = agent.policy(epsilon=0.5), agent.policy(epsilon=0.5)
    first, second = acts(agent, one), acts(agent, one)
    assert not torch.equal(first, second)
    assert torch.equal(acts(agent, other), first)
    other.reset()  # resets episodes, not the random stream
    assert torch.equal(acts(agent, other), second)
    assert first_difference(before, agent.state_dict()) is None


@ALL
def test_loaded_policy_continues_the_random_stream(make: Make) -> None:
    agent = make()
    policy, loaded = agent.policy(epsilon=0.5), agent.policy(epsilon=0.5)
    acts(agent, policy)
    loaded.load_state_dict(copy_state(policy.state_dict()))
    assert torch.equal(acts(agent, loaded), acts(agent, policy))


@ALL
def test_greedy_and_exploring_states_are_incompatible(make: Make) -> None:
    policies = make().policy(), make().policy(epsilon=0.5)
    for policy, other in (policies, policies[::-1]):
        with pytest.raises(ValueError, match="the generator in the state does not fit"):
            policy.load_state_dict(copy_state(other.state_dict()))


@ALL
@pytest.mark.parametrize("epsilon", [-0.1, 1.5, float("nan"), "0.1"])
def test_invalid_epsilon_is_rejected(make: Make, epsilon: Any) -> None:
    agent = make()
    with pytest.raises(
        ValueError, match=rf"{type(agent).__name__}.policy\(epsilon={epsilon!r}\): give a number from 0 to 1"
    ):
        agent.policy(epsilon=epsilon)


@pytest.mark.parametrize("name", ["DQN", "IQN"])
def test_policy_epsilon_works_with_temperature(name: str) -> None:
    agent = AGENTS[name](temperature=100.0)
    assert share_of_non_greedy_actions(agent, agent.policy(deterministic=False)) == pytest.approx(0.75, abs=0.03)
    for deterministic in (True, False):
        policy = agent.policy(deterministic, epsilon=0.1)
        assert share_of_non_greedy_actions(agent, policy) == pytest.approx(0.1 * 0.75, abs=0.03)
