"""Q-learning on Gymnasium's Taxi-v4."""

from __future__ import annotations

from rein.agents.q_learning import QLearning
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.handlers.evaluate_every import evaluate_every as evaluate
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.ops.random import stream_seed
from rein.protocols import Store
from rein.training.training_loop import training_loop


def taxi(
    store: Store | None = None,
    *,
    num_envs: int = 16,
    learning_rate: float = 0.5,
    gamma: float = 0.99,
    epsilon: float = 0.1,
    seed: int = 0,
    epochs: int = 100,
    iterations: int = 125,
    evaluation_episodes: int = 100,
    evaluate_every: int = 5,
    stop_when_solved: bool = True,
) -> Loop:
    """Tabular Q-learning on Taxi-v4: 500 states, solved at a mean greedy return of 7.0 (7.93 is optimal).

    Args:
        store: where trajectories go.
        num_envs: environments stepped together.
        learning_rate: the fraction of the way that a value goes to its target in one update.
        gamma: discount factor.
        epsilon: probability of a random action.
        seed: of everything random.
        epochs: epochs at most.
        iterations: steps of every environment in an epoch.
        evaluation_episodes: greedy episodes in one evaluation.
        evaluate_every: epochs from one evaluation to the next.
        stop_when_solved: end the run at the first evaluation that solves the task.
    """
    environment = GymnasiumEnvironment("Taxi-v4", num_envs=num_envs, seed=seed)
    agent = QLearning(
        environment.single_observation_space,
        environment.single_action_space,
        learning_rate=learning_rate,
        gamma=gamma,
        epsilon=epsilon,
        seed=seed,
    )
    loop = training_loop(agent, environment, store, seed=seed, epochs=epochs, iterations=iterations)
    # its own environments, of a stream of their own: an evaluation is of starts that training has not seen
    proving_ground = GymnasiumEnvironment("Taxi-v4", num_envs=num_envs, seed=stream_seed(seed, "evaluation"))
    evaluate(loop, agent.policy(), proving_ground, episodes=evaluation_episodes, every=evaluate_every)
    solved(loop, "evaluation_return", at_least=7.0, stop=stop_when_solved)
    return loop
