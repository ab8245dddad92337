"""Saving and loading of gradients that are accumulated over iterations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rein
from rein.agents.ppo import PPO
from rein.envs.cartpole import CartPole
from rein.handlers.checkpoint import checkpoint


class Owner:
    """Part that holds its network and optimizer inside other objects."""

    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.networks, self.optimizers = {"main": network}, [optimizer]

    def state_dict(self) -> dict[str, Any]:
        return {"network": self.networks["main"].state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.networks["main"].load_state_dict(state["network"])


def accumulating(owner: str, set_to_none: bool = True) -> rein.Loop:
    """Return a loop whose optimizer steps in every third iteration, with the sum of three gradients."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    unused = nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*network.parameters(), *unused.parameters()], lr=0.1)

    def step(state: rein.State) -> None:
        x = torch.full((3, 2), float(state.total_iterations + 1))
        network(x).square().mean().backward()
        if state.total_iterations % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    loop = rein.Loop(step, epochs=2, iterations=6)
    if owner == "object":
        loop.own("agent", Owner(network, optimizer))
    if owner in ("module", "both"):
        loop.own("network", network)
    if owner in ("optimizer", "both"):
        loop.own("optimizer", optimizer)
    if owner == "optimizer":
        loop.own("weights", Owner(network, optimizer))
    return loop


def parameters(loop: rein.Loop) -> list[torch.Tensor]:
    part = next(loop.parts[name] for name in ("network", "agent", "weights") if name in loop.parts)
    return list((part.networks["main"] if isinstance(part, Owner) else part).parameters())


@pytest.mark.default_cases(every=3)
@pytest.mark.parametrize("owner", ["module", "both", "object", "optimizer"])
@pytest.mark.parametrize("saved_at", range(1, 12))
def test_accumulated_gradients_resume_from_every_iteration(owner: str, saved_at: int, tmp_path: Path) -> None:
    whole, first, second = accumulating(owner), accumulating(owner), accumulating(owner)
    whole.run()
    if owner == "both":
        checkpoint(first, rein.Checkpoints(tmp_path))
    first.iteration_completed(once=saved_at)(lambda state: first.interrupt())
    first.run()
    if owner == "both":
        rein.resume(second, tmp_path)
    else:
        second.load_state_dict(first.state_dict())
    second.run()
    pairs = zip(parameters(second), parameters(whole), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


def test_zero_gradient_and_missing_gradient_are_distinguished() -> None:
    first, second = accumulating("both", set_to_none=False), accumulating("both")
    first.run(iterations=3, epochs=1)
    second.load_state_dict(first.state_dict())
    for parameter in parameters(second):
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_shared_parameter_is_saved_once_and_copied_when_loaded() -> None:
    first, second = accumulating("both"), accumulating("both")
    first.run(iterations=1, epochs=1)
    saved = first.state_dict()["gradients"]
    assert list(saved) == ["network"]
    second.load_state_dict(first.state_dict())
    for left, right in zip(parameters(first), parameters(second), strict=True):
        assert left.grad is not None and right.grad is not None
        right.grad.zero_()
        assert left.grad.any()


@pytest.mark.parametrize("old", [False, True], ids=["no gradients", "a state without the entry"])
def test_loading_clears_gradients_of_the_loop(old: bool) -> None:
    first, second = accumulating("both"), accumulating("both")
    saved = first.state_dict()
    if old:
        del saved["gradients"]
    second.run(iterations=1, epochs=1)
    second.load_state_dict(saved)
    assert all(parameter.grad is None for parameter in parameters(second))


def test_sparse_gradient_does_not_break_a_checkpoint(tmp_path: Path) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    loop = rein.Loop(lambda state: table(torch.tensor([1])).sum().backward(), iterations=1)
    loop.own("table", table)
    checkpoint(loop, rein.Checkpoints(tmp_path))
    loop.run()
    saved = loop.state_dict()["gradients"]["table"]["weight"]
    assert saved.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]


def test_gradient_of_an_unknown_parameter_is_rejected() -> None:
    first, second = accumulating("both"), accumulating("both")
    first.run(iterations=1, epochs=1)
    saved = first.state_dict()
    saved["gradients"]["network"]["third.weight"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"third\.weight"):
        second.load_state_dict(saved)


def test_agents_of_rein_have_no_gradients_between_steps() -> None:
    environment = CartPole(num_envs=2, seed=0)
    spaces = environment.single_observation_space, environment.single_action_space
    loop = rein.training_loop(PPO(*spaces, hidden=(4,), rollout_steps=4, seed=0), environment, iterations=8)
    loop.run()
    assert loop.state_dict()["gradients"] == {}
    for parameter in loop.parts["agent"].networks.parameters():  # custom steps and handlers may leave gradients there
        parameter.sum().backward()
    names = {name for name, _ in loop.parts["agent"].networks.named_parameters(prefix="networks")}
    assert loop.state_dict()["gradients"]["agent"].keys() == names
