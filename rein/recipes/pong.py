"""PPO on Atari Pong, from images of the screen."""

from __future__ import annotations

from rein.agents.ppo import PPO
from rein.loop import Loop
from rein.recipes.recipe import Builder, recipe
from rein.recipes.tasks import pong_screens
from rein.schedules import linear


@recipe(
    pong_screens,
    PPO,
    size=42,
    gae_lambda=0.95,
    clip=0.1,
    entropy_coefficient=0.01,
    hidden=(),
    shared=True,
    iterations=128,
)
def pong(
    build: Builder, learning_rate: float = 5e-4, env_steps: int = 10_000_000, stop_when_solved: bool = True
) -> Loop:
    """PPO on Atari Pong from images, 10 M env steps: solved at a mean return of 20 of 21 in 100 training episodes.

    The run takes three to six hours on one core. Its final return has not been measured. In a run of 2 M env steps
    (seed 0, 76 minutes on one core), the mean return of 100 training episodes increased from -20.4 to -0.4.

    Args:
        learning_rate: initial learning rate; decreases to 0 over the run.
    """
    environment = build.environment()
    agent = build.agent(environment, learning_rate=linear(learning_rate, 0.0, env_steps=env_steps))
    return build.solved_loop(agent, environment, at_least=20.0, stop=stop_when_solved)
