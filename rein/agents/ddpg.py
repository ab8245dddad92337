"""Deep deterministic policy gradient."""

from __future__ import annotations

from rein.agents.base.deterministic import DeterministicAgent
from rein.agents.base.exploration import ActionNoise, OrnsteinUhlenbeck
from rein.agents.base.options import option


class DDPG(DeterministicAgent):
    """Deep deterministic policy gradient (Lillicrap et al. 2016): the actor follows the gradient of one critic.

        y = r + gamma * Q'(s', mu'(s')),  or r at a terminal state

    Observations are flattened; wrappers in `rein.envs.wrappers.observations` stack the last few. Actions: a Box with
    finite bounds.
    """

    noise: ActionNoise | float = option(default=OrnsteinUhlenbeck())
