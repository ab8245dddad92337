"""Offline learning on Pendulum-v1, from what SAC did while it learned, and stumbled."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from rein.agents.awac import AWAC
from rein.agents.base.exploration import random_action
from rein.agents.bc import BC
from rein.agents.iql import IQL
from rein.agents.sac import SAC
from rein.envs.pendulum import Pendulum
from rein.handlers.evaluate_every import evaluate_every
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.loop.state import State
from rein.ops.random import generator, stream_seed
from rein.protocols import Store
from rein.store.hdf5 import HDF5Store
from rein.store.reader import open_run
from rein.training.offline import offline_loop
from rein.training.training_loop import training_loop

logger = logging.getLogger("rein")

RECORDED = "runs/pendulum-data"
STUMBLES = 0.3  # of all actions that are recorded
ALGORITHMS: dict[str, tuple[Any, dict[str, float]]] = {
    "iql": (IQL, {"expectile": 0.9, "tau": 0.02}),
    "awac": (AWAC, {"tau": 0.02}),
    "bc": (BC, {}),
}


def pendulum_iql(
    store: Store | None = None,
    *,
    data: str | None = None,
    data_env_steps: int = 6_000,
    algorithm: str = "iql",
    learning_rate: float = 1e-3,
    gamma: float = 0.95,
    batch_size: int = 256,
    hidden: tuple[int, ...] = (64, 64),
    seed: int = 0,
    epochs: int = 20,
    iterations: int = 100,
    updates_per_iteration: int = 5,
    evaluation_episodes: int = 20,
    device: str = "cpu",
    stop_when_solved: bool = True,
) -> Loop:
    """IQL on recorded Pendulum-v1, without acting in it: solved at a mean greedy return of at least -250.

    Args:
        store: where metrics and checkpoints go.
        data: the folder of the run to learn from. None for runs/pendulum-data, which SAC is trained for and records
            first where it is not there.
        data_env_steps: how long SAC is trained for that. Most of what it does is bad, the last of it is good, and 3 of
            10 actions are random, so that there is something to learn of how to get up again.
        algorithm: "iql", "awac", or "bc", which imitates good and bad alike.
        learning_rate: of Adam.
        gamma: discount factor.
        batch_size: transitions of an update.
        hidden: features of the hidden layers.
        seed: of everything random, SAC's recording among it.
        epochs: epochs at most; after each one the policy is evaluated.
        iterations: iterations of an epoch.
        updates_per_iteration: updates of an iteration.
        evaluation_episodes: greedy episodes in one evaluation.
        device: where environments and networks are.
        stop_when_solved: end the run at the first evaluation that solves the task.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r}: use one of {', '.join(ALGORITHMS)}")
    if data is None and not Path(RECORDED).exists():
        record(Path(RECORDED), data_env_steps, seed)
    proving_ground = Pendulum(evaluation_episodes, seed=stream_seed(seed, "evaluation"), device=device)
    kind, own = ALGORITHMS[algorithm]
    agent = kind(
        proving_ground.single_observation_space,
        proving_ground.single_action_space,
        **own,
        learning_rate=learning_rate,
        gamma=gamma,
        batch_size=batch_size,
        hidden=hidden,
        seed=seed,
        device=device,
    )
    loop = offline_loop(
        agent,
        open_run(RECORDED if data is None else data),
        store,
        epochs=epochs,
        iterations=iterations,
        updates_per_iteration=updates_per_iteration,
    )
    evaluate_every(loop, agent.policy(), proving_ground, episodes=evaluation_episodes)
    solved(loop, "evaluation_return", at_least=-250.0, stop=stop_when_solved)
    return loop


def record(path: Path, env_steps: int, seed: int) -> None:
    """Train SAC for so many env_steps and keep all that is done: a run in the folder `path`, there when it is whole."""
    logger.warning("%s: nothing is recorded there yet; SAC is trained for %s env steps first", path, f"{env_steps:,}")
    environment = Pendulum(1, seed=seed)
    agent = SAC(
        environment.single_observation_space,
        environment.single_action_space,
        learning_rate=1e-3,
        hidden=(64, 64),
        learning_starts=min(1_000, env_steps // 2),
        seed=seed,
    )
    store = HDF5Store(path.with_name(f"{path.name}-unfinished"), exist="new")
    loop = training_loop(agent, environment, store, epochs=1, iterations=env_steps)
    drawn = generator(seed, "stumbling")

    @loop.action_selected
    def stumble(state: State) -> None:
        if torch.rand((), generator=drawn, dtype=torch.float32, device="cpu") < STUMBLES:
            action = random_action(environment.single_action_space, state.step_state.observation, drawn)
            state.step_state = state.step_state._replace(action=action)

    loop.run()
    store.close()
    store.path.rename(path)
