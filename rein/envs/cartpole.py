"""CartPole: balance a pole on a cart by pushing the cart left or right.

Shapes: 4 for (x, v, theta, omega), N environments.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.rendering import DARK, LINE, YELLOW, Canvas, Frame
from rein.envs.base.simulation import SimulatedEnvironment

_GRAVITY = 9.8  # m/s^2
_POLE_MASS, _CART_MASS = 0.1, 1.0  # kg
_HALF_LENGTH = 0.5  # m, of the pole
_FORCE = 10.0  # N
_TAU = 0.02  # s, one step
_X_LIMIT, _THETA_LIMIT = 2.4, math.radians(12.0)

_MASS = _POLE_MASS + _CART_MASS
_LEVER = _POLE_MASS * _HALF_LENGTH / _MASS
_BOUNDS = np.array([2.0 * _X_LIMIT, np.inf, 2.0 * _THETA_LIMIT, np.inf], np.float32)


@functools.cache
def _arm(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(_HALF_LENGTH * 4.0 / 3.0, dtype=dtype, device=device)


def _beyond(value_N: Tensor, limit: float) -> Tensor:
    return value_N.clamp(-limit, limit) != value_N  # |value| > limit, in two thirds of the time


class CartPole(SimulatedEnvironment, max_episode_steps=500):
    """N carts, each with a hinged pole: CartPole-v1 of Gymnasium.

    The state is the position x and velocity v of the cart, and the angle theta (0 if upright) and angular velocity
    omega of the pole. All start uniform on [-0.05, 0.05). Actions are 0 push left and 1 push right with F = 10 N. A
    step of 0.02 s is::

        p = (F + m l omega^2 sin theta) / M
        alpha = (g sin theta - p cos theta) / (l (4/3 - m cos^2 theta / M))
        a = p - m l alpha cos theta / M
        (x, v, theta, omega)' = (x, v, theta, omega) + 0.02 (v, a, omega, alpha)

    with pole mass m = 0.1 kg, half length l = 0.5 m, total mass M = 1.1 kg and g = 9.8 m/s^2. The reward is 1 per step.
    An episode terminates if x leaves [-2.4, 2.4] or theta leaves [-12, 12] degrees, and is truncated after
    `max_episode_steps` (default 500; None: never). The observation (N, 4) is x, v, theta and omega.

    Source: Barto, Sutton and Anderson 1983, Neuronlike adaptive elements that can solve difficult learning control
    problems. The equations are those of Florian 2007, without friction.
    """

    single_observation_space = spaces.Box(-_BOUNDS, _BOUNDS)
    single_action_space = spaces.Discrete(2)
    initial_range = ((-0.05, 0.05),) * 4
    action_values = (-_FORCE / _MASS, _FORCE / _MASS)
    render_fps = 50  # frames per second of videos

    def dynamics(self, state_4N: Tensor, push_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Push the carts for 0.02 s. Uses few calls, which cost more than arithmetic for a thousand environments."""
        x_N, v_N, theta_N, omega_N = state_4N.unbind()
        sin_N, cos_N = theta_N.sin(), theta_N.cos()
        thrust_N = torch.addcmul(push_N, omega_N * omega_N, sin_N, value=_LEVER)
        inertia_N = torch.addcmul(
            _arm(cos_N.dtype, cos_N.device), cos_N, cos_N, value=-_HALF_LENGTH * _POLE_MASS / _MASS
        )
        alpha_N = torch.addcmul(sin_N, cos_N, thrust_N, value=-1.0 / _GRAVITY) / inertia_N  # as a multiple of gravity
        a_N = torch.addcmul(thrust_N, alpha_N, cos_N, value=-_LEVER * _GRAVITY)
        x_N, v_N = torch.add(x_N, v_N, alpha=_TAU), torch.add(v_N, a_N, alpha=_TAU)
        theta_N, omega_N = torch.add(theta_N, omega_N, alpha=_TAU), torch.add(omega_N, alpha_N, alpha=_TAU * _GRAVITY)
        terminated_N = _beyond(x_N, _X_LIMIT) | _beyond(theta_N, _THETA_LIMIT)
        return torch.stack((x_N, v_N, theta_N, omega_N)), torch.ones_like(x_N), terminated_N

    def draw(self, state: list[float]) -> Frame:
        """Draw the cart, the pole and the limits of the track."""
        x, _, theta, _ = state
        canvas = Canvas((-2.7, 2.7), (-0.4, 1.4), 110)
        canvas.line((-2.7, 0.0), (2.7, 0.0), 0.02, LINE)
        for side in (-_X_LIMIT, _X_LIMIT):
            canvas.line((side, -0.05), (side, 0.05), 0.02, LINE)
        canvas.line((x - 0.15, 0.0), (x + 0.15, 0.0), 0.2, DARK)
        tip = x + 2.0 * _HALF_LENGTH * math.sin(theta), 2.0 * _HALF_LENGTH * math.cos(theta)
        canvas.line((x, 0.0), tip, 0.07, YELLOW)
        canvas.disc((x, 0.0), 0.03, LINE)
        return canvas.frame
