"""Proximal policy optimization.

Shapes: T steps of a rollout, N environments, M minibatches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rein.agents.base.learner import Batch, mean_metrics
from rein.agents.base.on_policy import Coefficients, OnPolicyAgent, Trace, check_enough
from rein.ops.returns import gae, smooth_rewards
from rein.ops.statistics import minibatches, standardize
from rein.options import above_zero, finite, in_unit_interval, not_negative, option
from rein.replay.rollout import Rollout
from rein.schedules import Schedule

if TYPE_CHECKING:
    from rein.agents.base.segments import SegmentSampler


def _segments(value: Any) -> Any:
    if value is None:
        return None
    from rein.agents.base.segments import PrioritizedSegments

    if not isinstance(value, PrioritizedSegments):
        raise ValueError("give PrioritizedSegments(...), or None")
    return value


class PPO(OnPolicyAgent):
    """Proximal policy optimization (Schulman et al. 2017).

    After every `rollout_steps` vector steps, PPO makes `update_epochs` passes over the rollout with `minibatches`
    updates each. With a recurrent `core`, a minibatch consists of whole sequences, each with its recorded initial
    carry. Advantages are generalized advantage estimates (Schulman et al. 2016): a truncated episode bootstraps from
    its final observation, a terminated episode does not.

    Images are processed by a CNN, other observations are flattened. Every action space of tensors is supported:
    Discrete, MultiDiscrete, MultiBinary, Box, and Dict and Tuple of these. Integers of a Box are categorical actions,
    other numbers are Gaussian. The components of a Dict or Tuple are independent given the observation. The entry
    `action_mask` of a Dict observation masks invalid actions, and the entry `critic_observation` is an input of the
    critic only.
    """

    gae_lambda: float = option(default=0.95)
    update_epochs: int = option(default=4)
    minibatches: int = option(default=4)
    clip: float | Schedule = option(
        default=0.2, check=not_negative, help="clip range of the probability ratio; a number or a schedule"
    )
    value_clip: float | None = option(
        default=None, check=above_zero, help="clip range of the value, in units of the return; None for no clipping"
    )
    target_kl: float | None = option(
        default=None, check=finite, help="skip the remaining passes once the mean approx_kl of a pass exceeds this"
    )
    normalize_advantage: bool = option(default=True)
    reward_smoothing: float = option(
        default=0.0,
        check=in_unit_interval,
        help="fraction of the next smoothed reward that is added to each reward, see rein.ops.returns.smooth_rewards",
    )
    segments: Any = option(
        default=None,
        check=_segments,
        help="PrioritizedSegments(...) to sample whole sequences by their advantages instead of shuffling rows",
    )

    def check_num_envs(self, num_envs: int) -> None:
        """Raise ValueError if a rollout has fewer rows than minibatches."""
        if self.minibatches > (rows := self.rollout_steps * num_envs):
            raise ValueError(
                f"PPO(minibatches={self.minibatches}): a rollout of {self.rollout_steps} steps has {rows} rows, fewer "
                "than minibatches; use more environments, a longer rollout or fewer minibatches"
            )

    def update(self, rollout: Rollout) -> dict[str, Tensor]:
        """Make `update_epochs` passes over a full rollout and return the mean metrics of the last pass."""
        batch, trace = self.learning_batch(rollout, self.rewards())
        sequences = None
        if self.segments is not None:
            from rein.agents.base.segments import SegmentSampler

            settings = {"gamma": self.gamma, "lambda_": self.gae_lambda}
            sequences = SegmentSampler(self.segments, self.networks, batch, trace, **settings)
        metrics: list[dict[str, Tensor]] = []
        for passes_left in range(self.update_epochs - 1, -1, -1):
            metrics = self._pass(batch, sequences, report=not passes_left or self.target_kl is not None)
            if self.target_kl is not None:
                approx_kl = torch.stack([each["approx_kl"] for each in metrics]).mean()
                if float(approx_kl) > self.target_kl:
                    break
        return mean_metrics(metrics, batch)

    def learning_batch(self, rollout: Rollout, reward_TN: Tensor) -> tuple[Batch, Trace]:
        """Return the rollout with advantages and targets, and the columns from which they were computed."""
        trace = self.trace(rollout, reward_TN)
        if self.reward_smoothing:
            ends = trace.terminated, trace.truncated
            trace = trace._replace(reward=smooth_rewards(reward_TN, *ends, trace.valid, decay=self.reward_smoothing))
        advantage_TN = gae(*trace, gamma=self.gamma, lambda_=self.gae_lambda)
        return self.batch(advantage_TN, advantage_TN + trace.value, trace.valid), trace

    def learn_from(self, part: Batch, coefficients: Coefficients, *, report: bool = True) -> dict[str, Tensor]:
        """Make one optimizer step with a minibatch and return its metrics."""
        return self._learner.step(self._standardized(part), coefficients, report=report)

    def _standardized(self, part: Batch) -> Batch:
        if not self.normalize_advantage:
            return part
        check_enough(self, part.advantage)
        return part._replace(advantage=standardize(part.advantage, part.valid))

    def coefficients(self) -> Coefficients:
        """Return the current clip ranges, and weights of the terms of the loss."""
        counts = self.counts
        entropy = self.entropy_coefficient(**counts)  # type: ignore[operator]
        return Coefficients(self.clip(**counts), self.value_coefficient, entropy, self.value_clip)  # type: ignore[operator]

    def _pass(self, batch: Batch, sequences: SegmentSampler | None, report: bool) -> list[dict[str, Tensor]]:
        """Update once per minibatch and return the metrics of each update."""
        coefficients = self.coefficients()
        metrics: list[dict[str, Tensor]] = []
        if sequences is None:
            for part in batch.shuffled(minibatches(batch.size, self.minibatches, self.generator)):
                metrics.append(self.learn_from(part, coefficients, report=report))
                self.updates += 1
            return metrics
        for part, weight in sequences.minibatches(self.minibatches, self.generator, self.counts):
            part = self._standardized(part)
            part = part._replace(advantage=part.advantage * weight)
            metrics.append(self._learner.step(part, coefficients, report=report))
            self.updates += 1
        return metrics
