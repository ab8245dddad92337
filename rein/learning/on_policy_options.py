"""The hyper-parameters that on-policy agents share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

from rein.learning.update import Guard, OptimizerFactory
from rein.networks.actor_critic import CoreFactory
from rein.networks.own_stem import StemFactory
from rein.schedules import Schedule


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
            `rein.networks.own_stem.stem_for` says. None for convolutions where there are images.
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
