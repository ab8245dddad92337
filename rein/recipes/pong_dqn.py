"""DQN on Atari Pong, from images of the screen."""

from __future__ import annotations

from rein.agents.dqn import DQN
from rein.loop import Loop
from rein.recipes.recipe import Builder, recipe
from rein.recipes.tasks import pong_screens


@recipe(
    pong_screens,
    DQN,
    num_envs=4,
    learning_rate=1e-4,
    batch_size=32,
    hidden=(),
    capacity=100_000,
    learning_starts=50_000,
    train_frequency=4,
    update_to_data=0.25,
    tau=1.0,
    target_frequency=250,
    frame_stack=4,
    epsilon=0.01,
    epsilon_env_steps=1_000_000,
    iterations=1_000,
)
def pong_dqn(build: Builder, env_steps: int = 10_000_000, stop_when_solved: bool = True) -> Loop:
    """DQN on Atari Pong from images, 10 M env steps: solved at a mean return of 18 of 21 in 100 training episodes.

    The replay stores each frame once, as bytes: 100,000 transitions take 0.7 GB instead of 5.6 GB. The defaults are
    those of rl-baselines3-zoo for Atari, except that learning starts after 50,000 env steps as in Mnih et al. (2015).
    The run takes a day or more on one core. Use device="cuda" if a GPU is available.
    """
    environment = build.environment()
    agent = build.agent(environment)
    return build.solved_loop(agent, environment, at_least=18.0, stop=stop_when_solved)
