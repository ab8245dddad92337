"""Without `rein.accelerate`, every agent trains with the same results up to rounding."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import rein
from rein import accelerators
from rein.agents.a2c import A2C
from rein.agents.awac import AWAC
from rein.agents.base.learner import Learner
from rein.agents.bc import BC
from rein.agents.ddpg import DDPG
from rein.agents.discrete_sac import DiscreteSAC
from rein.agents.dqn import DQN
from rein.agents.impala import IMPALA
from rein.agents.iql import IQL
from rein.agents.iqn import IQN
from rein.agents.ppo import PPO
from rein.agents.pqn import PQN
from rein.agents.q_learning import QLearning
from rein.agents.recurrent_dqn import RecurrentDQN
from rein.agents.sac import SAC
from rein.agents.td3 import TD3
from rein.envs.cartpole import CartPole
from rein.envs.gridworld import Gridworld
from rein.envs.pendulum import Pendulum
from rein.networks.recurrent import LSTM

ROLLOUT = {"hidden": (8,), "rollout_steps": 8}
REPLAY = {"hidden": (8,), "batch_size": 8, "capacity": 200, "learning_starts": 0}
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "PPO": (PPO, CartPole, ROLLOUT),
    "PPO, continuous": (PPO, Pendulum, ROLLOUT),
    "PPO, recurrent": (PPO, CartPole, {**ROLLOUT, "minibatches": 1, "core": functools.partial(LSTM, features=8)}),
    "A2C": (A2C, CartPole, ROLLOUT),
    "IMPALA": (IMPALA, CartPole, ROLLOUT),
    "PQN": (PQN, CartPole, ROLLOUT),
    "DQN": (DQN, CartPole, REPLAY),
    "DQN, prioritized": (DQN, CartPole, {**REPLAY, "prioritized": True}),
    "IQN": (IQN, CartPole, REPLAY),
    "RecurrentDQN": (RecurrentDQN, CartPole, {**REPLAY, "sequence_length": 4, "burn_in": 2}),
    "DDPG": (DDPG, Pendulum, REPLAY),
    "TD3": (TD3, Pendulum, REPLAY),
    "SAC": (SAC, Pendulum, REPLAY),
    "DiscreteSAC": (DiscreteSAC, CartPole, REPLAY),
    "AWAC": (AWAC, Pendulum, REPLAY),
    "IQL": (IQL, Pendulum, REPLAY),
    "BC": (BC, Pendulum, REPLAY),
    "QLearning": (QLearning, Gridworld, {}),
}


def trained(case: str) -> Any:
    kind, world, options = CASES[case]
    environment = world(num_envs=2, seed=0)
    agent = kind(environment.single_observation_space, environment.single_action_space, seed=0, **options)
    rein.training_loop(agent, environment, iterations=24).run(epochs=1)
    return agent


@pytest.mark.default_cases(every=2)
@pytest.mark.parametrize("case", CASES)
def test_plain_agent_trains_to_the_same_parameters(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimized = trained(case)
    monkeypatch.setattr(accelerators, "PLAIN", True)
    plain = trained(case)
    assert plain.updates == optimized.updates > 0
    assert all(type(learner) is Learner for learner in getattr(plain, "learners", {}).values())
    states = [agent.table if case == "QLearning" else agent.networks.state_dict() for agent in (plain, optimized)]
    torch.testing.assert_close(*states, atol=2e-5, rtol=2e-4)


@pytest.mark.default_cases("1-True")
@pytest.mark.parametrize(("value", "plain"), [("1", "True"), ("0", "False"), ("", "False")])
def test_environment_variable_sets_the_switch(value: str, plain: str) -> None:
    command = [sys.executable, "-c", "from rein import accelerators; print(accelerators.PLAIN)"]
    shown = subprocess.run(command, env={**os.environ, "REIN_PLAIN": value}, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == plain


def test_agents_learn_without_the_package() -> None:
    program = """
import sys
sys.modules["rein.accelerate"] = None  # its import fails
from tests.learning.test_plain import trained
for case in ("PPO", "SAC", "DQN, prioritized"):
    agent = trained(case)
    print(agent.updates > 0, {type(learner).__name__ for learner in agent.learners.values()})
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout == "True {'Learner'}\n" * 3
