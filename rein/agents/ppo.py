"""Proximal policy optimization.

Shapes: T steps of a rollout, N environments, B = T * N rows, M rows of a minibatch, F features of an observation.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from rein.buffers.on_policy import Rollout
from rein.networks.actor_critic import ActorCritic
from rein.networks.flatten import Flatten
from rein.networks.policy import NetworkPolicy
from rein.networks.policy_loss import Batch, Coefficients, policy_loss
from rein.networks.update import (
    Guard,
    OptimizerFactory,
    apply_gradients,
    default_optimizer,
    load_plain_state,
    plain_state,
    set_learning_rate,
)
from rein.ops.distributions import Distribution
from rein.ops.indices import minibatches
from rein.ops.random import generator, restore
from rein.ops.returns import gae
from rein.ops.statistics import explained_variance, standardize
from rein.schedules import Schedule, as_schedule
from rein.types import Transition, Tree


class PPO:
    """Proximal policy optimization (Schulman et al. 2017) over N environments at once.

    Every `rollout_steps` vector steps it learns for `epochs` passes over what it saw, in `minibatches` a pass.
    Advantages are generalized ones (Schulman et al. 2016): a truncated episode bootstraps from its final observation, a
    terminated one does not, and nothing reaches over a reset.

    Args:
        observation_space: of one environment; flattened to a vector.
        action_space: Discrete, MultiDiscrete or a Box of one dimension.
        learning_rate: of the optimizer; a number or a schedule.
        gamma: discount factor.
        gae_lambda: how far advantages look, from one step (0) to the episode's end (1).
        rollout_steps: vector steps between two rounds of learning.
        epochs: passes over the rollout.
        minibatches: updates in a pass.
        clip: how far from 1 a ratio of probabilities still counts; a number or a schedule.
        value_clip: how far the value may move from what it was, in its own units; None for as far as it wants.
        value_coefficient: weight of the value's loss.
        entropy_coefficient: weight of the bonus for entropy.
        max_grad_norm: global norm that gradients are clipped to; None for no clipping.
        target_kl: end the round after a pass whose mean approx_kl was larger; None for never.
        normalize_advantage: standardize advantages within each minibatch.
        micro_batch: rows that the gradient is computed of at once; it changes speed and memory, not the result.
        hidden: features of the hidden layers.
        activation: "tanh", "relu", "silu" or "gelu".
        shared: whether actor and critic look through one network.
        squash: squash continuous actions into their bounds instead of clipping them.
        log_std: what the logarithm of a continuous action's standard deviation begins with.
        optimizer: a function of the parameters, `functools.partial(torch.optim.RMSprop, alpha=0.9)`; Adam by default.
        guard: asked before every step of the optimizer with (metrics, gradients); False skips the step.
        seed: of everything random; None until `training_loop(seed=)` gives it.
        device: where the networks are.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        learning_rate: float | Schedule = 3e-4,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        rollout_steps: int = 32,
        epochs: int = 4,
        minibatches: int = 4,
        clip: float | Schedule = 0.2,
        value_clip: float | None = None,
        value_coefficient: float = 0.5,
        entropy_coefficient: float = 0.0,
        max_grad_norm: float | None = 0.5,
        target_kl: float | None = None,
        normalize_advantage: bool = True,
        micro_batch: int | None = None,
        hidden: Sequence[int] = (64, 64),
        activation: str = "tanh",
        shared: bool = False,
        squash: bool = False,
        log_std: float = 0.0,
        optimizer: OptimizerFactory | None = None,
        guard: Guard | None = None,
        seed: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        counts = {"rollout_steps": rollout_steps, "epochs": epochs, "minibatches": minibatches}
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"PPO({name}={count}): give 1 or more")
        self.observation_space, self.action_space = observation_space, action_space
        self.device = torch.device(device)
        self.learning_rate, self.clip = as_schedule(learning_rate), as_schedule(clip)
        self.gamma, self.gae_lambda = gamma, gae_lambda
        self.epochs, self.minibatches, self.micro_batch = epochs, minibatches, micro_batch
        self.value_clip, self.value_coefficient = value_clip, value_coefficient
        self.entropy_coefficient, self.max_grad_norm = entropy_coefficient, max_grad_norm
        self.target_kl, self.normalize_advantage, self.guard = target_kl, normalize_advantage, guard
        self._shape = {"hidden": tuple(hidden), "activation": activation, "shared": shared}
        self._shape |= {"squash": squash, "log_std": log_std}
        self._optimizer_of = optimizer or default_optimizer
        self._flatten = Flatten(observation_space, self.device)
        self._rollout = Rollout(rollout_steps)
        self.seed: int | None = None
        self.env_steps = self.updates = 0
        self._build(secrets.randbits(31) if seed is None else seed)
        self.seed = seed

    def _build(self, seed: int) -> None:
        self._root = seed
        self._generator = generator(seed, "agent", device=self.device)
        drawn = generator(seed, "networks", device=self.device)
        self.networks = ActorCritic(self._flatten.features, self.action_space, drawn, **self._shape)
        self.optimizer = self._optimizer_of(self.networks.parameters())

    def reseed(self, seed: int) -> None:
        """Take `seed` and draw the parameters anew; RuntimeError after the first step."""
        if self.env_steps:
            raise RuntimeError(f"reseed({seed}): the agent has taken {self.env_steps} env steps already")
        self._build(seed)
        self.seed = seed

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        names = ("gamma", "gae_lambda", "epochs", "minibatches", "micro_batch", "value_clip", "value_coefficient")
        names += ("entropy_coefficient", "max_grad_norm", "target_kl", "normalize_advantage", "seed")
        return {
            "observation_space": str(self.observation_space),
            "action_space": str(self.action_space),
            "learning_rate": self.learning_rate.config,
            "clip": self.clip.config,
            "rollout_steps": self._rollout.steps,
            **{name: getattr(self, name) for name in names},
            **self._shape,
            "hidden": list(self._shape["hidden"]),
            "optimizer": type(self.optimizer).__name__,
            "device": str(self.device),
        }

    def select_action(self, observation: Tree) -> tuple[Tensor, dict[str, Tensor]]:
        """A sample of the policy, and with it `value`, `log_prob` and, where it is not the action, `sample`."""
        with torch.no_grad():
            distribution, value_N = self.networks(self._flatten(observation))
            sample = distribution.sample(self._generator)
            action = self.networks.policy_head.to_action(distribution, sample)
            return action, _extras(distribution, value_N, sample, action)

    def record_observation(self, transition: Transition) -> None:
        """Keep it until the rollout is full."""
        if "log_prob" not in transition.extras:  # somebody else has acted
            transition = transition._replace(extras={**transition.extras, **self._say(transition)})
        self._rollout.append(transition)
        self.env_steps += len(transition.reward)

    def _say(self, transition: Transition) -> dict[str, Tensor]:
        """What `select_action` would have said of an action that it did not select."""
        with torch.no_grad():
            distribution, value_N = self.networks(self._flatten(transition.observation))
            sample = self.networks.policy_head.from_action(distribution, transition.action)
            return _extras(distribution, value_N, sample, transition.action)

    def observe_reset(self, observation: Tree, mask: Tensor) -> None:
        """No advantage reaches over a reset."""
        self._rollout.observe_reset(mask)

    def optimize_model(self) -> dict[str, Tensor]:
        """Learn from the rollout when it is full; means over all of its updates."""
        if not self._rollout.full:
            return {}
        set_learning_rate(self.optimizer, self.learning_rate(env_steps=self.env_steps, updates=self.updates))
        batch = self._batch()
        metrics = self._learn(batch)
        metrics["explained_variance"] = explained_variance(batch.value, batch.target, batch.valid)
        self._rollout.clear()
        return metrics

    def _batch(self) -> Batch:
        rollout = self._rollout
        with torch.no_grad():
            next_value_TN = rollout.next_value(lambda observation: self.networks.value(self._flatten(observation)))
        ends = rollout["terminated"], rollout["truncated"]
        value_TN, valid_TN = rollout["value"], self._mask(rollout["valid"])
        advantage_TN = gae(
            rollout["reward"], *ends, value_TN, next_value_TN, valid_TN, gamma=self.gamma, lambda_=self.gae_lambda
        )
        return Batch(
            features=self._flatten(rollout.flat("observation")),
            sample=rollout.flat("sample" if "sample" in rollout else "action"),
            log_prob=rollout.flat("log_prob"),
            value=rollout.flat("value"),
            advantage=advantage_TN.flatten(),
            target=(advantage_TN + value_TN).flatten(),
            valid=None if valid_TN is None else valid_TN.flatten(),
        )

    def _mask(self, valid_TN: Tensor) -> Tensor | None:
        """None where all rows are valid, which spares many small operations: known at once on the host alone."""
        return None if self.device.type == "cpu" and bool(valid_TN.all()) else valid_TN

    def _learn(self, batch: Batch) -> dict[str, Tensor]:
        clip = self.clip(env_steps=self.env_steps, updates=self.updates)
        coefficients = Coefficients(clip, self.value_coefficient, self.entropy_coefficient, self.value_clip)
        seen: list[dict[str, Tensor]] = []
        for _ in range(self.epochs):
            order_MB = minibatches(len(batch.value), self.minibatches, self._generator)
            shuffled = batch.rows(order_MB.flatten())  # one gather for a pass: minibatches are slices of it
            size = order_MB.shape[1]
            one_pass = [
                self._update(shuffled.rows(slice(m * size, (m + 1) * size)), coefficients)
                for m in range(self.minibatches)
            ]
            seen += one_pass
            if self.target_kl is not None:
                approx_kl = torch.stack([metrics["approx_kl"] for metrics in one_pass]).mean()
                if float(approx_kl) > self.target_kl:  # the one host round trip of a pass, for those who ask for it
                    break
        return {name: torch.stack([metrics[name] for metrics in seen]).mean() for name in seen[0]}

    def _update(self, batch: Batch, coefficients: Coefficients) -> dict[str, Tensor]:
        """One step of the optimizer, of the gradients of one micro-batch after the other."""
        if self.normalize_advantage:
            batch = batch._replace(advantage=standardize(batch.advantage, batch.valid))
        if self.micro_batch is None:
            loss, metrics = policy_loss(self.networks, batch, coefficients)
            loss.backward()
        else:
            metrics = self._accumulate(batch, coefficients, self.micro_batch)
        metrics["grad_norm"] = apply_gradients(
            self.optimizer, metrics, max_grad_norm=self.max_grad_norm, guard=self.guard
        )
        self.updates += 1
        return metrics

    def _accumulate(self, batch: Batch, coefficients: Coefficients, size: int) -> dict[str, Tensor]:
        """Gradients of parts of the batch, each weighed by its share of the rows that count: those of the whole."""
        metrics: dict[str, Tensor] = {}
        for start in range(0, len(batch.value), size):
            part = batch.rows(slice(start, start + size))
            if batch.valid is None or part.valid is None:
                share = len(part.value) / len(batch.value)
            else:
                share = part.valid.sum() / batch.valid.sum().clamp(min=1)
            loss, found = policy_loss(self.networks, part, coefficients)
            (loss * share).backward()
            metrics = {name: metrics.get(name, 0.0) + value * share for name, value in found.items()}
        return metrics

    def policy(self, deterministic: bool = True) -> NetworkPolicy:
        """Acts by the networks as they are at any time: the mode, or samples drawn under a generator of its own."""
        own = None if deterministic else generator(self._root, "policy", device=self.device)
        return NetworkPolicy(self.networks, self._flatten, own, self.device)

    def state_dict(self) -> dict[str, Any]:
        """Networks, optimizer, generator, counts and the rollout so far."""
        return {
            "networks": dict(self.networks.state_dict()),
            "optimizer": plain_state(self.optimizer),
            "generator": self._generator.get_state(),
            "rollout": self._rollout.state_dict(),
            "env_steps": self.env_steps,
            "updates": self.updates,
            "seed": self._root,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.networks.load_state_dict(state["networks"])
        load_plain_state(self.optimizer, state["optimizer"])
        restore(self._generator, state["generator"])
        self._rollout.load_state_dict(state["rollout"])
        self.env_steps, self.updates = int(state["env_steps"]), int(state["updates"])
        self._root = int(state["seed"])


def _extras(distribution: Distribution, value_N: Tensor, sample: Tensor, action: Tensor) -> dict[str, Tensor]:
    said = {"value": value_N, "log_prob": distribution.log_prob(sample)}
    return said if sample is action else said | {"sample": sample}  # no file needs the same twice
