"""DQN on the 5 x 5 Gridworld."""

from __future__ import annotations

from rein.agents.dqn import DQN
from rein.envs.gridworld import Gridworld
from rein.handlers.evaluate_every import evaluate_every as evaluate
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.recipes.base import Builder, recipe
from rein.recipes.tasks import optimal_return
from rein.schedules import linear


@recipe(
    Gridworld,
    DQN,
    computed=["possible_targets"],
    num_envs=16,
    max_episode_steps=50,
    learning_rate=1e-3,
    gamma=0.95,
    hidden=(64, 64),
    learning_starts=500,
    update_to_data=0.25,
    tau=0.01,
    capacity=40_000,
    epochs=50,
    iterations=50,
)
def gridworld_dqn(
    build: Builder,
    target_x: int = 2,
    target_y: int = 4,
    epsilon: float = 0.05,
    epsilon_env_steps: int = 5_000,
    evaluate_every: int = 2,
    stop_when_solved: bool = True,
) -> Loop:
    """DQN on the 5 x 5 Gridworld: solved when the greedy policy is within 0.5 of the best return.

    Args:
        target_x: column of the target, 0 to 4.
        target_y: row of the target, 0 to 4; episodes start in row 0.
        epsilon: final probability of a random action; decreases from 1.
        epsilon_env_steps: env steps over which epsilon decreases.
    """
    targets = [(target_x, target_y)]
    environment = build.environment(possible_targets=targets)
    agent = build.agent(environment, epsilon=linear(1.0, epsilon, env_steps=epsilon_env_steps))
    loop = build.loop(agent, environment)
    test_environment = build.evaluation_environment(200, possible_targets=targets, max_episode_steps=None)
    evaluate(loop, agent.policy(), test_environment, episodes=200, max_episode_steps=50, every=evaluate_every)
    solved(loop, "evaluation_return", at_least=optimal_return(target_x, target_y) - 0.5, stop=stop_when_solved)
    return loop
