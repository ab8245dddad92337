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
from rein.agents.base.learner import Learner
from rein.networks.recurrent import LSTM

ROLLOUT = {"hidden": (8,), "rollout_steps": 8}
REPLAY = {"hidden": (8,), "batch_size": 8, "capacity": 200, "learning_starts": 0}
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "PPO": (rein.PPO, rein.envs.CartPole, ROLLOUT),
    "PPO, continuous": (rein.PPO, rein.envs.Pendulum, ROLLOUT),
    "PPO, recurrent": (
        rein.PPO,
        rein.envs.CartPole,
        {**ROLLOUT, "minibatches": 1, "core": functools.partial(LSTM, features=8)},
    ),
    "A2C": (rein.A2C, rein.envs.CartPole, ROLLOUT),
    "IMPALA": (rein.IMPALA, rein.envs.CartPole, ROLLOUT),
    "PQN": (rein.PQN, rein.envs.CartPole, ROLLOUT),
    "DQN": (rein.DQN, rein.envs.CartPole, REPLAY),
    "DQN, prioritized": (rein.DQN, rein.envs.CartPole, {**REPLAY, "prioritized": True}),
    "IQN": (rein.IQN, rein.envs.CartPole, REPLAY),
    "RecurrentDQN": (rein.RecurrentDQN, rein.envs.CartPole, {**REPLAY, "sequence_length": 4, "burn_in": 2}),
    "DDPG": (rein.DDPG, rein.envs.Pendulum, REPLAY),
    "TD3": (rein.TD3, rein.envs.Pendulum, REPLAY),
    "SAC": (rein.SAC, rein.envs.Pendulum, REPLAY),
    "DiscreteSAC": (rein.DiscreteSAC, rein.envs.CartPole, REPLAY),
    "AWAC": (rein.AWAC, rein.envs.Pendulum, REPLAY),
    "IQL": (rein.IQL, rein.envs.Pendulum, REPLAY),
    "BC": (rein.BC, rein.envs.Pendulum, REPLAY),
    "QLearning": (rein.QLearning, rein.envs.Gridworld, {}),
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
