"""PPO on Acrobot-v1, simulated in torch."""

from __future__ import annotations

from rein.agents.ppo import PPO
from rein.envs.acrobot import Acrobot
from rein.loop import Loop
from rein.recipes.recipe import Builder, recipe
from rein.schedules import linear


@recipe(
    Acrobot,
    PPO,
    num_envs=128,
    update_epochs=2,
    hidden=(32, 32),
    normalize_observation=True,
    normalize_reward=True,
    epochs=200,
    iterations=16,
)
def acrobot(build: Builder, learning_rate: float = 5e-3, decay: int = 300_000, stop_when_solved: bool = True) -> Loop:
    """PPO on Acrobot-v1: solved when the last 100 training episodes have a mean return of at least -83.

    Args:
        learning_rate: initial learning rate; decreases to a tenth.
        decay: env steps over which the learning rate decreases.
    """
    environment = build.environment()
    agent = build.agent(environment, learning_rate=linear(learning_rate, learning_rate / 10.0, env_steps=decay))
    return build.solved_loop(agent, environment, at_least=-83.0, stop=stop_when_solved)
