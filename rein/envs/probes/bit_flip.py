"""Bit-flip probe: tests whether an agent learns to reach goals that it never reaches by chance.

Shapes: S numbers of a state, N environments, P episode seeds, K bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.rendering import GREEN, WHITE, Frame, board
from rein.envs.probes.probe import Probe
from rein.ops.random import integers
from rein.types import TimeStep, Tree


class BitFlip(Probe):
    """Flip K bits, one in each step, until they equal the goal (Andrychowicz et al. 2017, section 3.1).

    Start and goal are drawn uniformly; if they are equal, bit 0 differs. Action k flips bit k. The reward is -1 in each
    step, and 0 in the step that reaches the goal. An episode terminates at the goal, and is truncated after
    `max_episode_steps`, K by default. A random policy does not reach the goal of many bits.

    The observation is a Dict of `observation` and `achieved_goal`, which are the bits, and `desired_goal`, each (N, K)
    float32. `time_step.info["is_success"]` is whether the goal was reached. Pass `compute_reward` and
    `compute_terminated` to `rein.replay.Hindsight`.
    """

    def __init__(
        self,
        num_envs: int = 16,
        bits: int = 20,
        *,
        seed: int | None = None,
        max_episode_steps: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if bits < 2:
            raise ValueError(f"BitFlip(bits={bits}): give 2 or more")
        self.bits = bits
        self.optimal_return = 1.0 - bits / 2.0 - 0.5**bits
        self.single_action_space = spaces.Discrete(bits)
        bit_space = spaces.Box(0.0, 1.0, (bits,), np.float32)
        names = "observation", "achieved_goal", "desired_goal"
        self.single_observation_space = spaces.Dict(dict.fromkeys(names, bit_space))
        limit = bits if max_episode_steps is None else max_episode_steps
        super().__init__(num_envs, seed=seed, max_episode_steps=limit, device=device)

    @staticmethod
    def compute_reward(achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        """Return 0 for achieved goals (R, K) that equal the desired goals, and -1 for the others; (R,)."""
        return (achieved_goal != desired_goal).any(-1) * -1.0

    @staticmethod
    def compute_terminated(achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        """Return whether achieved goals (R, K) equal the desired goals, (R,)."""
        return (achieved_goal == desired_goal).all(-1)

    def initial_state(self, seeds: Tensor) -> Tensor:
        """Return the bits and the goals (2 K, P) of episodes."""
        bit_K1 = torch.arange(self.bits, device=seeds.device)[:, None]
        start_KP = integers(seeds, bit_K1, 2)
        differs_KP = integers(seeds, self.bits + bit_K1, 2)
        differs_KP[0] |= ~differs_KP.any(0)
        return torch.cat([start_KP, start_KP ^ differs_KP]).to(torch.float32)

    def dynamics(self, state_SN: Tensor, action_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Flip a bit."""
        bits_KN, goal_KN = state_SN.chunk(2)
        flips_KN = torch.arange(self.bits, device=state_SN.device)[:, None] == action_N
        bits_KN = torch.where(flips_KN, 1.0 - bits_KN, bits_KN)
        reached_N = (bits_KN == goal_KN).all(0)
        return torch.cat([bits_KN, goal_KN]), reached_N.to(torch.float32) - 1.0, reached_N

    def draw(self, state: list[float]) -> Frame:
        """Draw a row of bits, with a 1 in green, and the goal below."""
        rows = state[: self.bits], state[self.bits :]
        return board([[GREEN if bit else WHITE for bit in row] for row in rows])

    def _observation(self) -> Any:
        return self._as_goals(super()._observation())

    def _step(self, action: Tree, mask: Tensor | None) -> TimeStep:
        time_step = super()._step(action, mask)
        return time_step._replace(
            observation=self._as_goals(time_step.observation),
            final_observation=self._as_goals(time_step.final_observation),
            info={"is_success": time_step.terminated},
        )

    def _as_goals(self, state_NS: Any) -> dict[str, Tensor]:
        bits_NK, goal_NK = (half.contiguous() for half in state_NS.chunk(2, 1))
        return {"observation": bits_NK, "achieved_goal": bits_NK.clone(), "desired_goal": goal_NK}
