"""Proximal policy optimization.

Shapes: T steps of a rollout, N environments, M minibatches.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from gymnasium import spaces
from torch import Tensor

from rein.buffers.on_policy import Rollout
from rein.learning.learner import mean_metrics
from rein.learning.on_policy import OnPolicyAgent
from rein.learning.options import OnPolicyOptions, as_json, at_least_one
from rein.learning.policy_loss import Batch, Coefficients
from rein.ops.indices import minibatches as cut
from rein.ops.returns import gae
from rein.ops.statistics import standardize
from rein.schedules import Schedule, as_schedule


class PPO(OnPolicyAgent):
    """Proximal policy optimization (Schulman et al. 2017) over N environments at once.

    Every `rollout_steps` vector steps it learns for `epochs` passes over what it saw, in `minibatches` a pass: of rows,
    or, where a `core` makes it recurrent, of whole sequences from their true initial carry. Advantages are generalized
    ones (Schulman et al. 2016): a truncated episode bootstraps from its final observation, a terminated one does not,
    and nothing reaches over a reset.

    Args:
        observation_space: of one environment; an image goes through convolutions, all else is flattened to a vector.
        action_space: Discrete, MultiDiscrete or a Box of one dimension.
        gae_lambda: how far advantages look, from one step (0) to the episode's end (1).
        epochs: passes over the rollout.
        minibatches: updates in a pass.
        clip: how far from 1 a ratio of probabilities still counts; a number or a schedule.
        value_clip: how far the value may move from what it was, in its own units; None for as far as it wants.
        target_kl: end the round after a pass whose mean approx_kl was larger; None for never.
        normalize_advantage: standardize advantages within each minibatch.
        options: those of every on-policy agent, `rein.learning.options.OnPolicyOptions`: learning_rate, gamma,
            rollout_steps, hidden, core, seed, device and others.
    """

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
        **options: Unpack[OnPolicyOptions],
    ) -> None:
        super().__init__(observation_space, action_space, **options)
        self.gae_lambda, self.clip = gae_lambda, as_schedule(clip)
        self.epochs, self.minibatches = (
            at_least_one(self, "epochs", epochs),
            at_least_one(self, "minibatches", minibatches),
        )
        self.value_clip, self.target_kl, self.normalize_advantage = value_clip, target_kl, normalize_advantage

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        names = ("gae_lambda", "epochs", "minibatches", "clip", "value_clip", "target_kl", "normalize_advantage")
        return {**super().config, **{name: as_json(getattr(self, name)) for name in names}}

    def _learn(self, rollout: Rollout) -> dict[str, Tensor]:
        ends = rollout["terminated"], rollout["truncated"]
        value_TN, valid_TN = rollout["value"], self.valid()
        settings = {"gamma": self.gamma, "lambda_": self.gae_lambda}
        advantage_TN = gae(self.rewards(), *ends, value_TN, self.next_values(value_TN), valid_TN, **settings)
        batch = self.batch(advantage_TN, advantage_TN + value_TN, valid_TN)
        seen: list[dict[str, Tensor]] = []
        for _ in range(self.epochs):
            one_pass = self._pass(batch, self._coefficients())
            seen += one_pass
            if self.target_kl is not None:
                approx_kl = torch.stack([metrics["approx_kl"] for metrics in one_pass]).mean()
                if float(approx_kl) > self.target_kl:  # the one host round trip of a pass, for those who ask for it
                    break
        return mean_metrics(seen, batch)

    def _coefficients(self) -> Coefficients:
        weights = self._options["value_coefficient"], self.entropy_coefficient(**self.counts)
        return Coefficients(self.clip(**self.counts), *weights, self.value_clip)

    def _pass(self, batch: Batch, coefficients: Coefficients) -> list[dict[str, Tensor]]:
        order_MB = cut(batch.size, self.minibatches, self._generator)
        shuffled = batch.rows(order_MB.flatten())  # one gather for a pass: minibatches are slices of it
        size = order_MB.shape[1]
        return [
            self._update(shuffled.rows(slice(m * size, (m + 1) * size)), coefficients) for m in range(self.minibatches)
        ]

    def _update(self, batch: Batch, coefficients: Coefficients) -> dict[str, Tensor]:
        if self.normalize_advantage:
            batch = batch._replace(advantage=standardize(batch.advantage, batch.valid))
        self.updates += 1
        return self._learner.step(batch, coefficients)
