"""PPO on Pendulum-v1, simulated in torch."""

from __future__ import annotations

from rein.agents.ppo import PPO
from rein.envs.pendulum import Pendulum
from rein.loop import Loop
from rein.recipes.recipe import Builder, recipe


@recipe(
    Pendulum,
    PPO,
    num_envs=64,
    learning_rate=3e-3,
    gamma=0.95,
    minibatches=8,
    hidden=(32, 32),
    normalize_reward=True,
    epochs=100,
    iterations=64,
)
def pendulum_ppo(build: Builder, stop_when_solved: bool = True) -> Loop:
    """PPO on Pendulum-v1: solved when the last 100 training episodes have a mean return of at least -250."""
    environment = build.environment()
    agent = build.agent(environment)
    return build.solved_loop(agent, environment, at_least=-250.0, stop=stop_when_solved)
