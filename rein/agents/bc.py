"""Behaviour cloning.

Shapes: N environments, B rows of a batch, A numbers or number of actions.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.agents.base.imitation import ImitationBatch, cross_entropy_loss, likelihood_loss, squared_action_loss
from rein.agents.base.policies import ActorPolicy, ValuePolicy
from rein.agents.base.replay_agent import ReplayAgent, ReplayOptions
from rein.networks.continuous import Actor, Scale
from rein.networks.encoder import Encoder, stem_for
from rein.networks.q_network import QNetwork
from rein.ops.exploration import boltzmann
from rein.ops.random import generator
from rein.replay.replay import Sample
from rein.types import Tree


class BC(ReplayAgent[nn.Module]):
    """Behaviour cloning (Pomerleau 1988): to do what was done, whatever came of it.

        L = mean -log pi(a | s),  or without `stochastic`, of continuous actions, mean |mu(s) - a|^2

    Discrete actions have a probability each, continuous ones a squashed Gaussian. It learns from a filled replay, by
    `rein.training.offline.offline_loop`; rewards, ends and next observations are not looked at.

    Args:
        observation_space: of one environment; flattened to a vector, but an image where actions are Discrete.
        action_space: Discrete, or a Box with finite bounds.
        stochastic: whether continuous actions have a distribution, or else are imitated by their squared error.
        **options: those of `rein.agents.base.replay_agent.ReplayOptions`; here learning_starts is 0 by default.

    Raises ValueError for spaces that do not fit and numbers out of their range, TypeError for unknown options.
    """

    reports = ("actor_loss", "grad_norm")
    values = False

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        stochastic: bool = True,
        **options: Unpack[ReplayOptions],
    ) -> None:
        self._discrete = isinstance(action_space, spaces.Discrete)
        own = {"stochastic": stochastic}
        super().__init__(observation_space, action_space, own, {"learning_starts": 0, **options})

    def _make_networks(self, drawn: torch.Generator) -> nn.Module:
        options, given = self._options, (self.observation_space, self.action_space, drawn)
        if self._discrete:
            names = ("hidden", "activation", "stem", "normalize_observation", "scale_images")
            shape = {name: options[name] for name in names}
            networks: nn.Module = QNetwork(*given, **shape, layer_norm=False)
            self._learner = self.learner("actor", networks, cross_entropy_loss)
            return networks
        networks = _ActorAlone(*given, options)
        loss = likelihood_loss if options["stochastic"] else squared_action_loss
        self._learner = self.learner("actor", networks.actor, loss)
        return networks

    def _explore(self, observation: Tree) -> Tensor:
        networks: Any = self.networks
        x = networks.encoder(observation)
        if self._discrete:
            return _sampled(networks(x), self._generator) + int(self.action_space.start)  # type: ignore[attr-defined]  # Discrete's
        if self._options["stochastic"]:
            return networks.scale.to_action(networks.actor.distribution(x).sample(self._generator).tanh())
        return networks.scale.to_action(networks.actor.action(x))

    def _update(self, sample: Sample, weight_B: Tensor | None, report: bool) -> tuple[dict[str, Tensor], Tensor]:
        networks: Any = self.networks
        if self._discrete:
            action = sample.action.long() - int(self.action_space.start)  # type: ignore[attr-defined]  # Discrete
        else:
            action = networks.scale.from_action(sample.action)
        batch = ImitationBatch(networks.encoder(sample.observation), action, weight_B)
        metrics = self._learner.step(batch, None, report=report)
        return metrics, metrics.pop("error")

    def policy(self, deterministic: bool = True) -> ActorPolicy | ValuePolicy:
        """Does the likeliest, or the middle of the distribution; otherwise samples under a generator of its own."""
        own = None if deterministic else generator(self._root, "policy", device=self.device)
        networks: Any = self.networks
        if self._discrete:
            first = int(self.action_space.start)  # type: ignore[attr-defined]  # Discrete
            return ValuePolicy(networks, first, _sampled, own, self.device)
        return ActorPolicy(networks, own, self.device)


class _ActorAlone(nn.Module):
    """What of `rein.networks.continuous.ContinuousNetworks` acts."""

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        drawn: torch.Generator,
        options: Any,
    ) -> None:
        super().__init__()
        self.scale = Scale(action_space, drawn.device)
        normalize, scale_images = options["normalize_observation"], options["scale_images"]
        scaling = {"scale_images": scale_images, "own_stem": options["stem"] is not None}
        self.encoder = Encoder(observation_space, drawn.device, normalize=normalize, **scaling)
        if self.encoder.images and options["stem"] is None:
            raise ValueError(
                f"there are images in {observation_space}: actions of this space are cloned from vectors alone, "
                "or by a stem="
            )
        shape = self.encoder.features, self.scale.actions, tuple(options["hidden"]), options["activation"], drawn
        stem = stem_for(observation_space, drawn, options["stem"])
        self.actor = Actor(*shape, stochastic=options["stochastic"], stem=stem)


def _sampled(logits_NA: Tensor, drawing: torch.Generator) -> Tensor:
    return boltzmann(logits_NA, 1.0, drawing)
