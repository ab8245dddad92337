"""DQN on Gymnasium's LunarLander-v3."""

from __future__ import annotations

from rein.agents.dqn import DQN
from rein.loop import Loop
from rein.recipes.recipe import Builder, recipe


@recipe(
    "LunarLander-v3",
    DQN,
    num_envs=4,
    n_step=3,
    capacity=50_000,
    learning_starts=500,
    train_frequency=4,
    update_to_data=0.5,
    epsilon=0.05,
    epsilon_env_steps=12_000,
    epochs=100,
    iterations=500,
)
def lunarlander_dqn(build: Builder, evaluate_every: int = 5, stop_when_solved: bool = True) -> Loop:
    """DQN on LunarLander-v3: solved at a mean greedy return of at least 200. Takes at most 200,000 env steps."""
    environment = build.environment()
    agent = build.agent(environment)
    return build.evaluated_loop(agent, environment, 20, at_least=200.0, every=evaluate_every, stop=stop_when_solved)
