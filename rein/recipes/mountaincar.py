"""PPO on MountainCar-v0, with the environments in torch."""

from __future__ import annotations

from rein.agents.ppo import PPO
from rein.envs.mountain_car import MountainCar
from rein.handlers.evaluate_every import evaluate_every as evaluate
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.ops.random import stream_seed
from rein.protocols import Store
from rein.training.training_loop import training_loop


def mountaincar(
    store: Store | None = None,
    *,
    num_envs: int = 64,
    learning_rate: float = 5e-3,
    gamma: float = 0.99,
    gae_lambda: float = 0.95,
    update_epochs: int = 2,
    minibatches: int = 4,
    hidden: tuple[int, ...] = (32, 32),
    seed: int = 0,
    epochs: int = 500,
    iterations: int = 32,
    evaluation_episodes: int = 100,
    evaluate_every: int = 4,
    device: str = "cpu",
    stop_when_solved: bool = True,
) -> Loop:
    """PPO on MountainCar-v0: solved at a mean greedy return of at least -112 over 100 episodes.

    No reward tells the way to the flag: it is found by chance, by many environments sooner than by few. Greedy episodes
    get there long before those of training do.

    Args:
        store: where trajectories go.
        num_envs: environments stepped together.
        learning_rate: of Adam.
        gamma: discount factor.
        gae_lambda: how far advantages look.
        update_epochs: passes over a rollout.
        minibatches: updates in a pass.
        hidden: features of the hidden layers, of actor and critic each.
        seed: of everything random.
        epochs: epochs at most.
        iterations: steps of every environment in an epoch, which is one rollout.
        evaluation_episodes: greedy episodes in one evaluation.
        evaluate_every: epochs from one evaluation to the next.
        device: where environments and networks are.
        stop_when_solved: end the run at the first evaluation that solves the task.
    """
    environment = MountainCar(num_envs, seed=seed, device=device)
    agent = PPO(
        environment.single_observation_space,
        environment.single_action_space,
        learning_rate=learning_rate,
        gamma=gamma,
        gae_lambda=gae_lambda,
        rollout_steps=iterations,
        update_epochs=update_epochs,
        minibatches=minibatches,
        hidden=hidden,
        normalize_observation=True,
        normalize_reward=True,
        seed=seed,
        device=device,
    )
    loop = training_loop(agent, environment, store, seed=seed, epochs=epochs, iterations=iterations)
    # its own environments, of a stream of their own: an evaluation is of starts that training has not seen
    proving_ground = MountainCar(evaluation_episodes, seed=stream_seed(seed, "evaluation"), device=device)
    evaluate(loop, agent.policy(), proving_ground, episodes=evaluation_episodes, every=evaluate_every)
    solved(loop, "evaluation_return", at_least=-112.0, stop=stop_when_solved)
    return loop
