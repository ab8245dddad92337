"""SAC on HalfCheetah-v5 (the extra `mujoco`)."""

from __future__ import annotations

from rein.agents.sac import SAC
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.loop import Loop
from rein.protocols import Store
from rein.training.training_loop import training_loop


def halfcheetah_sac(
    store: Store | None = None,
    *,
    num_envs: int = 1,
    learning_rate: float = 3e-4,
    gamma: float = 0.99,
    batch_size: int = 256,
    hidden: tuple[int, ...] = (256, 256),
    learning_starts: int = 10_000,
    update_to_data: float = 1.0,
    seed: int = 0,
    env_steps: int = 1_000_000,
    iterations: int = 1_000,
    compile: bool = False,
) -> Loop:
    """SAC on HalfCheetah-v5, with the numbers of the paper and of rl-zoo.

    Args:
        store: where trajectories go.
        num_envs: environments stepped together.
        learning_rate: of Adam.
        gamma: discount factor.
        batch_size: transitions of an update.
        hidden: features of the hidden layers, of actor and critics each.
        learning_starts: env steps before the first update, acted at random.
        update_to_data: updates for each env step.
        seed: of everything random.
        env_steps: env steps in all.
        iterations: steps of every environment in an epoch.
        compile: compile the losses.
    """
    environment = GymnasiumEnvironment("HalfCheetah-v5", num_envs, seed)
    epochs = -(-env_steps // (iterations * num_envs))  # rounded up
    agent = SAC(
        environment.single_observation_space,
        environment.single_action_space,
        learning_rate=learning_rate,
        gamma=gamma,
        batch_size=batch_size,
        hidden=hidden,
        learning_starts=learning_starts,
        update_to_data=update_to_data,
        capacity=min(env_steps, 1_000_000),
        compile=compile,
        seed=seed,
    )
    return training_loop(agent, environment, store, seed=seed, epochs=epochs, iterations=iterations)
