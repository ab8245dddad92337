"""Deep deterministic policy gradient."""

from __future__ import annotations

from typing import Any, Unpack

from gymnasium import spaces

from rein.agents.base.deterministic import DeterministicAgent
from rein.agents.base.exploration import ActionNoise, OrnsteinUhlenbeck, as_noise
from rein.agents.base.replay_agent import ReplayOptions
from rein.schedules import Schedule


class DDPG(DeterministicAgent):
    """DDPG (Lillicrap et al. 2016): an actor that climbs the gradient of one critic.

        y = r + gamma * Q'(s', mu'(s')),  and r alone where s' is the end

    Actions are between -1 and 1 wherever noise is spoken of, whatever the bounds of the space are. To learn from the
    last few observations, wrap the environments in `rein.envs.wrappers.observations`.

    Args:
        observation_space: of one environment; flattened to a vector.
        action_space: a Box with finite bounds.
        noise: what it explores by, or the standard deviation of Gaussian noise; by default the paper's
            Ornstein-Uhlenbeck process.
        actor_frequency: updates of the critic between two of the actor.
        actor_learning_rate: of the actor; a number or a schedule, None for learning_rate.
        **options: those of `rein.agents.base.replay_agent.ReplayOptions`; here learning_rate is 1e-3 by default.

    Raises ValueError for spaces that do not fit and numbers out of their range, TypeError for unknown options.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        noise: ActionNoise | float | None = None,
        actor_frequency: int = 1,
        actor_learning_rate: float | Schedule | None = None,
        **options: Unpack[ReplayOptions],
    ) -> None:
        own = {
            "critics": 1,
            "noise": as_noise(OrnsteinUhlenbeck() if noise is None else noise),
            "target_noise": 0.0,
            "target_noise_clip": 0.0,
            "actor_frequency": actor_frequency,
            "actor_learning_rate": actor_learning_rate,
        }
        super().__init__(observation_space, action_space, own, {"learning_rate": 1e-3, **options})
