"""WorldState: the state of the world for critics."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rein
from rein.agents.base.on_policy import OnPolicyAgent
from rein.envs.wrappers import WorldState
from rein.testing import EnvironmentContract, StatefulContract


def navigation(worlds: int = 3, seed: int | None = 0) -> WorldState:
    env = rein.envs.Navigation(worlds, 2, neighbours=1, early_leave=True, seed=seed, max_episode_steps=9)
    return WorldState(env)


class TestWorldState(EnvironmentContract):
    steps = 60

    def make(self, num_envs: int, seed: int | None) -> Any:
        return navigation(num_envs, seed)


class TestWorldStateState(StatefulContract):
    def make(self) -> Any:
        return navigation()

    def step(self, part: Any) -> Any:
        if int(part.episode_seeds[0]) < 0:
            part.reset()
        return part.apply_action(torch.linspace(-1.0, 1.0, 12).view(6, 2))


def test_critic_observation_concatenates_the_observations_of_a_world() -> None:
    env = navigation()
    seen = env.reset()
    assert env.single_observation_space["critic_observation"].shape == (16,)
    worlds = seen["observation"].view(3, 16)
    assert torch.equal(seen["critic_observation"], worlds.repeat_interleave(2, 0))


def test_final_state_contains_the_last_observations_of_agents_that_left() -> None:
    env = navigation(worlds=64)
    before, found = env.reset(), 0
    for _ in range(60):
        target = before["observation"][:, 2:4]
        step = env.apply_action(target * torch.tensor([[2.0], [0.3]]).repeat(64, 1))  # agent 0 is faster
        ended = step.terminated | step.truncated
        alone = ended.view(64, 2)[:, 1] & ~step.valid.view(64, 2)[:, 0]
        for world in alone.nonzero().flatten().tolist():
            found += 1
            row = 2 * world + 1
            final = step.final_observation["critic_observation"][row].view(2, 8)
            assert torch.equal(final[0], before["observation"][row - 1])
            assert torch.equal(final[1], step.final_observation["observation"][row])
        before = step.observation
    assert found >= 5


def test_policy_does_not_depend_on_the_world_state() -> None:
    env = navigation()
    agent = rein.PPO(env, rollout_steps=8, seed=0)
    assert isinstance(agent, OnPolicyAgent)
    rein.train(agent, env, epochs=1, iterations=16)
    seen = env.reset()
    one, _ = agent.policy().select_action(seen)
    other, _ = agent.policy().select_action({"observation": seen["observation"]})
    assert torch.equal(one, other)
    changed = {**seen, "critic_observation": seen["critic_observation"] + 1.0}
    value, value_of_changed = (agent.select_action(x)[1]["value"] for x in (seen, changed))
    assert not torch.equal(value, value_of_changed)


def test_environment_without_worlds_is_refused() -> None:
    with pytest.raises(TypeError, match=r"CartPole.* has no worlds"):
        WorldState(rein.envs.CartPole(2))
