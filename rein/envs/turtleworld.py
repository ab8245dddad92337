"""Turtleworld: turn and walk to a target in a box of 5 x 5. A continuous version of the Gridworld.

Shapes: N environments, 2 for (x, y), 4 for (x, y, heading, target), K targets, F environments with a recorded path, 3
for (x, y, step).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.rendering import BLUE, DARK, GREEN, LINE, PALE, Canvas, Frame
from rein.envs.base.simulation import SimulatedEnvironment

_SIZE = 5.0
_FARTHEST = _SIZE * math.sqrt(2.0)
_TURN = 2.0 * math.pi
_FILMED, _REMEMBERED = 16, 1000  # environments with a recorded path, and steps of a path
_MARGIN, _UNIT = 0.25, 48  # around the box, and pixels per unit


class Turtleworld(SimulatedEnvironment):
    """N turtles in a box of 5 x 5. They start at the lower edge and walk to the target.

    An episode starts at y = 0 with x uniform on [0, 5), the heading h uniform on [0, 2 pi) and the target (t_x, t_y)
    uniform among `possible_targets`. The action a, clipped to [-1, 1], turns the turtle, which then walks one step
    along its new heading::

        h' = h + pi a
        (x', y') = (x, y) + speed dt (cos h', sin h'), clipped to the box
        reward = -(|t_x - x'| + |t_y - y'|)

    An episode terminates within the Euclidean distance `radius` of the target, and is truncated after
    `max_episode_steps` (None: never). With the default speed the longest path takes 61 steps, so the default of 200
    leaves time to learn to turn.

    The observation is (N, 7) float32: x/5, y/5, t_x/5, t_y/5, cos h, sin h, and the distance to the target as a
    fraction of the diagonal of the box.

    Args:
        possible_targets: targets (x, y), one of which is drawn per episode.
        speed: distance per unit of time.
        dt: time of a step.
        radius: distance to the target within which an episode terminates.

    Raises ValueError for options out of range.
    """

    single_observation_space = spaces.Box(np.array([0, 0, 0, 0, -1, -1, 0], np.float32), np.ones(7, np.float32))
    single_action_space = spaces.Box(-1.0, 1.0, (1,))
    bounding_box = (0.0, _SIZE, 0.0, _SIZE)  # min x, max x, min y, max y

    @torch.inference_mode(False)  # inference tensors cannot be modified outside of inference mode
    def __init__(
        self,
        num_envs: int = 16,
        possible_targets: Sequence[Sequence[float]] = ((2.0, 4.0),),
        *,
        seed: int | None = None,
        speed: float = 0.1,
        dt: float = 1.0,
        radius: float = 1.0,
        max_episode_steps: int | None = 200,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in {"speed": speed, "dt": dt, "radius": radius}.items():
            if not value > 0.0:
                raise ValueError(f"Turtleworld({name}={value}): give more than 0")
        self.possible_targets = [_in_the_box(target) for target in possible_targets]
        if not self.possible_targets:
            raise ValueError("Turtleworld(possible_targets=[]): give at least one (x, y)")
        self.speed, self.dt, self.radius = speed, dt, radius
        self._targets_2K = torch.tensor(self.possible_targets, dtype=torch.float32, device=device).T.contiguous()
        self._path: deque[Tensor] = deque(maxlen=_REMEMBERED)  # positions and steps (F, 3) of the first turtles
        choice = (0.0, len(self.possible_targets))  # the integer part is the index of the target
        self.initial_range = ((0.0, _SIZE), (0.0, 0.0), (0.0, _TURN), choice)
        super().__init__(num_envs, seed=seed, max_episode_steps=max_episode_steps, device=device)

    def encode(self, *, x: float, y: float, heading: float, target: Sequence[float]) -> Tensor:
        """Return the observation of a turtle at (x, y) with `heading` in radians, as a batch of one: (1, 7)."""
        places = torch.tensor([_in_the_box((x, y)), _in_the_box(target)], dtype=torch.float32, device=self.device)[
            :, :, None
        ]
        unit_21 = torch.tensor([[math.cos(heading)], [math.sin(heading)]], dtype=torch.float32, device=self.device)
        return _seen(places[0], places[1], unit_21, _length(places[1] - places[0])).T

    def render(self, index: int = 0) -> Frame:
        """Return an RGB frame (height, width, 3) of one environment, y upwards: turtle with heading, target and path.

        The path shows at most the last 1,000 steps of the episode, and only for the first 16 environments.
        `load_state_dict` clears it.
        """
        index = range(self.num_envs)[index]
        return self.draw(self._state_SN[:, index].tolist(), self._path_of(index))

    def draw(self, state: list[float], path: Sequence[tuple[float, float]] = ()) -> Frame:
        """Draw the turtle with its heading, its target and its path."""
        x, y, heading, target = state
        canvas = Canvas((-_MARGIN, _SIZE + _MARGIN), (-_MARGIN, _SIZE + _MARGIN), _UNIT)
        for place in range(int(_SIZE) + 1):
            canvas.line((place, 0.0), (place, _SIZE), 1.5 / _UNIT, LINE)
            canvas.line((0.0, place), (_SIZE, place), 1.5 / _UNIT, LINE)
        canvas.disc(self.possible_targets[int(target)], self.radius, GREEN)
        for start, end in pairwise(path):
            canvas.line(start, end, 0.06, PALE)
        canvas.line((x, y), (x + 0.3 * math.cos(heading), y + 0.3 * math.sin(heading)), 0.12, DARK)
        canvas.disc((x, y), 0.16, BLUE)
        return canvas.frame

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. Raises ValueError for another number of environments."""
        super().load_state_dict(state)
        self._path.clear()

    def dynamics(self, state_4N: Tensor, action_N1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Turn, then walk one step."""
        heading_N = (state_4N[2] + action_N1[:, 0].clamp(-1.0, 1.0) * math.pi).remainder_(_TURN)
        unit_2N = torch.stack((heading_N.cos(), heading_N.sin()))
        place_2N = (state_4N[:2] + unit_2N * (self.speed * self.dt)).clamp_(0.0, _SIZE)
        _, gap_2N, distance_N = self._aim(place_2N, state_4N[3])
        state_4N = torch.cat((place_2N, heading_N[None], state_4N[3:]))
        return state_4N, -gap_2N.abs().sum(0), distance_N <= self.radius

    def observe(self, state_4N: Tensor) -> Tensor:
        """Return positions, headings and distances as fractions of the box."""
        place_2N, heading_N = state_4N[:2], state_4N[2]
        target_2N, _, distance_N = self._aim(place_2N, state_4N[3])
        return _seen(place_2N, target_2N, torch.stack((heading_N.cos(), heading_N.sin())), distance_N)

    def _aim(self, place_2N: Tensor, choice_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the targets (2, N), the vectors to the targets (2, N) and the distances (N,)."""
        target_2N = self._targets_2K.index_select(1, choice_N.long())
        gap_2N = target_2N - place_2N
        return target_2N, gap_2N, _length(gap_2N)

    def watch(self, observation: Tensor) -> None:
        """Record the positions of the first environments, for their paths."""
        self._path.append(torch.cat((observation[:_FILMED, :2], self._steps_N[:_FILMED, None]), 1))

    def _path_of(self, index: int) -> list[tuple[float, float]]:
        """Return the positions of the turtle in this episode, the latest first."""
        recorded = torch.stack(tuple(self._path))[:, index].tolist() if self._path and index < _FILMED else []
        path, step = [], int(self._steps_N[index])
        for x, y, steps in reversed(recorded):
            if steps == step:  # otherwise only other turtles were stepped
                path.append((x * _SIZE, y * _SIZE))
                step -= 1
        return path


def _length(vector_2N: Tensor) -> Tensor:
    return vector_2N.square().sum(0).sqrt_()


def _seen(place_2N: Tensor, target_2N: Tensor, unit_2N: Tensor, distance_N: Tensor) -> Tensor:
    """Return the observation (7, N)."""
    places_4N = torch.cat((place_2N, target_2N)).div_(_SIZE)
    return torch.cat((places_4N, unit_2N, (distance_N / _FARTHEST)[None]))


def _in_the_box(place: Sequence[float]) -> tuple[float, float]:
    x, y = (float(c) for c in place)
    if not (0.0 <= x <= _SIZE and 0.0 <= y <= _SIZE):
        raise ValueError(f"Turtleworld: ({x:g}, {y:g}) is outside the box, which has x and y from 0 to {_SIZE:g}")
    return x, y
