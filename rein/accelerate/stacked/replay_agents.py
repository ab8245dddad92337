"""Agents of a population that learn from replays and are computed together.

Shapes: S learners, K critics, N environments of a learner, R = S * N rows, B rows of a batch of a learner, F features
of an observation, A action dimensions or Discrete actions.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from rein.accelerate.closed_form import has_closed_form
from rein.accelerate.compiled import captured
from rein.accelerate.products import fast_products, largest_matrix
from rein.accelerate.stacked.parameters import StackedLearner, StackedModules, can_stack
from rein.accelerate.stacked.stacked_agents import StackedAgents
from rein.accelerate.stacked.value_gradients import (
    Metrics,
    StackedMLPs,
    critic_gradient,
    deterministic_actor_gradient,
    soft_actions,
    soft_actor_gradient,
    td_gradient,
)
from rein.agents.ddpg import DDPG
from rein.agents.dqn import DQN
from rein.agents.population import joined
from rein.agents.sac import SAC
from rein.agents.td3 import TD3
from rein.ops.values import td_target
from rein.types import Tree

RATES = "learning_rate", "actor_learning_rate", "temperature_learning_rate"
EXPLORATION = "noise", "epsilon"
TEMPERATURES = "temperature", "initial_temperature", "target_entropy"
PRIORITIES = "priority_alpha", "priority_beta"


class Samples(NamedTuple):
    """Batches of all learners."""

    observation: Tensor  # (S, B, F), preprocessed
    action: Tensor  # (S, B, A) scaled to [-1, 1], or (S, B) counted from 0
    reward: Tensor  # (S, B)
    terminated: Tensor  # (S, B)
    next_observation: Tensor  # (S, B, F), preprocessed
    discount: Any  # number, or (S, 1) or (S, B)
    weight: Tensor | None  # (S, B) importance weights; None for equal weights
    noise: Tensor | None  # standard normal noise of the update


class StackedReplayAgents(StackedAgents):
    """Replay agents with plain networks. Each agent has its own replay and generator."""

    different = ("seed", *RATES, "max_grad_norm", "gamma", "tau", "capacity", *EXPLORATION, *TEMPERATURES, *PRIORITIES)

    learned: ClassVar[Mapping[str, str]]  # networks of each learner
    followed: ClassVar[Mapping[str, str]]  # target networks and the networks that they follow

    def __init__(self, agents: Sequence[Any]) -> None:
        super().__init__(agents)
        self.stack()

    def stack(self) -> None:
        """Stack the networks and the optimizers of the agents."""
        networks = [agent.networks for agent in self.agents]
        names = dict.fromkeys((*self.learned.values(), *self.followed))
        self.modules = {name: StackedModules([getattr(each, name) for each in networks]) for name in names}
        self.learners = {
            learner: StackedLearner(self.modules[name], [agent.learners[learner] for agent in self.agents])
            for learner, name in self.learned.items()
            if learner in self.first.learners
        }
        self.mlps = {name: StackedMLPs(part) for name, part in self.modules.items() if name != "temperature"}
        self.largest_matrix = largest_matrix(self.first.networks)
        self.tau = self.column([agent.tau for agent in self.agents])
        self._act = captured(self.outputs, self.device)
        self._step = captured(self._learned, self.device)

    @classmethod
    def supports(cls, agents: Sequence[Any]) -> bool:
        """Return whether agents of this class can be computed together."""
        first, learners = agents[0].networks, [agent.learners for agent in agents]
        return (
            super().supports(agents)
            and all(has_closed_form(getattr(first, name)) for name in cls.followed.values())
            and all(can_stack([each[name] for each in learners]) for name in learners[0])
        )

    @torch.no_grad()
    def select_action(self, observation: Tree) -> tuple[Tree, dict[str, Tree]]:
        """Return random actions (R, ...) before `learning_starts` env steps, and exploring actions after that."""
        if any(agent.env_steps < agent.learning_starts for agent in self.agents):
            return super().select_action(observation)
        action_SN = self.explore(self.features(observation))
        action = action_SN.flatten(0, 1)
        self._selected = action, {}, [(part, {}) for part in action_SN.unbind()]
        return action, {}

    @abc.abstractmethod
    def explore(self, x_SNF: Tensor) -> Tensor:
        """Return exploring actions (S, N, ...) for preprocessed observations. Calls `self._act` for `outputs`."""

    @abc.abstractmethod
    def outputs(self, x_SNF: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return the outputs of the networks that act, (S, N, ...)."""

    def column(self, numbers: Sequence[float]) -> float | Tensor:
        """Return the numbers of all agents as one number if they are equal, otherwise as (S, 1)."""
        if len({*numbers}) == 1:
            return numbers[0]
        return torch.tensor(numbers, dtype=torch.float32, device=self.device).unsqueeze(1)

    def optimize_model(self) -> dict[str, Tensor]:
        """Run a round of updates if one is due. Returns metrics (S,) of the last update."""
        updates, *others = {agent.due_updates for agent in self.agents}
        if not updates and not others:
            return {}
        alike = len({(agent.updates, agent.batch_size) for agent in self.agents}) == 1
        if others or not alike or not all(learner.together for learner in self.learners.values()):
            return super().optimize_model()
        if not all(part.connected for part in self.modules.values()):
            self.stack()
        for agent in self.agents:
            agent.begin_round(updates)
            agent.set_learning_rates()
        self.check_options()
        for learner in self.learners.values():
            learner.read_options()
        metrics: Metrics = {}
        for last in range(updates - 1, -1, -1):
            metrics = self.update(report=not last)
        for learner in self.learners.values():
            learner.mark()
        return metrics

    @torch.no_grad()
    def update(self, *, report: bool) -> Metrics:
        """Make one update of all agents. Returns metrics (S,)."""
        samples, weights = zip(*(agent.sample() for agent in self.agents), strict=True)
        updates, frequency = self.first.updates + 1, getattr(self.first, "actor_frequency", 1)
        due = updates % frequency == 0, updates % self.first.target_frequency == 0
        batch = self.stacked(samples, weights)
        with fast_products(batch.reward.shape[1] * self.largest_matrix):
            metrics, error_SB = self._step(batch, report, *due)
        if report:
            metrics |= self.amounts()
        for agent, sample, error_B in zip(self.agents, samples, error_SB, strict=True):
            if agent.prioritized:
                agent.replay.update(sample.row, error_B[: len(sample.row)])
            agent.updates += 1
        return metrics

    def _learned(self, batch: Samples, report: bool, actor: bool, follow: bool) -> tuple[Metrics, Tensor]:
        result = self.learn(batch, report, actor)
        for targets, networks in self.followed.items() if follow else ():
            if isinstance(self.tau, Tensor):
                self.modules[targets].flat.lerp_(self.modules[networks].flat, self.tau)
            else:
                self.modules[targets].follow(self.modules[networks], self.tau)
        return result

    @abc.abstractmethod
    def learn(self, batch: Samples, report: bool, actor: bool) -> tuple[Metrics, Tensor]:
        """Update the networks with a batch, including the actors if `actor` is set.

        Returns metrics (S,), which are empty without `report`, and absolute errors (S, B).
        """

    def stacked(self, samples: Sequence[Any], weights: Sequence[Tensor | None]) -> Samples:
        """Return the samples of all agents with the noise of their updates."""
        learners, discounts = len(samples), [sample.discount for sample in samples]
        names = "observation", "action", "reward", "terminated", "next_observation"
        columns = {name: joined([getattr(sample, name) for sample in samples]) for name in names}
        return Samples(
            self.features(columns["observation"]),
            self.first.network_action(columns["action"]).unflatten(0, (learners, -1)),
            columns["reward"].view(learners, -1),
            columns["terminated"].view(learners, -1),
            self.features(columns["next_observation"]),
            torch.stack(discounts) if isinstance(discounts[0], Tensor) else self.column(discounts),
            None if weights[0] is None else torch.stack(weights),  # type: ignore[arg-type]  # all or none
            self.noise(),
        )

    def noise(self) -> Tensor | None:
        """Draw the noise of an update from the generators of the agents."""
        return None

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal noise (S, *shape) from the generators of the agents."""
        noise = torch.empty(len(self.agents), *shape, dtype=torch.float32, device=self.device)
        for agent, row in zip(self.agents, noise.unbind(), strict=True):
            like: dict[str, Any] = {"dtype": torch.float32, "device": self.device, "out": row}
            torch.randn(shape, generator=agent.generator, **like)
        return noise

    def amounts(self) -> Metrics:
        """Return the current amounts of exploration (S,) to report."""
        return {}

    def exploration(self) -> Tensor:
        """Return the current values (S,) of the option that `exploration` of the agents refers to."""
        amounts = [agent.exploration(**agent.counts) for agent in self.agents]
        return torch.tensor(amounts, dtype=torch.float32, device=self.device)


class StackedActorsAndCritics(StackedReplayAgents):
    """Base class of agents with an actor, K critics and target critics."""

    def learn(self, batch: Samples, report: bool, actor: bool) -> tuple[Metrics, Tensor]:
        """Update critics, and actors if `actor` is set."""
        target_SB = td_target(batch.reward, batch.terminated, self.next_values(batch), batch.discount)
        x_SBI = torch.cat((batch.observation, batch.action), -1)
        settings = x_SBI, target_SB, batch.weight
        gradients, metrics, error_SKB = critic_gradient(self.mlps["critics"], *settings, report=report)
        norm_S = self.learners["critics"].step(gradients)
        if report:
            metrics |= {"grad_norm": norm_S, **self.parameters()}
        if actor:
            metrics |= self.learn_actor(batch, report)
        return metrics, error_SKB.abs().mean(1)

    def target_values(self, x_SBF: Tensor, action_SBA: Tensor) -> Tensor:
        """Return the smallest value (S, B) of the target critics."""
        return self.mlps["target_critics"].forward(torch.cat((x_SBF, action_SBA), -1)).output.squeeze(-1).amin(1)

    @abc.abstractmethod
    def next_values(self, batch: Samples) -> Tensor:
        """Return the values (S, B) of the next observations."""

    @abc.abstractmethod
    def learn_actor(self, batch: Samples, report: bool) -> Metrics:
        """Update the actors. Returns metrics (S,), which are empty without `report`."""

    def parameters(self) -> Metrics:
        """Return parameters (S,) to report, as they were in this update."""
        return {}


class StackedSAC(StackedActorsAndCritics):
    """Agents of the class SAC."""

    learned: ClassVar[Mapping[str, str]] = {"critics": "critics", "actor": "actor", "temperature": "temperature"}
    followed: ClassVar[Mapping[str, str]] = {"target_critics": "critics"}

    def stack(self) -> None:
        """Stack the networks and the optimizers of the agents."""
        super().stack()
        self.target_entropy = self.column([agent._target_entropy for agent in self.agents])

    def explore(self, x_SNF: Tensor) -> Tensor:
        """Sample actions (S, N, ...)."""
        return self._act(x_SNF, self.normal(x_SNF.shape[1], self.first.networks.scale.actions))

    def outputs(self, x_SNF: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return samples (S, N, ...) of the policies."""
        _, _, sample_SNA = soft_actions(self.mlps["actor"], x_SNF, noise)  # type: ignore[arg-type]  # not None
        return self.first.networks.scale.to_action(sample_SNA.tanh().flatten(0, 1)).unflatten(0, x_SNF.shape[:2])

    def noise(self) -> Tensor:
        """Draw noise (S, 2, B, A) of the actions in the target and in the loss of the actor."""
        return self.normal(2, self.first.batch_size, self.first.networks.scale.actions)

    def next_values(self, batch: Samples) -> Tensor:
        """Return the values of samples (S, B), which include their entropies."""
        noise_SBA = batch.noise[:, 0]  # type: ignore[index]  # see `noise`
        _, distribution, sample = soft_actions(self.mlps["actor"], batch.next_observation, noise_SBA)
        value_SB = self.target_values(batch.next_observation, sample.tanh())
        return value_SB - self.alpha.unsqueeze(1) * distribution.log_prob(sample)

    def learn_actor(self, batch: Samples, report: bool) -> Metrics:
        """Update the actors and, if they are learned, the temperatures."""
        settings = self.mlps["actor"], self.mlps["critics"], batch.observation, batch.noise[:, 1]  # type: ignore[index]
        gradients, metrics, log_prob_SB = soft_actor_gradient(*settings, self.alpha.unsqueeze(1), report=report)
        self.learners["actor"].step(gradients)
        if "temperature" in self.learners:
            error_S1 = log_prob_SB.mean(1, keepdim=True) + self.target_entropy
            self.learners["temperature"].step({"log": -error_S1})
        return metrics

    @property
    def alpha(self) -> Tensor:
        """Weights of the entropies, (S,)."""
        return self.modules["temperature"].parameters["log"].exp()

    def parameters(self) -> Metrics:
        """Return the weights of the entropies."""
        return {"temperature": self.alpha}


class StackedDeterministicAgents(StackedActorsAndCritics):
    """Agents of the class DDPG, or of the class TD3."""

    learned: ClassVar[Mapping[str, str]] = {"critics": "critics", "actor": "actor"}
    followed: ClassVar[Mapping[str, str]] = {"target_critics": "critics", "target_actor": "actor"}

    def explore(self, x_SNF: Tensor) -> Tensor:
        """Return actions (S, N, ...) with the exploration noise of each agent."""
        action_SNA = self._act(x_SNF)
        pairs = zip(self.agents, action_SNA.unbind(), strict=True)
        noise_SNA = torch.stack([agent.noise(part, agent.generator, **agent.counts) for agent, part in pairs])
        noisy = (action_SNA + noise_SNA).clamp_(-1.0, 1.0).flatten(0, 1)
        return self.first.networks.scale.to_action(noisy).unflatten(0, x_SNF.shape[:2])

    def outputs(self, x_SNF: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return actions (S, N, A) in [-1, 1] without noise."""
        return self.mlps["actor"].forward(x_SNF).output.squeeze(1).tanh()

    def noise(self) -> Tensor | None:
        """Draw the noise of target actions, (S, B, A)."""
        if not self.first.target_noise:
            return None
        return self.normal(self.first.batch_size, self.first.networks.scale.actions)

    def next_values(self, batch: Samples) -> Tensor:
        """Return the values of the target actors' actions (S, B), with clipped noise for TD3."""
        action_SBA = self.mlps["target_actor"].forward(batch.next_observation).output.squeeze(1).tanh()
        if batch.noise is not None:
            clip = self.first.target_noise_clip
            noise_SBA = (batch.noise * self.first.target_noise).clamp_(-clip, clip)
            action_SBA = action_SBA.add_(noise_SBA).clamp_(-1.0, 1.0)
        return self.target_values(batch.next_observation, action_SBA)

    def learn_actor(self, batch: Samples, report: bool) -> Metrics:
        """Update the actors."""
        settings = self.mlps["actor"], self.mlps["critics"], batch.observation
        gradients, metrics = deterministic_actor_gradient(*settings, report=report)
        self.learners["actor"].step(gradients)
        return metrics

    def amounts(self) -> Metrics:
        """Return the sizes of the exploration noise."""
        return {"noise": self.exploration()}


class StackedDQN(StackedReplayAgents):
    """Agents of the class DQN."""

    learned: ClassVar[Mapping[str, str]] = {"values": "online"}
    followed: ClassVar[Mapping[str, str]] = {"target": "online"}

    def explore(self, x_SNF: Tensor) -> Tensor:
        """Return exploring actions (S, N)."""
        pairs = zip(self.agents, self._act(x_SNF).unbind(), strict=True)
        return torch.stack([agent.choose(value_NA, True) for agent, value_NA in pairs])

    def outputs(self, x_SNF: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return action values (S, N, A)."""
        return self.mlps["online"].forward(x_SNF).output.squeeze(1)

    def learn(self, batch: Samples, report: bool, actor: bool) -> tuple[Metrics, Tensor]:
        """Update the Q-networks."""
        next_value_SBA = self.mlps["target"].forward(batch.next_observation).output.squeeze(1)
        if self.first.double:
            best_SB1 = self.outputs(batch.next_observation).argmax(-1, keepdim=True)
            next_value_SB = next_value_SBA.gather(-1, best_SB1).squeeze(-1)
        else:
            next_value_SB = next_value_SBA.amax(-1)
        target_SB = td_target(batch.reward, batch.terminated, next_value_SB, batch.discount)
        settings = batch.observation, batch.action, target_SB, batch.weight, self.first.huber
        gradients, metrics, error_SB = td_gradient(self.mlps["online"], *settings, report=report)
        norm_S = self.learners["values"].step(gradients)
        return ({**metrics, "grad_norm": norm_S} if report else {}), error_SB.abs()

    def amounts(self) -> Metrics:
        """Return the probabilities of random actions, or the temperatures of their softmax."""
        return {"epsilon" if self.first.temperature is None else "temperature": self.exploration()}


ENGINES: dict[type, Any] = {
    DQN: StackedDQN,
    SAC: StackedSAC,
    TD3: StackedDeterministicAgents,
    DDPG: StackedDeterministicAgents,
}
