"""DDPG on Pendulum-v1, simulated in torch."""

from __future__ import annotations

from rein.agents.base.action_noise import OrnsteinUhlenbeck
from rein.agents.ddpg import DDPG
from rein.envs.pendulum import Pendulum
from rein.loop import Loop
from rein.recipes.recipe import Builder, recipe


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
    return build.evaluated_loop(agent, environment, 100, at_least=-200.0, every=evaluate_every, stop=stop_when_solved)
