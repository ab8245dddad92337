"""Base class of DDPG and TD3: deterministic actor, K critics, target networks.

Shapes: K critics, N environments, B rows of a batch, A action dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rein.agents.base.action_noise import ActionNoise, GaussianNoise, as_noise
from rein.agents.base.actor_and_critics import ActorAndCritics, ContinuousActions
from rein.agents.base.learner import Batch
from rein.networks.encoder import Features
from rein.networks.off_policy import Actor, DeterministicNetworks
from rein.options import option
from rein.replay.replay import Sample
from rein.schedules import Schedule
from rein.types import Tree


class DeterministicAgent(ContinuousActions, ActorAndCritics):
    """Deterministic actor and critics with target networks. Explores with action noise.

    Targets and losses::

        y    = r + gamma * min_k Q'_k(s', mu'(s') + clipped noise),  or r at a terminal state
        L_Q  = sum_k mean (Q_k(s, a) - y)^2 / 2
        L_mu = -mean Q_1(s, mu(s))

    The actor is updated every `actor_frequency` updates. Subclasses set the number of critics and the noise on target
    actions.
    """

    learning_rate: float | Schedule = option(default=1e-3)
    noise: ActionNoise | float = option(
        default=GaussianNoise(0.1),
        check=as_noise,
        fixed=True,
        help="exploration noise on actions scaled to [-1, 1]; a number is the standard deviation of Gaussian noise",
    )
    actor_frequency: int = option(default=1)

    reports = ("critic_loss", "action_value", "actor_loss", "noise", "grad_norm")
    critics: Any = 1
    target_noise: Any = 0.0
    target_noise_clip: Any = 0.0

    def build_networks(self, generator: torch.Generator) -> DeterministicNetworks:
        """Build the actor, critics, target networks and their learners."""
        networks = self.actor_and_critics(DeterministicNetworks, generator, deterministic_actor_loss)
        self.follow(networks.target_actor, networks.actor)
        self.exploration = self.noise.amount  # type: ignore[union-attr]
        return networks

    def act(self, observation: Tree, explore: bool | float) -> Tensor:
        """Return actions (N, ...). If `explore` is set, adds Gaussian noise with the current standard deviation."""
        networks = self.networks
        action_NA = networks.actor.action(networks.preprocess(observation))
        if explore:
            noise_NA = torch.randn(action_NA.shape, generator=self.generator, dtype=torch.float32, device=self.device)
            action_NA = action_NA.add_(noise_NA, alpha=self.exploration(**self.counts)).clamp_(-1.0, 1.0)
        return networks.scale.to_action(action_NA)

    def explore(self, observation: Tree) -> Tensor:
        """Return actions (N, ...) with exploration noise, which may be correlated over time."""
        networks = self.networks
        action_NA = networks.actor.action(networks.preprocess(observation))
        noise_NA = self.noise(action_NA, self.generator, **self.counts)  # type: ignore[operator]
        return networks.scale.to_action((action_NA + noise_NA).clamp_(-1.0, 1.0))

    def begin_episodes(self, mask_N: Tensor) -> None:
        """Reset the noise in the environments of `mask_N`."""
        self.noise.reset(mask_N)  # type: ignore[union-attr]

    def update_from(self, sample: Sample, weight_B: Tensor | None, report: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Update the critics with a batch, and the actor every `actor_frequency` updates."""
        batch, next_features = self.recorded(sample, weight_B)
        metrics, error_B = self.step_critics(sample, batch, self._next_values(next_features), report)
        if (self.updates + 1) % self.actor_frequency == 0:
            metrics = self._actor.step(Batch(batch.features), (self.networks.critics,), report=report) | metrics
        if report:
            metrics["noise"] = torch.tensor(self.exploration(**self.counts), dtype=torch.float32, device=self.device)
        return metrics, error_B

    @torch.no_grad()
    def _next_values(self, next_features: Features) -> Tensor:
        action_BA = self.networks.target_actor.action(next_features)
        if self.target_noise:
            noise_BA = torch.randn(action_BA.shape, generator=self.generator, dtype=torch.float32, device=self.device)
            noise_BA = noise_BA.mul_(self.target_noise).clamp_(-self.target_noise_clip, self.target_noise_clip)
            action_BA = action_BA.add_(noise_BA).clamp_(-1.0, 1.0)
        return self.networks.target_critics(next_features, action_BA).amin(0)


def deterministic_actor_loss(
    actor: Actor, batch: Batch, coefficients: Any, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute -mean Q_1(s, mu(s)).

    Sources: Silver et al. 2014, equation 9; Lillicrap et al. 2016, equation 6.
    """
    (critics,) = coefficients
    loss = -critics.frozen(batch.features, actor.action(batch.features), 1).mean()
    return loss, {"actor_loss": loss.detach()} if report else {}
