"""What agents have in common that follow the gradient of a critic with an actor without chance.

Shapes: K critics, N environments, B rows of a batch, A numbers of an action.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from rein.agents.base.critic_loss import (
    ActorBatch,
    CriticBatch,
    critic_gradient,
    critic_loss,
    deterministic_actor_gradient,
    deterministic_actor_loss,
    has_closed_form,
)
from rein.agents.base.exploration import ActionNoise
from rein.agents.base.options import Scheduled, at_least_one, not_negative, refuse_unknown
from rein.agents.base.policies import ActorPolicy
from rein.agents.base.replay_agent import REPLAY_DEFAULTS, ReplayAgent
from rein.networks.continuous import DeterministicNetworks
from rein.ops.backend import without_gradient
from rein.ops.random import generator
from rein.ops.values import td_target
from rein.replay.replay import Sample
from rein.types import Tree


class DeterministicAgent(ReplayAgent[DeterministicNetworks]):
    """A deterministic actor and K critics with targets; it explores by noise that is added to its actions.

    y    = r + gamma * min_k Q'_k(s', mu'(s') + clipped noise),  and r alone where s' is the end
    L_Q  = sum_k mean (Q_k(s, a) - y)^2 / 2
    L_mu = -mean Q_1(s, mu(s))                                   every `actor_frequency` updates, as the targets
    """

    reports = ("critic_loss", "action_value", "actor_loss", "noise")
    actor_learning_rate: Scheduled = Scheduled(optional=True)

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        own: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """`own` are the options that the subclass has by itself."""
        refuse_unknown(self, options, REPLAY_DEFAULTS)  # `own` ones may be settled for this agent
        whole_numbers = {name: at_least_one(self, name, own[name]) for name in ("critics", "actor_frequency")}
        own = {**own, **whole_numbers}
        for name in ("target_noise", "target_noise_clip"):
            not_negative(self, name, own[name])
        super().__init__(observation_space, action_space, own, options)

    def _make_networks(self, drawn: torch.Generator) -> DeterministicNetworks:
        options = self._options
        networks = DeterministicNetworks(
            self.observation_space,
            self.action_space,
            drawn,
            critics=options["critics"],
            hidden=options["hidden"],
            activation=options["activation"],
            normalize_observation=options["normalize_observation"],
            scale_images=options["scale_images"],
            stem=options["stem"],
        )
        written = has_closed_form(networks.critics)
        self._critics = self.learner("critics", networks.critics, critic_loss, critic_gradient if written else None)
        climb = deterministic_actor_gradient if written else None
        self._actor = self.learner("actor", networks.actor, deterministic_actor_loss, climb)
        self.follow(networks.target_critics, networks.critics)
        self.follow(networks.target_actor, networks.actor)
        self._noise: ActionNoise = copy.deepcopy(options["noise"])  # one of its own, at its beginning
        self.exploration = self._noise.amount
        return networks

    @property
    def noise(self) -> ActionNoise:
        """What it explores by; to assign it raises AttributeError, for a schedule is what changes it in mid-run."""
        return self._noise

    @noise.setter
    def noise(self, noise: ActionNoise | float) -> None:
        raise AttributeError(
            f"{type(self).__name__}.noise is read when the agent is built, and would change nothing now: "
            "give noise= to its constructor, as a schedule where it is to change"
        )

    def _explore(self, observation: Tree) -> Tensor:
        networks = self.networks
        action_NA = networks.actor.action(networks.encoder(observation))
        noise_NA = self.noise(action_NA, self._generator, **self.counts)
        return networks.scale.to_action((action_NA + noise_NA).clamp_(-1.0, 1.0))

    def _forget(self, mask_N: Tensor) -> None:
        self.noise.reset(mask_N)

    def _update(self, sample: Sample, weight_B: Tensor | None, report: bool) -> tuple[dict[str, Tensor], Tensor]:
        networks = self.networks
        features, next_features = networks.encoder(sample.observation), networks.encoder(sample.next_observation)
        action_BA = networks.scale.from_action(sample.action)
        batch = CriticBatch(features, action_BA, self._target(sample, next_features), weight_B)
        metrics = self._critics.step(batch, None, report=report)
        error_B = metrics.pop("td_error")
        if (self.updates + 1) % self._options["actor_frequency"] == 0:
            metrics |= self._actor.step(ActorBatch(features, action_BA), (networks.critics,), report=report)
        if report:
            metrics["noise"] = torch.tensor(self.noise.amount(**self.counts), dtype=torch.float32, device=self.device)
        return metrics, error_B

    @without_gradient
    def _target(self, sample: Sample, next_features: Tensor) -> Tensor:
        networks, spread, clip = self.networks, self._options["target_noise"], self._options["target_noise_clip"]
        action_BA = networks.target_actor.action(next_features)
        if spread:
            noise_BA = torch.randn(
                action_BA.shape, generator=self._generator, dtype=torch.float32, device=self.device
            ).mul_(spread)
            action_BA = action_BA.add_(noise_BA.clamp_(-clip, clip)).clamp_(-1.0, 1.0)
        value_B = networks.target_critics(next_features, action_BA).amin(0)
        return td_target(sample.reward, sample.terminated, value_B, sample.discount)

    def policy(self, deterministic: bool = True) -> ActorPolicy:
        """Acts by the actor as it is at any time; with Gaussian noise of its own where not `deterministic`."""
        own = None if deterministic else generator(self._root, "policy", device=self.device)
        return ActorPolicy(self.networks, own, self.device, lambda: self.noise.amount(**self.counts))

    def state_dict(self) -> dict[str, Any]:
        """What every agent with a replay has, and the noise."""
        return {**super().state_dict(), "noise": self.noise.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError for that of an agent with other options."""
        super().load_state_dict(state)
        self.noise.load_state_dict(state["noise"])
