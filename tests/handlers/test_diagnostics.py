"""Norms of parameters and gradients, by part of the networks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import rein
from rein.handlers.diagnostics import diagnostics
from rein.testing.stateful import copy_state, first_difference

REPLAY: dict[str, Any] = {"hidden": (8,), "batch_size": 8, "learning_starts": 4, "seed": 0}


def a2c() -> tuple[rein.A2C, Any]:
    environment = rein.envs.CartPole(num_envs=4, seed=0)
    return rein.A2C(environment, rollout_steps=4, hidden=(8,), seed=0), environment


def test_norms_of_the_gradients_of_all_parts_combine_to_grad_norm() -> None:
    agent, environment = a2c()
    loop = rein.training_loop(agent, environment, iterations=4)  # one update per epoch
    diagnostics(loop, agent)
    for record in loop.run(epochs=3).history:
        norms = [value for name, value in record.metrics.items() if name.endswith("_grad_norm")]
        assert len(norms) == 3  # hidden, policy_head, value_head
        assert math.hypot(*norms) == pytest.approx(record.metrics["grad_norm"], rel=1e-5)


def test_gradient_norms_are_means_over_updates() -> None:
    each, whole = (a2c() for _ in range(2))
    loops = []
    for (agent, environment), iterations in ((each, 4), (whole, 12)):
        loops.append(rein.training_loop(agent, environment, iterations=iterations))
        diagnostics(loops[-1], agent)
    single = [record.metrics["hidden_grad_norm"] for record in loops[0].run(epochs=3).history]
    assert loops[1].run(epochs=1).metrics["hidden_grad_norm"] == pytest.approx(sum(single) / 3, rel=1e-5)


def test_parameter_norms_are_those_at_the_end_of_the_epoch_without_target_networks() -> None:
    environment = rein.envs.Pendulum(num_envs=2, seed=0)
    agent = rein.SAC(environment, **REPLAY)
    loop = rein.training_loop(agent, environment, iterations=8)
    diagnostics(loop, agent)
    metrics = loop.run(epochs=1).metrics
    names = {name.removesuffix("_norm") for name in metrics if name.endswith("_norm") and "grad" not in name}
    assert names == {"actor", "critics", "temperature"}
    for name in names:
        parameters = [parameter.detach().flatten() for parameter in getattr(agent.networks, name).parameters()]
        assert metrics[f"{name}_norm"] == pytest.approx(float(torch.cat(parameters).norm()), rel=1e-5)
        assert metrics[f"{name}_grad_norm"] > 0.0


def test_training_is_the_same_with_and_without_diagnostics() -> None:
    states = []
    for attached in (False, True):
        agent, environment = a2c()
        loop = rein.training_loop(agent, environment, iterations=6)
        if attached:
            diagnostics(loop, agent, every=2)
        loop.run(epochs=4)
        states.append(copy_state(agent.state_dict()))
    assert first_difference(*states) is None


def test_filter_selects_the_epochs_to_report() -> None:
    agent, environment = a2c()
    loop = rein.training_loop(agent, environment, iterations=4)
    diagnostics(loop, agent, every=2)
    history = loop.run(epochs=4).history
    assert ["hidden_norm" in record.metrics for record in history] == [False, True, False, True]
    assert ["hidden_grad_norm" in record.metrics for record in history] == [False, True, False, True]


def test_epoch_that_was_interrupted_and_resumed_reports_the_same_norms() -> None:
    def make() -> rein.Loop:
        agent, environment = a2c()
        loop = rein.training_loop(agent, environment, iterations=12)
        diagnostics(loop, agent)
        return loop

    expected = [dict(record.metrics) for record in make().run(epochs=2).history]
    first, second = make(), make()
    first.iteration_completed(lambda state: first.interrupt(), once=18)
    first.run(epochs=2)
    second.load_state_dict(copy_state(first.state_dict()))
    found = [dict(record.metrics) for record in second.run(epochs=2).history]
    assert first_difference(expected[-1], found[-1]) is None


def test_agent_without_networks_reports_the_norm_of_its_table() -> None:
    environment = rein.envs.Gridworld(num_envs=4, seed=0)
    agent = rein.QLearning(environment, seed=0)
    loop = rein.training_loop(agent, environment, iterations=8)
    diagnostics(loop, agent)
    metrics = loop.run(epochs=1).metrics
    assert metrics["table_norm"] == pytest.approx(float(agent.table.norm()), rel=1e-5)
    assert "table_grad_norm" not in metrics


def test_parts_of_a_custom_agent_are_its_modules() -> None:
    class Custom(rein.Agent):
        def build(self, generator: torch.Generator) -> None:
            self.actor = rein.networks.actor(self.observation_space, self.action_space, generator=generator)
            self.baseline = rein.networks.critic(self.observation_space, generator=generator)

        def act(self, observation: Any, explore: bool | float) -> Any:
            return self.actor(observation)

        def update(self, batch: Any) -> dict[str, torch.Tensor]:
            return {}

    environment = rein.envs.CartPole(num_envs=2, seed=0)
    agent = Custom(environment, seed=0)
    loop = rein.training_loop(agent, environment, iterations=2)
    diagnostics(loop, agent)
    metrics = loop.run(epochs=1).metrics
    assert {name for name in metrics if name.endswith("_norm")} == {"actor_norm", "baseline_norm"}
