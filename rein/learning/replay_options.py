"""The hyper-parameters that agents share which learn from replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch

from rein.learning.update import Guard, OptimizerFactory
from rein.schedules import Schedule


class ReplayOptions(TypedDict, total=False):
    """What every agent takes that learns from replay, besides its own."""

    learning_rate: float | Schedule  # of all optimizers
    gamma: float  # discount factor
    capacity: int  # transitions kept
    batch_size: int  # transitions of an update
    learning_starts: int  # env_steps before the first update, in which actions are drawn uniformly
    train_frequency: int  # env_steps between two rounds of updates
    train_frequency_episodes: int | None  # episodes that end between two rounds of updates, in place of env_steps
    update_to_data: float  # updates for each env_step
    n_step: int  # rewards before the value of what came next
    tau: float  # how far targets move toward the networks, from not at all (0) to copies (1)
    target_frequency: int  # updates between two such moves
    prioritized: bool  # sample by the size of the last error (Schaul et al. 2016)
    priority_alpha: float  # how much the size counts, from uniform (0) to proportional (1)
    priority_beta: float | Schedule  # how much the weights of the loss make up for that, up to entirely (1)
    priority_normalize: str  # which weight of the loss is 1: the largest of the "batch", or of the whole "buffer"
    hidden: Sequence[int]  # features of the hidden layers
    activation: str  # "relu", "tanh", "silu" or "gelu"
    normalize_observation: bool  # by the mean and deviation of all observations so far
    max_grad_norm: float | None  # global norm that gradients are clipped to; None for no clipping
    storage: str  # of the replay: "memory", or "memmap" for a file
    optimizer: OptimizerFactory | None  # Adam by default
    guard: Guard | None  # asked before every step of an optimizer with (metrics, gradients); False skips the step
    micro_batch: int | None  # rows whose gradient is computed at once: changes speed and memory, not the result
    compile: bool  # compile the losses: seconds at the first update
    precision: str  # of matrix products in the update: "float32" or "bfloat16"
    seed: int | None  # of everything random; None until `training_loop(seed=)` gives it
    device: torch.device | str  # where the networks and the replay are


REPLAY_DEFAULTS: ReplayOptions = {
    "learning_rate": 3e-4,
    "gamma": 0.99,
    "capacity": 1_000_000,
    "batch_size": 256,
    "learning_starts": 1_000,
    "train_frequency": 1,
    "train_frequency_episodes": None,
    "update_to_data": 1.0,
    "n_step": 1,
    "tau": 0.005,
    "target_frequency": 1,
    "prioritized": False,
    "priority_alpha": 0.6,
    "priority_beta": 0.4,
    "priority_normalize": "batch",
    "hidden": (256, 256),
    "activation": "relu",
    "normalize_observation": False,
    "max_grad_norm": None,
    "storage": "memory",
    "optimizer": None,
    "guard": None,
    "micro_batch": None,
    "compile": False,
    "precision": "float32",
    "seed": None,
    "device": "cpu",
}
HOW = ("max_grad_norm", "guard", "micro_batch", "compile", "precision")
