"""PPO on CartPole-v1, simulated in torch."""

from __future__ import annotations

from rein.agents.ppo import PPO
from rein.envs.cartpole import CartPole
from rein.loop import Loop
from rein.recipes.recipe import Builder, recipe
from rein.schedules import linear


@recipe(
    CartPole,
    PPO,
    num_envs=128,
    gamma=0.98,
    gae_lambda=0.9,
    update_epochs=2,
    minibatches=16,
    hidden=(32, 32),
    epochs=100,
    iterations=64,
)
def cartpole(build: Builder, learning_rate: float = 6e-3, stop_when_solved: bool = True) -> Loop:
    """PPO on CartPole-v1: solved when the last 100 training episodes have a mean return of at least 475 of 500.

    Args:
        learning_rate: initial learning rate; decreases to a twelfth over 150,000 env steps.
    """
    environment = build.environment()
    agent = build.agent(environment, learning_rate=linear(learning_rate, learning_rate / 12.0, env_steps=150_000))
    return build.solved_loop(agent, environment, at_least=475.0, stop=stop_when_solved)
