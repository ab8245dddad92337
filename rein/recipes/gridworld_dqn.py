"""DQN on the 5 x 5 Gridworld."""

from __future__ import annotations

from rein.agents.dqn import DQN
from rein.envs.gridworld import Gridworld
from rein.loop import Loop
from rein.recipes.recipe import Builder, recipe
from rein.recipes.tasks import gridworld_loop


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
    epsilon=0.05,
    epsilon_env_steps=5_000,
    epochs=50,
    iterations=50,
)
def gridworld_dqn(
    build: Builder, target_x: int = 2, target_y: int = 4, evaluate_every: int = 2, stop_when_solved: bool = True
) -> Loop:
    """DQN on the 5 x 5 Gridworld: solved when the greedy policy is within 0.5 of the best return.

    Args:
        target_x: column of the target, 0 to 4.
        target_y: row of the target, 0 to 4; episodes start in row 0.
    """
    target = (target_x, target_y)
    return gridworld_loop(build, target, steps=50, every=evaluate_every, stop=stop_when_solved, max_episode_steps=None)
