"""DQN on CartPole-v1, simulated in torch."""

from __future__ import annotations

from rein.agents.dqn import DQN
from rein.envs.cartpole import CartPole
from rein.handlers.evaluate_every import evaluate_every as evaluate
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.recipes.base import Builder, recipe
from rein.schedules import linear


@recipe(
    CartPole,
    DQN,
    num_envs=8,
    n_step=3,
    train_frequency=8,
    update_to_data=0.25,
    tau=0.01,
    capacity=50_000,
    epochs=100,
    iterations=125,
)
def cartpole_dqn(
    build: Builder,
    epsilon: float = 0.05,
    epsilon_env_steps: int = 10_000,
    evaluate_every: int = 5,
    stop_when_solved: bool = True,
) -> Loop:
    """DQN on CartPole-v1: solved at a mean greedy return of at least 475. Takes at most 100,000 env steps.

    Args:
        epsilon: final probability of a random action; decreases from 1.
        epsilon_env_steps: env steps over which epsilon decreases.
    """
    environment = build.environment()
    agent = build.agent(environment, epsilon=linear(1.0, epsilon, env_steps=epsilon_env_steps))
    loop = build.loop(agent, environment)
    test_environment = build.evaluation_environment(100)
    evaluate(loop, agent.policy(), test_environment, episodes=100, every=evaluate_every)
    solved(loop, "evaluation_return", at_least=475.0, stop=stop_when_solved)
    return loop
