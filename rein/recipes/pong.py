"""PPO on Atari's Pong, from its screen."""

from __future__ import annotations

import functools

from rein.agents.ppo import PPO
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.envs.wrappers.observations import FrameStack
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.protocols import Store
from rein.recipes.base import screen
from rein.schedules import linear
from rein.training.training_loop import training_loop


def pong(
    store: Store | None = None,
    *,
    num_envs: int = 8,
    size: int = 42,
    learning_rate: float = 5e-4,
    gamma: float = 0.99,
    gae_lambda: float = 0.95,
    update_epochs: int = 4,
    minibatches: int = 4,
    clip: float = 0.1,
    entropy_coefficient: float = 0.01,
    seed: int = 0,
    env_steps: int = 10_000_000,
    iterations: int = 128,
    device: str = "cpu",
    stop_when_solved: bool = True,
) -> Loop:
    """PPO on Atari's Pong from its screen, for 10 M env steps; solved at a mean of 20 of 21 in 100 training episodes.

    That is three to six hours on one core, and nobody has run it to its end. With 2 M steps in all, 76 minutes on one
    core, one run (seed 0) got from -20.4 to -0.4 in its last 100 training episodes, and rose to the end.

    Args:
        store: where trajectories go.
        num_envs: environments stepped together.
        size: pixels of a side of the screen; the 84 of Mnih et al. (2015) take four times as long.
        learning_rate: of Adam at first; it falls in a straight line to 0 at the end.
        gamma: discount factor.
        gae_lambda: how far advantages look.
        update_epochs: passes over a rollout.
        minibatches: updates in a pass.
        clip: how far from 1 a ratio of probabilities still counts.
        entropy_coefficient: weight of the bonus for entropy.
        seed: of everything random.
        env_steps: env steps in all, at whose end the learning rate is 0.
        iterations: steps of every environment in an epoch, which is one rollout.
        device: where the network is; the environments are on the host.
        stop_when_solved: end the run when it is solved.
    """
    environment = FrameStack(GymnasiumEnvironment(functools.partial(screen, size), num_envs, seed), 4)
    epochs = -(-env_steps // (iterations * num_envs))  # rounded up
    agent = PPO(
        environment.single_observation_space,
        environment.single_action_space,
        learning_rate=linear(learning_rate, 0.0, env_steps=env_steps),
        gamma=gamma,
        gae_lambda=gae_lambda,
        rollout_steps=iterations,
        update_epochs=update_epochs,
        minibatches=minibatches,
        clip=clip,
        entropy_coefficient=entropy_coefficient,
        hidden=(),
        shared=True,
        seed=seed,
        device=device,
    )
    loop = training_loop(agent, environment, store, seed=seed, epochs=epochs, iterations=iterations)
    solved(loop, "episode_return_100", at_least=20.0, stop=stop_when_solved)
    return loop
