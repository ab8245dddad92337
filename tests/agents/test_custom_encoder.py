"""Agents with a custom encoder before the hidden layers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

import rein
from rein.envs.probes import Corridor
from rein.networks.recurrent import GRU
from rein.testing import AgentContract
from tests.agents.steps import practice

BOX = spaces.Box(-1.0, 1.0, (2,))


class FlatEncoder(nn.Module):
    """Encoder of flat observations whose layers are initialized with torch's global generator."""

    def __init__(self, space: spaces.Space[Any], drawn: torch.Generator, *, features: int = 6) -> None:
        super().__init__()
        self.features = features
        self.layers = nn.Sequential(nn.Linear(spaces.flatdim(space), features), nn.LayerNorm(features), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Product(nn.Module):
    """Product of two numbers, which a linear layer cannot compute."""

    features = 1

    def __init__(self, space: spaces.Space[Any], drawn: torch.Generator) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x.prod(1, keepdim=True)


class Camera(nn.Module):
    """Convolution of byte images (B, H, W, C)."""

    features = 4

    def __init__(self, space: spaces.Space[Any], drawn: torch.Generator) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 12, 12), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.uint8 and x.shape[1:] == (36, 36, 1)
        return self.layers(x.movedim(-1, 1) / 255.0)


ROLLOUT: dict[str, Any] = {"rollout_steps": 4, "hidden": (8,), "encoder": FlatEncoder}
REPLAY: dict[str, Any] = {
    "hidden": (8,),
    "batch_size": 8,
    "capacity": 200,
    "learning_starts": 0,
    "encoder": FlatEncoder,
}
SEQUENCES: dict[str, Any] = {**REPLAY, "sequence_length": 4, "burn_in": 2, "learning_starts": 16}
KINDS: dict[str, tuple[Any, bool, dict[str, Any]]] = {  # kind, whether actions are continuous, options
    "PPO": (rein.PPO, False, ROLLOUT),
    "PPO, shared": (rein.PPO, True, ROLLOUT | {"shared": True}),
    "PPO, parts": (rein.PPO, True, ROLLOUT | {"micro_batch": 2, "threads": 2}),
    "PPO, half": (rein.PPO, True, ROLLOUT | {"precision": "bfloat16"}),
    "PPO, no layers": (rein.PPO, True, ROLLOUT | {"hidden": ()}),
    "PPO, a core": (rein.PPO, True, ROLLOUT | {"core": functools.partial(GRU, features=4), "minibatches": 1}),
    "A2C": (rein.A2C, True, ROLLOUT),
    "IMPALA": (rein.IMPALA, False, ROLLOUT),
    "PQN": (rein.PQN, False, ROLLOUT),
    "PQN, plain": (rein.PQN, False, ROLLOUT | {"layer_norm": False}),
    "DQN": (rein.DQN, False, REPLAY),
    "DQN, no layers": (rein.DQN, False, REPLAY | {"hidden": (), "dueling": True}),
    "IQN": (rein.IQN, False, REPLAY),
    "IQN, no layers": (rein.IQN, False, REPLAY | {"hidden": ()}),
    "RecurrentDQN": (rein.RecurrentDQN, False, SEQUENCES),
    "BC": (rein.BC, False, REPLAY),
    "BC, continuous": (rein.BC, True, REPLAY),
    "DDPG": (rein.DDPG, True, REPLAY),
    "TD3": (rein.TD3, True, REPLAY),
    "SAC": (rein.SAC, True, REPLAY),
    "SAC, no layers": (rein.SAC, True, REPLAY | {"hidden": ()}),
    "DiscreteSAC": (rein.DiscreteSAC, False, REPLAY),
    "AWAC": (rein.AWAC, True, REPLAY),
    "IQL": (rein.IQL, True, REPLAY),
}


def made(case: str, **options: Any) -> tuple[Any, Corridor]:
    kind, continuous, defaults = KINDS[case]
    environment = Corridor(4, length=3, continuous=continuous, seed=0, max_episode_steps=8)
    spaces_of = environment.single_observation_space, environment.single_action_space
    return kind(*spaces_of, **{"seed": 0, **defaults, **options}), environment


def copies(agent: Any) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in agent.networks.named_parameters()}


class TestPQN(AgentContract):
    steps, num_envs = 32, 4

    def make(self, seed):
        how = {"update_epochs": 2, "minibatches": 2, "epsilon": 0.3}
        return rein.PQN(self.environment(1, 0), seed=seed, **ROLLOUT, **how)

    def environment(self, num_envs, seed):
        return rein.envs.Gridworld(num_envs=num_envs, seed=seed, max_episode_steps=9)


@pytest.mark.default_cases(every=2)
@pytest.mark.parametrize("case", KINDS)
def test_encoder_is_seeded_and_trained(case: str) -> None:
    before = torch.get_rng_state()
    agent, environment = made(case)
    again = made(case)[0]
    assert torch.equal(torch.get_rng_state(), before)
    initial = copies(agent)
    assert all(torch.equal(x, initial[name]) for name, x in copies(again).items())
    encoder_names = [name for name in initial if "encoder." in name and "target" not in name]
    assert encoder_names and {*initial} <= {*agent.networks.state_dict()}
    rein.train(agent, environment, env_steps=48)
    assert agent.updates
    after = copies(agent)
    assert [name for name in encoder_names if torch.equal(after[name], initial[name])] == []


@pytest.mark.parametrize("case", ["SAC", "DDPG", "DiscreteSAC", "IQL"])
def test_actor_and_critics_have_separate_encoders_and_targets_copies(case: str) -> None:
    networks = made(case)[0].networks
    weight, others = networks.actor.encoder.layers[0].weight, [networks.critics.encoder.layers[0].weight]
    if case == "IQL":
        others.append(networks.state_value.encoder.layers[0].weight)
    assert not any(torch.equal(weight, other) for other in others)
    target = networks.target_critics.encoder.layers[0].weight
    assert torch.equal(target, others[0]) and target is not others[0] and not target.requires_grad


def test_actor_loss_does_not_reach_the_critic_encoder() -> None:
    networks = made("SAC")[0].networks
    x, action = torch.linspace(0.0, 1.0, 5).unsqueeze(1), torch.zeros(5, 1, requires_grad=True)
    value = networks.critics.frozen(x, action)
    torch.testing.assert_close(value, networks.critics(x, action))
    found = torch.autograd.grad(value.sum(), [action, *networks.critics.parameters()], allow_unused=True)
    assert found[0] is not None and all(gradient is None for gradient in found[1:])


def learned(
    kind: Any, space: spaces.Space[Any], observation: Tensor, target: Tensor, steps: int, **options: Any
) -> bool:
    """Return whether the agent selects the target actions after `steps` one-step episodes that reward them with 1."""
    agent = kind(space, spaces.Discrete(2), seed=0, **options)
    practice(agent, observation, lambda action: (action == target).float(), steps)
    return agent.policy().select_action(observation)[0].tolist() == target.tolist()


LINEAR: dict[str, Any] = {"rollout_steps": 8, "update_epochs": 2, "minibatches": 2, "hidden": (), "learning_rate": 3e-2}


@pytest.mark.parametrize("kind", [rein.PPO, rein.PQN])
def test_linear_heads_learn_from_the_features_of_the_encoder(kind: Any) -> None:
    """The best action is 1 if both numbers have the same sign."""
    observation = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]).repeat(4, 1)
    target = (observation.prod(1) > 0.0).long()
    options = LINEAR if kind is rein.PPO else {**LINEAR, "epsilon": 0.3}
    assert learned(kind, BOX, observation, target, 8 * 12, encoder=Product, **options)
    assert not learned(kind, BOX, observation, target, 8 * 12, **options)


@pytest.mark.parametrize(
    "kind", [rein.SAC, rein.DiscreteSAC, rein.TD3, rein.BC, rein.IQL], ids=lambda kind: kind.__name__
)
def test_vector_only_agents_accept_images_with_an_encoder(kind: Any) -> None:
    camera, actions = spaces.Box(0, 255, (36, 36, 1), np.uint8), spaces.Discrete(2) if kind is rein.DiscreteSAC else BOX
    options: dict[str, Any] = REPLAY | {"encoder": Camera}
    agent = kind(camera, actions, seed=0, **options)
    drawn = torch.Generator().manual_seed(0)
    seen, after = torch.randint(0, 256, (2, 4, 36, 36, 1), dtype=torch.uint8, generator=drawn)
    no, initial = torch.zeros(4, dtype=torch.bool), copies(agent)
    action, extras = agent.select_action(seen)
    agent.record_observation(rein.Transition(seen, action, torch.ones(4), no, no, after, ~no, extras))
    agent.learn(4)
    moved = {name for name, x in copies(agent).items() if not torch.equal(x, initial[name])}
    assert {name for name in initial if name.endswith("encoder.layers.0.weight")} <= moved


def test_config_describes_the_encoder() -> None:
    agent, environment = made("PPO", encoder=functools.partial(FlatEncoder, features=5))
    assert agent.config["encoder"] == {"function": "FlatEncoder", "features": 5}
    assert made("PPO")[0].config["encoder"] == "FlatEncoder" and rein.PPO(environment).config["encoder"] is None


@pytest.mark.parametrize("case", ["PPO", "PQN", "DQN", "SAC"])
def test_invalid_encoder_is_rejected(case: str) -> None:
    with pytest.raises(TypeError, match="encoder is 'CNN': pass a factory that is called as"):
        made(case, encoder="CNN")
    with pytest.raises(ValueError, match=r"Linear\.features is missing"):
        made(case, encoder=lambda space, drawn: nn.Linear(1, 1))


def test_loop_seed_reinitializes_the_encoder() -> None:
    agent, environment = made("SAC", seed=None)
    rein.training_loop(agent, environment, seed=0, iterations=1)
    assert all(torch.equal(x, copies(agent)[name]) for name, x in copies(made("SAC")[0]).items())
