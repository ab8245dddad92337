"""PPO on MountainCar-v0, simulated in torch."""

from __future__ import annotations

from rein.agents.ppo import PPO
from rein.envs.mountain_car import MountainCar
from rein.loop import Loop
from rein.recipes.recipe import Builder, recipe


@recipe(
    MountainCar,
    PPO,
    num_envs=64,
    learning_rate=5e-3,
    update_epochs=2,
    hidden=(32, 32),
    normalize_observation=True,
    normalize_reward=True,
    epochs=500,
    iterations=32,
)
def mountaincar(
    build: Builder, evaluation_episodes: int = 100, evaluate_every: int = 4, stop_when_solved: bool = True
) -> Loop:
    """PPO on MountainCar-v0: solved at a mean greedy return of at least -112 over 100 episodes.

    Rewards are negative until the car reaches the flag. Exploration first reaches it by chance, sooner with more
    environments. Greedy episodes reach the flag long before training episodes do.
    """
    environment = build.environment()
    agent = build.agent(environment)
    return build.evaluated_loop(
        agent,
        environment,
        evaluation_episodes,
        at_least=-112.0,
        every=evaluate_every,
        stop=stop_when_solved,
        episodes=evaluation_episodes,
    )
