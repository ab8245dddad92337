"""Updates as programs: replays with other data, learning rates and clip ranges equal ordinary updates."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import rein
from rein.accelerate import compiled
from rein.envs import CartPole, Gridworld, Navigation, Pendulum
from rein.schedules import linear
from tests.captures import Repeated, Traced

PPO = functools.partial(
    rein.PPO,
    minibatches=3,
    update_epochs=2,
    learning_rate=linear(1e-2, 1e-3, env_steps=300),
    clip=linear(0.3, 0.1, updates=40),
    entropy_coefficient=linear(0.1, 0.01, updates=40),
)
A2C = functools.partial(rein.A2C, learning_rate=linear(1e-2, 1e-3, env_steps=300))
CASES: dict[str, Any] = {
    "PPO, CartPole": (PPO, functools.partial(CartPole, 4, max_episode_steps=6), {}),
    "PPO, Pendulum": (PPO, functools.partial(Pendulum, 4, max_episode_steps=5), {"normalize_reward": True}),
    "A2C, CartPole": (A2C, functools.partial(CartPole, 4, max_episode_steps=6), {"normalize_advantage": True}),
    "A2C, Gridworld": (A2C, functools.partial(Gridworld, 4, max_episode_steps=5), {}),
    "PPO, Navigation": (PPO, functools.partial(Navigation, 2, 2, early_leave=True, max_episode_steps=5), {}),
    "autograd": (PPO, functools.partial(CartPole, 4, max_episode_steps=6), {"activation": "silu"}),
    "squashed": (PPO, functools.partial(Pendulum, 4, max_episode_steps=5), {"squash": True}),
}


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)


def learned(case: str, epochs: int = 5, **more: Any) -> tuple[list[torch.Tensor], list[dict[str, float]]]:
    kind, make, options = CASES[case]
    environment = make(seed=0)
    agent = kind(environment, rollout_steps=8, hidden=(8,), seed=0, **options, **more)
    state = rein.training_loop(agent, environment, seed=0).run(epochs=epochs, iterations=8)
    return [p.detach().clone() for p in agent.networks.parameters()], [dict(each.metrics) for each in state.history]


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.default_cases("A2C, Gridworld")
@pytest.mark.parametrize("case", CASES)
def test_replayed_updates_equal_updates(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary, metrics = learned(case)
    repeated, traced = Repeated(), Traced()
    results = []
    for capture in (repeated, traced):
        monkeypatch.setitem(compiled.CAPTURES, "cpu", capture)
        results.append(learned(case, compile=True))
    assert traced.replays == repeated.replays == 3 + 6 + 2  # updates, steps of the networks, and rollouts
    for one, other, plain in zip(results[0][0], results[1][0], ordinary, strict=True):
        assert torch.equal(one, other)
        assert torch.allclose(one, plain, atol=1e-5)
    for seen, same, expected in zip(results[1][1], results[0][1], metrics, strict=True):
        assert seen == pytest.approx(same, nan_ok=True, rel=0, abs=0)
        assert seen == pytest.approx(expected, nan_ok=True, abs=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by the compiler
@pytest.mark.parametrize("case", CASES)
def test_updates_with_compiled_gradients_are_close_to_updates(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary, _ = learned(case)
    monkeypatch.setitem(compiled.CAPTURES, "cpu", Repeated())
    for one, plain in zip(learned(case, compile=True)[0], ordinary, strict=True):
        assert torch.allclose(one, plain, rtol=0, atol=1e-4)
