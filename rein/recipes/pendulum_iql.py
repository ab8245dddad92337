"""Offline learning on Pendulum-v1, from a recording of SAC with additional random actions."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from rein.agents.awac import AWAC
from rein.agents.base.action_noise import random_action
from rein.agents.bc import BC
from rein.agents.iql import IQL
from rein.agents.sac import SAC
from rein.envs.pendulum import Pendulum
from rein.handlers.evaluate_every import evaluate_every
from rein.handlers.record_solved import record_solved
from rein.loop import Loop
from rein.loop.state import State
from rein.ops.random import generator
from rein.recipes.recipe import Builder, recipe
from rein.store.hdf5 import HDF5Store
from rein.store.reader import open_run
from rein.training.offline import offline_loop
from rein.training.training_loop import training_loop

logger = logging.getLogger("rein")

RECORDED = "runs/pendulum-data"
RANDOM_ACTIONS = 0.3  # probability of a random action in the recording
ALGORITHMS = {"iql": IQL, "awac": AWAC, "bc": BC}


@recipe(
    Pendulum,
    IQL,
    computed=["num_envs"],
    learning_rate=1e-3,
    gamma=0.95,
    hidden=(64, 64),
    tau=0.02,
    expectile=0.9,
    epochs=20,
    iterations=100,
)
def pendulum_iql(
    build: Builder,
    data: str | None = None,
    data_env_steps: int = 6_000,
    algorithm: str = "iql",
    updates_per_iteration: int = 5,
    evaluation_episodes: int = 20,
    stop_when_solved: bool = True,
) -> Loop:
    """IQL on recorded data of Pendulum-v1: solved at a mean greedy return of at least -250.

    Args:
        data: folder of the run to learn from; None for runs/pendulum-data, which is recorded first if it is missing.
        data_env_steps: env steps of SAC for this recording. Most of its actions are bad, and 30 % are random.
        algorithm: "iql", "awac", or "bc", which imitates good and bad actions equally.
        updates_per_iteration: updates per iteration.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r}: use one of {', '.join(ALGORITHMS)}")
    if data is None and not Path(RECORDED).exists():
        record(Path(RECORDED), data_env_steps, build.options["seed"])
    environment = build.evaluation_environment(evaluation_episodes)
    agent = build.agent(environment, ALGORITHMS[algorithm])
    loop = offline_loop(
        agent,
        open_run(RECORDED if data is None else data),
        build.store,
        epochs=build.options["epochs"],
        iterations=build.options["iterations"],
        updates_per_iteration=updates_per_iteration,
    )
    evaluate_every(loop, agent.policy(), environment, episodes=evaluation_episodes)
    record_solved(loop, "evaluation_return", at_least=-250.0, stop=stop_when_solved)
    return loop


def record(path: Path, env_steps: int, seed: int) -> None:
    """Train SAC for `env_steps` and store the run in the folder `path`, which is created when the run is complete."""
    logger.warning("%s does not exist; training SAC for %s env steps to record it", path, f"{env_steps:,}")
    environment = Pendulum(1, seed=seed)
    learning_starts = min(1_000, env_steps // 2)
    agent = SAC(environment, learning_rate=1e-3, hidden=(64, 64), learning_starts=learning_starts, seed=seed)
    store = HDF5Store(path.with_name(f"{path.name}-unfinished"), exist="new")
    loop = training_loop(agent, environment, store, epochs=1, iterations=env_steps)
    noise = generator(seed, "stumbling")

    @loop.action_selected
    def act_randomly(state: State) -> None:
        if torch.rand((), generator=noise, dtype=torch.float32, device="cpu") < RANDOM_ACTIONS:
            action = random_action(environment.single_action_space, state.step_state.observation, noise)
            state.step_state = state.step_state._replace(action=action)

    loop.run()
    store.close()
    store.path.rename(path)
