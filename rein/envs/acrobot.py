"""Acrobot: swing up two links that hang from a bar, with a motor between the links only.

Shapes: 4 for (theta_1, theta_2, omega_1, omega_2), N environments.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.rendering import BLUE, GREEN, LINE, PALE, Canvas, Frame
from rein.envs.base.simulation import SimulatedEnvironment

_GRAVITY = 9.8  # m/s^2
_TAU = 0.2  # s, one step
_TOP_SPEED_1, _TOP_SPEED_2 = 4.0 * math.pi, 9.0 * math.pi  # rad/s
_HEIGHT = 1.0  # m above the bar, which the feet must reach
_TURN = 2.0 * math.pi
_BOUNDS = np.array([1.0, 1.0, 1.0, 1.0, _TOP_SPEED_1, _TOP_SPEED_2], np.float32)


def _derivative(state_4N: Tensor, torque_N: Tensor) -> Tensor:
    """Return the time derivative (4, N) of the state: M (alpha_1, alpha_2) = (-g_1, torque - g_2) by Cramer's rule.

    Links have 1 kg, 1 m, the centre of mass in the middle and, as in Gymnasium, an inertia of 1 kg m^2.
    """
    theta_1N, theta_2N, omega_1N, omega_2N = state_4N.unbind()
    sin_N, cos_N = theta_2N.sin(), theta_2N.cos()
    inertia_11N, inertia_12N, inertia_22 = cos_N + 3.5, 0.5 * cos_N + 1.25, 1.25
    g_2N = (0.5 * _GRAVITY) * (theta_1N + theta_2N).sin()
    g_1N = torch.add(g_2N, theta_1N.sin(), alpha=1.5 * _GRAVITY)
    g_1N = torch.addcmul(g_1N, sin_N, omega_2N * torch.add(omega_2N, omega_1N, alpha=2.0), value=-0.5)
    g_2N = torch.addcmul(g_2N, sin_N, omega_1N * omega_1N, value=0.5)
    force_N = torque_N - g_2N
    determinant_N = inertia_22 * inertia_11N - inertia_12N * inertia_12N
    alpha_1N = -(inertia_22 * g_1N + inertia_12N * force_N) / determinant_N
    alpha_2N = (inertia_11N * force_N + inertia_12N * g_1N) / determinant_N
    return torch.stack((omega_1N, omega_2N, alpha_1N, alpha_2N))


class Acrobot(SimulatedEnvironment, max_episode_steps=500):
    """N chains of two links with a fixed upper end: Acrobot-v1 of Gymnasium.

    The angle of the upper link is theta_1, which is 0 if the link hangs down. The angle of the lower link relative to
    the upper one is theta_2. Both angles and their velocities omega start uniform on [-0.1, 0.1). Actions 0, 1 and 2
    are a torque t of -1, 0 and 1 N m between the links, held for 0.2 s. A step is one Runge-Kutta step of::

        (3.5 + c) alpha_1 + (1.25 + c/2) alpha_2 = -g_1
        (1.25 + c/2) alpha_1 + 1.25 alpha_2 = t - g_2
        g_1 = 14.7 sin theta_1 + 4.9 sin(theta_1 + theta_2) - s omega_2 (omega_2 + 2 omega_1) / 2
        g_2 = 4.9 sin(theta_1 + theta_2) + s omega_1^2 / 2

    with s, c = sin, cos of theta_2. Then the velocities are clipped to 4 pi and 9 pi.

    An episode terminates if the lower end is more than 1 m above the fixed end:
    -cos theta_1 - cos(theta_1 + theta_2) > 1. The reward is 0 in this step and -1 in all others. An episode
    is truncated after `max_episode_steps` (default 500; None: never). The observation (N, 6) is cosine and sine of
    theta_1, cosine and sine of theta_2, omega_1 and omega_2.

    Source: Sutton 1996, Generalization in Reinforcement Learning: Successful Examples Using Sparse Coarse Coding. The
    equations are those of the book by Sutton and Barto, which correct the paper.
    """

    single_observation_space = spaces.Box(-_BOUNDS, _BOUNDS)
    single_action_space = spaces.Discrete(3)
    initial_range = ((-0.1, 0.1),) * 4
    action_values = (-1.0, 0.0, 1.0)
    render_fps = 15  # frames per second of videos

    def dynamics(self, state_4N: Tensor, torque_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Apply a torque between the links for 0.2 s."""
        k_1 = _derivative(state_4N, torque_N)  # classic Runge-Kutta method of order 4
        k_2 = _derivative(torch.add(state_4N, k_1, alpha=_TAU / 2.0), torque_N)
        k_3 = _derivative(torch.add(state_4N, k_2, alpha=_TAU / 2.0), torque_N)
        k_4 = _derivative(torch.add(state_4N, k_3, alpha=_TAU), torque_N)
        state_4N = torch.add(state_4N, k_1 + k_4 + 2.0 * (k_2 + k_3), alpha=_TAU / 6.0)
        theta_2N, (omega_1N, omega_2N) = state_4N[:2], state_4N[2:]
        theta_1N, theta_2N = torch.add(theta_2N, (theta_2N / _TURN).round_(), alpha=-_TURN)  # into [-pi, pi]
        omega_1N, omega_2N = omega_1N.clamp(-_TOP_SPEED_1, _TOP_SPEED_1), omega_2N.clamp(-_TOP_SPEED_2, _TOP_SPEED_2)
        terminated_N = theta_1N.cos() + (theta_1N + theta_2N).cos_() < -_HEIGHT
        state_4N = torch.stack((theta_1N, theta_2N, omega_1N, omega_2N))
        return state_4N, terminated_N.to(torch.float32) - 1.0, terminated_N

    def observe(self, state_4N: Tensor) -> Tensor:
        """Return cosine and sine of both angles, and both velocities."""
        theta_1N, theta_2N, omega_1N, omega_2N = state_4N.unbind()
        return torch.stack((theta_1N.cos(), theta_1N.sin(), theta_2N.cos(), theta_2N.sin(), omega_1N, omega_2N))

    def draw(self, state: list[float]) -> Frame:
        """Draw both links and the target height."""
        theta_1, theta_2, _, _ = state
        hips = math.sin(theta_1), -math.cos(theta_1)
        feet = hips[0] + math.sin(theta_1 + theta_2), hips[1] - math.cos(theta_1 + theta_2)
        canvas = Canvas((-2.2, 2.2), (-2.2, 2.2), 60)
        canvas.line((-2.2, _HEIGHT), (2.2, _HEIGHT), 0.04, LINE)
        canvas.line((0.0, 0.0), hips, 0.2, BLUE)
        canvas.line(hips, feet, 0.2, PALE)
        for joint in ((0.0, 0.0), hips):
            canvas.disc(joint, 0.1, GREEN)
        return canvas.frame
