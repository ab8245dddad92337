"""DQN on Gymnasium's LunarLander-v3."""

from __future__ import annotations

from rein.agents.dqn import DQN
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.handlers.evaluate_every import evaluate_every as evaluate
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.ops.random import stream_seed
from rein.protocols import Store
from rein.schedules import linear
from rein.training.training_loop import training_loop


def lunarlander_dqn(
    store: Store | None = None,
    *,
    num_envs: int = 4,
    learning_rate: float = 1e-3,
    gamma: float = 0.99,
    batch_size: int = 128,
    hidden: tuple[int, ...] = (128, 128),
    epsilon: float = 0.05,
    epsilon_env_steps: int = 12_000,
    n_step: int = 3,
    capacity: int = 50_000,
    learning_starts: int = 500,
    train_frequency: int = 4,
    update_to_data: float = 0.5,
    tau: float = 0.005,
    target_frequency: int = 1,
    prioritized: bool = False,
    seed: int = 0,
    epochs: int = 100,
    iterations: int = 500,
    evaluate_every: int = 5,
    device: str = "cpu",
    stop_when_solved: bool = True,
) -> Loop:
    """DQN on LunarLander-v3, for 200,000 env steps at most: solved when the greedy policy has a mean return of 200.

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
        capacity: transitions kept.
        learning_starts: env steps before the first update, acted at random.
        train_frequency: env steps between two rounds of updates.
        update_to_data: updates for each env step.
        tau: how far the targets follow the networks each time.
        target_frequency: updates between two such times.
        prioritized: sample by the size of the last error.
        seed: of everything random.
        epochs: epochs at most.
        iterations: steps of every environment in an epoch.
        evaluate_every: epochs from one evaluation of 100 episodes to the next.
        device: where the networks and the replay are; the environments are on the host.
        stop_when_solved: end the run when it is solved.
    """
    environment = GymnasiumEnvironment("LunarLander-v3", num_envs, seed)
    agent = DQN(
        environment.single_observation_space,
        environment.single_action_space,
        learning_rate=learning_rate,
        gamma=gamma,
        batch_size=batch_size,
        hidden=hidden,
        epsilon=linear(1.0, epsilon, env_steps=epsilon_env_steps),
        n_step=n_step,
        capacity=capacity,
        learning_starts=learning_starts,
        train_frequency=train_frequency,
        update_to_data=update_to_data,
        tau=tau,
        target_frequency=target_frequency,
        prioritized=prioritized,
        seed=seed,
        device=device,
    )
    loop = training_loop(agent, environment, store, seed=seed, epochs=epochs, iterations=iterations)
    proving_ground = GymnasiumEnvironment("LunarLander-v3", 20, stream_seed(seed, "evaluation"))
    evaluate(loop, agent.policy(), proving_ground, episodes=100, every=evaluate_every)
    solved(loop, "evaluation_return", at_least=200.0, stop=stop_when_solved)
    return loop
