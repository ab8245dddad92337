"""IQN: contract tests, probe environments, targets, and learned quantiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

import rein
from rein.agents.iqn import IQN
from rein.envs.probes import Bandit, Corridor, Fork
from rein.networks.q_networks import even_levels
from rein.schedules import linear
from rein.types import Transition

SMALL = {
    "hidden": (16,),
    "cosines": 8,
    "action_quantiles": 8,
    "batch_size": 16,
    "capacity": 2_000,
    "learning_starts": 40,
    "train_frequency": 8,
    "update_to_data": 0.125,
    "epsilon": 0.2,
}


def fitted(environment: Any, **options: Any) -> IQN:
    return IQN(environment.single_observation_space, environment.single_action_space, **{**SMALL, **options})


@pytest.mark.default_cases("Fork")
@pytest.mark.parametrize("probe", [Bandit, Corridor, Fork])
def test_learns_values_of_probes(probe):
    environment = probe(num_envs=8, seed=0)
    how = {"gamma": 0.9, "learning_rate": 5e-3, "tau": 0.2, "hidden": (32,), "batch_size": 32, "train_frequency": 8}
    agent = fitted(environment, seed=0, learning_starts=200, **{**how, "update_to_data": 0.2, "epsilon": 0.3})
    rein.training_loop(agent, environment, seed=0, epochs=1, iterations=260).run()
    observation = environment.reset()
    value_N = agent.networks.online(observation).amax(1)
    assert torch.allclose(value_N, environment.optimal_value(observation, 0.9), atol=0.1, rtol=0.05)


def with_recorded_rewards(agent: IQN, rewards: list[list[float]]) -> IQN:
    """Record one-step episodes with action a and each of rewards[a], and return the agent."""
    action = torch.tensor([a for a, paid in enumerate(rewards) for _ in paid])
    reward = torch.tensor([r for paid in rewards for r in paid])
    observation, yes = torch.ones(len(reward), 1), torch.ones(len(reward), dtype=torch.bool)
    agent.replay.append(Transition(observation, action, reward, yes, ~yes, observation, yes, {}))
    return agent


def one_state(actions: int, **options: Any) -> IQN:
    space = spaces.Box(0.0, 1.0, (1,))
    how = {"hidden": (32,), "cosines": 16, "quantiles": 16, "target_quantiles": 1, "batch_size": 64, "seed": 0}
    return IQN(space, spaces.Discrete(actions), **{**SMALL, **how, "max_grad_norm": None, **options})


def fixed_point(level: Tensor, outcomes: Tensor, huber: float) -> Tensor:
    """Solve tau * E clamp(x - q, 0, huber) = (1 - tau) * E clamp(q - x, 0, huber) for q (Q,) by bisection."""
    low, high = torch.full_like(level, -5.0), torch.full_like(level, 5.0)
    for _ in range(40):
        middle = (low + high) / 2
        error = outcomes.unsqueeze(1) - middle
        up = level * error.clamp(0.0, huber).mean(0) - (1.0 - level) * (-error).clamp(0.0, huber).mean(0)
        low, high = torch.where(up > 0, middle, low), torch.where(up > 0, high, middle)
    return middle


@pytest.mark.default_cases("1.0")
@pytest.mark.parametrize("huber", [0.05, 1.0])
def test_quantiles_of_a_two_point_distribution_are_learned(huber):
    agent = with_recorded_rewards(
        one_state(1, huber=huber, learning_rate=linear(5e-3, 2e-4, updates=700)), [[1.0, -1.0]]
    )
    agent.learn(700 if huber == 0.05 else 400)
    level = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9])
    with torch.no_grad():
        learned = agent.networks.online.quantiles(torch.ones(1, 1), level[None])[0, :, 0]
        assert agent.networks.online(torch.ones(1, 1)).abs().item() < 0.15  # the mean
    assert torch.allclose(learned, fixed_point(level, torch.tensor([1.0, -1.0]), huber), atol=0.15)
    if huber == 0.05:
        assert torch.allclose(learned, torch.where(level < 0.5, -1.0, 1.0), atol=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(("risk", "chosen"), [(1.0, 0), (0.25, 1)])
def test_risk_aversion_prefers_the_safe_reward(risk, chosen):
    agent = with_recorded_rewards(one_state(2, risk=risk, learning_rate=5e-3), [[1.5, -1.0], [0.0, 0.0]])
    agent.learn(250)
    assert agent.policy().select_action(torch.ones(1, 1))[0].tolist() == [chosen]


def filled(**options: Any) -> IQN:
    """Return an agent with recorded transitions whose target network differs from the online network."""
    space, drawn = spaces.Box(-1.0, 1.0, (3,)), torch.Generator().manual_seed(0)
    agent = IQN(space, spaces.Discrete(4, start=2), **{**SMALL, "seed": 0, "tau": 0.3, **options})
    for _ in range(20):
        observation, after = torch.rand(2, 4, 3, generator=drawn)
        terminated = torch.rand(4, generator=drawn) < 0.3
        action, reward = torch.randint(2, 6, (4,), generator=drawn), torch.rand(4, generator=drawn)
        valid = torch.ones(4, dtype=torch.bool)
        agent.record_observation(Transition(observation, action, reward, terminated, ~valid, after, valid, {}))
    agent.learn(3)
    with torch.no_grad():
        for parameter in agent.networks.online.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=drawn)
    return agent


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("risk", [1.0, 0.5])
@pytest.mark.parametrize("double", [False, True])
def test_evenly_spaced_levels_give_qr_dqn_targets(double, risk, n_step):
    how = {"drawn_levels": False, "target_quantiles": 5, "quantiles": 3, "double": double, "risk": risk}
    agent = filled(**how, n_step=n_step)
    sample, _ = agent.sample()
    batch = agent.batch(sample)
    assert torch.equal(batch.action, sample.action - 2)
    assert torch.equal(batch.level, even_levels(3).expand(16, 3))
    assert torch.equal(batch.features, sample.observation)
    online, target = agent.networks.online, agent.networks.target
    after = sample.next_observation
    assert not torch.equal(online(after).argmax(1), target(after).argmax(1))
    chooser = online if double else target
    for b in range(16):
        after = sample.next_observation[b : b + 1]
        with torch.no_grad():
            acting = chooser.quantiles(after, (even_levels(8) * risk)[None])[0].mean(0)
            expected = target.quantiles(after, even_levels(5)[None])[0, :, acting.argmax()]
        discount = sample.discount if n_step == 1 else sample.discount[b]
        expected = sample.reward[b] + (0.0 if sample.terminated[b] else discount * expected)
        assert torch.allclose(batch.target[b], expected * torch.ones(5), atol=1e-6)


def test_levels_differ_per_row_and_use_the_agents_generator():
    agent, other = filled(), filled()
    sample, _ = agent.sample()
    other.sample()
    batch, again = agent.batch(sample), agent.batch(sample)
    assert torch.equal(batch.level, other.batch(sample).level)
    assert len(batch.level.unique()) == batch.level.numel() == 16 * 8
    assert not torch.equal(batch.level, again.level)
    assert not torch.equal(batch.target, again.target)  # levels of targets differ too
    assert 0.0 < batch.level.amin() < 0.05 < 0.95 < batch.level.amax() < 1.0


def test_row_errors_are_means_over_all_pairs():
    agent = filled(prioritized=True)
    sample, weight_B = agent.sample()
    state = agent.generator.get_state()
    quantile_BQA = agent.networks.online.quantiles(
        sample.observation, (batch := agent.batch(sample, weight_B=weight_B)).level
    )
    agent.generator.set_state(state)
    assert torch.equal(batch.weight, weight_B)
    _, error_B = agent.update_from(sample, weight_B, report=False)
    for b in range(16):
        quantile_Q = quantile_BQA[b, :, batch.action[b]].detach()
        assert torch.allclose(error_B[b], (batch.target[b][:, None] - quantile_Q).abs().mean(), atol=1e-6)
