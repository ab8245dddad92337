"""SAC: contract tests, probe environments, targets, temperature and entropy."""

from __future__ import annotations

import pytest
import torch
from gymnasium import spaces

from rein.accelerate.closed_form import temperature_gradient
from rein.agents.base.learner import Batch
from rein.agents.base.soft_actor_critic import Temperature, temperature_loss
from rein.agents.sac import SAC
from rein.ops.random import generator
from rein.types import Transition

BOX, UNITS = spaces.Box(-1.0, 1.0, (2,)), spaces.Box(-2.0, 5.0, (2,))
SMALL = {"hidden": (16,), "batch_size": 16, "capacity": 300, "learning_starts": 8}


def trained(agent, steps, num_envs=4):
    """Train on one-step episodes. The reward decreases with the distance of the action from the center."""
    no = torch.zeros(num_envs, dtype=torch.bool)
    for step in range(steps):
        observation, after = torch.rand(2, num_envs, 2, generator=generator(0, "rows", step)) - 0.5
        action, extras = agent.select_action(observation)
        reward = -4.0 * agent.networks.scale.from_action(action).square().sum(1)
        agent.record_observation(Transition(observation, action, reward, ~no, no, after, ~no, extras))
        agent.optimize_model()
    return agent


@pytest.mark.parametrize("critics", [2, 3])
def test_critics_stay_different(critics):
    agent = SAC(BOX, BOX, critics=critics, seed=0, **SMALL)
    x, action = torch.rand(2, 50, 2, generator=generator(0, "rows"))
    for learned in (False, True):
        if learned:
            trained(agent, 40)
        value_KB = agent.networks.critics(x, action)
        for one in range(critics):
            for other in range(one):
                assert (value_KB[one] - value_KB[other]).abs().mean() > 1e-3
    assert not torch.equal(agent.networks.critics.weight, agent.networks.target_critics.weight)


@pytest.mark.default_cases("None")
@pytest.mark.parametrize("target_entropy", [0.5, None])
def test_entropy_reaches_its_target(target_entropy):
    """The default target is minus the number of action dimensions, for every scale of the action space."""
    options = {"learning_rate": 2e-2, "target_entropy": target_entropy, "batch_size": 64, "learning_starts": 64}
    agent = trained(SAC(BOX, UNITS, seed=0, **{**SMALL, **options}), 120)
    x = torch.rand(2000, 2, generator=generator(0, "rows")) - 0.5
    distribution = agent.networks.actor.distribution(agent.networks.preprocess(x))
    entropy = -distribution.log_prob(distribution.sample(generator(0, "test"))).mean().detach()
    assert float(entropy) == pytest.approx(-2.0 if target_entropy is None else target_entropy, abs=0.5)


@pytest.mark.parametrize(
    ("log_prob", "target_entropy", "increases"), [(-1.0, 2.0, True), (-3.0, 2.0, False), (3.0, -2.0, True)]
)
def test_temperature_increases_below_the_target_entropy(log_prob, target_entropy, increases):
    temperature, batch = Temperature(0.3, torch.device("cpu")), Batch(log_prob=torch.full((5,), log_prob))
    loss, _ = temperature_loss(temperature, batch, target_entropy)
    (expected,) = torch.autograd.grad(loss, [temperature.log])
    (found,), _ = temperature_gradient(temperature, batch, target_entropy, None, report=False)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        temperature_gradient(temperature, batch, target_entropy, 0.25, report=False)[0][0], 0.25 * expected
    )
    assert (found < 0.0) == increases


def test_fixed_temperature_does_not_change():
    agent = trained(SAC(BOX, BOX, temperature=0.3, seed=0, **SMALL), 20)
    assert agent.networks.temperature.log.exp().item() == pytest.approx(0.3)
    assert "temperature" not in agent.learners
    learns = trained(SAC(BOX, BOX, initial_temperature=0.3, seed=0, **SMALL), 20)
    assert learns.networks.temperature.log.exp().item() != pytest.approx(0.3, rel=1e-4)


def test_target_matches_definition():
    """r + gamma (min Q' - alpha log pi), or r if terminated."""
    agent = trained(SAC(BOX, spaces.Box(-2.0, 5.0, (2,)), temperature=0.7, gamma=0.8, seed=0, **SMALL), 20)
    networks, sample = agent.networks, agent.replay.sample(30, generator(0, "test"), gamma=0.8)
    sample = sample._replace(terminated=torch.arange(30) % 3 == 0)
    noise = torch.randn(30, 2, generator=generator(1, "test"))
    found = agent.target(sample, agent.next_values(sample.next_observation, noise, torch.tensor(0.7)))
    mean, log_std = networks.actor(sample.next_observation).chunk(2, -1)
    u = mean + log_std.exp() * noise
    gaussian = torch.distributions.Normal(mean, log_std.exp())
    log_prob = (gaussian.log_prob(u) - torch.log1p(-u.tanh().square())).sum(1)
    value = networks.target_critics(sample.next_observation, u.tanh()).min(0).values
    expected = sample.reward + torch.where(sample.terminated, 0.0, 0.8 * (value - 0.7 * log_prob))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    row = sample._replace(**{name: getattr(sample, name)[4:5] for name in ("reward", "terminated")})
    value = agent.next_values(sample.next_observation[4:5], noise[4:5], torch.tensor(0.7))
    alone = agent.target(row, value)
    torch.testing.assert_close(alone, found[4:5], rtol=1e-4, atol=1e-4)


def test_exploring_policy_samples_like_the_agent():
    agent = trained(SAC(BOX, spaces.Box(-2.0, 5.0, (2,)), seed=0, **SMALL), 20)
    x = torch.zeros(4000, 2)
    acted, sampled = agent.select_action(x)[0], agent.policy(deterministic=False).select_action(x)[0]
    torch.testing.assert_close(acted.mean(0), sampled.mean(0), atol=0.15, rtol=0)
    torch.testing.assert_close(acted.std(0), sampled.std(0), atol=0.1, rtol=0)
    middle = agent.policy().select_action(x[:1])[0]
    torch.testing.assert_close(acted.median(0).values, middle[0], atol=0.2, rtol=0)
