"""On-policy agents of a population that are computed together.

Shapes: S learners, N environments of a learner, R = S * N rows, T steps of a rollout, B = T * N rows of a learner,
M rows of a minibatch (number of minibatches in shapes of orders), A action dimensions.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rein.accelerate.compiled import captured
from rein.accelerate.products import fast_products, largest_matrix
from rein.accelerate.stacked.parameters import StackedLearner, StackedModules, can_stack
from rein.accelerate.stacked.policy_gradient import Outputs, forward, policy_gradient
from rein.accelerate.stacked.stacked_agents import StackedAgents
from rein.agents.a2c import A2C
from rein.agents.base.learner import Batch
from rein.agents.base.on_policy import Coefficients, OnPolicyAgent, check_enough, report_rows
from rein.agents.population import joined, split
from rein.agents.ppo import PPO
from rein.networks.heads import DiscreteHead
from rein.ops.random import hash_bits, stream_seed, uniform
from rein.ops.returns import gae
from rein.ops.statistics import explained_variance, minibatches, standardize
from rein.ops.trees import map_tree
from rein.replay.rollout import Rollout
from rein.types import Transition, Tree

COEFFICIENTS = "value_coefficient", "entropy_coefficient"


class AgentNoise:
    """Noise of actions and order of minibatches of S agents.

    On the CPU, each agent draws from its generator, as it would alone. On other devices, a call for each agent would
    take most of the time, so the numbers of all agents are computed together from their seeds and counts.
    """

    def __init__(self, agents: Sequence[Any]) -> None:
        self.agents = agents
        self.device = torch.device(agents[0].device)
        keys = [stream_seed(agent._root_seed, "population") for agent in agents]
        self._key_S = torch.tensor(keys, dtype=torch.int64, device=self.device)
        self._keys_by_count: dict[int, Tensor] = {}  # keys by their number

    def uniform(self, rows: int) -> Tensor:
        """Return uniform numbers in [0, 1), (S, N)."""
        if self.device.type != "cpu":
            return uniform(self._keys(rows), 2 * self._count())
        noise_SN = torch.empty(len(self.agents), rows, dtype=torch.float32, device=self.device)
        for agent, row_N in zip(self.agents, noise_SN.unbind(), strict=True):
            torch.rand(rows, generator=agent.generator, dtype=torch.float32, device=self.device, out=row_N)
        return noise_SN

    def normal(self, rows: int, actions: int) -> Tensor:
        """Return standard normal numbers, (S, N, A)."""
        if self.device.type != "cpu":  # Box & Muller 1958
            keys, count = self._keys(rows * actions), 2 * self._count()
            radius = (-2.0 * torch.log1p(-uniform(keys, count))).sqrt()
            return (radius * torch.cos(2.0 * math.pi * uniform(keys, count + 1))).unflatten(1, (rows, actions))
        noise_SNA = torch.empty(len(self.agents), rows, actions, dtype=torch.float32, device=self.device)
        for agent, row_NA in zip(self.agents, noise_SNA.unbind(), strict=True):
            like: dict[str, Any] = {"dtype": torch.float32, "device": self.device, "out": row_NA}
            torch.randn(row_NA.shape, generator=agent.generator, **like)
        return noise_SNA

    def orders(self, rows: int, count: int) -> Tensor:
        """Return a random split of the rows of each agent into `count` minibatches, (S, M, B // M) int64."""
        if self.device.type == "cpu":
            return torch.stack([minibatches(rows, count, agent.generator) for agent in self.agents])
        bits_SB = hash_bits(self._keys(rows), -1 - self.agents[0].updates)
        return bits_SB.argsort(1)[:, : rows // count * count].unflatten(1, (count, rows // count))

    def _keys(self, count: int) -> Tensor:
        """Return different keys for each agent, (S, count)."""
        if count not in self._keys_by_count:
            number_C = torch.arange(count, dtype=torch.int64, device=self._key_S.device)
            self._keys_by_count[count] = hash_bits(self._key_S.unsqueeze(1), number_C)
        return self._keys_by_count[count]

    def _count(self) -> int:
        """Return a number that grows with each vector step."""
        return self.agents[0].env_steps


class StackedOnPolicyAgents(StackedAgents):
    """On-policy agents with plain networks, which share a rollout. Subclasses implement `update`."""

    different = ("seed", "learning_rate", "gamma", "gae_lambda", "clip", *COEFFICIENTS, "max_grad_norm")

    def __init__(self, agents: Sequence[OnPolicyAgent]) -> None:
        super().__init__(agents)
        self.rollout = Rollout(self.first.rollout_steps)
        self._head: Any = self.first.networks.policy_head
        self.discrete = isinstance(self._head, DiscreteHead)
        self.stack()

    def stack(self) -> None:
        """Stack the networks and the optimizers of the agents."""
        self.networks = StackedModules([agent.networks for agent in self.agents])
        learners = [agent.learners["networks"] for agent in self.agents]
        self.learner = StackedLearner(self.networks, learners)
        self.noise = AgentNoise(self.agents)
        self.largest_matrix = largest_matrix(self.first.networks)
        self._plain = True  # whether `self.learner` makes the steps
        self._act = captured(self._chosen, self.device)
        self._step = captured(self._learned, self.device)

    @classmethod
    def supports(cls, agents: Sequence[Any]) -> bool:
        """Return whether agents of this class can be computed together."""
        return super().supports(agents) and can_stack([agent.learners["networks"] for agent in agents])

    @torch.no_grad()
    def select_action(self, observation: Tree) -> tuple[Tree, dict[str, Tree]]:
        """Sample actions (R, ...). Returns them with `value`, `log_prob` and, if it differs, `sample`."""
        x_SNF = self.features(observation)
        rows = x_SNF.shape[1]
        noise = self.noise.uniform(rows) if self.discrete else self.noise.normal(rows, len(self._head.low))
        action, extras = self._act(x_SNF, noise)
        if action is None:
            action = extras.pop("sample")
        self._selected = action, dict(extras), []
        return action, extras

    def _chosen(self, x_SNF: Tensor, noise: Tensor) -> tuple[Tree, dict[str, Tensor]]:
        """Return actions, or None if they are the samples, and extras, (R, ...)."""
        (distribution, value_SN), _, _ = forward(self.first.networks, self.networks.parameters, x_SNF)
        sample = distribution.sample_from(noise)
        action = self._head.to_action(distribution, sample)
        extras = {"value": value_SN, "log_prob": distribution.log_prob(sample), "sample": sample}
        return map_tree(lambda x: x.flatten(0, 1), (None if action is sample else action, extras))

    def record_observation(self, transition: Transition) -> None:
        """Add the transitions of all agents to the rollout. See `OnPolicyAgent.record_observation`."""
        (action, extras, _), self._selected = self._selected, (None, {}, [])
        if action is None or action is not transition.action:
            parts = zip(self.agents, split((transition, dict(extras)), len(self.agents)), strict=True)
            transition = joined([agent.completed(part, ours) for agent, (part, ours) in parts])
        self.rollout.append(transition)
        rows = len(transition.reward) // len(self.agents)
        for agent in self.agents:
            agent.env_steps += rows

    def observe_reset(self, observation: Tree, mask: Tensor) -> None:
        """End the current episodes of the rows in `mask` (R,), which were reset outside a step."""
        if self.first.reward_normalizer is not None and not len(self.rollout):
            for agent, mask_N in zip(self.agents, split(mask, len(self.agents)), strict=True):
                agent.reward_normalizer.observe_reset(mask_N)
        self.rollout.observe_reset(mask)

    def optimize_model(self) -> dict[str, Tensor]:
        """Update with the rollout if it is full, and return metrics (S,)."""
        if not self.rollout.full:
            return {}
        if not self.networks.connected:
            self.stack()
        for agent in self.agents:
            agent.set_learning_rates()
        self.check_options()
        self.learner.read_options()
        squashed = getattr(self._head, "squash", False)  # then the entropy has no closed form
        entropy = squashed and any(agent.entropy_coefficient.bounds[1] for agent in self.agents)
        self._plain = self.learner.together and not entropy
        metrics = self.update(self.batch())
        self.learner.mark()
        if self.first.normalize_observation:
            observation, valid = self.rollout["observation"], self.rollout["valid"]
            parts = split(map_tree(lambda x: x.transpose(0, 1), (observation, valid)), len(self.agents))
            for agent, part in zip(self.agents, parts, strict=True):
                agent.networks.preprocess.update(*map_tree(lambda x: x.flatten(0, 1), part))
        self.rollout.clear()
        return metrics

    @abc.abstractmethod
    def update(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Learn from a rollout, given as columns (S, B, ...) of a `Batch`, and return metrics (S,)."""

    @torch.no_grad()
    def batch(self) -> dict[str, Tensor]:
        """Return the rollout with advantages and targets, (S, B, ...). `valid` is left out if all rows are valid."""
        rollout, value_TR, valid_TR = self.rollout, self.rollout["value"], self.rollout.valid()
        ends = rollout["terminated"], rollout["truncated"]
        settings = {"gamma": self._of_rows("gamma"), "lambda_": self._of_rows("gae_lambda")}
        rewards = self._rewards()
        advantage_TR = gae(rewards, *ends, value_TR, self._next_values(value_TR), valid_TR, **settings)
        columns = {
            "features": self.features(map_tree(lambda x: self._by_learner(x).flatten(0, 1), rollout["observation"])),
            "sample": rollout["sample" if "sample" in rollout else "action"],
            "log_prob": rollout["log_prob"],
            "value": value_TR,
            "advantage": advantage_TR,
            "target": advantage_TR + value_TR,
        }
        if valid_TR is not None:
            columns["valid"] = valid_TR
        return {name: x if name == "features" else self._by_learner(x) for name, x in columns.items()}

    def _by_learner(self, x_TR: Tensor) -> Tensor:
        """Return rows (T, R, ...) as (S, B, ...)."""
        return x_TR.unflatten(1, (len(self.agents), -1)).transpose(0, 1).flatten(1, 2)

    def _of_rows(self, option: str) -> float | Tensor:
        """Return an option, as a number if it is the same for all agents, otherwise for each row, (R,)."""
        values = [getattr(agent, option) for agent in self.agents]
        if len({*values}) == 1:
            return values[0]
        rows = self.rollout["reward"].shape[1] // len(values)
        return torch.tensor(values, dtype=torch.float32, device=self.device).repeat_interleave(rows)

    def _rewards(self) -> Tensor:
        """Return the rewards (T, R), normalized by each agent."""
        reward_TR = self.rollout["reward"]
        if self.first.reward_normalizer is None:
            return reward_TR
        ended_TR = self.rollout["terminated"] | self.rollout["truncated"]
        columns = [x.tensor_split(len(self.agents), dim=1) for x in (reward_TR, ended_TR, self.rollout["valid"])]
        scaled = []
        for agent, *own_columns in zip(self.agents, *columns, strict=True):
            agent.reward_normalizer.gamma = agent.gamma
            scaled.append(agent.reward_normalizer.scale(*own_columns))
        return torch.cat(scaled, 1)

    def _next_values(self, value_TR: Tensor) -> Tensor:
        """Return the values (T, R) of the true next observations, see `Rollout.next_values`."""
        rollout, learners = self.rollout, len(self.agents)
        cut_TR = rollout["truncated"] & ~rollout["terminated"] & rollout["valid"]
        observation = rollout["next_observation"]
        if not value_TR.is_cpu:  # all rows, because selecting rows would wait for the device
            after = map_tree(lambda x: self._by_learner(x).flatten(0, 1), observation)
            after_TSN = self._values(after).unflatten(1, (len(value_TR), -1)).transpose(0, 1)
            next_value_TR = torch.cat((value_TR[1:], value_TR[-1:]))
            cut_TR[-1] = True
            return torch.where(cut_TR, after_TSN.flatten(1), next_value_TR)
        last_SN = self._values(map_tree(lambda x: x[-1], observation))
        next_value_TR = torch.cat((value_TR[1:], last_SN.view(1, -1)))
        step_Q, row_Q = cut_TR[:-1].nonzero(as_tuple=True)
        of_Q = row_Q // (value_TR.shape[1] // learners)
        for number in of_Q.unique().tolist():
            place, networks = (step_Q[of_Q == number], row_Q[of_Q == number]), self.agents[number].networks
            rows = map_tree(lambda x, place=place: x[place], observation)
            next_value_TR[place] = networks.value(networks.preprocess(rows))
        return next_value_TR

    def _values(self, observation: Tree) -> Tensor:
        """Return the values (S, M) of S M rows."""
        return forward(self.first.networks, self.networks.parameters, self.features(observation))[0].value

    def learn(self, part: Mapping[str, Tensor], coefficients: Coefficients, *, report: bool) -> dict[str, Tensor]:
        """Make one optimizer step with columns (S, M, ...). Returns metrics (S,), which are empty without `report`."""
        if not self._plain:
            return self._learn_alone(part, coefficients, report)
        with fast_products(part["target"].shape[1] * self.largest_matrix):
            norm_S, metrics = self._step(part, coefficients, report)
        return {**metrics, "grad_norm": norm_S} if report else {}

    @torch.no_grad()
    def _learned(self, part: Mapping[str, Tensor], coefficients: Coefficients, report: bool) -> Any:
        """Return the gradient norms (S,) and metrics (S,)."""
        parameters = self.networks.parameters
        gradients, outputs, log_prob_SM = policy_gradient(self.first.networks, parameters, part, coefficients)
        metrics = self._metrics(outputs, log_prob_SM, part, coefficients) if report else {}  # of the old parameters
        return self.learner.step(gradients), metrics

    def _metrics(
        self, outputs: Outputs, log_prob_SM: Tensor, part: Mapping[str, Tensor], coefficients: Coefficients
    ) -> dict[str, Tensor]:
        batch = Batch(**part)
        rows = report_rows(outputs.distribution, log_prob_SM, outputs.value, batch, coefficients)
        rows_QSM = torch.stack([row.float() for row in rows.values()])
        if batch.valid is None:
            return dict(zip(rows, rows_QSM.mean(-1).unbind(), strict=True))
        sums_QS = torch.where(batch.valid, rows_QSM, 0.0).sum(-1)
        return dict(zip(rows, (sums_QS / batch.valid.sum(-1).clamp(min=1)).unbind(), strict=True))

    def _learn_alone(self, part: Mapping[str, Tensor], coefficients: Coefficients, report: bool) -> dict[str, Tensor]:
        """Let each agent make its step, with guards, hooks and frozen parameters."""
        metrics = []
        for number, agent in enumerate(self.agents):
            batch = Batch(**{name: x[number] for name, x in part.items()})
            own: Any = (float(x[number]) if isinstance(x, Tensor) else x for x in coefficients)
            metrics.append(agent.learners["networks"].step(batch, Coefficients(*own), report=report))
        return {name: torch.stack([of_agent[name] for of_agent in metrics]) for name in metrics[0]} if report else {}

    def _count_updates(self, updates: int) -> None:
        for agent in self.agents:
            agent.updates += updates

    def _coefficients(self) -> Coefficients:
        """Return the coefficients of all agents, as tensors (S, 1), or as numbers if they are equal.

        Numbers would become constants of a CUDA graph.
        """
        columns: list[Any] = []
        for values in zip(*(agent.coefficients() for agent in self.agents), strict=True):
            if values[0] is None or (len({*values}) == 1 and self.device.type == "cpu"):
                columns.append(values[0])
            else:
                columns.append(torch.tensor(values, dtype=torch.float32, device=self.device).unsqueeze(1))
        return Coefficients(*columns)

    def means(self, seen: Sequence[Mapping[str, Tensor]], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean metrics (S,) of updates, and the explained variances of the values of the batch."""
        means = {name: torch.stack([metrics[name] for metrics in seen]).mean(0) for name in seen[0]}
        valid = (batch["valid"],) if "valid" in batch else ()
        explained_S = torch.vmap(explained_variance)(batch["value"], batch["target"], *valid)
        return {**means, "explained_variance": explained_S}

    def keep(self, numbers: Sequence[int]) -> None:
        """Continue with these agents only."""
        entries = self.entries()
        super().keep(numbers)
        self.load_entries([entries[number] for number in numbers])

    def entries(self) -> list[dict[str, Any]]:
        """Return the rollout of each agent."""
        state, learners = self.rollout.state_dict(), len(self.agents)
        by_row = map_tree(lambda x: x.transpose(0, 1), state["fields"])
        parts = split(by_row, learners) if by_row else [{}] * learners
        fields = [map_tree(lambda x: x.transpose(0, 1), part) for part in parts]
        return [{"rollout": {"length": state["length"], "fields": part}} for part in fields]

    def load_entries(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Join the rollouts of the agents, which then have none themselves."""
        super().load_entries(states)
        rollouts = [state["rollout"] for state in states]
        fields = map_tree(lambda *x: torch.cat(x, 1), *(each["fields"] for each in rollouts))
        self.rollout.load_state_dict({"length": rollouts[0]["length"], "fields": fields})
        for agent in self.agents:
            agent.rollout = Rollout(agent.rollout_steps)


class StackedPPO(StackedOnPolicyAgents):
    """Agents of the class PPO."""

    required: ClassVar[Mapping[str, Any]] = {"target_kl": None, "segments": None, "reward_smoothing": 0.0}

    def update(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Make `update_epochs` passes and return the mean metrics of the last pass."""
        learners, rows = batch["target"].shape
        metrics: list[dict[str, Tensor]] = []
        for last in range(self.first.update_epochs - 1, -1, -1):
            coefficients = self._coefficients()
            order_SMB = self.noise.orders(rows, self.first.minibatches)
            first_S11 = torch.arange(0, learners * rows, rows, device=self.device).view(-1, 1, 1)
            index_MSB = (order_SMB + first_S11).transpose(0, 1)
            parts = {
                name: x.flatten(0, 1).index_select(0, index_MSB.flatten()).unflatten(0, index_MSB.shape)
                for name, x in batch.items()
            }
            if self.first.normalize_advantage:
                check_enough(self.first, parts["advantage"][0, 0])
                flat = [parts[name].flatten(0, 1) for name in ("advantage", "valid") if name in parts]
                parts["advantage"] = _standardized(*flat).view(index_MSB.shape)
            each = ({name: x[number] for name, x in parts.items()} for number in range(len(index_MSB)))
            metrics = [self.learn(part, coefficients, report=not last) for part in each]
            self._count_updates(len(metrics))
        return self.means(metrics, batch)


class StackedA2C(StackedOnPolicyAgents):
    """Agents of the class A2C."""

    def update(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Update the networks once and return the metrics."""
        batch = dict(batch)
        if self.first.normalize_advantage:
            check_enough(self.first, batch["advantage"][0])
            columns = [batch[name] for name in ("advantage", "valid") if name in batch]
            batch["advantage"] = _standardized(*columns)
        coefficients = self._coefficients()
        self._count_updates(1)
        return self.means([self.learn(batch, coefficients, report=True)], batch)


def _standardized(advantage_QM: Tensor, *valid_QM: Tensor) -> Tensor:
    """Return the advantages of each minibatch, standardized."""
    return torch.vmap(lambda advantage, *valid: standardize(advantage, *valid))(advantage_QM, *valid_QM)


ENGINES: dict[type, Any] = {PPO: StackedPPO, A2C: StackedA2C}
