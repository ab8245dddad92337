"""Deep Q-learning of the distribution of returns, from replay.

Shapes: B rows of a batch, F features, Q levels, S samples of a target, A actions.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import torch
from gymnasium import spaces
from torch import Tensor

from rein.agents.base.critic_loss import take_rows
from rein.agents.base.exploration import Amount
from rein.agents.base.options import at_least_one
from rein.agents.base.replay_agent import ReplayOptions
from rein.agents.base.value_agent import DEFAULTS, EPSILON, ValueAgent
from rein.networks.quantile_network import QuantileNetwork, even_levels
from rein.networks.target import OnlineAndTarget
from rein.ops.backend import without_gradient
from rein.ops.losses import quantile_huber
from rein.ops.values import td_target
from rein.replay.replay import Sample


class QuantileBatch(NamedTuple):
    """Rows that quantiles are learned from."""

    features: Tensor  # (B, F) what the encoder made of the observations
    action: Tensor  # (B,) int64, counted from 0
    level: Tensor  # (B, Q) at which quantiles are learned
    target: Tensor  # (B, S) samples of the return
    weight: Tensor | None  # (B,) of each row; None for all alike

    valid = None  # all of them

    @property
    def value(self) -> Tensor:
        """A number for each row."""
        return self.target[:, 0]

    @property
    def size(self) -> int:
        """How many rows there are."""
        return len(self.target)

    rows = take_rows


def quantile_loss(
    networks: QuantileNetwork, batch: QuantileBatch, kappa: float, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean of `rein.ops.losses.quantile_huber` over rows; their mean absolute errors as `td_error` (B,).

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


class IQN(ValueAgent[OnlineAndTarget[QuantileNetwork]]):
    """Implicit quantile networks (Dabney et al. 2018).

        y_j = r + gamma * Z'_tau_j(s', a*),  r alone at an end       a* = argmax_a mean_k Z'_tau_k(s', a)

    Z_tau(s, a) is the quantile tau of the return, which is learned at `quantiles` levels from `target_quantiles`
    samples y_j, both uniform on (0, 1) and drawn anew for each row; Z' are targets, which follow Z by `tau` every
    `target_frequency` updates. The values that are acted by are means over `action_quantiles` levels, evenly spaced: of
    one alone they are medians. With `double` it is Z that says what a* is. Priorities are the mean absolute error over
    all pairs of a quantile and a sample.

    Args:
        observation_space: of one environment; an image goes through convolutions, all else is flattened to a vector.
        action_space: Discrete.
        epsilon: probability of a random action; a number, a schedule or a `Plateau` of `rein.agents.base.exploration`.
        temperature: with it actions are drawn by softmax(Q / temperature), and not epsilon-greedily.
        double: choose the next action by the networks, and let the targets say what it is worth.
        quantiles: levels at which a row is learned.
        target_quantiles: levels at which its target is sampled.
        action_quantiles: levels whose mean is the value of an action.
        drawn_levels: draw the first two; without it they are evenly spaced too, as in QR-DQN.
        risk: which part of the returns, from the lowest on, counts when an action is chosen; below 1 it is averse.
        cosines: features of a level.
        huber: where the loss turns from quadratic to linear; quantiles closer to one another than that are blurred.
        frame_stack: how many frames an observation stacks, in its first axis or else its last; the replay then keeps
            each frame once.
        **options: those of `rein.agents.base.replay_agent.ReplayOptions`; here learning_rate is 1e-3, batch_size 128,
            hidden (128, 128) and max_grad_norm 10 by default.

    Raises ValueError for spaces that do not fit and numbers out of their range, TypeError for unknown options.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        epsilon: float | Amount = EPSILON,
        temperature: float | Amount | None = None,
        double: bool = False,
        quantiles: int = 8,
        target_quantiles: int = 8,
        action_quantiles: int = 32,
        drawn_levels: bool = True,
        risk: float = 1.0,
        cosines: int = 64,
        huber: float = 1.0,
        frame_stack: int | None = None,
        **options: Unpack[ReplayOptions],
    ) -> None:
        own = {
            "epsilon": epsilon,
            "temperature": temperature,
            "double": double,
            "quantiles": quantiles,
            "target_quantiles": target_quantiles,
            "action_quantiles": action_quantiles,
            "drawn_levels": drawn_levels,
            "risk": risk,
            "cosines": cosines,
            "huber": huber,
            "frame_stack": frame_stack,
        }
        super().__init__(observation_space, action_space, own, {**DEFAULTS, **options})

    def _check(self, options: dict[str, Any]) -> None:
        super()._check(options)
        for name in ("quantiles", "target_quantiles", "action_quantiles", "cosines"):
            options[name] = at_least_one(self, name, options[name])
        if options["huber"] is None:
            raise ValueError("IQN(huber=None): quantiles need a number above 0; a small one keeps them apart")
        if not 0.0 < options["risk"] <= 1.0:
            raise ValueError(f"IQN(risk={options['risk']}): give a number above 0, up to 1 for all returns")

    def _make_networks(self, drawn: torch.Generator) -> OnlineAndTarget[QuantileNetwork]:
        names = ("hidden", "activation", "stem", "cosines", "action_quantiles", "risk")
        names += ("normalize_observation", "scale_images")
        shape = {name: self._options[name] for name in names}
        networks = OnlineAndTarget(QuantileNetwork(self.observation_space, self.action_space, drawn, **shape))
        self._learner = self.learner("quantiles", networks.online, quantile_loss)
        self.follow(networks.target, networks.online)
        return networks

    @without_gradient
    def batch(self, sample: Sample, weight_B: Tensor | None = None) -> QuantileBatch:
        """What is learned from a sample, at levels that are drawn here."""
        online, target = self.networks.online, self.networks.target
        next_features = online.encoder(sample.next_observation)
        best_B = (online if self._options["double"] else target)(next_features).argmax(1)
        level_BS = self._levels(len(best_B), self._options["target_quantiles"])
        next_BSA = target.quantiles(next_features, level_BS)
        next_BS = next_BSA.gather(2, best_B.view(-1, 1, 1).expand(-1, next_BSA.shape[1], -1)).squeeze(2)
        gamma = sample.discount
        discount = gamma.unsqueeze(1) if isinstance(gamma, Tensor) else gamma
        return QuantileBatch(
            features=online.encoder(sample.observation),
            action=self._taken(sample),
            level=self._levels(len(best_B), self._options["quantiles"]),
            target=td_target(sample.reward.unsqueeze(1), sample.terminated.unsqueeze(1), next_BS, discount),
            weight=weight_B,
        )

    def _levels(self, rows: int, count: int) -> Tensor:
        """(B, Q) in (0, 1)."""
        if not self._options["drawn_levels"]:
            return even_levels(count, self.device).expand(rows, -1)
        return torch.rand((rows, count), generator=self._generator, dtype=torch.float32, device=self.device)
