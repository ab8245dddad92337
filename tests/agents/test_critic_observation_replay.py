"""Critic observations of agents that learn from a replay: the critics receive them, and the actor does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

import rein
from rein.accelerate.closed_form import (
    critic_gradient,
    deterministic_actor_gradient,
    has_closed_form,
    soft_actor_gradient,
)
from rein.agents.base.actor_and_critics import critic_loss
from rein.agents.base.deterministic import deterministic_actor_loss
from rein.agents.base.learner import Batch
from rein.agents.base.soft_actor_critic import soft_actor_loss
from rein.envs.cartpole import CartPole
from rein.envs.probes import Reach
from rein.envs.wrappers import Wrapper
from rein.networks.encoder import Inputs
from rein.networks.off_policy import Actor, Critics, Layers
from rein.ops.random import generator
from rein.testing import AgentContract
from rein.types import TimeStep

SEEN, HIDDEN, ACTION = spaces.Box(-1.0, 1.0, (1,)), spaces.Box(-1.0, 1.0, (2,)), spaces.Box(-1.0, 1.0, (2,))
SPACE = spaces.Dict({"observation": SEEN, "critic_observation": HIDDEN})
SMALL: dict[str, Any] = {"hidden": (16,), "batch_size": 16, "capacity": 300, "learning_starts": 8}
AGENTS = [rein.SAC, rein.TD3, rein.DDPG, rein.AWAC, rein.IQL]
NAMES = [kind.__name__ for kind in AGENTS]


class Asymmetric(Wrapper):
    """Environment whose observation is the first number, and whose critic observation is all of them."""

    single_observation_space: Any = None

    def __init__(self, inner: Any) -> None:
        hidden = inner.single_observation_space
        self.inner = inner
        self.single_observation_space = spaces.Dict({"observation": SEEN, "critic_observation": hidden})

    @property
    def config(self) -> dict[str, Any]:
        return self._config()

    def _begin(self, observation: Any, mask: Tensor | None) -> Any:
        return {"observation": observation[:, :1], "critic_observation": observation}

    def _step(self, action: Any, mask: Tensor | None) -> TimeStep:
        step = self._step_inner(action, mask)
        first, last = self._begin(step.observation, None), self._begin(step.final_observation, None)
        return step._replace(observation=first, final_observation=last)


def reach(num_envs: int, seed: int) -> Asymmetric:
    return Asymmetric(Reach(num_envs, dimensions=2, seed=seed, max_episode_steps=7))


def cartpole(num_envs: int, seed: int) -> Asymmetric:
    return Asymmetric(CartPole(num_envs, seed=seed, max_episode_steps=7))


@pytest.mark.slow
class TestSAC(AgentContract):
    steps, num_envs = 40, 4
    kind: ClassVar[Any] = rein.SAC
    options: ClassVar[dict[str, Any]] = {
        "update_to_data": 0.25,
        "n_step": 3,
        "prioritized": True,
        "normalize_observation": True,
    }

    def make(self, seed):
        return self.kind(SPACE, ACTION, seed=seed, **SMALL, **self.options)

    def environment(self, num_envs, seed):
        return reach(num_envs, seed)


class TestTD3(TestSAC):
    kind: ClassVar[Any] = rein.TD3
    options: ClassVar[dict[str, Any]] = {"update_to_data": 0.25}


@pytest.mark.slow
class TestDiscreteSAC(TestSAC):
    options: ClassVar[dict[str, Any]] = {"update_to_data": 0.25, "normalize_observation": True}

    def make(self, seed):
        return rein.DiscreteSAC(self.environment(1, 0), seed=seed, **SMALL, **self.options)

    def environment(self, num_envs, seed):
        return cartpole(num_envs, seed)


def trained(kind: Any, **options: Any) -> Any:
    env = cartpole(4, 0) if kind is rein.DiscreteSAC else reach(4, 0)
    agent = kind(env, seed=0, **{**SMALL, **options})
    loop = rein.training_loop(agent, env)
    loop.run(epochs=1, iterations=15)
    assert agent.updates
    return agent


def rows(count: int = 9) -> dict[str, Tensor]:
    drawn = generator(0, "rows")
    return {
        "observation": torch.rand(count, 1, generator=drawn) * 2.0 - 1.0,
        "critic_observation": torch.rand(count, 2, generator=drawn) * 2.0 - 1.0,
    }


@pytest.mark.parametrize("kind", AGENTS, ids=NAMES)
def test_actions_do_not_depend_on_the_critic_observation(kind: Any) -> None:
    agent, x = trained(kind, normalize_observation=True), rows()
    policy = agent.policy()
    expected = policy.select_action(x)[0]
    for observation in (
        {**x, "critic_observation": x["critic_observation"] + 1.0},
        {"observation": x["observation"]},
        x["observation"],
    ):
        assert torch.equal(policy.select_action(observation)[0], expected)
    other = {**x, "observation": -x["observation"]}
    assert not torch.equal(policy.select_action(other)[0], expected)


@pytest.mark.parametrize("kind", AGENTS, ids=NAMES)
def test_values_depend_on_the_critic_observation(kind: Any) -> None:
    agent, x = trained(kind), rows()
    networks, action = agent.networks, torch.zeros(9, 2)
    inputs = networks.preprocess(x)
    other = networks.preprocess({**x, "critic_observation": -x["critic_observation"]})
    for critics in (networks.critics, networks.target_critics):
        assert not torch.equal(critics(inputs, action), critics(other, action))
    if kind is rein.IQL:
        assert not torch.equal(networks.state_value(inputs), networks.state_value(other))


def values(critics: Critics, x: dict[str, Tensor], action: Tensor) -> Tensor:
    """Evaluate one critic after the other, with one hidden layer, (K, B)."""
    input = torch.cat([x["observation"], x["critic_observation"], action], 1)
    weight, bias = critics.hidden.layers
    return torch.stack(
        [
            torch.relu(input @ weight[k] + bias[k]) @ critics.weight[k, 0] + critics.bias[k, 0]
            for k in range(critics.members)
        ]
    )


def test_discrete_sac_separates_the_inputs_of_actor_and_critics() -> None:
    agent = trained(rein.DiscreteSAC, gamma=0.8, normalize_observation=False)
    networks, sample = agent.networks, agent.replay.sample(30, generator(0, "test"), gamma=0.8)
    after = sample.next_observation
    found = agent.target(sample, agent._next_values(networks.preprocess(after), torch.tensor(0.7)))
    log_prob = networks.actor(after["observation"]).log_probs
    weight, bias = networks.target_critics.hidden.layers
    input = torch.cat([after["observation"], after["critic_observation"]], 1)
    value = torch.stack(
        [
            torch.relu(input @ weight[k] + bias[k]) @ networks.target_critics.weight[k]
            + networks.target_critics.bias[k]
            for k in range(2)
        ]
    ).amin(0)
    expected = sample.reward + 0.8 * (log_prob.exp() * (value - 0.7 * log_prob)).sum(1) * ~sample.terminated
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    policy = agent.policy()
    assert torch.equal(policy.select_action(after)[0], policy.select_action(after["observation"])[0])


def batch_of(**columns: Any) -> Batch:
    drawn = torch.Generator().manual_seed(3)
    x, critic = (torch.randn(37, size, generator=drawn, dtype=torch.float64) for size in (5, 4))
    return Batch(Inputs(x, None, critic), **columns)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_closed_forms_match_autograd(activation: str) -> None:
    drawn = torch.Generator().manual_seed(0)
    critics = Critics(2, 5, 3, Layers((16, 8), activation, drawn), privileged=4).double()
    stochastic = Actor(5, 3, Layers((16, 8), activation, drawn), stochastic=True).double()
    deterministic = Actor(5, 3, Layers((16, 8), activation, drawn), stochastic=False).double()
    assert has_closed_form(critics)
    recorded = batch_of(action=noise(37, 3).tanh(), target=noise(37))
    sampled = batch_of(noise=noise(37, 3))
    for networks, batch, coefficients, loss, gradient in (
        (critics, recorded, None, critic_loss, critic_gradient),
        (stochastic, sampled, (critics, torch.tensor(0.3)), soft_actor_loss, soft_actor_gradient),
        (deterministic, sampled, (critics,), deterministic_actor_loss, deterministic_actor_gradient),
    ):
        value, _ = loss(networks, batch, coefficients)
        expected = torch.autograd.grad(value, [*networks.parameters()])
        found, _ = gradient(networks, batch, coefficients, None, report=False)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)


@pytest.mark.default_cases("SAC", "TD3")
@pytest.mark.parametrize("kind", AGENTS, ids=NAMES)
def test_micro_batches_give_the_same_update(kind: Any) -> None:
    whole, split = (trained(kind, micro_batch=size) for size in (None, 5))
    for one, other in zip(whole.networks.parameters(), split.networks.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


class Encoder(torch.nn.Linear):
    """Encoder of two features that keeps the space it was built for."""

    def __init__(self, space: Any, generator: torch.Generator) -> None:
        super().__init__(1, 3)
        self.features, self.space = 3, space


def test_critic_observation_bypasses_the_encoder() -> None:
    networks = trained(rein.TD3, encoder=Encoder).networks
    assert networks.actor.encoder.space == SEEN
    assert networks.critics.encoder.space == SEEN
    assert networks.actor.hidden.layers[0].shape[1] == 3
    assert networks.critics.hidden.layers[0].shape[1] == 3 + 2 + 2


def test_critic_observation_of_any_space() -> None:
    hidden = spaces.Dict({"goal": spaces.Discrete(4), "mass": spaces.Box(0.0, 1.0, (2, 3))})
    space = spaces.Dict({"a": SEEN, "b": SEEN, "critic_observation": hidden})
    networks = rein.SAC(space, ACTION, seed=0, **SMALL).networks
    assert networks.actor.hidden.layers[0].shape[1] == 2
    assert networks.critics.hidden.layers[0].shape[1] == 2 + 4 + 6 + 2


def run(path: Path, epochs: int) -> Any:
    env = reach(4, 0)
    agent = rein.SAC(env, seed=0, **SMALL, normalize_observation=True)
    store = rein.HDF5Store(path, exist="resume")
    loop = rein.training_loop(agent, env, store)
    rein.checkpoint(loop, every=1)
    rein.resume(loop)
    loop.run(epochs=epochs, iterations=12)
    store.close()
    return agent


@pytest.mark.slow
def test_resumed_run_is_equal_bit_for_bit(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 2)
    resumed = run(tmp_path / "parts", 4)
    assert resumed.updates == whole.updates
    for one, other in zip(whole.networks.state_dict().values(), resumed.networks.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_saved_policy_acts_without_the_critic_observation(tmp_path: Path) -> None:
    agent, x = run(tmp_path / "run", 2), rows()
    policy = rein.load_policy(tmp_path / "run")
    assert torch.equal(policy.select_action(x["observation"])[0], agent.policy().select_action(x)[0])


@pytest.mark.parametrize("kind", [rein.DQN, rein.IQN, rein.RecurrentDQN, rein.PQN, rein.QLearning])
def test_agents_without_a_critic_refuse_critic_observations(kind: Any) -> None:
    space = spaces.Dict({"observation": spaces.Discrete(3), "critic_observation": HIDDEN})
    with pytest.raises(ValueError, match=f"{kind.__name__} has no separate critic"):
        kind(space, spaces.Discrete(2))


def test_behaviour_cloning_ignores_critic_observations() -> None:
    agent = rein.BC(SPACE, spaces.Box(-1.0, 1.0, (2,), np.float32), seed=0)
    x = rows()
    assert torch.equal(agent.policy().select_action(x)[0], agent.policy().select_action(x["observation"])[0])
