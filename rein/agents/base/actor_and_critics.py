"""Base classes of off-policy agents with an actor, K critics and target critics, and their losses.

Losses of a single algorithm are in its module.

Shapes: K critics, N environments, B rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from rein.agents.base.learner import Batch, Loss
from rein.agents.base.replay_agent import ReplayAgent
from rein.networks.encoder import Features, NetworkFactory
from rein.networks.heads import check_bounded
from rein.ops.values import td_target
from rein.options import option
from rein.replay.replay import Sample
from rein.schedules import Schedule
from rein.types import Tree

if TYPE_CHECKING:
    from gymnasium import spaces

    from rein.networks.off_policy import Critics

Networks = TypeVar("Networks", bound=nn.Module)


def critic_loss(
    critics: Critics, batch: Batch, coefficients: None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute half the mean squared error, summed over critics.

    The metrics contain the mean absolute error of each row as `td_error` (B,).
    """
    return squared_errors(critics(batch.features, batch.action), batch, report)


def squared_errors(value_KB: Tensor, batch: Batch, report: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute `critic_loss` from the values of the recorded actions."""
    error_KB = value_KB - batch.target
    square_KB = error_KB.square()
    loss = (square_KB if batch.weight is None else square_KB * batch.weight).sum() * (0.5 / batch.size)
    with torch.no_grad():
        metrics = {"td_error": error_KB.abs().mean(0)}
        if report:
            metrics |= {"critic_loss": loss.detach(), "action_value": value_KB.mean()}
    return loss, metrics


class ActorAndCritics(ReplayAgent):
    """Base class of off-policy agents with an actor, K critics and target critics.

    Subclasses build their networks with `actor_and_critics`, and implement `act` and `update_from`.
    """

    actor: NetworkFactory | None = option(default=None)
    critic: NetworkFactory | None = option(default=None)
    actor_learning_rate: float | Schedule | None = option(default=None)
    layer_norm: bool = option(default=False, help="apply layer normalization before each activation of the critics")

    def actor_and_critics(
        self,
        kind: Callable[..., Networks],
        generator: torch.Generator,
        actor_loss: Loss,
        *,
        critic_loss: Loss = critic_loss,
        **more: Any,
    ) -> Networks:
        """Build networks of a class of `rein.networks.off_policy`, and the learners of the actor and the critics."""
        shape = self.options("critics", "hidden", "activation", "encoder", "actor", "critic")
        shape |= self.options("normalize_observation", "scale_images")
        if self.layer_norm:
            from rein.networks.normalized_stacks import LayerNormStack  # most runs do not need it

            more = {"critic_stack": LayerNormStack, **more}
        networks: Any = kind(self.observation_space, self.action_space, generator, **shape, **more)
        self._critics = self.add_learner("critics", networks.critics, critic_loss)
        self._actor = self.add_learner("actor", networks.actor, actor_loss)
        if hasattr(networks, "target_critics"):
            self.follow(networks.target_critics, networks.critics)
        return networks

    def recorded(self, sample: Sample, weight_B: Tensor | None) -> tuple[Batch, Features]:
        """Return the preprocessed observations and actions of a sample, and its next observations."""
        preprocess = self.networks.preprocess
        batch = Batch(preprocess(sample.observation), self.network_action(sample.action), weight=weight_B)  # type: ignore[attr-defined]
        return batch, preprocess(sample.next_observation)

    def target(self, sample: Sample, next_value_B: Tensor) -> Tensor:
        """Return the one-step targets (B,) of the critics, given the values of the next observations."""
        return td_target(sample.reward, sample.terminated, next_value_B, sample.discount)

    def step_critics(
        self, sample: Sample, batch: Batch, next_value_B: Tensor, report: bool
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Update the critics toward one-step targets. Returns metrics and the errors (B,)."""
        batch = batch._replace(target=self.target(sample, next_value_B))
        metrics = self._critics.step(batch, None, report=report)
        return metrics, metrics.pop("td_error")


class ContinuousActions:
    """Mixin of agents whose actions are a Box with finite bounds. The actor is stochastic, unless `act` is replaced."""

    @classmethod
    def check_spaces(cls, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        """Raise ValueError unless the action space is a Box of floating-point numbers with finite bounds."""
        check_bounded(action_space)

    def network_action(self, action: Tensor) -> Tensor:
        """Return recorded actions scaled to [-1, 1], (B, A)."""
        return self.networks.scale.from_action(action)  # type: ignore[attr-defined]

    def act(self, observation: Tree, explore: bool | float) -> Tensor:
        """Return the tanh of the mean, scaled to the bounds, or a sample if `explore` is set; (N, ...)."""
        return self.networks.act(observation, self.generator if explore else None)  # type: ignore[attr-defined]
