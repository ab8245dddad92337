"""PPO on Gymnasium's LunarLander-v3."""

from __future__ import annotations

from rein.agents.ppo import PPO
from rein.loop import Loop
from rein.recipes.recipe import Builder, recipe


@recipe(
    "LunarLander-v3",
    PPO,
    num_envs=32,
    learning_rate=3e-3,
    gamma=0.999,
    gae_lambda=0.98,
    minibatches=8,
    entropy_coefficient=0.01,
    normalize_observation=True,
    normalize_reward=True,
    epochs=400,
    iterations=128,
)
def lunarlander(build: Builder, stop_when_solved: bool = True) -> Loop:
    """PPO on LunarLander-v3: solved when the last 100 training episodes have a mean return of at least 200."""
    environment = build.environment()
    agent = build.agent(environment)
    return build.solved_loop(agent, environment, at_least=200.0, stop=stop_when_solved)
