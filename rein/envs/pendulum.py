"""Pendulum: swing up a pendulum and balance it with a motor that is too weak to lift it directly.

Shapes: 2 for (angle, velocity), N environments.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.rendering import DARK, RED, Canvas, Frame
from rein.envs.base.simulation import SimulatedEnvironment

_GRAVITY = 10.0  # m/s^2
_MASS, _LENGTH = 1.0, 1.0  # kg, m, of a thin rod
_TAU = 0.05  # s, one step
_TOP_SPEED, _TOP_TORQUE = 8.0, 2.0  # rad/s, N m
_TURN = 2.0 * math.pi
_BOUNDS = np.array([1.0, 1.0, _TOP_SPEED], np.float32)
_FALL, _LIFT = 3.0 * _GRAVITY / (2.0 * _LENGTH) * _TAU, 3.0 / (_MASS * _LENGTH**2) * _TAU


class Pendulum(SimulatedEnvironment, max_episode_steps=200):
    """N pendulums with a motor at the axle: Pendulum-v1 of Gymnasium.

    The angle theta is in [-pi, pi] and 0 if the pendulum is upright. An episode starts with theta uniform on [-pi, pi)
    and the velocity omega uniform on [-1, 1). The action is a torque u, clipped to [-2, 2]::

        reward = -(theta^2 + 0.1 omega^2 + 0.001 u^2), before the move
        omega' = omega + 0.05 (15 sin theta + 3 u), clipped to [-8, 8]
        theta' = theta + 0.05 omega'

    An episode never terminates, and is truncated after `max_episode_steps` (default 200; None: never). The observation
    (N, 3) is cos theta, sin theta and omega.

    Source: the equations of Gymnasium, for a thin rod of 1 kg and 1 m and a gravity of 10 m/s^2.
    """

    single_observation_space = spaces.Box(-_BOUNDS, _BOUNDS)
    single_action_space = spaces.Box(-_TOP_TORQUE, _TOP_TORQUE, (1,))
    initial_range = ((-math.pi, math.pi), (-1.0, 1.0))
    render_fps = 30  # frames per second of videos

    def dynamics(self, state_2N: Tensor, action_N1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Apply a torque for 0.05 s."""
        theta_N, omega_N = state_2N.unbind()
        torque_N = action_N1[:, 0].clamp(-_TOP_TORQUE, _TOP_TORQUE)
        reward_N = -(theta_N.square() + 0.1 * omega_N.square() + 0.001 * torque_N.square())
        omega_N = omega_N + (_FALL * theta_N.sin() + _LIFT * torque_N)
        omega_N = omega_N.clamp_(-_TOP_SPEED, _TOP_SPEED)
        theta_N = torch.add(theta_N, omega_N, alpha=_TAU)
        # Gymnasium does not bound the angle; here it stays in [-pi, pi], where float32 is precise
        theta_N = torch.add(theta_N, (theta_N / _TURN).round_(), alpha=-_TURN)
        return torch.stack((theta_N, omega_N)), reward_N, torch.zeros_like(reward_N, dtype=torch.bool)

    def observe(self, state_2N: Tensor) -> Tensor:
        """Return cosine and sine of the angle, and the velocity."""
        theta_N, omega_N = state_2N.unbind()
        return torch.stack((theta_N.cos(), theta_N.sin(), omega_N))

    def draw(self, state: list[float]) -> Frame:
        """Draw the rod and its axle."""
        theta, _ = state
        canvas = Canvas((-1.3, 1.3), (-1.3, 1.3), 100)
        canvas.line((0.0, 0.0), (-math.sin(theta), math.cos(theta)), 0.2, RED)
        canvas.disc((0.0, 0.0), 0.05, DARK)
        return canvas.frame
