"""Optimizers of learners, and Muon."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rein
from rein.testing.stateful import copy_state, first_difference
from rein.training.saved_agents import own_agents

PAGE = Path(__file__).parents[2] / "docs/how_to/optimizers.md"
REPLAY: dict[str, Any] = {"hidden": (8,), "batch_size": 8, "learning_starts": 4, "capacity": 100}
TWO = {"actor": torch.optim.RMSprop, "critics": rein.Muon}


def sac(**options: Any) -> tuple[rein.SAC, Any]:
    environment = rein.envs.Pendulum(num_envs=2, seed=0)
    return rein.SAC(environment, seed=0, **REPLAY, **options), environment


def trained(optimizer: Any) -> dict[str, Any]:
    agent, environment = sac(optimizer=optimizer)
    rein.train(agent, environment, env_steps=20)
    return copy_state(agent.state_dict())


def kinds(agent: Any) -> dict[str, type]:
    return {name: type(learner.optimizer) for name, learner in agent.learners.items()}


def test_dictionary_gives_each_learner_its_optimizer_and_the_others_the_default() -> None:
    agent, _ = sac(optimizer=TWO)
    assert kinds(agent) == {"critics": rein.Muon, "actor": torch.optim.RMSprop, "temperature": rein.Adam}
    environment = rein.envs.CartPole(2)
    assert kinds(rein.PPO(environment, optimizer={"networks": torch.optim.SGD})) == {"networks": torch.optim.SGD}


def test_same_optimizer_for_each_learner_equals_one_optimizer() -> None:
    names = ("critics", "actor", "temperature")
    assert first_difference(trained(torch.optim.RMSprop), trained(dict.fromkeys(names, torch.optim.RMSprop))) is None
    assert first_difference(trained(None), trained({})) is None


def test_unknown_learner_is_rejected_with_the_known_names() -> None:
    with pytest.raises(ValueError, match="no learner critic; the learners are critics, actor, temperature"):
        sac(optimizer={"critic": torch.optim.SGD})
    with pytest.raises(ValueError, match=r"no learner temperature; the learners are critics, actor$"):
        sac(optimizer={"temperature": torch.optim.SGD}, temperature=0.1)
    with pytest.raises(ValueError, match="no learner actor, critic; the learners are networks"):
        rein.PPO(rein.envs.CartPole(2), optimizer={"actor": torch.optim.SGD, "critic": torch.optim.SGD})
    with pytest.raises(TypeError, match="expected a function of parameters, got 'adam'"):
        sac(optimizer={"actor": "adam"})


def test_config_describes_each_optimizer() -> None:
    config = sac(optimizer=TWO)[0].config
    assert json.loads(json.dumps(config)) == config
    assert {name: each["type"].rpartition(".")[2] for name, each in config["optimizer"].items()} == {
        "critics": "Muon",
        "actor": "RMSprop",
        "temperature": "Adam",
    }
    assert config != sac(optimizer={"actor": torch.optim.RMSprop})[0].config


def test_resumed_run_with_two_optimizers_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    whole, first, second = (rein.training_loop(*sac(optimizer=TWO), iterations=4) for _ in range(3))
    whole.run(epochs=4)
    first.run(epochs=2)
    rein.save(first.parts["agent"], tmp_path / "agent.h5")
    loaded = rein.load_agent(tmp_path / "agent.h5", optimizer=TWO)
    assert (
        first_difference(copy_state(first.parts["agent"].state_dict()["learners"]), loaded.state_dict()["learners"])
        is None
    )
    second.load_state_dict(copy_state(first.state_dict()))
    second.run(epochs=4)
    assert first_difference(whole.state_dict()["parts"]["agent"], second.state_dict()["parts"]["agent"]) is None


def test_page_lists_the_learners_of_every_agent() -> None:
    rows = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \| ((?:`\w+`(?:, )?)+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    listed = {agent: re.findall(r"\w+", learners) for agents, learners in rows for agent in re.findall(r"\w+", agents)}
    found = {}
    for kind in own_agents().values():
        environment = rein.envs.Pendulum(1) if "actor" in listed.get(kind.__name__, ()) else rein.envs.CartPole(1)
        if kind is rein.DiscreteSAC:
            environment = rein.envs.CartPole(1)
        if kind is not rein.QLearning:
            found[kind.__name__] = [*kind(environment).learners]
    assert listed == found


def numbers(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SHAPES = [(3, 4, 5), (3, 1, 5), (6, 7), (1, 7), (7,), (), (8, 2, 3, 3)]


def steps(optimizer: Any, parameters: list[Tensor], gradients: list[Tensor]) -> None:
    for step in range(1, 4):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient * step
        optimizer.step()


def test_stacked_matrices_are_updated_like_separate_ones_and_other_parameters_like_adam() -> None:
    parameters = [nn.Parameter(numbers(shape)) for shape in SHAPES]
    gradients = [numbers(shape, seed=1) for shape in SHAPES]
    separate = [nn.Parameter(x.clone()) for x in (*parameters[0].detach(), parameters[2].detach())]
    others = [nn.Parameter(x.detach().clone()) for x in (parameters[1], *parameters[3:])]
    steps(rein.Muon(parameters, lr=1e-2, weight_decay=0.1), parameters, gradients)
    muon = torch.optim.Muon(separate, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    steps(muon, separate, [*gradients[0], gradients[2]])
    steps(rein.Adam(others, lr=1e-2), others, [gradients[1], *gradients[3:]])
    assert torch.equal(parameters[0], torch.stack(separate[:3])) and torch.equal(parameters[2], separate[3])
    for mine, expected in zip((parameters[1], *parameters[3:]), others, strict=True):
        assert torch.equal(mine, expected)


def test_parameters_without_gradients_do_not_change() -> None:
    parameters = [nn.Parameter(numbers(shape)) for shape in SHAPES]
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = rein.Muon(parameters, lr=1e-2)
    parameters[0].grad = numbers(SHAPES[0])
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()  # no momentum moves parameters without a gradient
    changed = [not torch.equal(old, new) for old, new in zip(before, parameters, strict=True)]
    assert changed == [True, *[False] * (len(SHAPES) - 1)]


@pytest.mark.slow
def test_ppo_with_muon_learns_cartpole() -> None:
    environment = rein.envs.CartPole(num_envs=16, seed=0)
    agent = rein.PPO(environment, optimizer=rein.Muon, learning_rate=3e-3, gamma=0.98, rollout_steps=32, seed=0)
    loop = rein.training_loop(agent, environment, iterations=32)
    history = loop.run(epochs=15).history
    returns = [record.metrics["episode_return"] for record in history]
    assert returns[-1] > 3 * returns[0]
