"""PPO: the contracts, the probes, and what must not change its results."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import pytest
import torch
from gymnasium import spaces

import rein
from rein.agents.ppo import PPO
from rein.envs.gridworld import Gridworld
from rein.envs.probes import Bandit, ConstantReward, Corridor, DelayedReward, Fork, ObservedReward, Reach
from rein.schedules import linear
from rein.testing import AgentContract, StatefulContract
from rein.testing.stateful import first_difference

SMALL = {"rollout_steps": 8, "epochs": 2, "minibatches": 2, "hidden": (16,)}


def fitted(environment, **options) -> PPO:
    return PPO(environment.single_observation_space, environment.single_action_space, **{**SMALL, **options})


class TestDiscrete(AgentContract):
    def learned(self, agent):
        return dict(agent.networks.state_dict())

    def make(self, seed):
        return fitted(self.environment(1, 0), seed=seed)

    def environment(self, num_envs, seed):
        return Gridworld(num_envs=num_envs, seed=seed, max_episode_steps=9)


class TestContinuous(AgentContract):
    def learned(self, agent):
        return dict(agent.networks.state_dict())

    def make(self, seed):
        return fitted(self.environment(1, 0), seed=seed, learning_rate=linear(1e-3, 0.0, env_steps=10_000))

    def environment(self, num_envs, seed):
        return Reach(num_envs=num_envs, seed=seed, dimensions=2)


class TestSquashed(TestContinuous):
    def make(self, seed):
        return fitted(self.environment(1, 0), seed=seed, squash=True)


class TestState(StatefulContract):
    """Saved in the middle of a rollout: after 7 steps of 8."""

    options: ClassVar[dict[str, Any]] = {}

    def make(self):
        environment = Gridworld(num_envs=4, seed=0, max_episode_steps=9)
        return _Run(environment, fitted(environment, seed=1, **self.options))

    def step(self, part):
        return part.step()


class TestStateOfTorchsAdam(TestState):
    options: ClassVar[dict[str, Any]] = {"optimizer": functools.partial(torch.optim.Adam, lr=1e-3)}


class _Run:
    """An agent in its environments."""

    def __init__(self, environment, agent):
        self.parts = {"agent": agent, "environment": environment}
        self.state = rein.State(step_state=rein.StepState(environment.reset()))

    def step(self):
        self.state.step_state = rein.batch_step(self.state, **self.parts)
        return {"action": self.state.step_state.action, "metrics": self.state.step_state.metrics}

    def state_dict(self):
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        return {**parts, "observation": self.state.step_state.observation}

    def load_state_dict(self, state):
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.state.step_state = rein.StepState(state["observation"].clone())


PROBES = {
    "constant reward": (lambda n, s: ConstantReward(n, seed=s), 30, {}),
    "observed reward": (lambda n, s: ObservedReward(n, seed=s), 60, {}),
    "delayed reward": (lambda n, s: DelayedReward(n, seed=s), 60, {}),
    "bandit": (lambda n, s: Bandit(n, seed=s), 60, {}),
    "corridor": (lambda n, s: Corridor(n, seed=s), 80, {}),
    "continuous corridor": (lambda n, s: Corridor(n, seed=s, continuous=True), 120, {}),
    "reach": (lambda n, s: Reach(n, seed=s), 200, {"log_std": -0.7}),
}
PROBE = {"rollout_steps": 16, "epochs": 4, "minibatches": 4, "hidden": (32,), "learning_rate": 1e-2, "gamma": 0.9}


def trained_on(make, epochs, options, seed):
    environment = make(64, seed)
    agent = fitted(environment, seed=seed, **{**PROBE, **options})
    rein.train(agent, environment, epochs=epochs, iterations=16)
    return agent, environment


@pytest.mark.parametrize("name", PROBES)
def test_it_solves_the_probe(name):
    make, epochs, options = PROBES[name]
    agent, environment = trained_on(make, epochs, options, seed=0)
    reached = rein.evaluate(agent.policy(), make(64, 1), 256).mean_return
    best = environment.optimal_return
    assert reached >= best - 0.05 * max(1.0, abs(best)) - (0.5 if name == "reach" else 0.0)


def test_it_takes_the_road_that_pays_beyond_the_time_limit():
    """An agent that takes a truncation for an end prefers the prize that is paid at once."""
    agent, environment = trained_on(lambda n, s: Fork(n, seed=s), 150, {"gamma": 0.9, "entropy_coefficient": 0.01}, 0)
    reached = rein.evaluate(agent.policy(), Fork(64, seed=1), 64).mean_return
    assert reached == pytest.approx(environment.optimal_return, abs=0.5)


def learned(seed=0, steps=48, **options) -> PPO:
    environment = Gridworld(num_envs=8, seed=0, max_episode_steps=9)
    agent = fitted(environment, seed=seed, **options)
    rein.train(agent, environment, epochs=1, iterations=steps)
    return agent


@pytest.mark.parametrize("micro_batch", [1, 5, 16])
def test_micro_batches_change_nothing_but_rounding(micro_batch):
    whole, parts = learned(), learned(micro_batch=micro_batch)
    assert whole.updates == parts.updates == 24
    for one, other in zip(whole.networks.parameters(), parts.networks.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-5)


def test_the_adam_of_rein_is_the_adam_of_torch():
    mine, torchs = (
        learned(learning_rate=1e-3),
        learned(learning_rate=1e-3, optimizer=functools.partial(torch.optim.Adam, eps=1e-5)),
    )
    for one, other in zip(mine.networks.parameters(), torchs.networks.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-5)


def test_schedules_reach_their_end_at_their_horizon():
    agent = learned(learning_rate=linear(1e-3, 0.0, env_steps=8 * 40), steps=40)
    assert agent.optimizer.param_groups[0]["lr"] == 0.0
    before = {name: value.clone() for name, value in agent.networks.state_dict().items()}
    environment = Gridworld(num_envs=8, seed=0, max_episode_steps=9)
    rein.train(agent, environment, epochs=1, iterations=8)
    assert first_difference(before, dict(agent.networks.state_dict())) is None


def test_a_target_kl_of_nothing_ends_every_round_after_one_pass():
    assert learned(target_kl=0.0, epochs=7).updates == 6 * 2
    assert learned(target_kl=1e9, epochs=7).updates == 6 * 2 * 7


def test_a_guard_that_refuses_leaves_the_parameters_as_they_are():
    asked = []

    def guard(metrics, gradients):
        asked.append(sorted(metrics))
        return False

    untouched, agent = learned(steps=1), learned(guard=guard)
    assert first_difference(dict(untouched.networks.state_dict()), dict(agent.networks.state_dict())) is None
    assert len(asked) == 24
    assert {"grad_norm", "approx_kl", "entropy"} <= set(asked[0])


def test_the_first_update_of_a_round_sees_the_policy_that_acted():
    first = []

    def guard(metrics, gradients):
        first.append({name: float(metrics[name]) for name in ("approx_kl", "ratio", "clip_fraction")})
        return True

    learned(guard=guard, minibatches=1, epochs=3)
    for metrics in first[::3]:
        assert metrics == pytest.approx({"approx_kl": 0.0, "ratio": 1.0, "clip_fraction": 0.0}, abs=1e-5)
    assert any(metrics["approx_kl"] > 1e-6 for metrics in first[1::3])


def test_multi_discrete_actions_are_learned_together():
    space = spaces.MultiDiscrete([2, 3], start=[1, 0])
    agent = PPO(spaces.Box(-1.0, 1.0, (2,)), space, seed=0, **{**SMALL, "learning_rate": 3e-2})
    observation = torch.ones(32, 2)
    flags = torch.zeros(32, dtype=torch.bool)
    for _ in range(8 * 25):
        action, extras = agent.select_action(observation)
        assert all(space.contains(row.numpy()) for row in action[:2])
        reward = ((action[:, 0] == 2) & (action[:, 1] == 1)).float()
        transition = (observation, action, reward, ~flags, flags, observation, ~flags, extras)
        agent.record_observation(rein.Transition(*transition))
        agent.optimize_model()
    assert agent.policy().select_action(observation[:1])[0].tolist() == [[2, 1]]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"epochs": 0}, r"PPO\(epochs=0\): give 1 or more"),
        ({"rollout_steps": 0}, r"PPO\(rollout_steps=0\)"),
        ({"activation": "sinh"}, "activation='sinh': use one of tanh"),
        ({"squash": True}, "finite bounds"),
    ],
)
def test_nonsense_is_refused_where_it_is_written(options, text):
    with pytest.raises(ValueError, match=text):
        PPO(spaces.Box(-1.0, 1.0, (2,)), spaces.Box(-float("inf"), float("inf"), (1,)), **options)


def test_an_action_space_without_a_head_is_refused():
    with pytest.raises(ValueError, match="there is a head for Discrete, MultiDiscrete and Box"):
        PPO(spaces.Box(-1.0, 1.0, (2,)), spaces.MultiBinary(3))


@pytest.mark.parametrize(("make", "kept"), [(lambda: Gridworld(4, seed=0), False), (lambda: Reach(4, seed=0), True)])
def test_the_sample_is_kept_only_where_the_action_is_another(make, kept):
    environment = make()
    _, extras = fitted(environment, seed=0).select_action(environment.reset())
    assert set(extras) == {"value", "log_prob"} | ({"sample"} if kept else set())
