"""SAC on Gymnasium's HalfCheetah-v5."""

from __future__ import annotations

from rein.agents.sac import SAC
from rein.loop import Loop
from rein.recipes.recipe import Builder, recipe


@recipe("HalfCheetah-v5", SAC, num_envs=1, learning_starts=10_000, iterations=1_000)
def halfcheetah_sac(build: Builder, env_steps: int = 1_000_000) -> Loop:
    """SAC on HalfCheetah-v5, with the options of Haarnoja et al. (2018) and rl-baselines3-zoo."""
    environment = build.environment()
    agent = build.agent(environment)
    return build.loop(agent, environment)
