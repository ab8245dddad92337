"""Q-learning on the Gridworld of the ancestor's guide."""

from __future__ import annotations

from rein.agents.q_learning import QLearning
from rein.envs.gridworld import Gridworld
from rein.handlers.evaluate_every import evaluate_every as evaluate
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.ops.random import stream_seed
from rein.protocols import Store
from rein.recipes.base import optimal_return
from rein.training.training_loop import training_loop


def gridworld(
    store: Store | None = None,
    *,
    num_envs: int = 64,
    target_x: int = 2,
    target_y: int = 4,
    learning_rate: float = 0.5,
    gamma: float = 0.99,
    epsilon: float = 0.1,
    seed: int = 0,
    epochs: int = 100,
    iterations: int = 20,
    evaluate_every: int = 5,
    stop_when_solved: bool = True,
) -> Loop:
    """Tabular Q-learning on a 5 x 5 Gridworld, an episode an epoch; solved within 0.5 of the best return.

    Args:
        store: where trajectories go.
        num_envs: environments stepped together.
        target_x: column of the target, 0 to 4.
        target_y: row of the target, 0 to 4; episodes start in row 0.
        learning_rate: the fraction of the way that a value goes to its target in one update.
        gamma: discount factor.
        epsilon: probability of a random action.
        seed: of everything random.
        epochs: epochs at most.
        iterations: steps after which an episode is cut.
        evaluate_every: epochs from one evaluation to the next.
        stop_when_solved: end the run at the first evaluation that solves the task.
    """
    targets = [(target_x, target_y)]
    environment = Gridworld(num_envs, targets, seed=seed)
    agent = QLearning(
        environment.single_observation_space,
        environment.single_action_space,
        learning_rate=learning_rate,
        gamma=gamma,
        epsilon=epsilon,
        seed=seed,
    )
    loop = training_loop(agent, environment, store, episodic=True, seed=seed, epochs=epochs, iterations=iterations)
    proving_ground = Gridworld(200, targets, seed=stream_seed(seed, "evaluation"))
    evaluate(loop, agent.policy(), proving_ground, episodes=200, max_episode_steps=iterations, every=evaluate_every)

    solved(loop, "evaluation_return", at_least=optimal_return(target_x, target_y) - 0.5, stop=stop_when_solved)
    return loop
