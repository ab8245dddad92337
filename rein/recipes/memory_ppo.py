"""PPO with and without a memory on a task that asks for one."""

from __future__ import annotations

import functools

from rein.agents.ppo import PPO
from rein.envs.probes.memory import Memory
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.networks.recurrent import GRU, LSTM, MinimalGRU
from rein.protocols import Store
from rein.training.training_loop import training_loop

CORES = {"lstm": LSTM, "gru": GRU, "mingru": MinimalGRU, "none": None}


def memory_ppo(
    store: Store | None = None,
    *,
    core: str = "lstm",
    cues: int = 4,
    delay: int = 8,
    num_envs: int = 64,
    learning_rate: float = 1e-2,
    gamma: float = 0.95,
    gae_lambda: float = 0.95,
    update_epochs: int = 4,
    minibatches: int = 4,
    entropy_coefficient: float = 0.01,
    features: int = 64,
    seed: int = 0,
    epochs: int = 100,
    iterations: int = 40,
    device: str = "cpu",
    stop_when_solved: bool = True,
) -> Loop:
    """Recurrent PPO on Memory: 95 of 100 answers right, which without a memory stay at chance (try --core none).

    Args:
        store: where trajectories go.
        core: what remembers: lstm, gru or mingru; none for a network without a memory.
        cues: how many cues there are to be told apart.
        delay: steps from a cue to the question.
        num_envs: environments stepped together.
        learning_rate: of Adam.
        gamma: discount factor.
        gae_lambda: how far advantages look.
        update_epochs: passes over a rollout.
        minibatches: updates in a pass, each of whole sequences.
        entropy_coefficient: weight of the bonus for entropy.
        features: of the hidden layer and of the core, of actor and critic each.
        seed: of everything random.
        epochs: epochs at most.
        iterations: steps of every environment in an epoch, which is one rollout.
        device: where environments and networks are.
        stop_when_solved: end the run when it is solved.
    """
    if core not in CORES:
        raise ValueError(f"core={core!r}: use one of {', '.join(CORES)}")
    kind = CORES[core]
    environment = Memory(num_envs, cues, delay, seed=seed, device=device)
    agent = PPO(
        environment.single_observation_space,
        environment.single_action_space,
        learning_rate=learning_rate,
        gamma=gamma,
        gae_lambda=gae_lambda,
        rollout_steps=iterations,
        update_epochs=update_epochs,
        minibatches=minibatches,
        entropy_coefficient=entropy_coefficient,
        hidden=(features,),
        core=None if kind is None else functools.partial(kind, features=features),
        seed=seed,
        device=device,
    )
    loop = training_loop(agent, environment, store, seed=seed, epochs=epochs, iterations=iterations)
    solved(loop, "episode_return_100", at_least=0.95, stop=stop_when_solved)
    return loop
