"""Mountain car: too weak to climb the hill, a car must swing up in the valley, N cars at once.

Shapes: 2 for (position, velocity), N environments.
"""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.drawing import Frame
from rein.envs.base.simulation import Moved, Physics, SimulatedEnvironment
from rein.envs.base.valley import POSITIONS, STARTS, TOP_SPEED, arrived, picture, roll

_FORCE = 0.001
_GOAL = 0.5


def _move(state_2N: Tensor, push_N: Tensor) -> Moved:
    state_2N = roll(state_2N, push_N)
    return Moved(state_2N, torch.full_like(push_N, -1.0), arrived(state_2N, _GOAL))


_PHYSICS = Physics(_move, STARTS, controls=(-_FORCE, 0.0, _FORCE))


class MountainCar(SimulatedEnvironment):
    """N cars in the valley sin(3 x), which start at rest with x uniform on [-0.6, -0.4): Gymnasium's MountainCar-v0.

    Actions are 0 push left, 1 do nothing, 2 push right:

        v' = v + 0.001 (action - 1) - 0.0025 cos(3 x), clipped to [-0.07, 0.07],
        x' = x + v', clipped to [-1.2, 0.6]; at -1.2 a wall stops the car.

    Every step costs 1, until x' >= 0.5 with v' >= 0 terminates the episode; it is truncated after `max_episode_steps`
    (None: never). The observation (N, 2) is x and v.

    Source: Moore 1990, Efficient Memory-based Learning for Robot Control.
    """

    render_fps = 30  # frames per second of its videos

    def __init__(
        self,
        num_envs: int = 16,
        *,
        seed: int | None = None,
        max_episode_steps: int | None = 200,
        device: torch.device | str = "cpu",
        compile: bool = False,
    ) -> None:
        low, high = np.array([POSITIONS, (-TOP_SPEED, TOP_SPEED)], np.float32).T
        super().__init__(
            _PHYSICS,
            spaces.Box(low, high),
            spaces.Discrete(3),
            num_envs=num_envs,
            seed=seed,
            max_episode_steps=max_episode_steps,
            device=device,
            compile=compile,
        )

    def _draw(self, state: list[float]) -> Frame:
        return picture(state[0], _GOAL)
