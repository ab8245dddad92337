"""A simulator with an interface of its own, and an adapter of it: an example of a new adapter in few lines."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from gymnasium import spaces

from rein.envs.host.block import Setup
from rein.envs.host.host_environment import SteppedSeparately
from rein.envs.host.pool import Workers


class Machine:
    """Cart that is pushed along a line, whose interface is neither Gymnasium's nor PettingZoo's."""

    def __init__(self, length: float) -> None:
        self.length = length

    def place(self, number: int) -> list[float]:
        self.random = np.random.default_rng(number)
        self.position = float(self.random.uniform(-1.0, 1.0))
        return [self.position]

    def push(self, force: float) -> dict[str, Any]:
        self.position += force + float(self.random.normal(0.0, 0.1))
        return {"position": [self.position], "points": -abs(force), "over": abs(self.position) > self.length}


class _Simulator:
    """A `Machine` with the methods of a `gymnasium.Env`."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,))
    action_space = spaces.Box(-1.0, 1.0, (1,))

    def __init__(self, length: float) -> None:
        self.unwrapped = Machine(length)

    def reset(self, *, seed: int, options: Any = None) -> Any:
        return np.array(self.unwrapped.place(seed), np.float32), {}

    def step(self, action: Any) -> Any:
        result = self.unwrapped.push(float(action[0]))
        return np.array(result["position"], np.float32), result["points"], result["over"], False, {}

    def close(self) -> None:
        pass


def _make(length: float, numbers: range) -> list[_Simulator]:
    return [_Simulator(length) for _ in numbers]


class MachineEnvironment(SteppedSeparately):
    """N machines."""

    def __init__(self, num_envs: int, seed: int | None = None, *, length: float = 2.0, **workers: Any) -> None:
        setup = Setup(name="Machine", make=functools.partial(_make, length), config={"length": length})
        super().__init__(setup, range(num_envs), seed, Workers(**workers) if workers else None)
