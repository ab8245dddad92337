"""Base class of PPO, A2C and IMPALA, and its options.

Shapes: T steps of a rollout, N environments, B = T * N rows, C features of a carry.
"""

from __future__ import annotations

import abc
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import torch
from gymnasium import spaces
from torch import Tensor

from rein.agents.base.actions import as_own
from rein.agents.base.learner import Learner, graph
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
    not_negative,
    refuse_unknown,
)
from rein.agents.base.policies import NetworkPolicy
from rein.agents.base.policy_loss import METRICS, Batch, closed_form_gradient, has_closed_form, policy_loss
from rein.agents.base.seeding import seed_anew
from rein.networks.actor_critic import ActorCritic, CoreFactory
from rein.networks.encoder import StemFactory
from rein.networks.normalizers import RewardNormalizer
from rein.ops.devices import checked_device
from rein.ops.distributions import Distribution
from rein.ops.parallel import rank
from rein.ops.random import checked_seed, generator, restore
from rein.ops.trees import to_device
from rein.replay.rollout import Rollout
from rein.schedules import Schedule
from rein.types import Transition, Tree


class OnPolicyOptions(TypedDict, total=False):
    """What every on-policy agent takes, besides its own, with the defaults where an agent does not say otherwise.

    Args:
        learning_rate: of the optimizer; a number or a schedule. 3e-4.
        gamma: discount factor. 0.99.
        rollout_steps: vector steps between two rounds of learning. 32.
        value_coefficient: weight of the value's loss, which is half the squared error. 0.5.
        entropy_coefficient: weight of the bonus for entropy; a number or a schedule. 0.
        max_grad_norm: global norm that gradients are clipped to; None for no clipping. 0.5.
        hidden: features of the hidden layers. (64, 64).
        activation: "tanh", "relu", "silu" or "gelu". "tanh".
        shared: whether actor and critic look through one network. False.
        core: recurrent part after the hidden layers: functools.partial(LSTM, features=64). None.
        stem: makes, of (observation_space, generator), a network of your own before the hidden layers, as
            `rein.networks.encoder.stem_for` says. None for convolutions where there are images.
        squash: squash continuous actions into their bounds instead of clipping them; "ball": by their length. False.
        log_std: what the logarithm of a continuous action's standard deviation begins with. 0.
        state_dependent_std: whether that deviation is an output of the network, or else a parameter beside it. False.
        normalize_observation: by the mean and deviation of all observations so far. False.
        scale_images: divide bytes of images by 255; see "Images" in docs/agents.md. True.
        normalize_reward: divide rewards by the deviation of their discounted sum so far. False.
        optimizer: makes one of parameters: functools.partial(torch.optim.RMSprop, alpha=0.99). None for Adam.
        guard: asked before every step of the optimizer with (metrics, gradients); False skips the step. None.
        micro_batch: rows whose gradient is computed at once: changes speed and memory, not the result. None: 4,096 on
            the host, all elsewhere.
        threads: cores that compute the gradients of micro-batches: changes speed alone. 1.
        compile: compile the loss: seconds at the first update, faster large ones. False.
        precision: of matrix products in the update: "float32" or "bfloat16". "float32".
        seed: of everything random. None until `training_loop(seed=)` gives it.
        device: where the networks are. "cpu".
    """

    learning_rate: float | Schedule
    gamma: float
    rollout_steps: int
    value_coefficient: float
    entropy_coefficient: float | Schedule
    max_grad_norm: float | None
    hidden: Sequence[int]
    activation: str
    shared: bool
    core: CoreFactory | None
    stem: StemFactory | None
    squash: bool | str
    log_std: float
    state_dependent_std: bool
    normalize_observation: bool
    scale_images: bool
    normalize_reward: bool
    optimizer: OptimizerFactory | None
    guard: Guard | None
    micro_batch: int | None
    threads: int
    compile: bool
    precision: str
    seed: int | None
    device: torch.device | str


# which of them make the networks, and which say how a step of the optimizer is made
SHAPE = ("hidden", "activation", "shared", "core", "stem", "normalize_observation", "scale_images")
SHAPE += ("squash", "log_std", "state_dependent_std")
HOW = ("max_grad_norm", "guard", "micro_batch", "threads", "compile", "precision")
DEFAULTS: OnPolicyOptions = {
    "learning_rate": 3e-4,
    "gamma": 0.99,
    "rollout_steps": 32,
    "value_coefficient": 0.5,
    "entropy_coefficient": 0.0,
    "max_grad_norm": 0.5,
    "hidden": (64, 64),
    "activation": "tanh",
    "shared": False,
    "core": None,
    "stem": None,
    "squash": False,
    "log_std": 0.0,
    "state_dependent_std": False,
    "normalize_observation": False,
    "scale_images": True,
    "normalize_reward": False,
    "optimizer": None,
    "guard": None,
    "micro_batch": None,
    "threads": 1,
    "compile": False,
    "precision": "float32",
    "seed": None,
    "device": "cpu",
}


def check_enough(agent: object, advantage: Tensor) -> None:
    """ValueError for one row alone, whose standardized advantage is 0: nothing would be learned from it."""
    if advantage.numel() < 2:
        name = type(agent).__name__
        raise ValueError(f"{name}(normalize_advantage=True): an update of one row; give it more, or turn that off")


class OnPolicyAgent(Configurable, abc.ABC):
    """An actor-critic and its rollout. A subclass says how it learns from a full one, and has no other business."""

    reports = (*METRICS, "grad_norm", "explained_variance")  # the metrics of `optimize_model`
    loaded = False  # whether a state was: what came with it is not drawn anew for a seed
    gamma: Adjustable = Adjustable(fraction)
    learning_rate: Scheduled = Scheduled()
    entropy_coefficient: Scheduled = Scheduled()

    @torch.inference_mode(False)  # inference tensors cannot be trained
    def __init__(
        self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], **options: Unpack[OnPolicyOptions]
    ) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self._options: dict[str, Any] = {**DEFAULTS, **options}
        refuse_unknown(self, options, DEFAULTS)
        self.device = checked_device(self._options["device"])
        for name in ("gamma", "learning_rate", "entropy_coefficient"):
            setattr(self, name, self._options[name])
        not_negative(self, "value_coefficient", self._options["value_coefficient"])
        self._options["max_grad_norm"] = above_zero(self, "max_grad_norm", self._options["max_grad_norm"])
        self._options["hidden"] = layers(self, self._options["hidden"])
        self._rollout = Rollout(at_least_one(self, "rollout_steps", self._options["rollout_steps"]))
        self._reward_normalizer = RewardNormalizer(self.gamma) if self._options["normalize_reward"] else None
        self.seed: int | None = None
        self.env_steps = self.updates = 0
        seed = checked_seed(self._options["seed"])
        self._build(secrets.randbits(31) if seed is None else seed)
        self._learner.check_learning_rate("learning_rate", {"learning_rate": self.learning_rate})
        self.seed, self._built = seed, True

    def _build(self, seed: int) -> None:
        self._root, options = seed, self._options
        self._generator = generator(seed, "agent", rank(), device=self.device)  # each process acts by its own stream
        drawn = generator(seed, "networks", device=self.device)
        shape = {name: options[name] for name in SHAPE}
        self.networks = ActorCritic(self.observation_space, self.action_space, drawn, **shape)
        how = {name: options[name] for name in HOW}
        how["closed_form"] = closed_form_gradient if has_closed_form(self.networks) else None
        self._learner = Learner(self.networks, policy_loss, options["optimizer"] or default_optimizer, **how)
        self._graph = graph(self.networks.step, self.device) if options["compile"] else None
        self._said: tuple[Any, Any] = None, None  # the action and extras of the step that is being taken
        self._carry: Tensor | None = None  # (N, C) before that step
        self._next_carry: Tensor | None = None  # after it
        self._first_carry: Tensor | None = None  # before the first step of the rollout
        self._reset_N: Tensor | None = None  # whether the carry was zeroed before the step that is being taken

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
        """A sample of the policy, and with it `value`, `log_prob` and, where it is not the action, `sample`."""
        with torch.no_grad():
            distribution, value_N = self._look(observation)
            sample = distribution.sample(self._generator)
            action = self.networks.policy_head.to_action(distribution, sample)
            extras = _extras(distribution, value_N, sample, action)
            self._said = action, dict(extras)  # a dictionary of its own: theirs may be written to
            return action, extras

    def _look(self, observation: Tree) -> tuple[Distribution, Tensor]:
        """What the networks say now; that they will have seen it is settled in `record_observation`."""
        x = self.networks.encoder(observation)
        if self.networks.carry_size and self._carry is None:
            self._carry = torch.zeros(len(x), self.networks.carry_size, dtype=torch.float32, device=self.device)
            self._reset_N = torch.ones(len(x), dtype=torch.bool, device=self.device)
        distribution, value_N, self._next_carry = (self._graph or self.networks.step)(x, self._carry)
        return distribution, value_N

    def record_observation(self, transition: Transition) -> None:
        """Keep it until the rollout is full.

        Where somebody else has acted, who may say with what `log_prob`, what this agent thinks of it is added.
        """
        action, extras = self._said
        if action is None or action is not transition.action:
            transition = transition._replace(action=as_own(transition.action, self.action_space))
            said, ours = self._say(transition), extras or {}
            # not what was said of another action, which may still be there beside what they say of theirs
            theirs = {name: x for name, x in transition.extras.items() if not _is_ours(x, ours.get(name))}
            theirs = _typed(theirs, {"sample": transition.action, **said})
            transition = transition._replace(extras={**said, **theirs, "value": said["value"]})
        self._said = None, None
        if self._next_carry is None or self._reset_N is None:
            self._rollout.append(transition)
        else:
            if not len(self._rollout):
                self._first_carry = self._carry
            self._rollout.append(transition, reset=self._reset_N, next_carry=self._next_carry)
            self._forget(transition.terminated | transition.truncated | ~transition.valid, self._next_carry)
        self.env_steps += len(transition.reward)

    def _say(self, transition: Transition) -> dict[str, Tensor]:
        """What `select_action` would have said of an action that it did not select."""
        with torch.no_grad():
            distribution, value_N = self._look(transition.observation)
            sample = self.networks.policy_head.from_action(distribution, transition.action)
            action = self.networks.policy_head.to_action(distribution, sample)  # so that it is kept where ours would be
            return _extras(distribution, value_N, sample, action)

    def _forget(self, mask_N: Tensor, carry_NC: Tensor) -> None:
        """Go on from this carry, and from the beginning in the environments of the mask."""
        self._carry, self._reset_N = carry_NC.masked_fill(mask_N.unsqueeze(1), 0.0), mask_N

    def observe_reset(self, observation: Tree, mask: Tensor) -> None:
        """No advantage reaches over a reset, and no memory."""
        if self._reward_normalizer is not None and not len(self._rollout):
            self._reward_normalizer.observe_reset(mask)
        self._rollout.observe_reset(mask)
        if self._carry is not None and self._reset_N is not None:
            self._forget(mask | self._reset_N, self._carry)

    def optimize_model(self) -> dict[str, Tensor]:
        """Learn from the rollout when it is full; what is worth knowing of it."""
        if not self._rollout.full:
            return {}
        self._compare_processes(self._learner)
        set_learning_rate(self.optimizer, self.learning_rate(**self.counts))
        metrics = self._learn(self._rollout)
        valid = self._rollout.flat("valid")
        self.networks.encoder.update(self._rollout.flat("observation"), valid)
        self._rollout.clear()
        return metrics

    @abc.abstractmethod
    def _learn(self, rollout: Rollout) -> dict[str, Tensor]:
        """Learn from a full rollout, `updates` steps of the optimizer; what is worth knowing of it."""

    def rewards(self) -> Tensor:
        """Of the rollout, (T, N), normalized if asked for."""
        return self._rollout.rewards(self._reward_normalizer, self.gamma)

    def next_values(self, value_TN: Tensor) -> Tensor:
        """The value (T, N) of what truly came next, given those of the observations, by the networks as they are."""

        def value_of(field: Any) -> Tensor:
            carry = field("next_carry") if self.networks.carry_size else None
            return self.networks.value(self.networks.encoder(field("next_observation")), carry)

        with torch.no_grad():
            return self._rollout.next_value(value_TN, value_of)

    def batch(self, advantage_TN: Tensor, target_TN: Tensor, valid_TN: Tensor | None) -> Batch:
        """The rollout as rows, or as whole sequences where the networks are recurrent."""
        rollout, recurrent = self._rollout, self.networks.carry_size > 0
        take = rollout.__getitem__ if recurrent else rollout.flat
        shaped = (lambda x: x) if recurrent else torch.flatten
        features = self.networks.encoder(rollout.flat("observation"))
        return Batch(
            features=features.unflatten(0, advantage_TN.shape) if recurrent else features,
            sample=take("sample" if "sample" in rollout else "action"),
            log_prob=take("log_prob"),
            value=take("value"),
            advantage=shaped(advantage_TN),
            target=shaped(target_TN),
            valid=None if valid_TN is None else shaped(valid_TN),
            reset=take("reset") if recurrent else None,
            carry=self._first_carry if recurrent else None,
        )

    def policy(self, deterministic: bool = True) -> NetworkPolicy:
        """Acts by the networks as they are at any time: the mode, or samples drawn under a generator of its own."""
        own = None if deterministic else generator(self._root, "policy", device=self.device)
        return NetworkPolicy(self.networks, own, self.device)

    def state_dict(self) -> dict[str, Any]:
        """Networks, optimizer, generator, counts, memory, statistics and the rollout so far."""
        rewards = self._reward_normalizer
        return {
            "networks": dict(self.networks.state_dict()),
            "optimizer": self._learner.state_dict(),
            "generator": self._generator.get_state(),
            "rollout": self._rollout.state_dict(),
            "carry": {name: getattr(self, name) for name in _CARRIES},
            "rewards": None if rewards is None else rewards.state_dict(),
            "env_steps": self.env_steps,
            "updates": self.updates,
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
        for name in _CARRIES:
            value = state["carry"][name]
            setattr(self, name, None if value is None else value.to(self.device, copy=True))
        self._said, self._next_carry = (None, None), None  # of what was here before
        if self._reward_normalizer is not None:
            self._reward_normalizer.load_state_dict(rewards)
        self.env_steps, self.updates = int(state["env_steps"]), int(state["updates"])
        self._root, self.loaded = int(state["seed"]), True


_CARRIES = ("_carry", "_first_carry", "_reset_N")


def _extras(distribution: Distribution, value_N: Tensor, sample: Tensor, action: Tensor) -> dict[str, Tensor]:
    said = {"value": value_N, "log_prob": distribution.log_prob(sample)}
    return said if sample is action else said | {"sample": sample}  # no file needs the same twice


def _is_ours(value: Tree, ours: Tensor | None) -> bool:
    """Whether this is what the agent said, be it in a copy, in another type or elsewhere."""
    if value is ours or ours is None or not isinstance(value, Tensor):
        return value is ours
    return value.shape == ours.shape and torch.equal(value.to(ours), ours)


def _typed(extras: Mapping[str, Tree], like: Mapping[str, Tensor]) -> dict[str, Tree]:
    """These, in the types of `like` where they have a namesake there."""
    alike = {name: x.to(like[name].dtype) for name, x in extras.items() if name in like and isinstance(x, Tensor)}
    return {**extras, **alike}
