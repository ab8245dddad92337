"""Q-learning on the 5 x 5 Gridworld."""

from __future__ import annotations

from rein.agents.q_learning import QLearning
from rein.envs.gridworld import Gridworld
from rein.handlers.evaluate_every import evaluate_every as evaluate
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.recipes.base import Builder, recipe
from rein.recipes.tasks import optimal_return


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
    targets = [(target_x, target_y)]
    environment = build.environment(possible_targets=targets)
    agent = build.agent(environment)
    loop = build.loop(agent, environment, episodic=True)
    test_environment = build.evaluation_environment(200, possible_targets=targets)
    evaluate(loop, agent.policy(), test_environment, episodes=200, max_episode_steps=iterations, every=evaluate_every)
    solved(loop, "evaluation_return", at_least=optimal_return(target_x, target_y) - 0.5, stop=stop_when_solved)
    return loop
