"""PPO on Navigation: discs that must reach their targets without collisions."""

from __future__ import annotations

from rein.agents.ppo import PPO
from rein.envs.navigation import Navigation
from rein.loop import Loop
from rein.recipes.recipe import Builder, recipe


@recipe(
    Navigation,
    PPO,
    worlds=32,
    learning_rate=3e-3,
    gamma=0.97,
    minibatches=8,
    update_epochs=4,
    log_std=-0.5,
    epochs=120,
    iterations=32,
)
def navigation(build: Builder, stop_when_solved: bool = True) -> Loop:
    """PPO on Navigation, one policy for all agents: solved when the last 100 episodes have a mean return of 2.1."""
    environment = build.environment()
    agent = build.agent(environment)
    return build.solved_loop(agent, environment, at_least=2.1, stop=stop_when_solved)
