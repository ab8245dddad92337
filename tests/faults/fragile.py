"""Environment whose actions end or block its worker."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

FINE, EXITS, CRASHES, HANGS = range(4)


class Fragile(gymnasium.Env[Any, Any]):
    """Environment whose actions end or block its worker. It observes its steps and a random number of its episode."""

    observation_space = spaces.Box(0.0, 1e6, (2,))
    action_space = spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps, self.drawn = 0, number_of(self.np_random)
        return np.array([0, self.drawn], np.float32), {}

    def step(self, action: Any) -> Any:
        if action == EXITS:
            os._exit(3)
        if action == CRASHES:
            faulthandler.disable()  # it would print a traceback
            os.kill(os.getpid(), signal.SIGSEGV)
        if action == HANGS:
            time.sleep(1000.0)
        self.steps += 1
        return np.array([self.steps, self.drawn], np.float32), 1.0, self.steps == 7, False, {}


def number_of(generator: np.random.Generator) -> int:
    return int(generator.integers(1_000_000))
