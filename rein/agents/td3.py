"""Twin delayed deep deterministic policy gradient."""

from __future__ import annotations

from typing import Any, Unpack

from gymnasium import spaces

from rein.agents.base.deterministic import DeterministicAgent
from rein.agents.base.exploration import ActionNoise, GaussianNoise, as_noise
from rein.agents.base.replay_agent import ReplayOptions
from rein.schedules import Schedule


class TD3(DeterministicAgent):
    """TD3 (Fujimoto et al. 2018): DDPG that believes the lesser of two critics, and moves its actor less often.

        y = r + gamma * min_k Q'_k(s', clamp(mu'(s') + clamp(noise, -c, c), -1, 1)),  and r alone where s' is the end

    Actions are between -1 and 1 wherever noise is spoken of, whatever the bounds of the space are.

    Args:
        observation_space: of one environment; flattened to a vector.
        action_space: a Box with finite bounds.
        critics: K, drawn independently of each other.
        noise: what it explores by, or the standard deviation of Gaussian noise, 0.1 by default.
        target_noise: standard deviation of the noise on the target's actions.
        target_noise_clip: c, the largest of that noise.
        actor_frequency: updates of the critics between two of the actor and of all targets.
        actor_learning_rate: of the actor; a number or a schedule, None for learning_rate.
        **options: those of `rein.agents.base.replay_agent.ReplayOptions`; here learning_rate is 1e-3 and
            target_frequency what actor_frequency is, by default.

    Raises ValueError for spaces that do not fit and numbers out of their range, TypeError for unknown options.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        critics: int = 2,
        noise: ActionNoise | float | None = None,
        target_noise: float = 0.2,
        target_noise_clip: float = 0.5,
        actor_frequency: int = 2,
        actor_learning_rate: float | Schedule | None = None,
        **options: Unpack[ReplayOptions],
    ) -> None:
        own = {
            "critics": critics,
            "noise": as_noise(GaussianNoise(0.1) if noise is None else noise),
            "target_noise": target_noise,
            "target_noise_clip": target_noise_clip,
            "actor_frequency": actor_frequency,
            "actor_learning_rate": actor_learning_rate,
        }
        options = {"learning_rate": 1e-3, "target_frequency": actor_frequency, **options}
        super().__init__(observation_space, action_space, own, options)
