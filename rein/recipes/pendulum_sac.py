"""SAC on Pendulum-v1, simulated in torch."""

from __future__ import annotations

from rein.agents.sac import SAC
from rein.envs.pendulum import Pendulum
from rein.loop import Loop
from rein.recipes.recipe import Builder, recipe


@recipe(Pendulum, SAC, num_envs=4, learning_rate=1e-3, hidden=(64, 64), capacity=20_000, epochs=20, iterations=250)
def pendulum_sac(build: Builder, evaluate_every: int = 2, stop_when_solved: bool = True) -> Loop:
    """SAC on Pendulum-v1: solved at a mean greedy return of at least -200. Takes at most 20,000 env steps."""
    environment = build.environment()
    agent = build.agent(environment)
    return build.evaluated_loop(agent, environment, 100, at_least=-200.0, every=evaluate_every, stop=stop_when_solved)
