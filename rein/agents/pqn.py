"""Parallelized Q-learning: temporal differences without replay and without a target network.

Shapes: T steps of a rollout, N environments, M minibatches of B rows, A actions.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from rein.agents.base.actions import as_own
from rein.agents.base.learner import Learner, graph, mean_metrics
from rein.agents.base.on_policy import HOW
from rein.agents.base.optimizers import (
    Guard,
    OptimizerFactory,
    default_optimizer,
    describe_optimizer,
    set_learning_rate,
)
from rein.agents.base.options import (
    Adjustable,
    Configurable,
    Scheduled,
    above_zero,
    adjustable,
    at_least_one,
    fraction,
    layers,
)
from rein.agents.base.policies import ValuePolicy, exploring
from rein.agents.base.seeding import seed_anew
from rein.agents.base.value_loss import Batch, squared_error
from rein.networks.encoder import StemFactory
from rein.networks.normalizers import RewardNormalizer
from rein.networks.q_network import QNetwork
from rein.ops.devices import checked_device
from rein.ops.exploration import epsilon_greedy
from rein.ops.parallel import rank
from rein.ops.random import checked_seed, generator, restore
from rein.ops.returns import lambda_returns
from rein.ops.statistics import minibatches as cut
from rein.ops.trees import to_device
from rein.replay.rollout import Rollout
from rein.schedules import Schedule, linear
from rein.types import Transition, Tree

EPSILON = linear(1.0, 0.05, env_steps=100_000)
SHAPE = ("hidden", "layer_norm", "dueling", "stem", "normalize_observation", "scale_images")


class PQN(Configurable):
    """Parallelized Q-network (Gallici et al. 2024): Q-learning from what N environments have just shown, and no other.

    Every `rollout_steps` vector steps the targets of the rollout are computed once, with the values that the network
    had in it, and learned for `epochs` passes of `minibatches` updates:

        G_t  = r_t + gamma * ((1 - q_lambda) * max_a Q(s_t+1, a) + q_lambda * G_t+1)
        loss = (Q(s_t, a_t) - G_t)^2 / 2

    A trace ends with its episode and with the rollout, where G_t = r_t + gamma * max_a Q(s_t+1, a): a truncated episode
    bootstraps from its final observation, a terminated one does not. As in the paper, and as Peng's Q(lambda) (Peng &
    Williams 1996), it is not cut at exploratory actions, which Watkins' is. What stands in for a target network is the
    norm in the hidden layers.

    Args:
        observation_space: of one environment; an image goes through convolutions, all else is flattened to a vector.
        action_space: Discrete.
        learning_rate: of the optimizer; a number or a schedule.
        gamma: discount factor.
        q_lambda: how far targets look, from one step (0) to the episode's or the rollout's end (1).
        rollout_steps: vector steps between two rounds of learning.
        epochs: passes over the rollout.
        minibatches: updates in a pass.
        epsilon: probability of a random action; a number or a schedule, by default from 1 to 0.05 in 100,000 env_steps.
        max_grad_norm: global norm that gradients are clipped to; None for no clipping.
        hidden: features of the hidden layers.
        layer_norm: normalize the hidden layers before their activation.
        dueling: learn the value of a state and what each action adds to it (Wang et al. 2016).
        stem: makes a network of your own before the hidden layers, see `rein.networks.encoder.stem_for`.
        normalize_observation: by the mean and deviation of all observations so far.
        scale_images: divide bytes of images by 255; see "Images" in docs/agents.md.
        normalize_reward: divide rewards by the deviation of their discounted sum so far.
        optimizer: Adam by default; the paper's is `torch.optim.RAdam`.
        guard: asked before every step of the optimizer with (metrics, gradients); False skips the step.
        micro_batch: rows whose gradient is computed at once: changes speed and memory, not the result.
        threads: cores that compute the gradients of micro-batches: changes speed alone.
        compile: compile the loss: seconds at the first update, faster large ones.
        precision: of matrix products in the update: "float32" or "bfloat16".
        seed: of everything random; None until `training_loop(seed=)` gives it.
        device: where the network is.

    Raises ValueError for actions that are not Discrete, and for numbers out of their range.
    """

    reports = ("value_loss", "action_value", "grad_norm", "explained_variance", "epsilon")  # of `optimize_model`
    loaded = False  # whether a state was: what came with it is not drawn anew for a seed
    learning_rate: Scheduled = Scheduled()
    gamma: Adjustable = Adjustable(fraction)
    q_lambda: Adjustable = Adjustable(fraction)
    epochs: Adjustable = Adjustable(at_least_one)
    minibatches: Adjustable = Adjustable(at_least_one)
    epsilon: Scheduled = Scheduled(high=1.0)

    @torch.inference_mode(False)  # inference tensors cannot be trained
    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        learning_rate: float | Schedule = 1e-3,
        gamma: float = 0.99,
        q_lambda: float = 0.9,
        rollout_steps: int = 32,
        epochs: int = 4,
        minibatches: int = 8,
        epsilon: float | Schedule = EPSILON,
        max_grad_norm: float | None = 10.0,
        hidden: Sequence[int] = (128, 128),
        layer_norm: bool = True,
        dueling: bool = False,
        stem: StemFactory | None = None,
        normalize_observation: bool = False,
        scale_images: bool = True,
        normalize_reward: bool = False,
        optimizer: OptimizerFactory | None = None,
        guard: Guard | None = None,
        micro_batch: int | None = None,
        threads: int = 1,
        compile: bool = False,
        precision: str = "float32",
        seed: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.device = checked_device(device)
        self.learning_rate, self.gamma, self.q_lambda = learning_rate, gamma, q_lambda
        self.epochs, self.minibatches, self.epsilon = epochs, minibatches, epsilon
        self._options = {
            **{"hidden": layers(self, hidden), "layer_norm": layer_norm, "dueling": dueling, "stem": stem},
            **{"normalize_observation": normalize_observation, "scale_images": scale_images},
            "normalize_reward": normalize_reward,
            "rollout_steps": at_least_one(self, "rollout_steps", rollout_steps),
            "max_grad_norm": above_zero(self, "max_grad_norm", max_grad_norm),
            **{"guard": guard, "micro_batch": micro_batch, "threads": threads, "compile": compile},
            **{"precision": precision, "optimizer": optimizer or default_optimizer},
        }
        self._rollout = Rollout(self._options["rollout_steps"])
        self._reward_normalizer = RewardNormalizer(self.gamma) if normalize_reward else None
        self.env_steps = self.updates = 0
        self.seed: int | None = None
        seed = checked_seed(seed)
        self._build(secrets.randbits(31) if seed is None else seed)
        self._learner.check_learning_rate("learning_rate", {"learning_rate": self.learning_rate})  # type: ignore[dict-item]  # a Schedule
        self.seed, self._built = seed, True

    def _build(self, seed: int) -> None:
        self._root = seed
        self._generator = generator(seed, "agent", rank(), device=self.device)
        drawn = generator(seed, "networks", device=self.device)
        shape, how = ({name: self._options[name] for name in names} for names in (SHAPE, HOW))
        self.networks = QNetwork(self.observation_space, self.action_space, drawn, **shape)
        self._learner = Learner(self.networks, squared_error, self._options["optimizer"], **how)
        self._graph = graph(self.networks, self.device) if how["compile"] else None
        self._first_action = int(self.action_space.start)  # type: ignore[attr-defined]  # the networks want Discrete
        self._said: tuple[Any, Any] = None, None  # the action of the step that is being taken, and the best one's value

    @torch.inference_mode(False)
    def reseed(self, seed: int) -> None:
        """Take `seed` and draw anew what was not loaded; RuntimeError after the first step."""
        if self.env_steps and not self.loaded:
            raise RuntimeError(f"reseed({seed}): the agent has taken {self.env_steps} env steps already")
        seed_anew(self, seed)

    @property
    def counts(self) -> dict[str, int]:
        """What schedules run on."""
        return {"env_steps": self.env_steps, "updates": self.updates}

    @property
    def rollout(self) -> Rollout:
        """The steps that were recorded and not learned from yet."""
        return self._rollout

    @property
    def learners(self) -> dict[str, Learner]:
        """The learner of the networks, by name."""
        return {"networks": self._learner}

    @property
    def optimizer(self) -> Any:
        """Of the networks' parameters."""
        return self._learner.optimizer

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        return {
            "observation_space": str(self.observation_space),
            "action_space": str(self.action_space),
            **self._described_options(),
            **adjustable(self),
            "optimizer": describe_optimizer(self.optimizer),
            "device": str(self.device),
            "seed": self.seed,
        }

    def select_action(self, observation: Tree) -> tuple[Tensor, dict[str, Tensor]]:
        """An epsilon-greedy action (N,), and with it `value` (N,): that of the best action."""
        value_NA = self._look(observation)
        action_N = self._choose(value_NA, self._generator) + self._first_action
        self._said = action_N, value_NA.amax(1)
        return action_N, {"value": self._said[1]}

    @torch.no_grad()
    def _look(self, observation: Tree) -> Tensor:
        return (self._graph or self.networks)(self.networks.encoder(observation))

    def _choose(self, value_NA: Tensor, drawing: torch.Generator) -> Tensor:
        return epsilon_greedy(value_NA, self.epsilon(**self.counts), drawing)

    def record_observation(self, transition: Transition) -> None:
        """Keep it until the rollout is full. Where somebody else has acted, its `value` is looked up here."""
        action_N, value_N = self._said
        if action_N is not transition.action:
            transition = transition._replace(action=as_own(transition.action, self.action_space))
            value_N = self._look(transition.observation).amax(1)
        self._said = None, None
        self._rollout.append(transition._replace(extras={"value": value_N}))
        self.env_steps += len(transition.reward)

    def observe_reset(self, observation: Tree, mask: Tensor) -> None:
        """No target reaches over a reset."""
        if self._reward_normalizer is not None and not len(self._rollout):
            self._reward_normalizer.observe_reset(mask)
        self._rollout.observe_reset(mask)

    def optimize_model(self) -> dict[str, Tensor]:
        """Learn from the rollout when it is full; means over the updates of the last pass, and epsilon."""
        if not self._rollout.full:
            return {}
        self._compare_processes(self._learner)
        set_learning_rate(self.optimizer, self.learning_rate(**self.counts))
        batch = self._batch()
        seen: list[dict[str, Tensor]] = []
        for last in range(self.epochs - 1, -1, -1):
            seen = self._pass(batch, report=not last)
        self.networks.encoder.update(self._rollout.flat("observation"), batch.valid)
        self._rollout.clear()
        return {
            **mean_metrics(seen, batch),
            "epsilon": torch.tensor(self.epsilon(**self.counts), dtype=torch.float32, device=self.device),
        }

    def _batch(self) -> Batch:
        """The rollout as rows, with the targets that the networks as they are make of it."""
        rollout = self._rollout
        valid_TN = rollout.valid()
        next_value_TN = rollout.next_value(rollout["value"], lambda of: self._look(of("next_observation")).amax(1))
        ends = rollout["terminated"], rollout["truncated"]
        settings = {"gamma": self.gamma, "lambda_": self.q_lambda}
        reward_TN = rollout.rewards(self._reward_normalizer, self.gamma)
        target_TN = lambda_returns(reward_TN, *ends, next_value_TN, valid_TN, **settings)
        return Batch(
            features=self.networks.encoder(rollout.flat("observation")),
            action=rollout.flat("action").long() - self._first_action,
            value=rollout.flat("value"),
            target=target_TN.flatten(),
            valid=None if valid_TN is None else valid_TN.flatten(),
        )

    def _pass(self, batch: Batch, report: bool) -> list[dict[str, Tensor]]:
        """Once through all rows; the metrics of each update."""
        order_MB = cut(batch.size, self.minibatches, self._generator)
        shuffled = batch.rows(order_MB.flatten())  # one gather for a pass: minibatches are slices of it
        size = order_MB.shape[1]
        self.updates += self.minibatches
        parts = (shuffled.rows(slice(start, start + size)) for start in range(0, self.minibatches * size, size))
        return [self._learner.step(part, None, report=report) for part in parts]

    def policy(self, deterministic: bool = True, *, epsilon: float | None = None) -> ValuePolicy:
        """The greedy policy of the networks as they are at any time; epsilon-greedy where not `deterministic`.

        Its epsilon is the agent's at any time, or the one that is given, from 0 to 1. An epsilon-greedy one begins the
        same stream of its own each time, so evaluations compare like with like.
        """
        explore = exploring(self, self._choose, epsilon)
        own = None if deterministic and epsilon is None else generator(self._root, "policy", device=self.device)
        return ValuePolicy(self.networks, self._first_action, explore, own, self.device)

    def state_dict(self) -> dict[str, Any]:
        """Networks, optimizer, generator, counts, statistics and the rollout so far."""
        rewards = self._reward_normalizer
        return {
            "networks": dict(self.networks.state_dict()),
            "optimizer": self._learner.state_dict(),
            "generator": self._generator.get_state(),
            "rollout": self._rollout.state_dict(),
            "rewards": None if rewards is None else rewards.state_dict(),
            **self.counts,
            "seed": self._root,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError for that of an agent with other options."""
        rewards = state["rewards"]
        if (rewards is None) != (self._reward_normalizer is None):
            raise ValueError(f"normalize_reward is {rewards is not None} in the state, and the opposite here")
        self.networks.load_state_dict(state["networks"])
        self._learner.load_state_dict(state["optimizer"])
        restore(self._generator, state["generator"])
        self._rollout.load_state_dict(to_device(state["rollout"], self.device))
        self._said = None, None
        if self._reward_normalizer is not None:
            self._reward_normalizer.load_state_dict(rewards)
        self.env_steps, self.updates = int(state["env_steps"]), int(state["updates"])
        self._root, self.loaded = int(state["seed"]), True
