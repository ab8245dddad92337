"""DQN on CartPole-v1, simulated in torch."""

from __future__ import annotations

from rein.agents.dqn import DQN
from rein.envs.cartpole import CartPole
from rein.loop import Loop
from rein.recipes.recipe import Builder, recipe


@recipe(
    CartPole,
    DQN,
    num_envs=8,
    n_step=3,
    train_frequency=8,
    update_to_data=0.25,
    tau=0.01,
    capacity=50_000,
    epsilon=0.05,
    epsilon_env_steps=10_000,
    epochs=100,
    iterations=125,
)
def cartpole_dqn(build: Builder, evaluate_every: int = 5, stop_when_solved: bool = True) -> Loop:
    """DQN on CartPole-v1: solved at a mean greedy return of at least 475. Takes at most 100,000 env steps."""
    environment = build.environment()
    agent = build.agent(environment)
    return build.evaluated_loop(agent, environment, 100, at_least=475.0, every=evaluate_every, stop=stop_when_solved)
