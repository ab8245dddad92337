"""Base class of DDPG and TD3: deterministic actor, K critics, target networks.

Shapes: K critics, N environments, B rows of a batch, A action dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rein.agents.base.exploration import ActionNoise, GaussianNoise, as_noise
from rein.agents.base.learner import Batch
from rein.agents.base.losses import critic_loss
from rein.agents.base.options import option
from rein.agents.base.replay_agent import ContinuousActions, ReplayAgent
from rein.networks.encoder import Features, NetworkFactory
from rein.networks.off_policy import Actor, DeterministicNetworks
from rein.ops.values import td_target
from rein.replay.replay import Sample
from rein.schedules import Schedule
from rein.types import Tree


class DeterministicAgent(ContinuousActions, ReplayAgent):
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
    actor: NetworkFactory | None = option(default=None)
    critic: NetworkFactory | None = option(default=None)
    actor_learning_rate: float | Schedule | None = option(default=None)

    reports = ("critic_loss", "action_value", "actor_loss", "noise", "grad_norm")
    critics: Any = 1
    target_noise: Any = 0.0
    target_noise_clip: Any = 0.0

    def build_networks(self, generator: torch.Generator) -> DeterministicNetworks:
        """Build the actor, critics, target networks and their learners."""
        shape = self.options(
            "critics", "hidden", "activation", "normalize_observation", "scale_images", "encoder", "actor", "critic"
        )
        networks = DeterministicNetworks(self.observation_space, self.action_space, generator, **shape)
        self._critics = self.add_learner("critics", networks.critics, critic_loss)
        self._actor = self.add_learner("actor", networks.actor, deterministic_actor_loss)
        self.follow(networks.target_critics, networks.critics)
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
        networks = self.networks
        features, next_features = networks.preprocess(sample.observation), networks.preprocess(sample.next_observation)
        action_BA = networks.scale.from_action(sample.action)
        batch = Batch(features, action_BA, target=self._target(sample, next_features), weight=weight_B)
        metrics = self._critics.step(batch, None, report=report)
        error_B = metrics.pop("td_error")
        if (self.updates + 1) % self.actor_frequency == 0:
            metrics = self._actor.step(Batch(features), (networks.critics,), report=report) | metrics
        if report:
            metrics["noise"] = torch.tensor(self.exploration(**self.counts), dtype=torch.float32, device=self.device)
        return metrics, error_B

    @torch.no_grad()
    def _target(self, sample: Sample, next_features: Features) -> Tensor:
        networks, spread, clip = self.networks, self.target_noise, self.target_noise_clip
        action_BA = networks.target_actor.action(next_features)
        if spread:
            noise_BA = torch.randn(action_BA.shape, generator=self.generator, dtype=torch.float32, device=self.device)
            action_BA = action_BA.add_(noise_BA.mul_(spread).clamp_(-clip, clip)).clamp_(-1.0, 1.0)
        value_B = networks.target_critics(next_features, action_BA).amin(0)
        return td_target(sample.reward, sample.terminated, value_B, sample.discount)


def deterministic_actor_loss(
    actor: Actor, batch: Batch, coefficients: Any, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute -mean Q_1(s, mu(s)).

    Sources: Silver et al. 2014, equation 9; Lillicrap et al. 2016, equation 6.
    """
    (critics,) = coefficients
    loss = -critics.frozen(batch.features, actor.action(batch.features), 1).mean()
    return loss, {"actor_loss": loss.detach()} if report else {}
