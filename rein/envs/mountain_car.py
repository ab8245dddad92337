"""Mountain car with discrete or continuous actions: a weak car must gain speed by swinging in a valley.

Shapes: 2 for (position, velocity), N environments.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.rendering import BLUE, DARK, GREEN, GREY, LINE, Canvas, Frame
from rein.envs.base.simulation import SimulatedEnvironment

_POSITIONS, _TOP_SPEED = (-1.2, 0.6), 0.07
_STARTS = ((-0.6, -0.4), (0.0, 0.0))
_SPACE = spaces.Box(*np.array([_POSITIONS, (-_TOP_SPEED, _TOP_SPEED)], np.float32).T)
_GRAVITY = 0.0025
_FORCE, _GOAL = 0.001, 0.5
_POWER, _GOAL_CONTINUOUS = 0.0015, 0.45
_PRIZE, _COST = 100.0, 0.1


class MountainCar(SimulatedEnvironment, max_episode_steps=200):
    """N cars in the valley sin(3 x): MountainCar-v0 of Gymnasium.

    The cars start at rest with x uniform on [-0.6, -0.4). Actions are 0 push left, 1 do nothing, 2 push right::

        v' = v + 0.001 (action - 1) - 0.0025 cos(3 x), clipped to [-0.07, 0.07]
        x' = x + v', clipped to [-1.2, 0.6]; at -1.2 a wall stops the car

    The reward is -1 per step. An episode terminates if x' >= 0.5 and v' >= 0, and is truncated after
    `max_episode_steps` (default 200; None: never). The observation (N, 2) is x and v.

    Source: Moore 1990, Efficient Memory-based Learning for Robot Control.
    """

    single_observation_space = _SPACE
    single_action_space = spaces.Discrete(3)
    initial_range = _STARTS
    action_values = (-_FORCE, 0.0, _FORCE)
    render_fps = 30  # frames per second of videos

    def dynamics(self, state_2N: Tensor, push_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Push the cars for one step."""
        state_2N = _roll(state_2N, push_N)
        return state_2N, torch.full_like(push_N, -1.0), _arrived(state_2N, _GOAL)

    def draw(self, state: list[float]) -> Frame:
        """Draw the car, the valley and the goal."""
        return _picture(state[0], _GOAL)


class MountainCarContinuous(SimulatedEnvironment, max_episode_steps=999):
    """N cars in the valley sin(3 x): MountainCarContinuous-v0 of Gymnasium.

    The cars start at rest with x uniform on [-0.6, -0.4). The action a is the throttle::

        v' = v + 0.0015 clip(a, -1, 1) - 0.0025 cos(3 x), clipped to [-0.07, 0.07]
        x' = x + v', clipped to [-1.2, 0.6]; at -1.2 a wall stops the car
        reward = -0.1 a^2 with the unclipped action, plus 100 at the goal

    An episode terminates if x' >= 0.45 and v' >= 0, and is truncated after `max_episode_steps` (default 999; None:
    never). The observation (N, 2) is x and v.

    Source: Moore 1990, Efficient Memory-based Learning for Robot Control.
    """

    single_observation_space = _SPACE
    single_action_space = spaces.Box(-1.0, 1.0, (1,))
    initial_range = _STARTS
    render_fps = 30  # frames per second of videos

    def dynamics(self, state_2N: Tensor, action_N1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Push the cars for one step."""
        action_N = action_N1[:, 0]
        state_2N = _roll(state_2N, action_N.clamp(-1.0, 1.0).mul_(_POWER))
        terminated_N = _arrived(state_2N, _GOAL_CONTINUOUS)
        return state_2N, torch.addcmul(_PRIZE * terminated_N, action_N, action_N, value=-_COST), terminated_N

    def draw(self, state: list[float]) -> Frame:
        """Draw the car, the valley and the goal."""
        return _picture(state[0], _GOAL_CONTINUOUS)


def _roll(state_2N: Tensor, push_N: Tensor) -> Tensor:
    """Return position and velocity (2, N) after one step with the acceleration `push_N`.

    Source: Moore 1990, Efficient Memory-based Learning for Robot Control; the constants are those of Gymnasium.
    """
    x_N, v_N = state_2N.unbind()
    v_N = torch.add(v_N + push_N, (3.0 * x_N).cos_(), alpha=-_GRAVITY).clamp_(-_TOP_SPEED, _TOP_SPEED)
    x_N = (x_N + v_N).clamp_(*_POSITIONS)
    return torch.stack((x_N, torch.where(x_N > _POSITIONS[0], v_N, v_N.clamp(min=0.0))))


def _arrived(state_2N: Tensor, goal: float) -> Tensor:
    """Return booleans (N,): True if the car has reached the goal and does not roll back."""
    return (state_2N[0] >= goal) & (state_2N[1] >= 0.0)


def _picture(position: float, goal: float) -> Frame:
    """Draw the car, the valley and the flag at the goal."""
    canvas = Canvas(_POSITIONS, (0.0, 1.3), 220)
    canvas.ground(_height, LINE)
    canvas.ground(lambda x: _height(x) - 0.01, GREY)
    foot = float(_height(goal))
    canvas.line((goal, foot), (goal, foot + 0.2), 0.01, DARK)
    canvas.line((goal + 0.02, foot + 0.18), (goal + 0.06, foot + 0.18), 0.04, GREEN)
    canvas.disc((position, float(_height(position)) + 0.045), 0.045, BLUE)
    return canvas.frame


def _height(x: Any) -> Any:
    return 0.55 + 0.45 * np.sin(3.0 * x)
