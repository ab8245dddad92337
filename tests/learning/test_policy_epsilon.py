"""Policies that take a random valid action with a given probability, and policies of value-based agents.

Shapes: N observations, A actions.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

import rein
from rein.networks.recurrent import GRU
from rein.testing.stateful import copy_state, first_difference

N, A, FIRST = 4000, 4, 5
BOX, DISCRETE = spaces.Box(0.0, 1.0, (3,)), spaces.Discrete(A, start=FIRST)
MASKED = spaces.Dict({"observation": BOX, "action_mask": spaces.MultiBinary(A)})
OBSERVATION = torch.tensor([0.1, 0.9, 0.4]).expand(N, 3)


class Greedy(rein.Agent):
    """Agent that always takes the first action."""

    def build(self, generator: torch.Generator) -> None:
        pass

    def act(self, observation: Tensor, explore: bool | float) -> Tensor:
        return torch.full((len(observation),), FIRST)

    def update(self, batch: Any) -> dict[str, Tensor]:
        return {}


AGENTS: dict[str, Any] = {
    name: functools.partial(getattr(rein, name), BOX, hidden=(8,), seed=0)
    for name in ("PPO", "A2C", "IMPALA", "DiscreteSAC", "BC")
}
AGENTS["recurrent PPO"] = functools.partial(AGENTS["PPO"], core=functools.partial(GRU, features=4))
AGENTS["a custom agent"] = functools.partial(Greedy, BOX, seed=0)
VALUE_AGENTS: dict[str, Any] = {
    name: functools.partial(getattr(rein, name), BOX, hidden=(8,), seed=0, epsilon=0.5)
    for name in ("DQN", "IQN", "PQN", "RecurrentDQN")
}
VALUE_AGENTS["QLearning"] = functools.partial(rein.QLearning, spaces.Discrete(6), seed=0, epsilon=0.5)
ALL = pytest.mark.parametrize("name", AGENTS | VALUE_AGENTS)
VALUE = pytest.mark.parametrize("make", VALUE_AGENTS.values(), ids=VALUE_AGENTS)


def made(name: str) -> Any:
    return (AGENTS | VALUE_AGENTS)[name](DISCRETE)


def acts(policy: Any, observation: Any = OBSERVATION) -> Tensor:
    policy.reset()
    return policy.select_action(observation)[0]


def seen(agent: Any) -> Tensor:
    """Return N equal observations."""
    return torch.tensor(3).expand(N) if isinstance(agent, rein.QLearning) else OBSERVATION


def share_of_other_actions(agent: Any, policy: Any) -> float:
    """Return the share of actions that are not greedy."""
    return float((acts(policy, seen(agent)) != acts(agent.policy(), seen(agent))).double().mean())


@ALL
def test_epsilon_is_the_probability_of_random_actions(name: str) -> None:
    agent = made(name)
    before = copy_state(agent.state_dict())
    for epsilon in (0.0, 0.1, 1.0):
        for deterministic in (True, False) if name in VALUE_AGENTS else (True,):
            policy = agent.policy(deterministic, epsilon=epsilon)
            assert share_of_other_actions(agent, policy) == pytest.approx(epsilon * (1 - 1 / A), abs=0.03)
    assert acts(agent.policy(epsilon=1.0), seen(agent)).unique().tolist() == [FIRST + action for action in range(A)]
    assert first_difference(before, agent.state_dict()) is None


@pytest.mark.parametrize("name", ["PPO", "A2C", "IMPALA", "DiscreteSAC"])
def test_epsilon_keeps_masks(name: str) -> None:
    mask = torch.tensor([0, 1, 0, 1], dtype=torch.int8).expand(N, A)
    policy = getattr(rein, name)(MASKED, DISCRETE, hidden=(8,), seed=0).policy(epsilon=1.0)
    count_A = (acts(policy, {"observation": OBSERVATION, "action_mask": mask}) - FIRST).bincount(minlength=A)
    assert count_A[[0, 2]].sum() == 0
    assert (count_A[[1, 3]] > 0.45 * N).all()


def test_epsilon_is_added_to_sampling() -> None:
    agent = rein.PPO(BOX, DISCRETE, hidden=(8,), seed=0)
    head: Any = agent.networks.policy_head
    with torch.no_grad():
        head.linear.bias[:] = torch.tensor([0.0, 0.0, -100.0, -100.0])
    sampled, mixed = (acts(agent.policy(False, epsilon=epsilon)) - FIRST for epsilon in (None, 0.4))
    assert sampled.unique().tolist() == [0, 1]
    assert float((mixed >= 2).double().mean()) == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize(
    "space",
    [spaces.MultiDiscrete([2, 3], start=[1, 0]), spaces.MultiBinary(3), spaces.Box(-1, 1, (2,), np.int64)],
    ids=str,
)
def test_epsilon_draws_from_all_discrete_spaces(space: spaces.Space[Any]) -> None:
    agent = rein.PPO(BOX, space, hidden=(8,), seed=0)
    action = acts(agent.policy(epsilon=1.0))
    assert action.dtype == acts(agent.policy()).dtype
    drawn = {tuple(row) for row in action.tolist()}
    assert all(space.contains(torch.tensor(row).numpy().astype(space.dtype)) for row in drawn)
    assert len(drawn) == {"MultiDiscrete": 6, "MultiBinary": 8, "Box": 9}[type(space).__name__]


class Levers(rein.envs.SimulatedWorlds):
    """Two agents in each world, each of which is a group with two actions."""

    agents = 2
    agent_groups = {"left": (0,), "right": (1,)}  # noqa: RUF012
    single_observation_space = BOX
    single_action_space = spaces.Discrete(2)
    initial_range = ((0.0, 1.0),) * 3

    def dynamics(self, state: Tensor, action: Tensor) -> Any:
        return state, torch.zeros(state.shape[1:]), torch.zeros(state.shape[-1], dtype=torch.bool)


def test_epsilon_applies_to_all_groups_of_several_agents() -> None:
    environment = Levers(1000, seed=0)
    agents = {name: rein.PPO(group, hidden=(8,), seed=0) for name, group in environment.groups.items()}
    agent, observation = rein.MultiAgent(environment, agents), environment.reset()
    greedy, random = (agent.policy(epsilon=epsilon).select_action(observation)[0] for epsilon in (0.0, 1.0))
    assert torch.equal(greedy, agent.policy().select_action(observation)[0])
    for group in environment.groups.values():
        assert random[group.rows].unique().tolist() == [0, 1]


@pytest.mark.parametrize("space", [spaces.Box(-1.0, 1.0, (2,)), spaces.Dict({"a": DISCRETE})], ids=str)
def test_epsilon_needs_discrete_actions(space: spaces.Space[Any]) -> None:
    with pytest.raises(ValueError, match=r"PPO.policy\(epsilon=0.1\).*deterministic=False"):
        rein.PPO(BOX, space, hidden=(8,), seed=0).policy(epsilon=0.1)


@ALL
@pytest.mark.parametrize("epsilon", [-0.1, 1.5, float("nan"), "0.1"])
def test_epsilon_out_of_range_is_rejected(name: str, epsilon: Any) -> None:
    agent = made(name)
    with pytest.raises(
        ValueError, match=rf"{type(agent).__name__}.policy\(epsilon={epsilon!r}\): give a number from 0"
    ):
        agent.policy(epsilon=epsilon)


@VALUE
def test_default_policy_is_greedy_or_explores_like_the_agent(make: Any) -> None:
    agent = make(DISCRETE)
    assert share_of_other_actions(agent, agent.policy()) == 0.0
    assert share_of_other_actions(agent, agent.policy(deterministic=False)) == pytest.approx(0.5 * 0.75, abs=0.03)
    agent.env_steps = 100_000  # after the warm-up
    explored = agent.select_action(seen(agent))[0] != acts(agent.policy(), seen(agent))
    assert explored.double().mean() == pytest.approx(0.5 * 0.75, abs=0.03)


@VALUE
def test_policy_has_a_separate_random_stream_that_is_part_of_its_state(make: Any) -> None:
    agent = make(DISCRETE)
    before = copy_state(agent.state_dict())
    one, other, loaded = (agent.policy(epsilon=0.5) for _ in range(3))
    first = acts(one, seen(agent))
    loaded.load_state_dict(copy_state(one.state_dict()))
    second = acts(one, seen(agent))  # resets episodes, not the random stream
    assert not torch.equal(first, second)
    assert torch.equal(acts(other, seen(agent)), first)
    assert torch.equal(acts(other, seen(agent)), second)
    assert torch.equal(acts(loaded, seen(agent)), second)
    assert first_difference(before, agent.state_dict()) is None


@VALUE
def test_greedy_and_exploring_states_are_incompatible(make: Any) -> None:
    policies = make(DISCRETE).policy(), make(DISCRETE).policy(epsilon=0.5)
    for policy, other in (policies, policies[::-1]):
        with pytest.raises(ValueError, match="the generator in the state does not fit"):
            policy.load_state_dict(copy_state(other.state_dict()))


@pytest.mark.parametrize("name", ["DQN", "IQN"])
def test_policy_epsilon_works_with_temperature(name: str) -> None:
    agent = VALUE_AGENTS[name](DISCRETE, temperature=100.0)
    assert share_of_other_actions(agent, agent.policy(deterministic=False)) == pytest.approx(0.75, abs=0.03)
    for deterministic in (True, False):
        policy = agent.policy(deterministic, epsilon=0.1)
        assert share_of_other_actions(agent, policy) == pytest.approx(0.1 * 0.75, abs=0.03)
