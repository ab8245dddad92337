"""Actor-critic with V-trace correction for off-policy data.

Shapes: T steps of a rollout, N environments, M minibatches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rein.agents.base.learner import Batch, mean_metrics
from rein.agents.base.on_policy import OnPolicyAgent
from rein.ops.returns import vtrace
from rein.ops.statistics import minibatches
from rein.options import above_zero, in_unit_interval, option
from rein.replay.rollout import Rollout


class IMPALA(OnPolicyAgent):
    """V-trace actor-critic of IMPALA (Espeholt et al. 2018), in one process.

    Before each of `update_epochs` passes over a rollout, V-trace computes targets and advantages with the current
    values and log probabilities. They correct for the difference between the current policy and the policy that acted.
    Another program can act too, if it adds its `log_prob` to the extras of the transitions.

    With a recurrent `core`, bootstrap values are computed by the current networks from the carry recorded while acting.
    These values are exact in the first pass only.

    Supports the same spaces, action masks and critic observations as PPO.
    """

    vtrace_lambda: float = option(
        default=1.0, check=in_unit_interval, help="lambda of V-trace: 0 uses one-step TD errors, 1 the whole rollout"
    )
    rho_clip: float = option(
        default=1.0, check=above_zero, help="bound of the importance weights of TD errors; determines the fixed point"
    )
    c_clip: float = option(
        default=1.0,
        check=above_zero,
        help="bound of the importance weights of the trace; affects the speed of learning",
    )
    update_epochs: int = option(default=1)
    minibatches: int = option(default=1)

    def update(self, rollout: Rollout) -> dict[str, Tensor]:
        """Make `update_epochs` passes over a full rollout and return the mean metrics of all updates."""
        reward_TN, valid_TN = self.rewards(), rollout.valid()
        coefficients = self.coefficients()
        first: Batch | None = None
        metrics: list[dict[str, Tensor]] = []
        for _ in range(self.update_epochs):
            batch = self._corrected(rollout, reward_TN, valid_TN)
            first = first or batch
            for part in batch.shuffled(minibatches(batch.size, self.minibatches, self.generator)):
                self.updates += 1
                metrics.append(self._learner.step(part, coefficients))
        return mean_metrics(metrics, first)  # type: ignore[arg-type]  # update_epochs is at least 1

    @torch.no_grad()
    def _corrected(self, rollout: Rollout, reward_TN: Tensor, valid_TN: Tensor | None) -> Batch:
        """Return the rollout with targets and advantages for the current policy."""
        zeros_TN = torch.zeros_like(reward_TN)
        batch = self.batch(zeros_TN, zeros_TN, valid_TN)
        distribution, value = self.networks.distribution_and_value(batch.features, batch.carry, batch.reset)
        value_TN = value.view_as(reward_TN)
        corrected = vtrace(
            distribution.log_prob(batch.sample).view_as(reward_TN) - rollout["log_prob"],
            reward_TN,
            rollout["terminated"],
            rollout["truncated"],
            value_TN,
            self.next_values(value_TN),
            valid_TN,
            gamma=self.gamma,
            lambda_=self.vtrace_lambda,
            rho_clip=self.rho_clip,
            c_clip=self.c_clip,
        )
        return self.batch(corrected.advantage, corrected.target, valid_TN)._replace(value=value)
