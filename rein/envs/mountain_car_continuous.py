"""Mountain car with a throttle: the less force it takes to get up the hill, the better, N cars at once.

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

_POWER = 0.0015
_GOAL = 0.45
_PRIZE, _COST = 100.0, 0.1


def _move(state_2N: Tensor, action_N1: Tensor) -> Moved:
    action_N = action_N1[:, 0]
    state_2N = roll(state_2N, action_N.clamp(-1.0, 1.0).mul_(_POWER))
    terminated_N = arrived(state_2N, _GOAL)
    return Moved(state_2N, torch.addcmul(_PRIZE * terminated_N, action_N, action_N, value=-_COST), terminated_N)


_PHYSICS = Physics(_move, STARTS)


class MountainCarContinuous(SimulatedEnvironment):
    """N cars in the valley sin(3 x), which start at rest with x uniform on [-0.6, -0.4).

    This is Gymnasium's MountainCarContinuous-v0. With an action a, which pushes no harder than its bounds -1 and 1,

        v' = v + 0.0015 clip(a, -1, 1) - 0.0025 cos(3 x), clipped to [-0.07, 0.07],
        x' = x + v', clipped to [-1.2, 0.6]; at -1.2 a wall stops the car,
        reward = -0.1 a^2, of the action as it was given, and 100 more at the goal.

    x' >= 0.45 with v' >= 0 terminates the episode; it is truncated after `max_episode_steps` (None: never). The
    observation (N, 2) is x and v.

    Source: Moore 1990, Efficient Memory-based Learning for Robot Control.
    """

    render_fps = 30  # frames per second of its videos

    def __init__(
        self,
        num_envs: int = 16,
        *,
        seed: int | None = None,
        max_episode_steps: int | None = 999,
        device: torch.device | str = "cpu",
        compile: bool = False,
    ) -> None:
        low, high = np.array([POSITIONS, (-TOP_SPEED, TOP_SPEED)], np.float32).T
        super().__init__(
            _PHYSICS,
            spaces.Box(low, high),
            spaces.Box(-1.0, 1.0, (1,)),
            num_envs=num_envs,
            seed=seed,
            max_episode_steps=max_episode_steps,
            device=device,
            compile=compile,
        )

    def _draw(self, state: list[float]) -> Frame:
        return picture(state[0], _GOAL)
