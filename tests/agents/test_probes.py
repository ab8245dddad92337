"""Agents solve probe environments, and learn their values.

Shapes: K values of a state, for example of several actions or critics, B states.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import rein
from rein.agents.base.action_noise import GaussianNoise
from rein.envs.probes import Bandit, ConstantReward, Corridor, DelayedReward, Fork, ObservedReward, Reach

SHORT: dict[str, Any] = {"rollout_steps": 4, "hidden": (32,), "learning_rate": 1e-2, "gamma": 0.9}
ROLLOUT = {**SHORT, "rollout_steps": 16, "update_epochs": 4, "minibatches": 4}
REPLAY = {"hidden": (32,), "learning_rate": 1e-2, "gamma": 0.9, "batch_size": 64, "learning_starts": 128, "tau": 0.05}
REPLAY |= {"update_to_data": 1 / 16, "capacity": 20_000}
EPSILON = {**REPLAY, "epsilon": rein.schedules.linear(1.0, 0.05, env_steps=2_000)}
SOFT, NOISY = {**REPLAY, "initial_temperature": 0.1}, {**REPLAY, "noise": GaussianNoise(0.3)}
DISCRETE = {"hidden": (32,), "learning_rate": 3e-3, "batch_size": 64, "learning_starts": 200}
DISCRETE |= {"update_to_data": 0.25, "target_entropy": 0.05}
RETURNS = {"value_min": -2.0, "value_max": 2.0}
WIDE = {"log_std": -0.7}
bandit, corridor, fork = (functools.partial(kind, continuous=True) for kind in (Bandit, Corridor, Fork))


class Case(NamedTuple):
    kind: Any
    probe: Any
    env_steps: int
    options: dict[str, Any]
    tolerance: float = 0.05
    num_envs: int = 16


CASES = {
    "A2C, bandit": Case(rein.A2C, Bandit, 20_480, SHORT, 0.0, 32),
    "A2C, corridor": Case(rein.A2C, Corridor, 30_720, SHORT, 0.0, 32),
    "A2C, reach": Case(rein.A2C, Reach, 40_960, {**SHORT, **WIDE}, 0.5, 32),
    "IMPALA, bandit": Case(rein.IMPALA, Bandit, 20_480, SHORT, 0.0, 32),
    "IMPALA, corridor": Case(rein.IMPALA, Corridor, 30_720, SHORT, 0.0, 32),
    "IMPALA, reach": Case(rein.IMPALA, Reach, 40_960, {**SHORT, **WIDE}, 0.5, 32),
    "PPO, bandit": Case(rein.PPO, Bandit, 6_144, ROLLOUT, 0.05, 32),
    "PPO, bandit in half precision": Case(rein.PPO, Bandit, 6_144, {**ROLLOUT, "precision": "bfloat16"}, 0.05, 32),
    "PPO, corridor": Case(rein.PPO, Corridor, 15_360, ROLLOUT, 0.05, 32),
    "PPO, continuous corridor": Case(rein.PPO, corridor, 20_480, ROLLOUT, 0.05, 32),
    "PPO, reach": Case(rein.PPO, Reach, 35_840, {**ROLLOUT, **WIDE}, 0.6, 32),
    # an agent that treats truncation as termination prefers the immediate reward
    "PPO, fork": Case(rein.PPO, Fork, 30_720, {**ROLLOUT, "entropy_coefficient": 0.01}, 0.5, 32),
    "DQN, bandit": Case(rein.DQN, Bandit, 3_200, EPSILON),
    "DQN, corridor": Case(rein.DQN, Corridor, 4_800, EPSILON),
    "DQN, most of Rainbow": Case(
        rein.DQN, Corridor, 4_800, {**EPSILON, "n_step": 3, "prioritized": True, "dueling": True}
    ),
    "DQN, copies": Case(rein.DQN, Corridor, 4_800, {**EPSILON, "tau": 1.0, "target_frequency": 10, "layer_norm": True}),
    "DQN, Boltzmann": Case(rein.DQN, Corridor, 4_800, {**EPSILON, "temperature": 0.1}),
    "DQN, fork": Case(rein.DQN, Fork, 6_400, {**EPSILON, "huber": None}),
    "Rainbow, bandit": Case(rein.Rainbow, Bandit, 3_200, {**REPLAY, **RETURNS}),
    "Rainbow, corridor": Case(rein.Rainbow, Corridor, 4_800, {**REPLAY, **RETURNS}),
    "Rainbow, fork": Case(rein.Rainbow, Fork, 6_400, {**REPLAY, "value_min": 0.0}),
    "SAC, bandit": Case(rein.SAC, bandit, 3_200, SOFT),
    "SAC, corridor": Case(rein.SAC, corridor, 4_800, SOFT),
    "SAC, three steps at once": Case(rein.SAC, corridor, 4_800, {**SOFT, "n_step": 3, "prioritized": True}),
    "SAC, reach": Case(rein.SAC, Reach, 6_400, SOFT),
    "SAC, fork": Case(rein.SAC, fork, 6_400, {**REPLAY, "temperature": 0.05}, 0.5),
    "TQC, corridor": Case(rein.TQC, corridor, 4_800, {**SOFT, "critics": 2}),
    "TQC, reach": Case(rein.TQC, Reach, 6_400, {**SOFT, "critics": 2}),
    "CrossQ, bandit": Case(rein.CrossQ, bandit, 4_800, SOFT),
    "CrossQ, corridor": Case(rein.CrossQ, corridor, 4_800, {**SOFT, "actor_frequency": 1}),
    "TD3, bandit": Case(rein.TD3, bandit, 4_800, NOISY),
    "TD3, reach": Case(rein.TD3, Reach, 6_400, NOISY),
    "DDPG, corridor": Case(rein.DDPG, corridor, 12_800, REPLAY, 0.15),
    "DDPG, reach": Case(rein.DDPG, Reach, 12_800, REPLAY, 0.15),
    "discrete SAC, bandit": Case(rein.DiscreteSAC, Bandit, 3_200, DISCRETE, 0.05, 8),
    "discrete SAC, corridor": Case(rein.DiscreteSAC, Corridor, 3_200, DISCRETE, 0.05, 8),
}
DEFAULT = ["A2C, corridor", "IMPALA, corridor", "PPO, bandit", "PPO, corridor", "PPO, continuous corridor", "PPO, fork"]
DEFAULT += [
    "DQN, bandit",
    "DQN, corridor",
    "DQN, fork",
    "Rainbow, corridor",
    "SAC, bandit",
    "SAC, three steps at once",
    "SAC, fork",
]
DEFAULT += ["TD3, bandit", "TQC, corridor", "CrossQ, corridor", "DDPG, corridor", "discrete SAC, corridor"]


def trained(case: Case) -> tuple[Any, Any]:
    environment = case.probe(case.num_envs, seed=0)
    agent = case.kind(environment, seed=0, **case.options)
    rein.train(agent, environment, env_steps=case.env_steps)
    return agent, environment


@pytest.mark.default_cases(*DEFAULT)
@pytest.mark.parametrize("name", CASES)
def test_solves_probe(name: str) -> None:
    agent, environment = trained(CASES[name])
    reached = rein.evaluate(agent.policy(), CASES[name].probe(64, seed=1), 128).mean_return
    assert reached >= environment.optimal_return - CASES[name].tolerance


STATES = {ConstantReward: [[0.0]], ObservedReward: [[-1.0], [1.0]], DelayedReward: [[0.0], [1.0]]}
FAST = {**EPSILON, "learning_rate": 3e-2, "epsilon": 1.0}
VALUES = {
    "A2C": Case(rein.A2C, {}, 20_480, SHORT, 0.05, 32),
    "IMPALA": Case(rein.IMPALA, {}, 20_480, SHORT, 0.05, 32),
    "PPO": Case(rein.PPO, {}, 12_800, ROLLOUT, 0.05, 32),
    "DQN": Case(rein.DQN, {}, 2_400, FAST),
    "DQN, n steps": Case(rein.DQN, {}, 2_400, {**FAST, "n_step": 3}),
    "Rainbow": Case(rein.Rainbow, {}, 2_400, {**FAST, **RETURNS}, 0.1),
    # a temperature near 0, so that the entropy does not contribute to values
    "SAC": Case(rein.SAC, {"continuous": True}, 3_200, {**REPLAY, "temperature": 1e-4}, 0.06),
    "TD3": Case(rein.TD3, {"continuous": True}, 3_200, NOISY, 0.08),
}


def values(agent: Any, x: Tensor) -> Tensor:
    """Return all values that networks learn for states, (K, B)."""
    networks = agent.networks
    if hasattr(networks, "critics"):
        actions = (torch.full((len(x), 1), action) for action in (-0.5, 0.5))
        return torch.cat([networks.critics(x, action) for action in actions])
    return networks.online(x).T if hasattr(networks, "online") else networks.value(x).unsqueeze(0)


@pytest.mark.default_cases(
    "IMPALA-DelayedReward",
    "PPO-DelayedReward",
    "DQN-ConstantReward",
    "DQN, n steps-DelayedReward",
    "Rainbow-DelayedReward",
    "SAC-DelayedReward",
    "TD3-DelayedReward",
)
@pytest.mark.parametrize("probe", STATES, ids=lambda probe: probe.__name__)
@pytest.mark.parametrize("name", VALUES)
def test_learns_state_values(name: str, probe: Any) -> None:
    case, x = VALUES[name], torch.tensor(STATES[probe])
    agent, environment = trained(case._replace(probe=functools.partial(probe, **case.probe)))
    found, expected = values(agent, x), environment.optimal_value(x, 0.9)
    torch.testing.assert_close(found, expected.expand_as(found), atol=case.tolerance, rtol=0)
