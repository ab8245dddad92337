"""Tests that wrong data raises the same error with every transport."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.errors import EnvironmentContractError
from tests.workers import in_workers

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*(Worker-|Traceback|Raising the last exception)"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"),
]

VECTOR = spaces.Box(-1.0, 1.0, (3,))
SPACES: dict[str, spaces.Space[Any]] = {
    "vector": VECTOR,
    "discrete": spaces.Discrete(5),
    "bytes": spaces.Box(-100, 100, (2,), np.int8),
    "narrow indices": spaces.MultiDiscrete([3, 3], dtype=np.uint8),
    "unsigned": spaces.Box(0, 1000, (2,), np.uint16),
    "dict": spaces.Dict({"camera": spaces.Box(0, 255, (2, 2, 1), np.uint8), "joints": VECTOR}),
    "tuple": spaces.Tuple((spaces.Discrete(3), VECTOR)),
}
INFO = {"count": np.int8(0), "position": np.zeros(2, np.float32), "success": False}
ZEROS = np.zeros(3, np.float32)


class Wrong(gymnasium.Env[Any, Any]):
    """Environment 1 of 2 returns `parts` instead of good data, from `method`."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: str, method: str, parts: dict[str, Any]) -> None:
        self.observation_space = SPACES[space]
        self.observation_space.seed(0)
        self.parts, self.method = parts, method

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.wrong = seed == SECOND
        parts = {"observation": self.observation_space.sample(), "info": {}}
        return self._returned("reset", parts)

    def step(self, action: Any) -> Any:
        parts = {
            "observation": self.observation_space.sample(), "reward": 1.0, "terminated": False, "truncated": False,
            "info": {"count": 3},
        }  # fmt: skip
        return self._returned("step", parts)

    def _returned(self, method: str, parts: dict[str, Any]) -> Any:
        if self.wrong and method == self.method:
            if "all" in self.parts:
                return self.parts["all"]
            parts |= self.parts
        return tuple(parts.values())


SECOND = int(GymnasiumEnvironment("CartPole-v1", 2, 7)._seeds.advance(1))  # the seed of environment 1's first episode

# observation space, method, wrong part of its result, part of the error message
TABLE: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "a scalar for a vector": ("vector", "step", {"observation": 0.5}, "observation, row 1"),
    "one number for three": ("vector", "step", {"observation": np.zeros(1, np.float32)}, "observation, row 1"),
    "a matrix of as many numbers": ("vector", "step", {"observation": ZEROS[None]}, "observation, row 1"),
    "no observation": ("vector", "step", {"observation": None}, "observation, row 1"),
    "no numbers in an observation": ("vector", "step", {"observation": [None] * 3}, "observation, row 1"),
    "a complex observation": ("vector", "step", {"observation": ZEROS + 1j}, "observation, row 1"),
    "text for numbers": ("vector", "step", {"observation": ["1", "2", "3"]}, "observation, row 1"),
    "a ragged observation": ("vector", "step", {"observation": [[1.0], [2.0, 3.0]]}, "observation, row 1"),
    "a float for an integer": ("discrete", "step", {"observation": 2.7}, "observation, row 1"),
    "an array for an integer": ("discrete", "step", {"observation": np.array([2])}, "observation, row 1"),
    "a float for a byte": ("bytes", "step", {"observation": np.array([0.5, 1.0])}, "observation, row 1"),
    "an integer beyond a byte": ("bytes", "step", {"observation": np.array([300, 0])}, "got 300, which is out"),
    "an index that would wrap around": ("narrow indices", "step", {"observation": [258, 0]}, "got 258, which is out"),
    "a number that would wrap around": ("unsigned", "step", {"observation": [70_000, 0]}, "got 70000, which is out"),
    "a negative number without a sign": ("unsigned", "reset", {"observation": [-1, 0]}, "got -1, which is out"),
    "a missing key": ("dict", "step", {"observation": {"joints": ZEROS}}, "lacks the key camera"),
    "a wrong shape in a dict": (
        "dict", "step", {"observation": {"camera": np.uint8(7), "joints": ZEROS}}, "observation.camera, row 1"
    ),
    "a tuple that is too short": ("tuple", "step", {"observation": (1,)}, "observation"),
    "no reward": ("vector", "step", {"reward": None}, "reward, row 1"),
    "a reward in words": ("vector", "step", {"reward": "1.0"}, "reward, row 1"),
    "a complex reward": ("vector", "step", {"reward": 1 + 2j}, "reward, row 1"),
    "two rewards": ("vector", "step", {"reward": np.ones(2)}, "reward, row 1"),
    "a reward in a list": ("vector", "step", {"reward": [1.0]}, "reward, row 1"),
    "terminated in words": ("vector", "step", {"terminated": "False"}, "terminated, row 1"),
    "terminated as a number": ("vector", "step", {"terminated": 1}, "terminated, row 1"),
    "terminated as None": ("vector", "step", {"terminated": None}, "terminated, row 1"),
    "terminated twice": ("vector", "step", {"terminated": np.array([True, False])}, "terminated, row 1"),
    "terminated as a tensor": ("vector", "step", {"terminated": torch.tensor([True] * 2)}, "terminated, row 1"),
    "truncated as a float": ("vector", "step", {"truncated": 0.5}, "truncated, row 1"),
    "truncated as a list": ("vector", "step", {"truncated": []}, "truncated, row 1"),
    "no info": ("vector", "step", {"info": None}, "info, row 1"),
    "a list of infos": ("vector", "step", {"info": [("count", 3)]}, "info, row 1"),
    "a float for an integer of the info": ("vector", "step", {"info": {"count": 2.7}}, "info.count, row 1"),
    "a number beyond the info's": ("vector", "step", {"info": {"count": 300}}, "got 300, which is out"),
    "a scalar for an array of the info": ("vector", "step", {"info": {"position": 1.0}}, "info.position, row 1"),
    "a nested info": ("vector", "step", {"info": {"count": {"of": 3}}}, "info.count, row 1"),
    "None in the info": ("vector", "step", {"info": {"success": None}}, "info.success, row 1"),
    "four parts of a step": ("vector", "step", {"all": (ZEROS, 1.0, False, {})}, "from step, got"),
    "nothing from a step": ("vector", "step", {"all": None}, "from step, got"),
    "an observation alone from reset": ("vector", "reset", {"all": ZEROS}, "from reset, got"),
    "five parts of a reset": ("vector", "reset", {"all": (ZEROS, 1.0, False, False, {})}, "from reset, got"),
    "a scalar for a vector in reset": ("vector", "reset", {"observation": 0.0}, "observation, row 1"),
    "no observation in reset": ("vector", "reset", {"observation": None}, "observation, row 1"),
}  # fmt: skip


class WrongWorld:
    """The same as a world of PettingZoo with one agent."""

    possible_agents = ("a",)

    def __init__(self, space: str, method: str, parts: dict[str, Any]) -> None:
        self.single = Wrong(space, method, parts)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self.single.observation_space

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self.single.action_space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return self._by_agent("reset", self.single.reset(seed=seed))

    def step(self, actions: dict[str, int]) -> Any:
        return self._by_agent("step", self.single.step(actions["a"]))

    def _by_agent(self, method: str, result: Any) -> Any:
        whole = self.single.wrong and method == self.single.method and "all" in self.single.parts
        return result if whole else tuple({"a": part} for part in result)

    def close(self) -> None:
        pass


SIMULATORS: dict[str, tuple[Any, Any]] = {
    "Gymnasium": (GymnasiumEnvironment, Wrong),
    "PettingZoo": (rein.PettingZooEnvironment, WrongWorld),
}
TRANSPORTS: tuple[dict[str, Any], ...] = ({}, {"workers": 2, "mode": "threads"}, {"workers": 2})


def error_of(
    simulator: str, space: str, method: str, parts: dict[str, Any], options: dict[str, Any]
) -> EnvironmentContractError:
    """Return the error of a reset and one step."""
    adapter, kind = SIMULATORS[simulator]
    environment = adapter(functools.partial(kind, space, method, parts), 2, 7, info=INFO, **options)
    try:
        with pytest.raises(EnvironmentContractError) as caught:
            environment.reset()
            environment.apply_action(torch.zeros(2, dtype=torch.int64))
    finally:
        environment.close()
    return caught.value


@pytest.mark.parametrize("case", TABLE)
@pytest.mark.parametrize("simulator", SIMULATORS)
def test_wrong_data_raises_with_its_place(simulator: str, case: str) -> None:
    space, method, parts, keyword = TABLE[case]
    assert keyword in str(error_of(simulator, space, method, parts, {}))


@pytest.mark.parametrize("method", ["reset", "step"])
def test_malformed_result_names_its_environment(method: str) -> None:
    assert "environment 1 of" in str(error_of("Gymnasium", "vector", method, {"all": None}, {}))


@pytest.mark.default_cases(every=9)
@pytest.mark.parametrize("case", TABLE)
@pytest.mark.parametrize("simulator", SIMULATORS)
def test_wrong_data_raises_the_same_error_with_every_transport(simulator: str, case: str) -> None:
    space, method, parts, _ = TABLE[case]
    first, *others = [error_of(simulator, space, method, parts, options) for options in TRANSPORTS]
    for other in others:
        assert (type(other), str(other)) == (type(first), str(first))


def test_infos_that_are_not_requested_stay_in_the_worker() -> None:
    """They may be None, of different types, or not picklable."""
    for info in (None, {"count": 1, "simulator": lambda: 1}, {"count": 1, "other": "text"}):
        parts = {"info": info}
        source = functools.partial(Wrong, "vector", "step", parts)
        environment = in_workers(source, 2, 7, info={} if info is None else {"count": 0})
        environment.reset()
        for _ in range(2):
            time_step = environment.apply_action(torch.zeros(2, dtype=torch.int64))
            assert time_step.info.get("count", torch.tensor([3, 1])).tolist() == [3, 1]
        environment.close()


class Far(gymnasium.Env[Any, Any]):
    """Environment whose observations leave their Box after the first step of an episode."""

    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (3,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return ZEROS, {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return ZEROS + 3.5 * (self.steps > 1), 1.0, self.steps == 9, False, {}


@pytest.mark.parametrize("evaluated", [False, True])
def test_observation_outside_of_its_box_is_logged_once(evaluated: bool, caplog: pytest.LogCaptureFixture) -> None:
    env = GymnasiumEnvironment(Far, 2, seed=0)
    agent = rein.PPO(env, rollout_steps=8, hidden=(4,), seed=0)
    if evaluated:
        rein.evaluate(agent, env, episodes=4)
    else:
        rein.train(agent, env, env_steps=100, progress=False)
    (text,) = [record.getMessage() for record in caplog.records if "outside" in record.getMessage()]
    assert "3.5" in text and str(VECTOR) in text
