"""PPO on MountainCar-v0, simulated in torch."""

from __future__ import annotations

from rein.agents.ppo import PPO
from rein.envs.mountain_car import MountainCar
from rein.handlers.evaluate_every import evaluate_every as evaluate
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.recipes.base import Builder, recipe


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
    loop = build.loop(agent, environment)
    test_environment = build.evaluation_environment(evaluation_episodes)
    evaluate(loop, agent.policy(), test_environment, episodes=evaluation_episodes, every=evaluate_every)
    solved(loop, "evaluation_return", at_least=-112.0, stop=stop_when_solved)
    return loop
