"""The training tasks of JaxDEM's tests: contract tests, and PPO solves the tasks within their budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rein
from rein.agents.base.segments import PrioritizedSegments
from rein.agents.ppo import PPO
from rein.envs.probes.jaxdem import OpenCorridor, SignBandit
from rein.schedules import linear
from rein.testing import EnvironmentContract, StatefulContract

KINDS = [SignBandit, OpenCorridor]


class TestTaskContract(EnvironmentContract):
    steps = 30
    different_starts = 1

    @pytest.fixture(autouse=True, params=[SignBandit, lambda **options: OpenCorridor(max_episode_steps=7, **options)])
    def _task(self, request: pytest.FixtureRequest) -> None:
        self.task = request.param

    def make(self, num_envs: int, seed: int | None) -> Any:
        return self.task(num_envs=num_envs, seed=seed)


class TestTaskState(StatefulContract):
    @pytest.fixture(autouse=True, params=KINDS)
    def _task(self, request: pytest.FixtureRequest) -> None:
        self.task = request.param

    def make(self) -> Any:
        return self.task(num_envs=8, seed=3)

    def step(self, part: Any) -> Any:
        if int(part.episode_seeds[0]) < 0:
            part.reset()
        return part.apply_action(torch.linspace(-1.0, 1.0, 8)[:, None])


def test_bandit_rewards_the_sign_of_the_action() -> None:
    environment = SignBandit(4, seed=0)
    assert not environment.reset().any()
    time_step = environment.apply_action(torch.tensor([[-1.0], [0.0], [1e-6], [7.0]]))
    assert time_step.reward.tolist() == [-1.0, -1.0, 1.0, 1.0]
    assert time_step.terminated.all()
    assert not time_step.truncated.any()


def test_corridor_rewards_and_termination() -> None:
    environment = OpenCorridor(3, seed=0)
    assert environment.reset().flatten().tolist() == [0.0, 0.0, 0.0]
    action = torch.tensor([[2.0], [-2.0], [9.0]])
    steps = [environment.apply_action(action) for _ in range(3)]
    assert [step.reward.tolist() for step in steps] == [pytest.approx([-0.1] * 3)] * 2 + [pytest.approx([10, -0.1, 10])]
    assert steps[-1].terminated.tolist() == [True, False, True]
    assert steps[-1].final_observation.flatten().tolist() == [6.0, -6.0, 6.0]
    assert steps[-1].observation.flatten().tolist() == [0.0, -6.0, 0.0]
    assert environment.optimal_return == pytest.approx(9.8)


@pytest.mark.parametrize("kind", KINDS)
def test_optimal_value_satisfies_the_bellman_equation(kind: Any) -> None:
    """v(s) >= r + gamma v(s') for all actions, with equality for the longest step to the right."""
    environment, gamma = kind(512, seed=0), 0.9
    observation = environment.reset()
    for k in range(30):
        action = 2.0 * torch.rand(512, 1, generator=torch.Generator().manual_seed(k)) - 1.0
        action = action.abs().sign() * 2.0 if k % 3 == 2 else 2.0 * action
        time_step = environment.apply_action(action)
        value_N, next_N = (environment.optimal_value(x, gamma) for x in (observation, time_step.final_observation))
        backup_N = time_step.reward + gamma * torch.where(time_step.terminated, 0.0, next_N)
        assert (backup_N <= value_N + 1e-4).all()
        if k % 3 == 2:
            torch.testing.assert_close(backup_N, value_N, rtol=1e-4, atol=1e-4)
        observation = time_step.observation


@pytest.mark.parametrize("kind", KINDS)
def test_every_state_can_be_rendered(kind: Any) -> None:
    environment = kind(2, seed=0)
    environment.reset()
    for _ in range(6):
        environment.apply_action(torch.tensor([[-2.0], [1.0]]))
        assert environment.render(0).shape == environment.render(1).shape


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in a ball": {"squash": "ball"},
    "all of JaxDEM's": {
        "squash": "ball",
        "state_dependent_std": True,
        "segments": PrioritizedSegments(alpha=0.8, beta=linear(0.2, 1.0, updates=400)),
        "reward_smoothing": 0.1,
    },
}
with_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def evaluate_at(agent: PPO, observation: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean of the Gaussian, the corresponding action, and the value."""
    with torch.no_grad():
        x = agent.networks.preprocess(torch.full((1, 1), observation))
        distribution, value, _ = agent.networks.step(x)
        return distribution.mode(), distribution.to_action(distribution.mode()), value


def learner(environment: Any, **options: Any) -> PPO:
    return PPO(environment.single_observation_space, environment.single_action_space, **options)


@pytest.mark.default_cases("0-plain", "1-in a ball")
@with_options
@pytest.mark.parametrize("seed", [0, 1])
def test_ppo_solves_the_bandit_within_budget(options: dict[str, Any], seed: int) -> None:
    environment = SignBandit(128, seed=seed)
    budget = {"rollout_steps": 2, "update_epochs": 1, "minibatches": 1, "learning_rate": 1e-2, "hidden": (16,)}
    agent = learner(environment, seed=seed, log_std=-0.5, **{**budget, **options})
    rein.train(agent, environment, epochs=100, iterations=2)
    assert agent.env_steps == 100 * 128 * 2
    _, action, value = evaluate_at(agent, 0.0)
    assert action > 0.5
    assert value > 0.5


@pytest.mark.slow
@with_options
def test_ppo_solves_the_corridor_within_a_third_of_the_budget(options: dict[str, Any]) -> None:
    environment = OpenCorridor(256, seed=0)
    budget = {"rollout_steps": 8, "update_epochs": 1, "minibatches": 4, "learning_rate": 3e-3, "gamma": 0.99}
    agent = learner(environment, seed=0, **{**budget, **options})
    rein.train(agent, environment, epochs=100, iterations=8)
    assert agent.env_steps == 100 * 256 * 8
    mean, action, _ = evaluate_at(agent, 0.0)
    assert mean > 0.55
    assert action > 0.55
    policy = agent.policy(deterministic=False)
    reached = rein.evaluate(policy, OpenCorridor(64, seed=1, max_episode_steps=20), 64).mean_return
    assert reached > 9.0
