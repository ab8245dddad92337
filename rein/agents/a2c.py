"""Advantage actor-critic."""

from __future__ import annotations

from torch import Tensor

from rein.agents.base.learner import mean_metrics
from rein.agents.base.on_policy import OnPolicyAgent, check_enough
from rein.ops.returns import gae
from rein.ops.statistics import standardize
from rein.options import option
from rein.replay.rollout import Rollout
from rein.schedules import Schedule


class A2C(OnPolicyAgent):
    """Synchronous advantage actor-critic (Mnih et al. 2016): one policy-gradient update per rollout.

    Supports the same spaces, action masks and critic observations as PPO. The paper uses the optimizer
    `functools.partial(torch.optim.RMSprop, alpha=0.99, eps=1e-5)`.
    """

    learning_rate: float | Schedule = option(default=7e-4)
    rollout_steps: int = option(default=5)
    gae_lambda: float = option(default=1.0)
    normalize_advantage: bool = option(default=False)

    def update(self, rollout: Rollout) -> dict[str, Tensor]:
        """Update the networks once with a full rollout and return the metrics."""
        ends = rollout["terminated"], rollout["truncated"]
        value_TN, valid_TN = rollout["value"], rollout.valid()
        settings = {"gamma": self.gamma, "lambda_": self.gae_lambda}
        advantage_TN = gae(self.rewards(), *ends, value_TN, self.next_values(value_TN), valid_TN, **settings)
        target_TN = advantage_TN + value_TN
        if self.normalize_advantage:
            check_enough(self, advantage_TN)
            advantage_TN = standardize(advantage_TN, valid_TN)
        batch = self.batch(advantage_TN, target_TN, valid_TN)
        coefficients = self.coefficients()
        self.updates += 1
        metrics = self._learner.step(batch, coefficients)
        return mean_metrics([metrics], batch)
