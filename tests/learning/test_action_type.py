"""Agents learn from externally selected actions of any dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.agents.base.agent import cast_action
from rein.training.offline import extend
from rein.types import Transition

BOX = spaces.Box(-1.0, 1.0, (2,))
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
ON_POLICY: dict[str, Any] = {"rollout_steps": 4, "hidden": (8,), "seed": 0}
REPLAY: dict[str, Any] = {"learning_starts": 0, "hidden": (8,), "batch_size": 8, "capacity": 64, "seed": 0}
N = 3


def rows(action: torch.Tensor, **extras: torch.Tensor) -> Transition:
    """Return one step of as many environments as there are actions."""
    observation = torch.rand(len(action), 2, generator=torch.Generator().manual_seed(0))
    no = torch.zeros(len(action), dtype=torch.bool)
    return Transition(observation, action, observation[:, 0], no, no, observation, ~no, extras)


def turns(agent: Any, action: torch.Tensor, steps: int = 4, **extras: torch.Tensor) -> None:
    """Let an external policy and the agent act in turn within one rollout, and update the agent."""
    for step in range(steps):
        row = rows(action, **extras)
        if step % 2:
            selected, agent_extras = agent.select_action(row.observation)
            row = row._replace(action=selected, extras=agent_extras)
        agent.record_observation(row)
    metrics = agent.optimize_model()
    assert agent.updates and metrics and all(value.isfinite().all() for value in metrics.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("options", [{}, {"squash": True}, {"squash": "ball"}, {"state_dependent_std": True}], ids=str)
@pytest.mark.parametrize("kind", [rein.PPO, rein.A2C, rein.IMPALA])
def test_on_policy_agents_accept_any_float_dtype(kind, options, dtype):
    turns(kind(BOX, BOX, **ON_POLICY, **options), torch.full((N, 2), 0.5, dtype=dtype))


@pytest.mark.parametrize("space", [spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 3], start=[1, 1])], ids=str)
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("kind", [rein.PPO, rein.IMPALA])
def test_on_policy_agents_accept_any_integer_dtype(kind, space, dtype):
    turns(kind(BOX, space, **ON_POLICY), torch.ones(N, *space.shape, dtype=dtype))


@pytest.mark.parametrize("kind", [rein.PPO, rein.A2C, rein.IMPALA])
def test_extras_of_any_float_dtype_are_cast(kind):
    extras = {"log_prob": torch.full((N,), -1.0, dtype=torch.float64), "mine": torch.zeros(N, dtype=torch.float64)}
    agent = kind(BOX, BOX, **ON_POLICY)
    for _ in range(4):
        sample = torch.full((N, 2), 2.0, dtype=torch.float64)  # clipped
        agent.record_observation(rows(sample.clamp(-1.0, 1.0), sample=sample, **extras))
    assert agent.rollout["log_prob"].dtype is agent.rollout["sample"].dtype is torch.float32
    assert agent.rollout["mine"].dtype is torch.float64
    assert (agent.rollout["log_prob"] == -1.0).all() and (agent.rollout["sample"] == 2.0).all()
    assert agent.optimize_model()
    turns(kind(BOX, spaces.Discrete(3), **ON_POLICY), torch.ones(N, dtype=torch.int64), log_prob=extras["log_prob"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("kind", [rein.SAC, rein.TD3, rein.DDPG, rein.IQL, rein.AWAC, rein.BC])
def test_replay_agents_accept_any_float_dtype(kind, dtype):
    turns(kind(BOX, BOX, **REPLAY), torch.full((N, 2), 0.5, dtype=dtype))


@pytest.mark.default_cases(every=7)
@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("kind", [rein.DQN, rein.IQN, rein.RecurrentDQN, rein.DiscreteSAC, rein.BC])
def test_replay_agents_accept_any_integer_dtype(kind, dtype, start):
    turns(kind(BOX, spaces.Discrete(3, start=start), **REPLAY), torch.ones(N, dtype=dtype))


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("kind", [rein.DQN, rein.IQN])
def test_replay_data_with_narrow_integers_is_learned(kind, dtype, start):
    agent = kind(BOX, spaces.Discrete(3, start=start), **REPLAY)
    extend(agent.replay, rows(torch.ones(32, dtype=dtype)))
    assert agent.learn(1)["value_loss"].isfinite()


@pytest.mark.parametrize(
    ("space", "given", "kept"),
    [
        (spaces.Discrete(3), torch.uint8, torch.int64),
        (spaces.Discrete(3), torch.float32, torch.float32),
        (spaces.MultiDiscrete([2, 3]), torch.int16, torch.int64),
        (spaces.MultiBinary(2), torch.int8, torch.int64),
        (spaces.Box(-1.0, 1.0, (2,), np.float64), torch.float64, torch.float32),
        (spaces.Box(0, 9, (2,), np.uint8), torch.uint8, torch.int64),
    ],
    ids=str,
)
def test_cast_action_uses_the_agents_dtype(space, given, kept):
    assert cast_action(torch.ones(N, *space.shape, dtype=given), space).dtype is kept


def test_cast_action_does_not_copy_matching_dtypes():
    for space, action in ((BOX, torch.zeros(N, 2)), (spaces.Discrete(3), torch.zeros(N, dtype=torch.int64))):
        assert cast_action(action, space) is action


def test_cast_action_casts_every_component():
    space = spaces.Tuple([spaces.Discrete(2), spaces.Dict(arm=BOX)])
    action = {"0": torch.ones(N, dtype=torch.uint8), "1": {"arm": torch.ones(N, 2, dtype=torch.float64)}}
    cast = cast_action(action, space)
    assert cast["0"].dtype is torch.int64 and cast["1"]["arm"].dtype is torch.float32
