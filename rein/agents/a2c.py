"""Advantage actor-critic."""

from __future__ import annotations

from torch import Tensor

from rein.agents.base.learner import Batch, mean_metrics
from rein.agents.base.on_policy import Coefficients, OnPolicyAgent, Trace, check_enough
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
        batch, _ = self.learning_batch(rollout, self.rewards())
        coefficients = self.coefficients()
        self.updates += 1
        return mean_metrics([self.learn_from(batch, coefficients)], batch)

    def learning_batch(self, rollout: Rollout, reward_TN: Tensor) -> tuple[Batch, Trace]:
        """Return the rollout with advantages and targets, and the columns from which they were computed."""
        trace = self.trace(rollout, reward_TN)
        advantage_TN = gae(*trace, gamma=self.gamma, lambda_=self.gae_lambda)
        target_TN = advantage_TN + trace.value
        if self.normalize_advantage:
            check_enough(self, advantage_TN)
            advantage_TN = standardize(advantage_TN, trace.valid)
        return self.batch(advantage_TN, target_TN, trace.valid), trace

    def learn_from(self, batch: Batch, coefficients: Coefficients, *, report: bool = True) -> dict[str, Tensor]:
        """Make one optimizer step and return its metrics."""
        return self._learner.step(batch, coefficients, report=report)
