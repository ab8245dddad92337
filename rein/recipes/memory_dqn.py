"""Deep Q-learning with and without a memory on a task that asks for one."""

from __future__ import annotations

import functools
from typing import Any

from rein.agents.dqn import DQN
from rein.agents.recurrent_dqn import RecurrentDQN
from rein.envs.probes.memory import Memory
from rein.handlers.evaluate_every import evaluate_every as evaluate
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.networks.recurrent import GRU, LSTM, MinimalGRU
from rein.ops.random import stream_seed
from rein.protocols import Store
from rein.schedules import linear
from rein.training.training_loop import training_loop

CORES = {"lstm": LSTM, "gru": GRU, "mingru": MinimalGRU, "none": None}


def memory_dqn(
    store: Store | None = None,
    *,
    core: str = "lstm",
    cues: int = 4,
    delay: int = 8,
    num_envs: int = 32,
    learning_rate: float = 1e-2,
    gamma: float = 0.95,
    sequence_length: int = 10,
    burn_in: int = 0,
    batch_size: int = 32,
    capacity: int = 50_000,
    learning_starts: int = 1_000,
    steps_per_update: int = 32,
    tau: float = 0.05,
    epsilon: float = 0.05,
    epsilon_steps: int = 10_000,
    features: int = 64,
    seed: int = 0,
    epochs: int = 50,
    iterations: int = 50,
    evaluate_every: int = 1,
    device: str = "cpu",
    stop_when_solved: bool = True,
) -> Loop:
    """Recurrent DQN on Memory: 95 of 100 answers right, which without a memory stay at chance (try --core none).

    Args:
        store: where trajectories go.
        core: what remembers: lstm, gru or mingru; none for a network without a memory.
        cues: how many cues there are to be told apart.
        delay: steps from a cue to the question.
        num_envs: environments stepped together.
        learning_rate: of Adam.
        gamma: discount factor.
        sequence_length: steps that are learned from together.
        burn_in: steps before them that only warm up what is remembered.
        batch_size: sequences of an update; transitions, without a core.
        capacity: transitions kept.
        learning_starts: env steps before the first update.
        steps_per_update: env steps from one update to the next.
        tau: how far targets move toward the networks after an update.
        epsilon: probability of a random action, in the end; it begins with 1.
        epsilon_steps: env steps until then.
        features: of the hidden layer and of the core.
        seed: of everything random.
        epochs: epochs at most.
        iterations: steps of every environment in an epoch.
        evaluate_every: epochs from one evaluation of the greedy policy to the next.
        device: where environments and networks are.
        stop_when_solved: end the run at the first evaluation that solves the task.
    """
    if core not in CORES:
        raise ValueError(f"core={core!r}: use one of {', '.join(CORES)}")
    environment = Memory(num_envs, cues, delay, seed=seed, device=device)
    common: dict[str, Any] = {
        "learning_rate": learning_rate,
        "gamma": gamma,
        "batch_size": batch_size,
        "capacity": capacity,
        "learning_starts": learning_starts,
        "train_frequency": steps_per_update,
        "update_to_data": 1.0 / steps_per_update,
        "tau": tau,
        "epsilon": linear(1.0, epsilon, env_steps=epsilon_steps),
        "hidden": (features,),
        "seed": seed,
        "device": device,
    }
    spaces = environment.single_observation_space, environment.single_action_space
    kind = CORES[core]
    if kind is None:
        agent: Any = DQN(*spaces, **common)
    else:
        made = functools.partial(kind, features=features)
        agent = RecurrentDQN(*spaces, core=made, sequence_length=sequence_length, burn_in=burn_in, **common)
    loop = training_loop(agent, environment, store, seed=seed, epochs=epochs, iterations=iterations)
    proving_ground = Memory(100, cues, delay, seed=stream_seed(seed, "evaluation"), device=device)
    evaluate(loop, agent.policy(), proving_ground, episodes=100, every=evaluate_every)
    solved(loop, "evaluation_return", at_least=0.95, stop=stop_when_solved)
    return loop
