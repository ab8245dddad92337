"""DQN on Gymnasium's LunarLander-v3."""

from __future__ import annotations

from rein.agents.dqn import DQN
from rein.handlers.evaluate_every import evaluate_every as evaluate
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.recipes.base import Builder, recipe
from rein.schedules import linear


@recipe(
    "LunarLander-v3",
    DQN,
    num_envs=4,
    n_step=3,
    capacity=50_000,
    learning_starts=500,
    train_frequency=4,
    update_to_data=0.5,
    epochs=100,
    iterations=500,
)
def lunarlander_dqn(
    build: Builder,
    epsilon: float = 0.05,
    epsilon_env_steps: int = 12_000,
    evaluate_every: int = 5,
    stop_when_solved: bool = True,
) -> Loop:
    """DQN on LunarLander-v3: solved at a mean greedy return of at least 200. Takes at most 200,000 env steps.

    Args:
        epsilon: final probability of a random action; decreases from 1.
        epsilon_env_steps: env steps over which epsilon decreases.
    """
    environment = build.environment()
    agent = build.agent(environment, epsilon=linear(1.0, epsilon, env_steps=epsilon_env_steps))
    loop = build.loop(agent, environment)
    test_environment = build.evaluation_environment(20)
    evaluate(loop, agent.policy(), test_environment, episodes=100, every=evaluate_every)
    solved(loop, "evaluation_return", at_least=200.0, stop=stop_when_solved)
    return loop
