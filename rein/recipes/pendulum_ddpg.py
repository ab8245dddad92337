"""DDPG on Pendulum-v1, simulated in torch."""

from __future__ import annotations

from rein.agents.base.action_noise import OrnsteinUhlenbeck
from rein.agents.ddpg import DDPG
from rein.envs.pendulum import Pendulum
from rein.handlers.evaluate_every import evaluate_every as evaluate
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.recipes.base import Builder, recipe


@recipe(
    Pendulum,
    DDPG,
    computed=["noise"],
    num_envs=4,
    learning_rate=1e-3,
    gamma=0.98,
    hidden=(64, 64),
    capacity=20_000,
    epochs=20,
    iterations=250,
)
def pendulum_ddpg(build: Builder, sigma: float = 0.2, evaluate_every: int = 2, stop_when_solved: bool = True) -> Loop:
    """DDPG on Pendulum-v1: solved at a mean greedy return of at least -200. Takes at most 20,000 env steps.

    Args:
        sigma: standard deviation per step of the Ornstein-Uhlenbeck noise on actions scaled to [-1, 1].
    """
    environment = build.environment()
    agent = build.agent(environment, noise=OrnsteinUhlenbeck(sigma=sigma))
    loop = build.loop(agent, environment)
    test_environment = build.evaluation_environment(100)
    evaluate(loop, agent.policy(), test_environment, episodes=100, every=evaluate_every)
    solved(loop, "evaluation_return", at_least=-200.0, stop=stop_when_solved)
    return loop
