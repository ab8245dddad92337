"""PPO on CartPole-v1, with the environments in torch."""

from __future__ import annotations

from rein.agents.ppo import PPO
from rein.envs.cartpole import CartPole
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.protocols import Store
from rein.schedules import linear
from rein.training.training_loop import training_loop


def cartpole(
    store: Store | None = None,
    *,
    num_envs: int = 128,
    learning_rate: float = 6e-3,
    gamma: float = 0.98,
    gae_lambda: float = 0.9,
    update_epochs: int = 2,
    minibatches: int = 16,
    clip: float = 0.2,
    hidden: tuple[int, ...] = (32, 32),
    seed: int = 0,
    epochs: int = 100,
    iterations: int = 64,
    device: str = "cpu",
    stop_when_solved: bool = True,
) -> Loop:
    """PPO on CartPole-v1: solved when the last 100 training episodes have a mean return of at least 475 of 500.

    Args:
        store: where trajectories go.
        num_envs: environments stepped together.
        learning_rate: of Adam at first; it falls to a twelfth in a straight line over 150,000 env steps.
        gamma: discount factor.
        gae_lambda: how far advantages look.
        update_epochs: passes over a rollout.
        minibatches: updates in a pass.
        clip: how far from 1 a ratio of probabilities still counts.
        hidden: features of the hidden layers, of actor and critic each.
        seed: of everything random.
        epochs: epochs at most.
        iterations: steps of every environment in an epoch, which is one rollout.
        device: where environments and networks are.
        stop_when_solved: end the run when it is solved.
    """
    environment = CartPole(num_envs, seed=seed, device=device)
    agent = PPO(
        environment.single_observation_space,
        environment.single_action_space,
        learning_rate=linear(learning_rate, learning_rate / 12.0, env_steps=150_000),
        gamma=gamma,
        gae_lambda=gae_lambda,
        rollout_steps=iterations,
        update_epochs=update_epochs,
        minibatches=minibatches,
        clip=clip,
        hidden=hidden,
        seed=seed,
        device=device,
    )
    loop = training_loop(agent, environment, store, seed=seed, epochs=epochs, iterations=iterations)
    solved(loop, "episode_return_100", at_least=475.0, stop=stop_when_solved)
    return loop
