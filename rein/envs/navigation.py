"""Navigation: discs that must reach their targets without collisions. A multi-agent task.

Shapes: W worlds, A agents of a world, J = A other agents, K neighbours in an observation, P episode seeds, C cells.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.contract import checked_count
from rein.envs.base.rendering import BLUE, DARK, GREEN, LINE, PALE, RED, YELLOW, Canvas, Frame
from rein.envs.base.worlds import SimulatedWorlds
from rein.ops.random import uniform

_RADIUS, _REACH = 0.2, 0.15  # of a disc, and distance to the target at which an agent has arrived
_SPEED, _LAG, _DT = 1.0, 0.3, 0.1  # top speed per axis, share of the wanted change of velocity per step, time of a step
_COLLISION, _ARRIVAL, _COST = 0.5, 1.0, 0.01  # penalty per step in contact, reward of the first arrival, cost of a step
_JITTER = 0.25  # largest distance of a start or target from the centre of its cell, per axis
_MARGIN, _UNIT = 0.1, 60  # around the arena, and pixels per unit
_COLOURS = (BLUE, RED, GREEN, YELLOW, DARK)


class Navigation(SimulatedWorlds):
    """W worlds of A discs in a square arena. Each disc must reach its target without touching another disc.

    Starts and targets are drawn in different cells of a grid with cells of side 1, so that no discs overlap at first.
    The action (2,), clipped to [-1, 1], is the wanted velocity. A step takes 0.1 units of time::

        v' = v + 0.3 (action - v)
        x' = x + 0.1 v', inside the arena; discs of radius 0.2 that overlap are pushed apart
        reward = decrease of the distance to the target - 0.01
                 - 0.5 if the disc touched another disc
                 + 1 at the first arrival, within 0.15 of the target

    By default, an agent stays in the world after its arrival, and the episode terminates for all agents when all are
    at their targets at the same time. With `early_leave=True`, an agent that arrives is terminated and leaves the
    world. Episodes are truncated after `max_episode_steps` (None: never).

    The observation is float32: velocity (2), vector to the target (2), and for each of the `neighbours` nearest other
    agents the relative position (2) and velocity (2), nearest first. Vectors to agents that have left are 0.

    Args:
        worlds: number of worlds W.
        agents: number of agents of a world, A.
        neighbours: number of other agents in an observation, at most A - 1.
        early_leave: whether an agent leaves its world when it arrives.

    Raises ValueError for options out of range.
    """

    single_action_space = spaces.Box(-1.0, 1.0, (2,))
    initial_range = ()
    render_fps = 20  # frames per second of videos

    def __init__(
        self,
        worlds: int = 16,
        agents: int = 4,
        *,
        neighbours: int = 2,
        early_leave: bool = False,
        seed: int | None = None,
        max_episode_steps: int | None = 100,
        device: torch.device | str = "cpu",
    ) -> None:
        self.agents, self.early_leave = checked_count(f"Navigation(agents={agents!r})", agents), early_leave
        if not isinstance(neighbours, int) or neighbours < 0:
            raise ValueError(f"Navigation(neighbours={neighbours!r}): give an integer, 0 or more")
        self.neighbours = min(neighbours, agents - 1)
        self._cells = math.ceil(math.sqrt(3 * agents))  # of a side; starts and targets take two thirds of all cells
        high = np.array([_SPEED, _SPEED, *[self._cells] * 2, *[self._cells, self._cells, 2, 2] * self.neighbours])
        self.single_observation_space = spaces.Box(-high.astype(np.float32), high.astype(np.float32))
        super().__init__(worlds, seed=seed, max_episode_steps=max_episode_steps, device=device)

    def initial_state(self, seeds: Tensor) -> Tensor:
        """Return positions, velocities, targets and arrivals (7, P, A): starts and targets in different cells."""
        count = self._cells**2
        index_C = torch.arange(count, device=seeds.device)
        cell_PB = uniform(seeds[:, None], index_C).argsort(dim=1, stable=True)[:, : 2 * self.agents]
        index_2B = count + torch.arange(4 * self.agents, device=seeds.device).view(2, 1, -1)
        jitter_2PB = (2.0 * uniform(seeds[:, None], index_2B) - 1.0) * _JITTER
        place_2PB = torch.stack([cell_PB % self._cells, cell_PB // self._cells]) + 0.5 + jitter_2PB
        start_2PA, target_2PA = place_2PB.split(self.agents, dim=2)
        rest_2PA = torch.zeros_like(start_2PA)
        return torch.cat([start_2PA, rest_2PA, target_2PA, rest_2PA[:1]])

    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Accelerate toward the wanted velocity for 0.1 units of time."""
        before_2WA, velocity_2WA, target_2WA, arrived_WA = state[:2], state[2:4], state[4:6], state[6] > 0.5
        wanted_2WA = action.clamp(-1.0, 1.0).movedim(-1, 0) * _SPEED
        velocity_2WA = velocity_2WA + _LAG * (wanted_2WA - velocity_2WA)
        place_2WA = before_2WA + _DT * velocity_2WA
        gap_2WAJ, distance_WAJ = self._others(place_2WA, arrived_WA)
        overlap_WAJ = (2.0 * _RADIUS - distance_WAJ).clamp(min=0.0)
        push_2WAJ = gap_2WAJ * (-0.5 * overlap_WAJ / distance_WAJ.clamp(min=1e-6))
        # a sum over the last dimension could depend on the number of worlds in its last bit
        place_2WA = place_2WA + functools.reduce(torch.add, push_2WAJ.unbind(-1))
        place_2WA = place_2WA.clamp(_RADIUS, self._cells - _RADIUS)
        distance_WA = _length(target_2WA - place_2WA)
        reached_WA = distance_WA <= _REACH
        reward_WA = _length(target_2WA - before_2WA) - distance_WA - _COST
        reward_WA = reward_WA - _COLLISION * (overlap_WAJ > 0.0).any(-1)
        reward_WA = reward_WA + _ARRIVAL * (reached_WA & ~arrived_WA)
        terminated_WA = reached_WA if self.early_leave else reached_WA.all(1, keepdim=True).expand_as(reached_WA)
        arrived_WA = arrived_WA | reached_WA
        moved = torch.cat([place_2WA, velocity_2WA, target_2WA, arrived_WA[None].to(torch.float32)])
        return moved, reward_WA, terminated_WA.clone()

    def observe(self, state: Tensor) -> Tensor:
        """Return velocity, vector to the target, and relative positions and velocities of the nearest agents."""
        place_2WA, velocity_2WA, target_2WA = state[:2], state[2:4], state[4:6]
        seen = [velocity_2WA, target_2WA - place_2WA]
        if self.neighbours:
            gap_2WAJ, distance_WAJ = self._others(place_2WA, state[6] > 0.5)
            nearest_WAK = distance_WAJ.argsort(dim=-1, stable=True)[..., : self.neighbours]
            there_WAK = distance_WAJ.gather(-1, nearest_WAK).isfinite()
            change_2WAJ = velocity_2WA[:, :, None, :] - velocity_2WA[:, :, :, None]
            both_4WAJ = torch.cat([gap_2WAJ, change_2WAJ])
            near_4WAK = both_4WAJ.gather(-1, nearest_WAK.expand(4, *nearest_WAK.shape))
            near_K4WA = torch.where(there_WAK, near_4WAK, 0.0).movedim(-1, 0)
            seen += near_K4WA.unbind()
        return torch.cat(seen)

    def draw(self, state: list[list[float]]) -> Frame:  # type: ignore[override]
        """Draw discs, velocities and targets. An agent that has left is not drawn."""
        canvas = Canvas((-_MARGIN, self._cells + _MARGIN), (-_MARGIN, self._cells + _MARGIN), _UNIT)
        corners = [(0.0, 0.0), (self._cells, 0.0), (self._cells, self._cells), (0.0, self._cells)]
        for start, end in zip(corners, corners[1:] + corners[:1], strict=True):
            canvas.line(start, end, 0.04, LINE)
        for agent, (x, y, v_x, v_y, t_x, t_y, arrived) in enumerate(zip(*state, strict=True)):
            colour = _COLOURS[agent % len(_COLOURS)]
            canvas.disc((t_x, t_y), _REACH, colour)
            canvas.disc((t_x, t_y), _REACH - 0.05, (255, 255, 255))
            if not (self.early_leave and arrived > 0.5):
                canvas.disc((x, y), _RADIUS, colour)
                canvas.line((x, y), (x + 0.3 * v_x, y + 0.3 * v_y), 0.05, PALE)
        return canvas.frame

    def _others(self, place_2WA: Tensor, arrived_WA: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors (2, W, A, J) from agents to others, and distances (W, A, J).

        Distances are infinite to the agent itself, and from and to agents that have left.
        """
        gap_2WAJ = place_2WA[:, :, None, :] - place_2WA[:, :, :, None]
        absent_WAJ = torch.eye(self.agents, dtype=torch.bool, device=place_2WA.device)
        if self.early_leave:
            absent_WAJ = absent_WAJ | arrived_WA[:, :, None] | arrived_WA[:, None, :]
        return gap_2WAJ, _length(gap_2WAJ).masked_fill(absent_WAJ, torch.inf)


def _length(vector: Tensor) -> Tensor:
    """Return the lengths of vectors (2, ...)."""
    x, y = vector
    return (x.square() + y.square()).sqrt()
