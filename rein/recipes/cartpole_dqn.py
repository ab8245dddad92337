"""DQN on CartPole-v1, with the environments in torch."""

from __future__ import annotations

from rein.agents.dqn import DQN
from rein.envs.cartpole import CartPole
from rein.handlers.evaluate_every import evaluate_every as evaluate
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.ops.random import stream_seed
from rein.protocols import Store
from rein.schedules import linear
from rein.training.training_loop import training_loop


def cartpole_dqn(
    store: Store | None = None,
    *,
    num_envs: int = 8,
    learning_rate: float = 1e-3,
    gamma: float = 0.99,
    batch_size: int = 128,
    hidden: tuple[int, ...] = (128, 128),
    epsilon: float = 0.05,
    epsilon_env_steps: int = 10_000,
    n_step: int = 3,
    learning_starts: int = 1_000,
    train_frequency: int = 8,
    update_to_data: float = 0.25,
    tau: float = 0.01,
    prioritized: bool = False,
    seed: int = 0,
    epochs: int = 100,
    iterations: int = 125,
    evaluate_every: int = 5,
    device: str = "cpu",
    stop_when_solved: bool = True,
) -> Loop:
    """DQN on CartPole-v1: solved when the greedy policy has a mean return of at least 475; 100,000 env steps at most.

    Args:
        store: where trajectories go.
        num_envs: environments stepped together.
        learning_rate: of Adam.
        gamma: discount factor.
        batch_size: transitions of an update.
        hidden: features of the hidden layers.
        epsilon: probability of a random action in the end; it begins with 1.
        epsilon_env_steps: env steps until then.
        n_step: rewards before the value of what came next.
        learning_starts: env steps before the first update, acted at random.
        train_frequency: env steps between two rounds of updates.
        update_to_data: updates for each env step.
        tau: how far the targets follow the networks at each update.
        prioritized: sample by the size of the last error.
        seed: of everything random.
        epochs: epochs at most.
        iterations: steps of every environment in an epoch.
        evaluate_every: epochs from one evaluation of 100 episodes to the next.
        device: where environments and networks are.
        stop_when_solved: end the run when it is solved.
    """
    environment = CartPole(num_envs, seed=seed, device=device)
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
        train_frequency=train_frequency,
        update_to_data=update_to_data,
        tau=tau,
        prioritized=prioritized,
        capacity=50_000,
        seed=seed,
        device=device,
    )
    loop = training_loop(agent, environment, store, seed=seed, epochs=epochs, iterations=iterations)
    proving_ground = CartPole(100, seed=stream_seed(seed, "evaluation"), device=device)
    evaluate(loop, agent.policy(), proving_ground, episodes=100, every=evaluate_every)
    solved(loop, "evaluation_return", at_least=475.0, stop=stop_when_solved)
    return loop
