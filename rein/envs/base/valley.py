"""The valley of the two mountain cars: how a car rolls in it, and a picture of it.

Shapes: 2 for (position, velocity), N environments.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rein.envs.base.drawing import BLUE, DARK, GREEN, GREY, LINE, Canvas, Frame

POSITIONS, TOP_SPEED = (-1.2, 0.6), 0.07
STARTS = ((-0.6, -0.4), (0.0, 0.0))
_GRAVITY = 0.0025


def roll(state_2N: Tensor, push_N: Tensor) -> Tensor:
    """(2, N) position and velocity after one step with an acceleration `push_N`; the left wall stops the car.

    v' = v + push - 0.0025 cos(3 x),    x' = x + v',    each clipped to its range.

    Source: Moore 1990, Efficient Memory-based Learning for Robot Control; the numbers are Sutton's and Gymnasium's.
    """
    x_N, v_N = state_2N.unbind()
    v_N = torch.add(v_N + push_N, (3.0 * x_N).cos_(), alpha=-_GRAVITY).clamp_(-TOP_SPEED, TOP_SPEED)
    x_N = (x_N + v_N).clamp_(*POSITIONS)
    return torch.stack((x_N, torch.where(x_N > POSITIONS[0], v_N, v_N.clamp(min=0.0))))


def arrived(state_2N: Tensor, goal: float) -> Tensor:
    """(N,) bool: where the car is at the goal or beyond, and does not roll back."""
    return (state_2N[0] >= goal) & (state_2N[1] >= 0.0)


def picture(position: float, goal: float) -> Frame:
    """The car in the valley, and the flag at the goal."""
    canvas = Canvas(POSITIONS, (0.0, 1.3), 220)
    canvas.ground(_height, LINE)
    canvas.ground(lambda x: _height(x) - 0.01, GREY)
    foot = float(_height(goal))
    canvas.line((goal, foot), (goal, foot + 0.2), 0.01, DARK)
    canvas.line((goal + 0.02, foot + 0.18), (goal + 0.06, foot + 0.18), 0.04, GREEN)
    canvas.disc((position, float(_height(position)) + 0.045), 0.045, BLUE)
    return canvas.frame


def _height(x: Any) -> Any:
    return 0.55 + 0.45 * np.sin(3.0 * x)
