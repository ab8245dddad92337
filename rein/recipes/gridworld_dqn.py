"""DQN on the Gridworld of the ancestor's guide."""

from __future__ import annotations

from rein.agents.dqn import DQN
from rein.envs.gridworld import Gridworld
from rein.handlers.evaluate_every import evaluate_every as evaluate
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.ops.random import stream_seed
from rein.protocols import Store
from rein.recipes.base import optimal_return
from rein.schedules import linear
from rein.training.training_loop import training_loop


def gridworld_dqn(
    store: Store | None = None,
    *,
    num_envs: int = 16,
    target_x: int = 2,
    target_y: int = 4,
    learning_rate: float = 1e-3,
    gamma: float = 0.95,
    batch_size: int = 128,
    hidden: tuple[int, ...] = (64, 64),
    epsilon: float = 0.05,
    epsilon_env_steps: int = 5_000,
    n_step: int = 1,
    learning_starts: int = 500,
    update_to_data: float = 0.25,
    tau: float = 0.01,
    prioritized: bool = False,
    seed: int = 0,
    epochs: int = 50,
    iterations: int = 50,
    evaluate_every: int = 2,
    device: str = "cpu",
    stop_when_solved: bool = True,
) -> Loop:
    """DQN on the 5 x 5 Gridworld; solved within 0.5 of the best return, as the recipe `gridworld`.

    Args:
        store: where trajectories go.
        num_envs: environments stepped together.
        target_x: column of the target, 0 to 4.
        target_y: row of the target, 0 to 4; episodes start in row 0.
        learning_rate: of Adam.
        gamma: discount factor.
        batch_size: transitions of an update.
        hidden: features of the hidden layers.
        epsilon: probability of a random action in the end; it begins with 1.
        epsilon_env_steps: env steps until then.
        n_step: rewards before the value of what came next.
        learning_starts: env steps before the first update, acted at random.
        update_to_data: updates for each env step.
        tau: how far the targets follow the networks at each update.
        prioritized: sample by the size of the last error.
        seed: of everything random.
        epochs: epochs at most.
        iterations: steps of every environment in an epoch.
        evaluate_every: epochs from one evaluation of 200 episodes to the next.
        device: where environments and networks are.
        stop_when_solved: end the run when it is solved.
    """
    targets = [(target_x, target_y)]
    environment = Gridworld(num_envs, targets, seed=seed, max_episode_steps=iterations, device=device)
    agent = DQN(
        environment.single_observation_space,
        environment.single_action_space,
        learning_rate=learning_rate,
        gamma=gamma,
        batch_size=batch_size,
        hidden=hidden,
        epsilon=linear(1.0, epsilon, env_steps=epsilon_env_steps),
        n_step=n_step,
        learning_starts=learning_starts,
        update_to_data=update_to_data,
        tau=tau,
        prioritized=prioritized,
        capacity=num_envs * iterations * epochs,
        seed=seed,
        device=device,
    )
    loop = training_loop(agent, environment, store, seed=seed, epochs=epochs, iterations=iterations)
    proving_ground = Gridworld(200, targets, seed=stream_seed(seed, "evaluation"), device=device)
    evaluate(loop, agent.policy(), proving_ground, episodes=200, max_episode_steps=50, every=evaluate_every)
    solved(loop, "evaluation_return", at_least=optimal_return(target_x, target_y) - 0.5, stop=stop_when_solved)
    return loop
