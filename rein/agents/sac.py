"""Soft actor-critic."""

from __future__ import annotations

from rein.agents.base.soft_actor_critic import ContinuousSoftActorCritic


class SAC(ContinuousSoftActorCritic):
    """Soft actor-critic (Haarnoja et al. 2018): maximizes expected return plus entropy.

    Targets and losses::

        y    = r + gamma * (min_k Q'_k(s', a') - alpha * log pi(a' | s')),  a' ~ pi(s'),  or r at a terminal state
        L_Q  = sum_k mean (Q_k(s, a) - y)^2 / 2
        L_pi = mean (alpha * log pi(a | s) - min_k Q_k(s, a)),  a ~ pi(s)
        L_a  = mean -log alpha * (log pi(a | s) + target_entropy)

    The target networks Q' move toward the K critics by `tau`. Critics receive actions scaled to [-1, 1]. Log
    probabilities refer to scaled actions too, so `target_entropy` does not depend on the bounds of the action space.

    Observations are flattened. The entry `critic_observation` of a Dict observation is an input of the critics only.
    The action space must be a Box with finite bounds.
    """
