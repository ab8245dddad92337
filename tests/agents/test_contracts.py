"""Contract tests of all agents.

A case is saved after 7 steps, for example of a rollout of 8, in environments whose episodes end at different times.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import pytest

import rein
from rein.agents.base.action_noise import AdaptiveExploration, OrnsteinUhlenbeck
from rein.agents.base.segments import PrioritizedSegments
from rein.envs.probes import BitFlip, Reach
from rein.networks.recurrent import GRU, LSTM, MinimalGRU
from rein.replay import Hindsight
from rein.schedules import linear
from rein.testing import AgentContract
from tests.envs.masked_grid import MaskedGrid

GRID = functools.partial(rein.envs.Gridworld, max_episode_steps=9)
MASKED = functools.partial(MaskedGrid, max_episode_steps=5)
REACH = functools.partial(Reach, dimensions=2, max_episode_steps=7)
CARTPOLE, PENDULUM = rein.envs.CartPole, rein.envs.Pendulum

ROLLOUT: dict[str, Any] = {"rollout_steps": 8, "update_epochs": 2, "minibatches": 2, "hidden": (16,)}
SHORT: dict[str, Any] = {"rollout_steps": 5, "hidden": (16,), "learning_rate": 1e-2, "gamma": 0.9}
REPLAY: dict[str, Any] = {"hidden": (16,), "batch_size": 16, "capacity": 300, "learning_starts": 8}
OFTEN = {**REPLAY, "update_to_data": 0.25}
RARELY = {**REPLAY, "capacity": 512, "learning_starts": 24, "train_frequency": 8, "update_to_data": 0.125}
QUANTILES = {**RARELY, "learning_starts": 40, "cosines": 8, "action_quantiles": 8, "epsilon": 0.2}
SEQUENCES = {**OFTEN, "hidden": (8,), "batch_size": 8, "capacity": 200, "tau": 0.1, "sequence_length": 4, "burn_in": 2}
WALK = OrnsteinUhlenbeck(sigma=AdaptiveExploration(0.1, low=0.001, high=0.2))
SEGMENTS = {
    "segments": PrioritizedSegments(beta=linear(0.2, 1.0, updates=100), rho_clip=math.inf),
    "reward_smoothing": 0.5,
}


def core(kind: Any, layers: int = 1) -> dict[str, Any]:
    return {"core": functools.partial(kind, features=6, layers=layers)}


def frames(num_envs: int, seed: int) -> rein.envs.wrappers.FrameStack:
    return rein.envs.wrappers.FrameStack(GRID(num_envs, seed=seed, observation="vector"), 3)


class Case(NamedTuple):
    kind: Any
    environment: Any
    options: dict[str, Any]
    num_envs: int = 4


CASES = {
    "PPO": Case(rein.PPO, GRID, ROLLOUT),
    "PPO, continuous": Case(rein.PPO, REACH, {**ROLLOUT, "learning_rate": linear(1e-3, 0.0, env_steps=10_000)}),
    "PPO, masks and segments": Case(rein.PPO, MASKED, {**ROLLOUT, "segments": PrioritizedSegments(), "shared": True}),
    "PPO, recurrent": Case(rein.PPO, GRID, {**ROLLOUT, **core(MinimalGRU), "minibatches": 1, "shared": True}),
    "A2C": Case(rein.A2C, GRID, {**SHORT, "normalize_advantage": True}),
    "A2C, masks": Case(rein.A2C, MASKED, {**SHORT, "rollout_steps": 8}),
    "IMPALA": Case(rein.IMPALA, GRID, ROLLOUT),
    "PQN": Case(rein.PQN, GRID, {**ROLLOUT, "epsilon": 0.3}),
    "PQN, masks": Case(rein.PQN, MASKED, {**ROLLOUT, "rollout_steps": 4, "gamma": 0.9}),
    "Q-learning": Case(rein.QLearning, GRID, {"epsilon": linear(0.5, 0.1, env_steps=200)}),
    "Q-learning, masks": Case(rein.QLearning, MASKED, {"gamma": 0.9}),
    "DQN": Case(rein.DQN, GRID, {**OFTEN, "epsilon": linear(0.5, 0.1, env_steps=100)}),
    "recurrent DQN": Case(  # old transitions are overwritten
        rein.RecurrentDQN,
        GRID,
        {**SEQUENCES, **core(MinimalGRU), "double": False, "huber": None, "capacity": 40, "burn_in": 0}
        | {
            "epsilon": AdaptiveExploration(0.5, window=4),
            "learning_rate": linear(1e-3, 0.0, env_steps=1000),
        },
    ),
    "recurrent DQN, R2D2": Case(
        rein.RecurrentDQN,
        GRID,
        {**SEQUENCES, **core(MinimalGRU), "n_step": 3, "prioritized": True, "value_rescaling": True, "capacity": 40},
    ),
    "IQN": Case(rein.IQN, GRID, QUANTILES),
    "Rainbow": Case(rein.Rainbow, GRID, {**OFTEN, "atoms": 11}),
    "SAC": Case(rein.SAC, REACH, OFTEN),
    "TQC": Case(rein.TQC, REACH, {**OFTEN, "critics": 2, "quantiles": 5, "n_step": 2, "prioritized": True}),
    "CrossQ": Case(rein.CrossQ, REACH, OFTEN),
    "discrete SAC": Case(rein.DiscreteSAC, GRID, OFTEN),
    "TD3": Case(rein.TD3, REACH, OFTEN),
    "DDPG": Case(rein.DDPG, REACH, OFTEN),
    "AWAC": Case(rein.AWAC, PENDULUM, RARELY, 8),
    "IQL": Case(rein.IQL, PENDULUM, RARELY, 8),
    "BC": Case(rein.BC, GRID, RARELY, 8),
}
SLOW_CASES = {
    "PPO, squashed": Case(rein.PPO, REACH, {**ROLLOUT, "squash": True}),
    "PPO, normalized": Case(
        rein.PPO, CARTPOLE, {**ROLLOUT, "normalize_observation": True, "normalize_reward": True, "activation": "relu"}
    ),
    "PPO, masks": Case(rein.PPO, MASKED, ROLLOUT),
    "PPO, segments": Case(rein.PPO, GRID, {**ROLLOUT, **SEGMENTS}),
    "PPO, ball": Case(rein.PPO, REACH, {**ROLLOUT, **SEGMENTS, "squash": "ball", "state_dependent_std": True}),
    "PPO, LSTM": Case(rein.PPO, GRID, {**ROLLOUT, **core(LSTM), "normalize_reward": True}),
    "PPO, GRU and masks": Case(rein.PPO, MASKED, {**ROLLOUT, **core(GRU), "normalize_observation": True}),
    "IMPALA, continuous": Case(rein.IMPALA, REACH, ROLLOUT),
    "IMPALA, LSTM and masks": Case(rein.IMPALA, MASKED, {**ROLLOUT, **core(LSTM)}),
    "PQN, all options": Case(
        rein.PQN,
        GRID,
        {**ROLLOUT, "dueling": True, "layer_norm": False, "normalize_observation": True, "normalize_reward": True}
        | {"epsilon": linear(1.0, 0.1, env_steps=100), "max_grad_norm": None}
        | {"learning_rate": linear(1e-3, 0.0, env_steps=10_000)},
    ),
    "DQN, Rainbow": Case(  # the replay is full after 25 steps, and targets are copies of the network
        rein.DQN,
        GRID,
        {**OFTEN, "dueling": True, "layer_norm": True, "n_step": 3, "prioritized": True, "tau": 1.0}
        | {"target_frequency": 5, "capacity": 102, "epsilon": AdaptiveExploration(0.5)},
    ),
    "DQN, Boltzmann": Case(
        rein.DQN, GRID, {**REPLAY, "temperature": 0.5, "double": False, "huber": None, "normalize_observation": True}, 1
    ),
    "DQN, masks": Case(rein.DQN, MASKED, {**OFTEN, "n_step": 3, "prioritized": True, "temperature": 0.3}),
    "recurrent DQN, LSTMs": Case(rein.RecurrentDQN, GRID, {**SEQUENCES, **core(LSTM, layers=2)}),
    "recurrent DQN, GRU and masks": Case(
        rein.RecurrentDQN, MASKED, {**SEQUENCES, **core(GRU), "dueling": True, "normalize_observation": True}
    ),
    "IQN, all options": Case(
        rein.IQN,
        GRID,
        {**QUANTILES, "double": True, "drawn_levels": False, "risk": 0.5, "n_step": 3, "prioritized": True}
        | {"temperature": linear(1.0, 0.1, env_steps=100), "normalize_observation": True, "huber": 0.1},
        8,
    ),
    "IQN, frames": Case(rein.IQN, frames, {**QUANTILES, "frame_stack": 3, "prioritized": True}, 8),
    "IQN, masks": Case(rein.IQN, MASKED, {**QUANTILES, "action_quantiles": 4}),
    "Rainbow, masks": Case(rein.Rainbow, MASKED, {**OFTEN, "atoms": 11, "dueling": False, "epsilon": 0.2}),
    "Rainbow, frames": Case(rein.Rainbow, frames, {**OFTEN, "atoms": 11, "frame_stack": 3}),
    "SAC, ensemble": Case(rein.SAC, REACH, {**OFTEN, "critics": 4, "target_subset": 2, "layer_norm": True}),
    "discrete SAC, layer norm": Case(rein.DiscreteSAC, GRID, {**OFTEN, "layer_norm": True}),
    "TD3, layer norm": Case(rein.TD3, REACH, {**OFTEN, "layer_norm": True}),
    "SAC, one environment": Case(rein.SAC, REACH, {**REPLAY, "n_step": 3, "prioritized": True}, 1),
    # matrix products large enough that torch uses oneDNN on some machines
    "SAC, large": Case(rein.SAC, REACH, {**REPLAY, "hidden": (160, 160), "batch_size": 256, "update_to_data": 0.1}),
    "SAC, fixed temperature": Case(
        rein.SAC, REACH, {**REPLAY, "temperature": 0.1, "critics": 3, "actor_frequency": 2, "activation": "tanh"}
    ),
    "discrete SAC, masks": Case(rein.DiscreteSAC, MASKED, OFTEN),
    "TD3, adaptive noise": Case(
        rein.TD3, REACH, {**REPLAY, "noise": WALK, "n_step": 3, "prioritized": True, "actor_frequency": 1}, 1
    ),
    "AWAC, exponential weights": Case(
        rein.AWAC,
        PENDULUM,
        {**RARELY, "weights": "exp", "max_weight": 5.0, "activation": "tanh", "prioritized": True},
        8,
    ),
    "IQL, every part": Case(
        rein.IQL,
        PENDULUM,
        {**RARELY, "critics": 3, "activation": "silu", "prioritized": True, "max_grad_norm": 1.0, "n_step": 2},
        8,
    ),
    "BC, continuous": Case(rein.BC, PENDULUM, RARELY, 8),
    "BC, deterministic": Case(rein.BC, PENDULUM, {**RARELY, "stochastic": False}, 8),
    "BC, masks": Case(rein.BC, MASKED, RARELY),
}


@pytest.mark.default_cases(*CASES)
class TestAgents(AgentContract):
    @pytest.fixture(autouse=True, params=[*CASES, *SLOW_CASES])
    def _case(self, request: pytest.FixtureRequest) -> None:
        self.case = (CASES | SLOW_CASES)[request.param]
        self.num_envs, self.steps = self.case.num_envs, 60 if self.case.num_envs == 8 else 40
        self.bootstraps = self.case.kind is not rein.BC

    def make(self, seed: int | None) -> Any:
        return self.case.kind(self.environment(1, 0), seed=seed, **self.case.options)

    def environment(self, num_envs: int, seed: int) -> Any:
        return self.case.environment(num_envs, seed=seed)

    def _acts(self, policy: Any) -> Any:
        policy.reset()  # clear the carry of earlier calls
        return super()._acts(policy)


class TestHindsight(AgentContract):
    """DQN with hindsight."""

    num_envs, steps = 4, 40
    test_terminated_row_does_not_bootstrap = None  # new goals come from next observations

    def make(self, seed: int | None) -> Any:
        hindsight = Hindsight(BitFlip.compute_reward, compute_terminated=BitFlip.compute_terminated)
        return rein.DQN(self.environment(1, 0), hindsight=hindsight, n_step=2, seed=seed, **OFTEN)

    def environment(self, num_envs: int, seed: int) -> Any:
        return BitFlip(num_envs, bits=4, seed=seed, max_episode_steps=5)
