"""Distributional deep Q-learning from replay.

Shapes: B rows of a batch, F features of an observation, Q quantile levels, S samples of a target, A actions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rein.agents.base.learner import Batch
from rein.agents.base.value_agent import ValueAgent
from rein.networks.encoder import inputs_of
from rein.networks.q_networks import OnlineAndTarget, QuantileNetwork, even_levels
from rein.ops.losses import quantile_huber
from rein.ops.values import td_target
from rein.options import above_zero, at_least_one, flag, in_unit_interval, option
from rein.replay.replay import Sample


def quantile_loss(
    networks: QuantileNetwork, batch: Batch, kappa: float, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the mean of `rein.ops.losses.quantile_huber`.

    The metrics contain the mean absolute error of each row as `td_error` (B,).

    Source: Dabney et al. 2018 (IQN), equation 3.
    """
    quantile_BQA = networks.quantiles(batch.features, batch.level)
    action_BQ1 = batch.action.view(-1, 1, 1).expand(-1, quantile_BQA.shape[1], -1)
    quantile_BQ = quantile_BQA.gather(2, action_BQ1).squeeze(2)
    loss_B = quantile_huber(quantile_BQ, batch.level, batch.target, kappa)
    loss = (loss_B if batch.weight is None else loss_B * batch.weight).mean()
    quantile_BQ = quantile_BQ.detach()
    metrics = {"td_error": (batch.target.unsqueeze(1) - quantile_BQ.unsqueeze(2)).abs().mean((1, 2))}
    if report:
        metrics |= {"value_loss": loss.detach(), "action_value": quantile_BQ.mean()}
    return loss, metrics


def _risk(value: Any) -> float:
    if not (value := in_unit_interval(value)) > 0.0:
        raise ValueError("give a number above 0 and at most 1")
    return value


class IQN(ValueAgent):
    """Implicit quantile networks (Dabney et al. 2018).

    Samples of the target::

        y_j = r + gamma * Z'(s', a*, l_j),  or r at a terminal state
        a*  = argmax_a mean_k Z'(s', a, l_k)

    Z(s, a, l) is the quantile of the return at level l. It is learned at `quantiles` levels from `target_quantiles`
    samples y_j. All levels are drawn uniformly from (0, 1) for each row. Action values are means over
    `action_quantiles` evenly spaced levels. With `double`, Z selects a* instead of Z'.

    The target network Z' moves toward Z by `tau` every `target_frequency` updates. Priorities are the mean absolute
    error over all pairs of a quantile and a sample.

    Images are processed by a CNN, other observations are flattened. The action space must be Discrete. Action masks are
    supported: only valid actions are taken, and maxima are over the valid actions of the next observation.
    """

    double: bool = option(default=False)
    huber: float = option(  # type: ignore[assignment]
        default=1.0,
        check=above_zero,
        fixed=True,
        help="error at which the Huber loss becomes linear; quantiles closer than this are blurred",
    )
    quantiles: int = option(default=8, check=at_least_one, fixed=True, help="levels learned per row")
    target_quantiles: int = option(default=8, check=at_least_one, fixed=True, help="samples of the target per row")
    action_quantiles: int = option(
        default=32, check=at_least_one, fixed=True, help="levels averaged to compute an action value"
    )
    drawn_levels: bool = option(
        default=True, check=flag, fixed=True, help="draw levels at random; False spaces them evenly, as in QR-DQN"
    )
    risk: float = option(
        default=1.0,
        check=_risk,
        fixed=True,
        help="fraction of lowest returns that action selection considers; below 1 is risk-averse",
    )
    cosines: int = option(default=64, check=at_least_one, fixed=True, help="cosine features per level")

    def build_networks(self, generator: torch.Generator) -> OnlineAndTarget[QuantileNetwork]:
        """Build the quantile network, its target network and the learner."""
        shape = self.options("hidden", "activation", "encoder", "normalize_observation", "scale_images")
        shape |= self.options("cosines", "action_quantiles", "risk")
        network = QuantileNetwork(self.observation_space, self.action_space, generator, **shape)
        return self.online_and_target(network, "quantiles", quantile_loss)

    @torch.no_grad()
    def batch(self, sample: Sample, weight_B: Tensor | None = None) -> Batch:
        """Return a batch with levels, targets and importance weights for a sample of the replay."""
        online, target = self.networks.online, self.networks.target
        next_features = online.preprocess(sample.next_observation)
        best_B = (online if self.double else target)(next_features).argmax(1)
        level_BS = self._levels(len(best_B), self.target_quantiles)
        next_BSA = target.quantiles(inputs_of(next_features).features, level_BS)
        next_BS = next_BSA.gather(2, best_B.view(-1, 1, 1).expand(-1, next_BSA.shape[1], -1)).squeeze(2)
        gamma = sample.discount
        discount = gamma.unsqueeze(1) if isinstance(gamma, Tensor) else gamma
        return Batch(
            features=inputs_of(online.preprocess(sample.observation)).features,
            action=self.network_action(sample.action),
            level=self._levels(len(best_B), self.quantiles),
            target=td_target(sample.reward.unsqueeze(1), sample.terminated.unsqueeze(1), next_BS, discount),
            weight=weight_B,
        )

    def _levels(self, rows: int, count: int) -> Tensor:
        """Return levels (B, Q) in (0, 1)."""
        if not self.drawn_levels:
            return even_levels(count, self.device).expand(rows, -1)  # type: ignore[arg-type]
        return torch.rand((rows, count), generator=self.generator, dtype=torch.float32, device=self.device)
