"""Twin delayed deep deterministic policy gradient."""

from __future__ import annotations

from typing import Any

import torch

from rein.agents.base.deterministic import DeterministicAgent
from rein.options import at_least_one, not_negative, option


class TD3(DeterministicAgent):
    """Twin delayed DDPG (Fujimoto et al. 2018): the smaller of two critics, target noise, delayed actor updates.

    Target of the critics::

        y = r + gamma * min_k Q'_k(s', clamp(mu'(s') + clamp(noise, -c, c), -1, 1)),  or r at a terminal state

    Observations are flattened. The entry `critic_observation` of a Dict observation is an input of the critics only.
    The action space must be a Box with finite bounds.
    """

    critics: int = option(default=2)
    target_noise: float = option(
        default=0.2, check=not_negative, fixed=True, help="standard deviation of the noise on target actions"
    )
    target_noise_clip: float = option(
        default=0.5, check=not_negative, fixed=True, help="clip range of the noise on target actions"
    )
    actor_frequency: int = option(default=2)
    target_frequency: int | None = option(  # type: ignore[assignment]
        default=None,
        check=at_least_one,
        fixed=True,
        help="updates per step of the target networks; None for actor_frequency",
    )

    def build(self, generator: torch.Generator) -> Any:
        """Build the replay, the networks and their learners."""
        if self.target_frequency is None:
            vars(self)["target_frequency"] = self.actor_frequency
        super().build(generator)
