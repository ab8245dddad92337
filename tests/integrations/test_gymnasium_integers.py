"""Tests of discrete observations outside their space."""

from __future__ import annotations

import re
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import rein
from rein.agents.dqn import DQN
from rein.agents.q_learning import QLearning
from rein.envs.gymnasium import GymnasiumEnvironment, GymnasiumVectorEnvironment
from rein.episodes import RandomPolicy
from rein.errors import EnvironmentContractError
from rein.training.offline import fill_replay
from rein.types import Transition

WRONG = {  # space, valid observation, invalid observation, part of the error message
    "discrete": (spaces.Discrete(4, start=2), 3, 6, "expected a value of Discrete(4, start=2), got 6"),
    "below": (spaces.Discrete(4, start=2), 3, 1, "expected a value of Discrete(4, start=2), got 1"),
    "multi-discrete": (spaces.MultiDiscrete([3, 3]), [0, 2], [1, -1], "at [1]: expected a value of MultiDiscrete"),
    "multi-binary": (spaces.MultiBinary(2), [0, 1], [2, 0], "at [0]: expected a value of MultiBinary(2), got 2"),
    "nested": (
        spaces.Dict({"at": spaces.Tuple([spaces.Discrete(3), spaces.Box(0.0, 1.0)])}),
        {"at": (1, [0.5])},
        {"at": (3, [0.5])},
        ": expected a value of Discrete(3), got 3",
    ),
}


class Wrong(gymnasium.Env[Any, Any]):
    """Environment with an invalid observation in step `wrong_step` (0: the reset) of episodes of 9 steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, case: str, wrong_step: int | None) -> None:
        self.observation_space, self.good, self.wrong, _ = WRONG[case]
        self.wrong_step, self.steps = wrong_step, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self._observation(), 0.0, self.steps == 9, False, {}

    def _observation(self) -> Any:
        value = self.wrong if self.steps == self.wrong_step else self.good
        return np.array(value, np.int8) if isinstance(self.observation_space, spaces.MultiBinary) else value


def environment(case: str, wrong_step: int, kind: str = "serial") -> Any:
    """Build two environments. The second one has the invalid observation."""
    steps = iter([None, wrong_step])
    if kind == "vector":
        makers = [lambda step=step: Wrong(case, step) for step in steps]
        return GymnasiumVectorEnvironment(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED), seed=0)
    return GymnasiumEnvironment(lambda: Wrong(case, next(steps)), 2, seed=0)


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("wrong_step", [0, 1, 9])
@pytest.mark.parametrize("kind", ["serial", "vector"])
def test_integer_observation_outside_its_space_raises_in_any_step(case: str, wrong_step: int, kind: str) -> None:
    found = environment(case, wrong_step, kind)
    agent = DQN(found.single_observation_space, found.single_action_space, seed=0, hidden=(4,))
    with pytest.raises(EnvironmentContractError, match=f"(environment|row) 1.*{re.escape(WRONG[case][3])}"):
        rein.train(agent, found, epochs=1, iterations=9, seed=0)


def test_training_checks_each_integer_observation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found, checked, aminmax = environment("discrete", 99), [], torch.aminmax
    monkeypatch.setattr(torch, "aminmax", lambda value: (checked.append(value), aminmax(value))[1])
    agent = QLearning(found.single_observation_space, found.single_action_space, seed=0)
    rein.train(agent, found, epochs=1, iterations=8, seed=0)
    assert len(checked) == 8, "the reset and all steps but the first one, which is checked in full"


class Untrusted:
    """Tensor environments without checks. Environment 2 of 3 returns [1, -1] in its fifth step."""

    num_envs, device, seed, replayable, config = 3, torch.device("cpu"), 0, False, {}
    single_observation_space, single_action_space = spaces.MultiDiscrete([3, 3]), spaces.Discrete(2)
    episode_seeds = torch.arange(3)

    def __init__(self, wrong_step: int = 5) -> None:
        self.steps, self.wrong_step = 0, wrong_step

    def reset(self, seed: int | None = None) -> torch.Tensor:
        return self._observation()

    def apply_action(self, action: torch.Tensor) -> rein.TimeStep:
        self.steps += 1
        no, seen = torch.zeros(3, dtype=torch.bool), self._observation()
        return rein.TimeStep(seen, torch.zeros(3), no, no, seen, ~no, {})

    def reseed(self, seed: int) -> None: ...

    def close(self) -> None: ...

    def _observation(self) -> torch.Tensor:
        seen = torch.ones(3, 2, dtype=torch.int64)
        if self.steps == self.wrong_step:
            seen[2, 1] = -1
        return seen


TEXT = r"environment 2 at \[1\]: expected a value of MultiDiscrete\(\[3 3\]\), got -1"


@pytest.mark.parametrize("wrong_step", [0, 5])
def test_training_checks_integers_of_environments_of_tensors(wrong_step: int) -> None:
    found: Any = Untrusted(wrong_step)
    agent = DQN(found.single_observation_space, found.single_action_space, seed=0, hidden=(4,))
    with pytest.raises(EnvironmentContractError, match=TEXT):
        rein.train(agent, found, epochs=1, iterations=20, seed=0)


@pytest.mark.parametrize("wrong_step", [0, 5])
def test_evaluation_checks_integers(wrong_step: int) -> None:
    found: Any = Untrusted(wrong_step)
    policy = RandomPolicy(found.single_action_space, seed=0)
    with pytest.raises(EnvironmentContractError, match=TEXT):
        rein.evaluate(policy, found, 3, max_episode_steps=20)


@pytest.mark.parametrize("field", ["observation", "next_observation"])
def test_recorded_integers_outside_their_space_raise(field: str) -> None:
    agent = DQN(spaces.MultiDiscrete([3, 3]), spaces.Discrete(2), seed=0, hidden=(4,), capacity=200)
    seen, no = torch.ones(6, 2, dtype=torch.int64), torch.zeros(6, dtype=torch.bool)
    wrong = seen.clone()
    wrong[4, 1] = -1
    data = Transition(seen, torch.zeros(6, dtype=torch.int64), torch.zeros(6), no, no, seen, ~no, {})
    with pytest.raises(ValueError, match=rf"fill_replay: the {field} is not in MultiDiscrete.* number 4"):
        fill_replay(agent, [data._replace(**{field: wrong})])
