"""Proximal policy optimization.

Shapes: T steps of a rollout, N environments, M minibatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Unpack

import torch
from gymnasium import spaces
from torch import Tensor

from rein.agents.base.learner import mean_metrics
from rein.agents.base.on_policy import OnPolicyAgent, OnPolicyOptions, check_enough
from rein.agents.base.options import Adjustable, Scheduled, above_zero, at_least_one, finite, flag, fraction
from rein.agents.base.policy_loss import Batch, Coefficients
from rein.agents.base.segments import Segments, Sequences, Trace
from rein.ops.returns import gae, smooth_rewards
from rein.ops.statistics import minibatches as cut
from rein.ops.statistics import standardize
from rein.replay.rollout import Rollout
from rein.schedules import Schedule


def _segments(agent: object, name: str, value: Any) -> Segments | None:
    if not isinstance(value, Segments | None):
        raise ValueError(f"{type(agent).__name__}({name}={value!r}): give Segments(...), or None")
    return value


class PPO(OnPolicyAgent):
    """Proximal policy optimization (Schulman et al. 2017) over N environments at once.

    Every `rollout_steps` vector steps it learns for `epochs` passes over what it saw, in `minibatches` a pass: of rows,
    or, where a `core` makes it recurrent, of whole sequences from their true initial carry. Advantages are generalized
    ones (Schulman et al. 2016): a truncated episode bootstraps from its final observation, a terminated one does not,
    and nothing reaches over a reset.

    Args:
        observation_space: of one environment; an image goes through convolutions, all else is flattened to a vector.
        action_space: Discrete, or a MultiDiscrete or a floating-point Box of one dimension.
        gae_lambda: how far advantages look, from one step (0) to the episode's end (1).
        epochs: passes over the rollout.
        minibatches: updates in a pass.
        clip: how far from 1 a ratio of probabilities still counts; a number or a schedule.
        value_clip: how far the value may move from what it was, in its own units; None for as far as it wants.
        target_kl: end the round after a pass whose mean approx_kl was larger; None for never.
        normalize_advantage: standardize advantages within each minibatch.
        reward_smoothing: how much of the next reward, already smooth, is added to each before anything is learned from
            it, from nothing (0) to all (1); see `rein.ops.returns.smooth_rewards`.
        segments: learn from whole sequences of environments, drawn by their advantages, instead of from shuffled rows.
        options: those of every on-policy agent, `rein.agents.base.on_policy.OnPolicyOptions`: learning_rate,
            gamma, rollout_steps, hidden, core, seed, device and others.
    """

    gae_lambda: Adjustable = Adjustable(fraction)
    epochs: Adjustable = Adjustable(at_least_one)
    minibatches: Adjustable = Adjustable(at_least_one)
    clip: Scheduled = Scheduled()
    value_clip: Adjustable = Adjustable(above_zero)
    target_kl: Adjustable = Adjustable(finite)
    normalize_advantage: Adjustable = Adjustable(flag)
    reward_smoothing: Adjustable = Adjustable(fraction)
    segments: Adjustable = Adjustable(_segments)

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        gae_lambda: float = 0.95,
        epochs: int = 4,
        minibatches: int = 4,
        clip: float | Schedule = 0.2,
        value_clip: float | None = None,
        target_kl: float | None = None,
        normalize_advantage: bool = True,
        reward_smoothing: float = 0.0,
        segments: Segments | None = None,
        **options: Unpack[OnPolicyOptions],
    ) -> None:
        super().__init__(observation_space, action_space, **options)
        self.gae_lambda, self.epochs, self.minibatches = gae_lambda, epochs, minibatches
        self.clip, self.value_clip, self.target_kl = clip, value_clip, target_kl
        self.normalize_advantage = normalize_advantage
        self.reward_smoothing, self.segments = reward_smoothing, segments

    def _learn(self, rollout: Rollout) -> dict[str, Tensor]:
        ends = rollout["terminated"], rollout["truncated"]
        value_TN, valid_TN = rollout["value"], rollout.valid()
        settings = {"gamma": self.gamma, "lambda_": self.gae_lambda}
        reward_TN, next_value_TN = self.rewards(), self.next_values(value_TN)
        if self.reward_smoothing:
            reward_TN = smooth_rewards(reward_TN, *ends, valid_TN, decay=self.reward_smoothing)
        advantage_TN = gae(reward_TN, *ends, value_TN, next_value_TN, valid_TN, **settings)
        batch = self.batch(advantage_TN, advantage_TN + value_TN, valid_TN)
        sequences = None
        if self.segments is not None:
            trace = Trace(reward_TN, *ends, next_value_TN, valid_TN)
            sequences = Sequences(self.segments, self.networks, batch, trace, **settings)
        seen: list[dict[str, Tensor]] = []
        for last in range(self.epochs - 1, -1, -1):
            seen = self._pass(batch, sequences, report=not last or self.target_kl is not None)
            if self.target_kl is not None:
                approx_kl = torch.stack([metrics["approx_kl"] for metrics in seen]).mean()
                if float(approx_kl) > self.target_kl:  # the one host round trip of a pass, for those who ask for it
                    break
        return mean_metrics(seen, batch)

    def _coefficients(self) -> Coefficients:
        weights = self._options["value_coefficient"], self.entropy_coefficient(**self.counts)
        return Coefficients(self.clip(**self.counts), *weights, self.value_clip)

    def _pass(self, batch: Batch, sequences: Sequences | None, report: bool) -> list[dict[str, Tensor]]:
        """One update for each minibatch; the metrics of each."""
        coefficients, seen, parts = self._coefficients(), [], self._shuffled(batch)
        if sequences is not None:
            parts = sequences.minibatches(self.minibatches, self._generator, self.counts)
        for part, weight in parts:
            if self.normalize_advantage:
                check_enough(self, part.advantage)
                part = part._replace(advantage=standardize(part.advantage, part.valid))
            if weight is not None:
                part = part._replace(advantage=part.advantage * weight)
            seen.append(self._learner.step(part, coefficients, report=report))
            self.updates += 1
        return seen

    def _shuffled(self, batch: Batch) -> Iterator[tuple[Batch, Tensor | None]]:
        """Minibatches of all rows, or sequences, in random order."""
        order_MB = cut(batch.size, self.minibatches, self._generator)
        shuffled = batch.rows(order_MB.flatten())  # one gather for a pass: minibatches are slices of it
        size = order_MB.shape[1]
        for start in range(0, self.minibatches * size, size):
            yield shuffled.rows(slice(start, start + size)), None
