"""An actor-critic that corrects for data of an older policy.

Shapes: T steps of a rollout, N environments, M minibatches.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from gymnasium import spaces
from torch import Tensor

from rein.agents.base.learner import mean_metrics
from rein.agents.base.on_policy import OnPolicyAgent, OnPolicyOptions
from rein.agents.base.options import Adjustable, above_zero, at_least_one, fraction
from rein.agents.base.policy_loss import Batch, Coefficients
from rein.ops.returns import vtrace
from rein.ops.statistics import minibatches as cut
from rein.replay.rollout import Rollout


class IMPALA(OnPolicyAgent):
    """The V-trace actor-critic of IMPALA (Espeholt et al. 2018), in one process.

    Before each of `epochs` passes over a rollout, values and probabilities are looked up again, and V-trace makes
    targets and advantages of them for the policy as it is, from data of the policy as it was. That may be an older one,
    or anybody's who says its `log_prob` in the extras of its transitions; without one, an action counts as this
    policy's own. With a `core`, what comes after a rollout's last row, or after one that was cut off, is valued by the
    networks as they are from the memory that they had while acting: in the first pass exactly.

    Args:
        observation_space: of one environment; an image goes through convolutions, all else is flattened to a vector.
        action_space: Discrete, or a MultiDiscrete or a floating-point Box of one dimension.
        vtrace_lambda: how far corrections reach, from one step (0) to the rollout's end (1).
        rho_clip: bound of the ratios that weigh temporal differences: which policy is valued.
        c_clip: bound of the ratios that weigh what comes after: how fast it is.
        epochs: passes over the rollout.
        minibatches: updates in a pass.
        options: those of every on-policy agent, `rein.agents.base.on_policy.OnPolicyOptions`.
    """

    vtrace_lambda: Adjustable = Adjustable(fraction)
    rho_clip: Adjustable = Adjustable(above_zero)
    c_clip: Adjustable = Adjustable(above_zero)
    epochs: Adjustable = Adjustable(at_least_one)
    minibatches: Adjustable = Adjustable(at_least_one)

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        vtrace_lambda: float = 1.0,
        rho_clip: float = 1.0,
        c_clip: float = 1.0,
        epochs: int = 1,
        minibatches: int = 1,
        **options: Unpack[OnPolicyOptions],
    ) -> None:
        super().__init__(observation_space, action_space, **options)
        self.vtrace_lambda, self.rho_clip, self.c_clip = vtrace_lambda, rho_clip, c_clip
        self.epochs, self.minibatches = epochs, minibatches

    def _learn(self, rollout: Rollout) -> dict[str, Tensor]:
        reward_TN, valid_TN = self.rewards(), rollout.valid()
        weights = self._options["value_coefficient"], self.entropy_coefficient(**self.counts)
        first: Batch | None = None
        seen: list[dict[str, Tensor]] = []
        for _ in range(self.epochs):
            batch = self._corrected(rollout, reward_TN, valid_TN)
            first = first or batch
            for index_B in cut(batch.size, self.minibatches, self._generator):
                self.updates += 1
                seen.append(self._learner.step(batch.rows(index_B), Coefficients(None, *weights)))
        return mean_metrics(seen, first)  # type: ignore[arg-type]  # there is one epoch at least

    @torch.no_grad()
    def _corrected(self, rollout: Rollout, reward_TN: Tensor, valid_TN: Tensor | None) -> Batch:
        """The rollout as the policy that there is now sees it."""
        zeros_TN = torch.zeros_like(reward_TN)
        batch = self.batch(zeros_TN, zeros_TN, valid_TN)
        distribution, value = self.networks.look(batch.features, batch.carry, batch.reset)
        value_TN = value.view_as(reward_TN)
        found = vtrace(
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
        return self.batch(found.advantage, found.target, valid_TN)._replace(value=value)
