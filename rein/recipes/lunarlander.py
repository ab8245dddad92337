"""PPO on Gymnasium's LunarLander-v3."""

from __future__ import annotations

from rein.agents.ppo import PPO
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.protocols import Store
from rein.training.training_loop import training_loop


def lunarlander(
    store: Store | None = None,
    *,
    num_envs: int = 32,
    learning_rate: float = 3e-3,
    gamma: float = 0.999,
    gae_lambda: float = 0.98,
    update_epochs: int = 4,
    minibatches: int = 8,
    entropy_coefficient: float = 0.01,
    hidden: tuple[int, ...] = (64, 64),
    seed: int = 0,
    epochs: int = 400,
    iterations: int = 128,
    stop_when_solved: bool = True,
) -> Loop:
    """PPO on LunarLander-v3: solved when the last 100 training episodes have a mean return of at least 200.

    Args:
        store: where trajectories go.
        num_envs: environments stepped together.
        learning_rate: of Adam.
        gamma: discount factor.
        gae_lambda: how far advantages look.
        update_epochs: passes over a rollout.
        minibatches: updates in a pass.
        entropy_coefficient: weight of the bonus for entropy.
        hidden: features of the hidden layers, of actor and critic each.
        seed: of everything random.
        epochs: epochs at most.
        iterations: steps of every environment in an epoch, which is one rollout.
        stop_when_solved: end the run when it is solved.
    """
    environment = GymnasiumEnvironment("LunarLander-v3", num_envs, seed)
    agent = PPO(
        environment.single_observation_space,
        environment.single_action_space,
        learning_rate=learning_rate,
        gamma=gamma,
        gae_lambda=gae_lambda,
        rollout_steps=iterations,
        update_epochs=update_epochs,
        minibatches=minibatches,
        entropy_coefficient=entropy_coefficient,
        hidden=hidden,
        normalize_observation=True,
        normalize_reward=True,
        seed=seed,
    )
    loop = training_loop(agent, environment, store, seed=seed, epochs=epochs, iterations=iterations)
    solved(loop, "episode_return_100", at_least=200.0, stop=stop_when_solved)
    return loop
