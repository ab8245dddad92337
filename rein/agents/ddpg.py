"""Deep deterministic policy gradient."""

from __future__ import annotations

from rein.agents.base.action_noise import ActionNoise, OrnsteinUhlenbeck
from rein.agents.base.deterministic import DeterministicAgent
from rein.options import option


class DDPG(DeterministicAgent):
    """Deep deterministic policy gradient (Lillicrap et al. 2016): the actor follows the gradient of one critic.

    Target of the critic::

        y = r + gamma * Q'(s', mu'(s')),  or r at a terminal state

    Observations are flattened. The entry `critic_observation` of a Dict observation is an input of the critic only. To
    stack the last observations, use a wrapper of `rein.envs.wrappers.observations`. The action space must be a Box with
    finite bounds.
    """

    noise: ActionNoise | float = option(default=OrnsteinUhlenbeck())
