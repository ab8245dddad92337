"""Base class of value-based agents for Discrete actions that learn from a replay.

Shapes: N environments, B rows of a batch, A actions.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rein.agents.base.action_noise import Amount, as_amount
from rein.agents.base.learner import Loss
from rein.agents.base.policies import AgentPolicy
from rein.agents.base.replay_agent import DiscreteActions, ReplayAgent
from rein.networks.q_networks import Network, OnlineAndTarget
from rein.ops.exploration import boltzmann, epsilon_greedy
from rein.ops.values import mask_values
from rein.options import at_least_one, option
from rein.replay.frames import FrameReplay, PrioritizedFrameReplay
from rein.schedules import Schedule, linear
from rein.spaces import mask_of
from rein.types import Tree


def probability(value: Any) -> Amount:
    """Return a number, schedule or `AdaptiveExploration` from 0 to 1 as an amount of exploration."""
    return _within(value, 1.0, "give a number from 0 to 1, or a schedule or AdaptiveExploration within these bounds")


def softmax_temperature(value: Any) -> Amount:
    """Return a number, schedule or `AdaptiveExploration` of 0 or more as an amount of exploration."""
    return _within(value, float("inf"), "give a number of 0 or more, a schedule or an AdaptiveExploration")


def _within(value: Any, high: float, remedy: str) -> Amount:
    amount = as_amount(value)
    if not 0.0 <= amount.bounds[0] <= amount.bounds[1] <= high:
        raise ValueError(remedy)
    return amount


class EpsilonGreedy(DiscreteActions, abc.ABC):
    """Mixin for greedy and epsilon-greedy action selection from the values of Discrete actions."""

    has_critic = False

    def policy(
        self, deterministic: bool = True, *, epsilon: float | None = None, device: torch.device | str | None = None
    ) -> AgentPolicy:
        """Return a policy that uses the current parameters of the agent, see `Agent.policy`.

        With `epsilon`, the policy is epsilon-greedy, whether or not `deterministic` is set.
        """
        greedy = deterministic or epsilon is not None
        return super().policy(greedy, epsilon=epsilon, device=device)  # type: ignore[misc]

    def choose(self, value_NA: Tensor, explore: bool | float, mask_NA: Tensor | None = None) -> Tensor:
        """Return actions (N,): greedy (`explore=False`), exploring (`True`), or with `explore` as epsilon."""
        if explore is False:
            index_N = mask_values(value_NA, mask_NA).argmax(1)
        elif explore is True:
            index_N = self.explore_by(value_NA, mask_NA)
        else:
            index_N = epsilon_greedy(value_NA, explore, self.generator, mask_NA)  # type: ignore[attr-defined]
        return index_N + self.first_action if self.first_action else index_N

    @abc.abstractmethod
    def explore_by(self, value_NA: Tensor, mask_NA: Tensor | None) -> Tensor:
        """Return exploring action indices (N,) within the mask."""


class TargetNetworkAgent(EpsilonGreedy, ReplayAgent):
    """Base class of agents with a Q-network `self.networks.online` and a target network `self.networks.target`.

    Subclasses create both with `online_and_target` in `build_networks`, and implement `act` and `batch`.
    """

    learning_rate: float | Schedule = option(default=1e-3)
    max_grad_norm: float | None = option(default=10.0)
    epsilon: float | Amount = option(
        default=linear(1.0, 0.05, env_steps=10_000),
        check=probability,
        fixed=True,
        help="probability of a random action; a number, a schedule or an AdaptiveExploration",
    )
    double: bool = option(default=True)
    huber: float | None = option(default=1.0)

    reports = ("value_loss", "action_value", "grad_norm", "epsilon")
    _exploration_metric = "epsilon"

    def build(self, generator: torch.Generator) -> None:
        """Build the replay, the networks and their learner."""
        self.exploration = getattr(self, self._exploration_metric)
        super().build(generator)

    def online_and_target(self, network: Network, learner: str, loss: Loss) -> OnlineAndTarget[Network]:
        """Return the Q-network and a target network that follows it. Adds the learner."""
        networks = OnlineAndTarget(network)
        self.add_learner(learner, networks.online, loss)
        self.follow(networks.target, networks.online)
        return networks

    def explore_by(self, value_NA: Tensor, mask_NA: Tensor | None) -> Tensor:
        """Return epsilon-greedy action indices (N,)."""
        return epsilon_greedy(value_NA, self.exploration(**self.counts), self.generator, mask_NA)

    @abc.abstractmethod
    def batch(self, sample: Any, weight_B: Tensor | None = None) -> Any:
        """Return a batch with targets and importance weights for a sample of the replay."""

    def coefficients(self) -> Any:
        """Return the coefficients of the loss of an update."""
        return self.huber

    def update_from(self, sample: Any, weight_B: Tensor | None, report: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Update the Q-network with a batch."""
        (learner,) = self.learners.values()
        metrics = learner.step(self.batch(sample, weight_B), self.coefficients(), report=report)
        error_B = metrics.pop("td_error")
        if report:
            amount = self.exploration(**self.counts)
            metrics[self._exploration_metric] = torch.as_tensor(amount, dtype=torch.float32, device=self.device)
        return metrics, error_B


class ValueAgent(TargetNetworkAgent):
    """Base class of agents that learn a Q-network from single transitions. Adds softmax exploration, frame stacks."""

    batch_size: int = option(default=128)
    hidden: Sequence[int] = option(default=(128, 128))
    temperature: float | Amount | None = option(
        default=None,
        check=softmax_temperature,
        fixed=True,
        help="sample actions from softmax(values / temperature) instead of epsilon-greedily",
    )
    frame_stack: int | None = option(
        default=None,
        check=at_least_one,
        fixed=True,
        help="number of frames stacked in the first or last axis of observations; stores each frame only once",
    )

    def build(self, generator: torch.Generator) -> None:
        """Build the replay, the networks and their learner."""
        if self.temperature is not None:
            self._exploration_metric = "temperature"
            self.reports = tuple("temperature" if name == "epsilon" else name for name in self.reports)  # type: ignore[misc]
        super().build(generator)

    def build_replay(self) -> Any:
        """Build the replay, which stores single frames if `frame_stack` is set."""
        if self.frame_stack is None:
            return super().build_replay()
        if self.hindsight is not None:
            raise ValueError("frame_stack: observations with goals are a Dict, which has no frames; omit frame_stack")
        stacks = (self.capacity, self.frame_stack, self.observation_space.shape or ())
        settings: dict[str, Any] = {"storage": self.storage, "device": self.device}
        if not self.prioritized:
            return FrameReplay(*stacks, **settings)
        return PrioritizedFrameReplay(*stacks, alpha=self.priority_alpha, **settings)

    def act(self, observation: Tree, explore: bool | float) -> Tensor:
        """Return greedy or exploring actions (N,)."""
        online = self.networks.online
        return self.choose(online(online.preprocess(observation)), explore, mask_of(observation))

    def explore_by(self, value_NA: Tensor, mask_NA: Tensor | None) -> Tensor:
        """Return epsilon-greedy or softmax action indices (N,)."""
        if self.temperature is None:
            return super().explore_by(value_NA, mask_NA)
        return boltzmann(value_NA, self.exploration(**self.counts), self.generator, mask_NA)
