"""What agents do that choose by the values of actions, and learn these from replay.

Shapes: N environments, B rows of a batch, A actions.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from rein.agents.base.exploration import Amount, Plateau, as_amount
from rein.agents.base.learner import Learner
from rein.agents.base.options import above_zero
from rein.agents.base.policies import ValuePolicy, exploring
from rein.agents.base.replay_agent import ReplayAgent
from rein.networks.q_network import QNetwork
from rein.networks.quantile_network import QuantileNetwork
from rein.networks.target import OnlineAndTarget
from rein.ops.exploration import boltzmann, epsilon_greedy
from rein.ops.random import generator
from rein.replay.frames import FrameReplay, PrioritizedFrameReplay
from rein.replay.replay import Replay, Sample
from rein.schedules import linear
from rein.types import Tree

Networks = TypeVar("Networks", bound=OnlineAndTarget[QNetwork] | OnlineAndTarget[QuantileNetwork])

EPSILON = linear(1.0, 0.05, env_steps=10_000)
DEFAULTS: Mapping[str, Any] = {
    "learning_rate": 1e-3,
    "hidden": (128, 128),
    "batch_size": 128,
    "max_grad_norm": 10.0,
}


class ValueAgent(ReplayAgent[Networks]):
    """Chooses among Discrete actions: epsilon-greedily, or with a `temperature` by a softmax of their values.

    Its networks are `online`, which turns features into values (N, A), and `target`, which follows it. A subclass makes
    them and `_learner`, and says what is learned from a sample; its options have `epsilon`, `temperature`, `huber` and
    those of `DEFAULTS`.
    """

    reports = ("value_loss", "action_value", "grad_norm", "epsilon")
    exploration: Amount
    _learner: Learner

    def _check(self, options: dict[str, Any]) -> None:
        super()._check(options)
        if options["temperature"] is not None:
            self.reports = tuple("temperature" if name == "epsilon" else name for name in self.reports)
        options["huber"] = above_zero(self, "huber", options["huber"])
        low, high = as_amount(self._explored).bounds
        if not (low >= 0.0 and (options["temperature"] is not None or high <= 1.0)):
            named = options["temperature"] is None
            name, limit = ("epsilon", "between 0 and 1") if named else ("temperature", "0 or more")
            raise ValueError(f"{type(self).__name__}: {name} goes from {low} to {high}; it is {limit}")

    @property
    def _explored(self) -> float | Amount:
        options = self._options
        return options["epsilon"] if options["temperature"] is None else options["temperature"]

    def _build(self, seed: int) -> None:
        self.exploration = copy.deepcopy(as_amount(self._explored))  # one of its own, at its beginning
        super()._build(seed)
        self._first_action = int(self.action_space.start)  # type: ignore[attr-defined]  # the networks want Discrete

    def _make_replay(self) -> Replay:
        options = self._options
        if options["frame_stack"] is None:
            return super()._make_replay()
        stacks = (options["capacity"], options["frame_stack"], self.observation_space.shape or ())
        how = {"storage": options["storage"], "device": self.device}
        if not options["prioritized"]:
            return FrameReplay(*stacks, **how)
        how |= {"alpha": options["priority_alpha"], "normalize": options["priority_normalize"]}
        return PrioritizedFrameReplay(*stacks, **how)

    def _explore(self, observation: Tree) -> Tensor:
        online = self.networks.online
        return self._choose(online(online.encoder(observation)), self._generator) + self._first_action

    def _choose(self, value_NA: Tensor, drawing: torch.Generator) -> Tensor:
        how_much = self.exploration(**self.counts)
        if self._options["temperature"] is None:
            return epsilon_greedy(value_NA, how_much, drawing)
        return boltzmann(value_NA, how_much, drawing)

    @abc.abstractmethod
    def batch(self, sample: Sample, weight_B: Tensor | None = None) -> Any:
        """What is learned from a sample: its rows with their targets, each as much as its weight says."""

    def _update(self, sample: Sample, weight_B: Tensor | None, report: bool) -> tuple[dict[str, Tensor], Tensor]:
        metrics = self._learner.step(self.batch(sample, weight_B), self._options["huber"], report=report)
        error_B = metrics.pop("td_error")
        if report:
            name = "epsilon" if self._options["temperature"] is None else "temperature"
            metrics[name] = torch.as_tensor(self.exploration(**self.counts), dtype=torch.float32, device=self.device)
        return metrics, error_B

    def _taken(self, sample: Sample) -> Tensor:
        """The actions (B,) int64, counted from 0."""
        action_B = sample.action.long()  # recorded ones may be of any type
        return action_B - self._first_action if self._first_action else action_B

    def policy(self, deterministic: bool = True, *, epsilon: float | None = None) -> ValuePolicy:
        """The greedy policy of the networks as they are at any time; as it explores where not `deterministic`.

        With an `epsilon`, from 0 to 1, it is greedy but for so many random actions, however the agent explores.
        """
        explore = exploring(self, self._choose, epsilon)
        own = None if deterministic and epsilon is None else generator(self._root, "policy", device=self.device)
        return ValuePolicy(self.networks.online, self._first_action, explore, own, self.device)

    def state_dict(self) -> dict[str, Any]:
        """What every agent with a replay has, and how it explores, where that adapts."""
        how = {"exploration": self.exploration.state_dict()} if isinstance(self.exploration, Plateau) else {}
        return {**super().state_dict(), **how}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError for that of an agent with other options."""
        super().load_state_dict(state)
        if isinstance(self.exploration, Plateau):
            self.exploration.load_state_dict(state["exploration"])
