"""Q-learning on the 5 x 5 Gridworld."""

from __future__ import annotations

from rein.agents.q_learning import QLearning
from rein.envs.gridworld import Gridworld
from rein.loop import Loop
from rein.recipes.recipe import Builder, recipe
from rein.recipes.tasks import gridworld_loop


@recipe(Gridworld, QLearning, computed=["possible_targets"], num_envs=64, learning_rate=0.5, epochs=100)
def gridworld(
    build: Builder,
    iterations: int = 20,
    target_x: int = 2,
    target_y: int = 4,
    evaluate_every: int = 5,
    stop_when_solved: bool = True,
) -> Loop:
    """Tabular Q-learning on a 5 x 5 Gridworld, one episode per epoch: solved within 0.5 of the best return.

    Args:
        iterations: maximum number of steps per episode.
        target_x: column of the target, 0 to 4.
        target_y: row of the target, 0 to 4; episodes start in row 0.
    """
    target = (target_x, target_y)
    return gridworld_loop(build, target, steps=iterations, every=evaluate_every, stop=stop_when_solved, episodic=True)
