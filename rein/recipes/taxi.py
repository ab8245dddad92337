"""Q-learning on Gymnasium's Taxi-v4."""

from __future__ import annotations

from rein.agents.q_learning import QLearning
from rein.loop import Loop
from rein.recipes.recipe import Builder, recipe


@recipe("Taxi-v4", QLearning, learning_rate=0.5, epochs=100, iterations=125, action_mask=False)
def taxi(
    build: Builder,
    num_envs: int = 16,
    evaluation_episodes: int = 100,
    evaluate_every: int = 5,
    stop_when_solved: bool = True,
) -> Loop:
    """Tabular Q-learning on Taxi-v4 (500 states): solved at a mean greedy return of 7.0. The optimum is 7.93."""
    environment = build.environment()
    agent = build.agent(environment)
    return build.evaluated_loop(
        agent,
        environment,
        num_envs,
        at_least=7.0,
        every=evaluate_every,
        stop=stop_when_solved,
        episodes=evaluation_episodes,
    )
