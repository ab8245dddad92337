"""PPO on Acrobot-v1, with the environments in torch."""

from __future__ import annotations

from rein.agents.ppo import PPO
from rein.envs.acrobot import Acrobot
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.protocols import Store
from rein.schedules import linear
from rein.training.training_loop import training_loop


def acrobot(
    store: Store | None = None,
    *,
    num_envs: int = 128,
    learning_rate: float = 5e-3,
    gamma: float = 0.99,
    gae_lambda: float = 0.95,
    update_epochs: int = 2,
    minibatches: int = 4,
    hidden: tuple[int, ...] = (32, 32),
    decay: int = 300_000,
    seed: int = 0,
    epochs: int = 200,
    iterations: int = 16,
    device: str = "cpu",
    stop_when_solved: bool = True,
) -> Loop:
    """PPO on Acrobot-v1: solved when the last 100 training episodes have a mean return of at least -83.

    Args:
        store: where trajectories go.
        num_envs: environments stepped together.
        learning_rate: of Adam at first; it falls to a tenth in a straight line.
        gamma: discount factor.
        gae_lambda: how far advantages look.
        update_epochs: passes over a rollout.
        minibatches: updates in a pass.
        hidden: features of the hidden layers, of actor and critic each.
        decay: env steps over which it falls.
        seed: of everything random.
        epochs: epochs at most.
        iterations: steps of every environment in an epoch, which is one rollout.
        device: where environments and networks are.
        stop_when_solved: end the run when it is solved.
    """
    environment = Acrobot(num_envs, seed=seed, device=device)
    agent = PPO(
        environment.single_observation_space,
        environment.single_action_space,
        learning_rate=linear(learning_rate, learning_rate / 10.0, env_steps=decay),
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
    solved(loop, "episode_return_100", at_least=-83.0, stop=stop_when_solved)
    return loop
