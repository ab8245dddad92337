"""Advantage actor-critic."""

from __future__ import annotations

from typing import Any, Unpack

from gymnasium import spaces
from torch import Tensor

from rein.agents.base.learner import mean_metrics
from rein.agents.base.on_policy import OnPolicyAgent, OnPolicyOptions, check_enough
from rein.agents.base.options import Adjustable, flag, fraction
from rein.agents.base.policy_loss import Coefficients
from rein.ops.returns import gae
from rein.ops.statistics import standardize
from rein.replay.rollout import Rollout

PAPER: OnPolicyOptions = {"learning_rate": 7e-4, "rollout_steps": 5}


class A2C(OnPolicyAgent):
    """Advantage actor-critic (Mnih et al. 2016, in step): one update of the plain policy gradient for every rollout.

    Args:
        observation_space: of one environment; an image goes through convolutions, all else is flattened to a vector.
        action_space: Discrete, or a MultiDiscrete or a floating-point Box of one dimension.
        gae_lambda: how far advantages look; 1, as in the paper, to the rollout's end.
        normalize_advantage: standardize the advantages of a rollout.
        options: those of every on-policy agent, `rein.agents.base.on_policy.OnPolicyOptions`. Here learning_rate
            is 7e-4 and rollout_steps 5 by default. The paper's optimizer is
            `functools.partial(torch.optim.RMSprop, alpha=0.99, eps=1e-5)`; the default is Adam.
    """

    gae_lambda: Adjustable = Adjustable(fraction)
    normalize_advantage: Adjustable = Adjustable(flag)

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        gae_lambda: float = 1.0,
        normalize_advantage: bool = False,
        **options: Unpack[OnPolicyOptions],
    ) -> None:
        super().__init__(observation_space, action_space, **{**PAPER, **options})
        self.gae_lambda, self.normalize_advantage = gae_lambda, normalize_advantage

    def _learn(self, rollout: Rollout) -> dict[str, Tensor]:
        ends = rollout["terminated"], rollout["truncated"]
        value_TN, valid_TN = rollout["value"], rollout.valid()
        settings = {"gamma": self.gamma, "lambda_": self.gae_lambda}
        advantage_TN = gae(self.rewards(), *ends, value_TN, self.next_values(value_TN), valid_TN, **settings)
        target_TN = advantage_TN + value_TN
        if self.normalize_advantage:
            check_enough(self, advantage_TN)
            advantage_TN = standardize(advantage_TN, valid_TN)
        batch = self.batch(advantage_TN, target_TN, valid_TN)
        weights = self._options["value_coefficient"], self.entropy_coefficient(**self.counts)
        self.updates += 1
        metrics = self._learner.step(batch, Coefficients(None, *weights))
        return mean_metrics([metrics], batch)
