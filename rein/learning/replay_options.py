"""The hyper-parameters that agents share which learn from replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch

from rein.learning.update import Guard, OptimizerFactory
from rein.networks.own_stem import StemFactory
from rein.schedules import Schedule


class ReplayOptions(TypedDict, total=False):
    """What the agents share that learn from replay, with the defaults where an agent does not say otherwise.

    Args:
        learning_rate: of all optimizers, but for those with an option of their own; a number or a schedule. 3e-4.
        gamma: discount factor. 0.99.
        capacity: transitions kept. 1,000,000.
        batch_size: transitions of an update. 256.
        learning_starts: env_steps before the first update, in which actions are drawn uniformly. 1,000.
        train_frequency: env_steps between two rounds of updates. 1.
        train_frequency_episodes: episodes that end between two rounds of updates, in place of env_steps. None.
        update_to_data: updates for each env_step. 1.
        n_step: rewards before the value of what came next. 1.
        tau: how far targets move toward the networks, from not at all (0) to copies (1). 0.005.
        target_frequency: updates between two such moves. 1.
        prioritized: sample by the size of the last error (Schaul et al. 2016). False.
        priority_alpha: how much the size counts, from uniform (0) to proportional (1). 0.6.
        priority_beta: how much the weights of the loss make up for that, up to entirely (1); a number or a schedule.
            0.4.
        priority_normalize: which weight of the loss is 1: the largest of the "batch", or of the whole "buffer".
            "batch".
        hidden: features of the hidden layers. (256, 256).
        activation: "relu", "tanh", "silu" or "gelu". "relu".
        stem: makes, of (observation_space, generator), a network of your own before the hidden layers, as
            `rein.networks.own_stem.stem_for` says. None for convolutions where there are images.
        normalize_observation: by the mean and deviation of all observations so far. False.
        scale_images: divide bytes of images by 255; see "Images" in docs/agents.md. True.
        max_grad_norm: global norm that gradients are clipped to. None for no clipping.
        storage: of the replay: "memory", or "memmap" for a file. "memory".
        optimizer: makes one of parameters. None for Adam.
        guard: asked before every step of an optimizer with (metrics, gradients); False skips the step. None.
        micro_batch: rows whose gradient is computed at once: changes speed and memory, not the result. None: 4,096 on
            the host, all elsewhere.
        compile: compile the losses: seconds at the first update. False.
        precision: of matrix products in the update: "float32" or "bfloat16". "float32".
        seed: of everything random. None until `training_loop(seed=)` gives it.
        device: where the networks and the replay are. "cpu".
    """

    learning_rate: float | Schedule
    gamma: float
    capacity: int
    batch_size: int
    learning_starts: int
    train_frequency: int
    train_frequency_episodes: int | None
    update_to_data: float
    n_step: int
    tau: float
    target_frequency: int
    prioritized: bool
    priority_alpha: float
    priority_beta: float | Schedule
    priority_normalize: str
    hidden: Sequence[int]
    activation: str
    stem: StemFactory | None
    normalize_observation: bool
    scale_images: bool
    max_grad_norm: float | None
    storage: str
    optimizer: OptimizerFactory | None
    guard: Guard | None
    micro_batch: int | None
    compile: bool
    precision: str
    seed: int | None
    device: torch.device | str


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
    "stem": None,
    "normalize_observation": False,
    "scale_images": True,
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
