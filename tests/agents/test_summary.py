"""Table of the parameters of an agent."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import rein
from rein.networks.recurrent import GRU
from rein.training.saved_agents import own_agents

CONTINUOUS = (rein.SAC, rein.TQC, rein.CrossQ, rein.TD3, rein.DDPG, rein.IQL, rein.AWAC)


def built(kind: Any, **options: Any) -> Any:
    if kind is rein.QLearning:
        return kind(rein.envs.Gridworld(2), **options)
    environment = rein.envs.Pendulum(2) if kind in CONTINUOUS else rein.envs.CartPole(2)
    return kind(environment, hidden=(8, 8), **options)


class Reinforce(rein.Agent):
    """Agent without learners, whose target network has parameters that require gradients."""

    def build(self, generator: torch.Generator) -> None:
        self.actor = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        self.scale = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(3))])
        self.target = torch.nn.Linear(4, 2)
        self.optimizers = {"actor": torch.optim.SGD(self.actor.parameters(), 1e-3), "scale": rein.Adam(self.scale)}

    def act(self, observation: Any, explore: bool | float) -> Any:
        return self.actor(observation)

    def update(self, batch: Any) -> dict[str, torch.Tensor]:
        return {}


@pytest.mark.parametrize("kind", own_agents().values(), ids=own_agents())
def test_totals_are_the_parameters_of_the_optimizers_and_the_others(kind: Any) -> None:
    agent = built(kind)
    summary = agent.summary()
    parameters = [agent.table] if kind is rein.QLearning else [*agent.networks.parameters()]
    optimized = [x for learner in agent.learners.values() for x in learner.networks.parameters()] or parameters
    assert summary.trainable == sum(x.numel() for x in optimized)
    assert summary.trainable + summary.target == sum(x.numel() for x in parameters)
    assert not summary.frozen


def test_rows_have_layers_types_shapes_and_counts() -> None:
    rows = built(rein.DQN).summary().parameters
    names = {f"{row.layer}.{row.name}": row for row in rows}
    weight = names["online.hidden.weights.1"]
    assert (weight.layer, weight.type, weight.shape, weight.size) == ("online.hidden", "Stack", (1, 8, 8), 64)
    assert (names["online.head.bias"].type, names["online.head.bias"].shape) == ("Linear", (2,))
    assert {row.role for row in rows if row.layer.startswith("online")} == {"trainable"}
    assert {row.role for row in rows if row.layer.startswith("target")} == {"target"}


def test_names_are_those_of_the_networks() -> None:
    agent = built(rein.PPO, core=functools.partial(GRU, features=4))
    names = [f"{row.layer}.{row.name}" for row in agent.summary().parameters]
    assert names == list(dict(agent.networks.named_parameters()))


def test_frozen_parameters_are_counted_separately() -> None:
    agent = built(rein.PPO)
    before = agent.summary()
    agent.networks.value_head.requires_grad_(False)
    after = agent.summary()
    assert after.frozen == 9 and after.trainable + after.frozen == before.trainable and not after.target


def test_custom_agent_has_one_part_for_each_module() -> None:
    summary = Reinforce(rein.envs.CartPole(2)).summary()
    assert [row.layer for row in summary.parameters] == ["actor.0"] * 2 + ["actor.2"] * 2 + ["scale"] + ["target"] * 2
    assert (summary.trainable, summary.target) == (40 + 18 + 3, 10)


def test_agent_without_optimizer_counts_parameters_that_require_gradients() -> None:
    class Manual(Reinforce):
        def build(self, generator: torch.Generator) -> None:
            self.network, self.target = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2).requires_grad_(False)

    summary = Manual(rein.envs.CartPole(2)).summary()
    assert (summary.trainable, summary.target) == (10, 10)


def test_text_is_a_table() -> None:
    lines = str(built(rein.QLearning, seed=0).summary()).splitlines()
    assert lines == [
        "QLearning(seed=0)",
        "",
        "layer  type    parameter  shape     count",
        "       Tensor  table      (625, 4)  2,500",
        "",
        "trainable parameters: 2,500",
    ]
    lines = str(built(rein.TD3).summary()).splitlines()
    assert lines[3].split() == ["actor.hidden", "Stack", "weights.0", "(1,", "3,", "8)", "24"]
    assert lines[-2].startswith("trainable parameters: ") and lines[-1].startswith("target parameters: ")
    assert len({line.index("(") for line in lines if "(" in line and line.startswith(("actor", "critics"))}) == 1
