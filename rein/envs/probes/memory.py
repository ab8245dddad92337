"""Memory probe: tests whether a recurrent agent remembers the first observation of an episode.

Shapes: S numbers of a state, N environments, K cues.
"""

from __future__ import annotations

import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.rendering import GREY, WHITE, YELLOW, Colour, Frame, board
from rein.envs.probes.probe import Probe, choices, chosen, one_hot

_COLOURS: tuple[Colour, ...] = ((208, 84, 78), (88, 175, 98), (150, 100, 190), (235, 140, 60), (70, 170, 190))


class Memory(Probe):
    """A cue is shown in the first step. After `delay` blank steps, repeating the cue as the action has reward 1.

    An episode has delay + 2 steps and terminates with the answer. Earlier actions have no effect. The observation
    (N, K + 1) is 1 at the cue in the first step, 1 in the last entry when the answer is due, and 0 elsewhere. Only the
    first observation contains the cue. With `continuous=True` the answer is an action in [-1, 1], divided into K equal
    intervals.

    The best return is 1. Without memory it is 1 / cues, also for an agent with `delay` + 1 stacked observations.

    Args:
        cues: number of cues.
        delay: blank steps between the cue and the answer.
        continuous: answer with an action in [-1, 1] instead of an integer.

    Raises ValueError for fewer than two cues or a negative delay.
    """

    optimal_return = 1.0

    def __init__(
        self,
        num_envs: int = 16,
        cues: int = 2,
        delay: int = 4,
        *,
        continuous: bool = False,
        seed: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if cues < 2 or delay < 0:
            raise ValueError(f"Memory(cues={cues}, delay={delay}): give 2 cues or more and a delay of 0 or more")
        self.cues = cues
        self.delay = delay
        self.continuous = continuous
        self.single_observation_space = spaces.Box(0.0, 1.0, (cues + 1,))
        self.single_action_space = choices(cues, continuous)
        self.initial_range = [(0.0, cues), (0.0, 0.0)]  # cue (integer part of the first) and time
        super().__init__(num_envs, seed=seed, device=device)

    @property
    def chance(self) -> float:
        """Best expected return without memory: 1 / cues."""
        return 1.0 / self.cues

    def dynamics(self, state_SN: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Advance the time; the action in the last step is the answer."""
        cue_N, time_N = state_SN
        due_N = time_N == self.delay + 1
        hit_N = due_N & (chosen(action, self.cues) == cue_N.long())
        state_SN = torch.stack([cue_N, time_N + 1.0])
        return state_SN, hit_N.to(torch.float32), due_N

    def observe(self, state_SN: Tensor) -> Tensor:
        """Return the cue in the first step, and a mark in the last one."""
        cue_N, time_N = state_SN
        place_N = torch.where(time_N == 0.0, cue_N, torch.where(time_N == self.delay + 1, self.cues, -1.0))
        return one_hot(place_N, self.cues + 1)

    def draw(self, state: list[float]) -> Frame:
        """Draw the cue, the delay and the answer."""
        cue, time = state
        colour = _COLOURS[int(cue) % len(_COLOURS)] if time == 0 else GREY
        return board([[colour, *[WHITE] * self.delay, YELLOW]], (0, time))
