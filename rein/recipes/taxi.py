"""Q-learning on Gymnasium's Taxi-v4."""

from __future__ import annotations

from rein.agents.q_learning import QLearning
from rein.handlers.evaluate_every import evaluate_every as evaluate
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.recipes.base import Builder, recipe


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
    loop = build.loop(agent, environment)
    test_environment = build.evaluation_environment(num_envs)
    evaluate(loop, agent.policy(), test_environment, episodes=evaluation_episodes, every=evaluate_every)
    solved(loop, "evaluation_return", at_least=7.0, stop=stop_when_solved)
    return loop
