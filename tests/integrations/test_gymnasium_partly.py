"""Tests of partial steps of the Gymnasium adapter, which step only unfinished environments."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.agents.ppo import PPO
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.envs.wrappers.rewards import ScaleReward
from rein.envs.wrappers.time import TimeLimit
from rein.episodes import RandomPolicy
from rein.episodes.episode_replay import replay
from rein.episodes.recorder import Recorder
from rein.errors import EnvironmentContractError


class Counted(gymnasium.Env[Any, Any]):
    """Environment with episodes of `length` steps, which counts its steps over all episodes."""

    observation_space, action_space = spaces.Box(0.0, 1000.0, (1,)), spaces.Discrete(2)

    def __init__(self, length: int) -> None:
        self.length, self.taken = length, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps, self.taken = self.steps + 1, self.taken + 1
        return np.full(1, self.steps, np.float32), 1.0, self.steps == self.length, False, {"at": self.steps}


def counted(*lengths: int) -> tuple[GymnasiumEnvironment, list[Counted]]:
    made = [Counted(length) for length in lengths]
    order = iter(made)
    return GymnasiumEnvironment(lambda: next(order), len(lengths), seed=0, info={"at": -1}), made


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: TimeLimit(ScaleReward(x, 2.0), 400)], ids=["bare", "wrapped"])
def test_evaluation_steps_only_unfinished_environments(wrap: Any) -> None:
    environment, made = counted(300, *[10] * 7)
    result = rein.evaluate(RandomPolicy(environment.single_action_space, seed=0), wrap(environment), 8)
    assert result.episode_length.tolist() == [300, *[10] * 7]
    assert [one.taken for one in made] == [300, *[10] * 7]


def test_episodic_epochs_step_only_unfinished_environments() -> None:
    environment, made = counted(20, 5, 5)
    agent = PPO(environment.single_observation_space, environment.single_action_space, seed=0, rollout_steps=10)
    rein.train(agent, environment, epochs=2, iterations=50, episodic=True, seed=0)
    assert [one.taken for one in made] == [40, 10, 10]


def test_replay_steps_only_unfinished_environments(tmp_path: Any) -> None:
    environment, _ = counted(20, 5, 5)
    recorder = Recorder(rein.HDF5Store(tmp_path / "played"), 3)
    rein.evaluate(RandomPolicy(environment.single_action_space, seed=0), environment, 3, recorder=recorder)
    recorder.store.close()
    run = rein.open_run(tmp_path / "played")
    environment, made = counted(20, 5, 5)
    found = replay(environment, [run.episode(k) for k in range(3)])
    assert [one.difference for one in found] == [None] * 3
    assert [one.taken for one in made] == [20, 5, 5]


def test_skipped_rows_keep_their_observation_and_have_default_info() -> None:
    environment, _ = counted(3, 3, 3)
    environment.reset()
    action = torch.zeros(3, dtype=torch.int64)
    for mask in ([True, False, True], [True, False, False], [False, False, False]):
        step = environment.apply_action_where(action, torch.tensor(mask))
    assert step.observation.flatten().tolist() == [2, 0, 1]
    assert step.info["at"].tolist() == [-1, -1, -1]
    step = environment.apply_action_where(action, torch.tensor([True, True, False]))
    assert step.final_observation.flatten().tolist() == [3, 1, 1]
    assert step.observation.flatten().tolist() == [0, 1, 1]
    assert (step.terminated.tolist(), step.valid.tolist()) == ([True, False, False], [True, True, False])
    assert (step.reward.tolist(), step.info["at"].tolist()) == ([1, 1, 0], [3, 1, -1])


def test_wrong_actions_and_masks_raise() -> None:
    environment, _ = counted(3, 3)
    action = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="call reset"):
        environment.apply_action_where(action, torch.tensor([True, False]))
    environment.reset()
    environment.apply_action(action)
    with pytest.raises(ValueError, match="apply_action_where: expected"):
        environment.apply_action_where(action, torch.tensor([1, 0]))
    with pytest.raises(EnvironmentContractError, match="action"):
        environment.apply_action_where(torch.zeros(3, dtype=torch.int64), torch.tensor([True, False]))


def test_error_in_a_partial_step_names_the_environment() -> None:
    environment, made = counted(3, 3, 3)
    made[2].step = lambda action: (np.zeros(1, np.float32), "much", False, False, {})  # type: ignore[method-assign]
    environment.reset()
    with pytest.raises(EnvironmentContractError, match="reward, row 2"):
        environment.apply_action_where(torch.zeros(3, dtype=torch.int64), torch.tensor([True, False, True]))
