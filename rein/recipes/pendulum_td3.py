"""TD3 on Pendulum-v1, with the environments in torch."""

from __future__ import annotations

from rein.agents.base.exploration import GaussianNoise
from rein.agents.td3 import TD3
from rein.envs.pendulum import Pendulum
from rein.handlers.evaluate_every import evaluate_every as evaluate
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.ops.random import stream_seed
from rein.protocols import Store
from rein.training.training_loop import training_loop


def pendulum_td3(
    store: Store | None = None,
    *,
    num_envs: int = 4,
    learning_rate: float = 1e-3,
    gamma: float = 0.98,
    batch_size: int = 256,
    hidden: tuple[int, ...] = (64, 64),
    noise: float = 0.1,
    learning_starts: int = 1_000,
    update_to_data: float = 1.0,
    seed: int = 0,
    epochs: int = 20,
    iterations: int = 250,
    evaluate_every: int = 2,
    device: str = "cpu",
    stop_when_solved: bool = True,
) -> Loop:
    """TD3 on Pendulum-v1: solved when the greedy policy has a mean return of at least -200; 20,000 env steps at most.

    Args:
        store: where trajectories go.
        num_envs: environments stepped together.
        learning_rate: of Adam.
        gamma: discount factor.
        batch_size: transitions of an update.
        hidden: features of the hidden layers, of actor and critics each.
        noise: standard deviation of what is added to actions between -1 and 1 to explore.
        learning_starts: env steps before the first update, acted at random.
        update_to_data: updates for each env step.
        seed: of everything random.
        epochs: epochs at most.
        iterations: steps of every environment in an epoch.
        evaluate_every: epochs from one evaluation of 100 episodes to the next.
        device: where environments and networks are.
        stop_when_solved: end the run when it is solved.
    """
    environment = Pendulum(num_envs, seed=seed, device=device)
    agent = TD3(
        environment.single_observation_space,
        environment.single_action_space,
        learning_rate=learning_rate,
        gamma=gamma,
        batch_size=batch_size,
        hidden=hidden,
        noise=GaussianNoise(noise),
        learning_starts=learning_starts,
        update_to_data=update_to_data,
        capacity=num_envs * iterations * epochs,
        seed=seed,
        device=device,
    )
    loop = training_loop(agent, environment, store, seed=seed, epochs=epochs, iterations=iterations)
    proving_ground = Pendulum(100, seed=stream_seed(seed, "evaluation"), device=device)
    evaluate(loop, agent.policy(), proving_ground, episodes=100, every=evaluate_every)
    solved(loop, "evaluation_return", at_least=-200.0, stop=stop_when_solved)
    return loop
