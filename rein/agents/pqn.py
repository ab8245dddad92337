"""Parallelized Q-learning without a replay and without a target network.

Shapes: T steps of a rollout, N environments, M minibatches of B rows, A actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rein.accelerators import find
from rein.agents.base.agent import cast_action
from rein.agents.base.learner import Batch, mean_metrics
from rein.agents.base.on_policy import RolloutAgent
from rein.agents.base.value_agent import EpsilonGreedy
from rein.networks.encoder import NetworkFactory, inputs_of
from rein.networks.q_networks import QNetwork
from rein.ops.exploration import epsilon_greedy
from rein.ops.returns import lambda_returns
from rein.ops.statistics import masked_mean, minibatches
from rein.ops.values import mask_values
from rein.options import in_unit_interval, option
from rein.replay.rollout import Rollout
from rein.schedules import Schedule, linear
from rein.spaces import mask_of
from rein.types import Transition, Tree


class PQN(EpsilonGreedy, RolloutAgent):
    """Parallelized Q-network (Gallici et al. 2024): Q(lambda) from rollouts of N environments, without a replay.

    After every `rollout_steps` vector steps, targets are computed once, with the values recorded during the rollout.
    They are learned in `update_epochs` passes of `minibatches` updates::

        G_t  = r_t + gamma * ((1 - q_lambda) * max_a Q(s_t+1, a) + q_lambda * G_t+1)
        loss = (Q(s_t, a_t) - G_t)^2 / 2

    At the end of the rollout and of a truncated episode, G_t bootstraps: `r_t + gamma * max_a Q(s_t+1, a)`. A
    terminated episode does not bootstrap. As in the paper and in Peng's Q(lambda) (Peng & Williams 1996), exploratory
    actions do not cut the trace. Layer normalization replaces the target network.

    Images are processed by a CNN, other observations are flattened. The action space must be Discrete. Action masks are
    supported: only valid actions are taken, and maxima are over valid actions. The paper uses the optimizer
    `torch.optim.RAdam`.
    """

    learning_rate: float | Schedule = option(default=1e-3)
    hidden: Sequence[int] = option(default=(128, 128))
    max_grad_norm: float | None = option(default=10.0)
    q_lambda: float = option(
        default=0.9, check=in_unit_interval, help="lambda of Q(lambda): 0 uses one-step targets, 1 uses full returns"
    )
    update_epochs: int = option(default=4)
    minibatches: int = option(default=8)
    epsilon: float | Schedule = option(default=linear(1.0, 0.05, env_steps=100_000))
    layer_norm: bool = option(default=True)
    dueling: bool = option(default=False)
    network: NetworkFactory | None = option(default=None)

    reports = ("value_loss", "action_value", "grad_norm", "explained_variance", "epsilon")

    def build(self, generator: torch.Generator) -> None:
        """Build the Q-network, its learner and the rollout."""
        shape = self.options("hidden", "activation", "layer_norm", "dueling", "encoder", "network")
        shape |= self.options("normalize_observation", "scale_images")
        self.networks = QNetwork(self.observation_space, self.action_space, generator, **shape)
        self._learner = self.add_learner("networks", self.networks, squared_error)
        self._graph = find("graph", self.networks, self.device) if self.compile else None  # type: ignore[arg-type]
        self.build_rollout()
        self._selected: tuple[Any, Any] = None, None  # action of the current step, and the largest action value

    def act(self, observation: Tree, explore: bool | float) -> Tensor:
        """Return greedy or epsilon-greedy actions (N,)."""
        return self.choose(self._values(observation), explore, mask_of(observation))

    def select_action(self, observation: Tree) -> tuple[Tensor, dict[str, Tensor]]:
        """Return epsilon-greedy actions (N,) and the largest action values `value` (N,)."""
        value_NA = self._values(observation)
        self._selected = self.choose(value_NA, True, mask_of(observation)), value_NA.amax(1)
        return self._selected[0], {"value": self._selected[1]}

    @torch.no_grad()
    def _values(self, observation: Tree) -> Tensor:
        x_NF, mask_NA, _ = inputs_of(self.networks.preprocess(observation))
        return mask_values((self._graph or self.networks)(x_NF), mask_NA)

    def explore_by(self, value_NA: Tensor, mask_NA: Tensor | None) -> Tensor:
        """Return epsilon-greedy action indices (N,)."""
        return epsilon_greedy(value_NA, self.epsilon(**self.counts), self.generator, mask_NA)  # type: ignore[operator]

    def record_observation(self, transition: Transition) -> None:
        """Add a transition to the rollout. Computes `value` if this agent did not select the action."""
        action_N, value_N = self._selected
        if action_N is not transition.action:
            transition = transition._replace(action=cast_action(transition.action, self.action_space))
            value_N = self._values(transition.observation).amax(1)
        self._selected = None, None
        self.rollout.append(transition._replace(extras={"value": value_N}))
        self.env_steps += len(transition.reward)

    def update(self, rollout: Rollout) -> dict[str, Tensor]:
        """Make `update_epochs` passes over a full rollout. Returns the mean metrics of the last pass, and epsilon."""
        batch = self.batch(rollout)
        metrics: list[dict[str, Tensor]] = []
        for last in range(self.update_epochs - 1, -1, -1):
            metrics = self._pass(batch, report=not last)
        epsilon = torch.tensor(self.epsilon(**self.counts), dtype=torch.float32, device=self.device)  # type: ignore[operator]
        return {**mean_metrics(metrics, batch), "epsilon": epsilon}

    def batch(self, rollout: Rollout) -> Batch:
        """Return the rollout as a batch of T * N rows with Q(lambda) targets."""
        valid_TN = rollout.valid()
        next_value_TN = rollout.next_values(rollout["value"], lambda observation: self._values(observation).amax(1))
        ends = rollout["terminated"], rollout["truncated"]
        settings = {"gamma": self.gamma, "lambda_": self.q_lambda}
        target_TN = lambda_returns(self.rewards(), *ends, next_value_TN, valid_TN, **settings)
        return Batch(
            features=inputs_of(self.networks.preprocess(rollout.flat("observation"))).features,
            action=self.network_action(rollout.flat("action")),
            value=rollout.flat("value"),
            target=target_TN.flatten(),
            valid=None if valid_TN is None else valid_TN.flatten(),
        )

    def _pass(self, batch: Batch, report: bool) -> list[dict[str, Tensor]]:
        """Update once per minibatch of all rows and return the metrics of each update."""
        self.updates += self.minibatches
        parts = batch.shuffled(minibatches(batch.size, self.minibatches, self.generator))
        return [self._learner.step(part, None, report=report) for part in parts]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned. Raises ValueError if the options of the agent differ."""
        super().load_state_dict(state)
        self._selected = None, None


def squared_error(
    networks: QNetwork, batch: Batch, coefficients: None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute half the mean squared error of the values of the recorded actions."""
    value_M = networks(batch.features).gather(1, batch.action.unsqueeze(1)).squeeze(1)
    loss = masked_mean((value_M - batch.target).square(), batch.valid) * 0.5
    if not report:
        return loss, {}
    return loss, {"value_loss": loss.detach(), "action_value": masked_mean(value_M.detach(), batch.valid)}
