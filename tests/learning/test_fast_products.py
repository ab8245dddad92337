"""Agents learn by products of oneDNN's where these are faster, and learn the same to rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rein.agents.dqn import DQN
from rein.agents.ppo import PPO
from rein.agents.sac import SAC
from rein.ops import products
from rein.types import Transition

OBSERVATION, BOX, DISCRETE = spaces.Box(-1.0, 1.0, (5,), np.float32), spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(3)
ROWS, LARGE = 256, (160, 160)  # 6.6 million multiplications
AGENTS: dict[str, Callable[..., Any]] = {
    "SAC": lambda **how: SAC(OBSERVATION, BOX, batch_size=ROWS, learning_starts=0, seed=0, **how),
    "DQN": lambda **how: DQN(OBSERVATION, DISCRETE, batch_size=ROWS, learning_starts=0, seed=0, **how),
    "PPO": lambda **how: PPO(OBSERVATION, BOX, rollout_steps=8, epochs=1, minibatches=1, seed=0, **how),
}
Seen = list[str]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """What float32 was multiplied by in each product of hidden layers, as if oneDNN suited this machine."""
    monkeypatch.setattr(products, "suits_onednn", lambda: True)
    product, found = torch.baddbmm, []

    def watched(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
        if a.shape[-1] == b.shape[-1]:
            found.append(torch.backends.mkldnn.matmul.fp32_precision)
        return product(bias, a, b)

    monkeypatch.setattr(torch, "baddbmm", watched)
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    yield found
    torch.backends.mkldnn.matmul.fp32_precision = before


def stepped(agent: Any, num_envs: int) -> dict[str, Tensor]:
    """The networks after eight steps of so many environments and a round of learning."""
    drawing = torch.Generator().manual_seed(0)
    yes, no = torch.ones(num_envs, dtype=torch.bool), torch.zeros(num_envs, dtype=torch.bool)
    for _ in range(8):
        observation, reward = torch.rand(num_envs, 5, generator=drawing), torch.rand(num_envs, generator=drawing)
        action, extras = agent.select_action(observation)
        agent.record_observation(Transition(observation, action, reward, no, no, observation.flip(0), yes, extras))
    agent.optimize_model()
    assert agent.updates
    return dict(agent.networks.state_dict())


@pytest.mark.parametrize("name", AGENTS)
def test_large_networks_act_by_mkl_and_learn_by_onednn(seen: Seen, name: str) -> None:
    stepped(AGENTS[name](hidden=LARGE), ROWS // 8)
    acted = seen.index("bf16")
    assert set(seen[:acted]) <= {"none"} and set(seen[acted:]) == {"bf16"}
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"


@pytest.mark.parametrize("name", AGENTS)
def test_small_networks_and_those_who_want_mkl_learn_by_it(seen: Seen, name: str) -> None:
    stepped(AGENTS[name](hidden=(32, 32)), ROWS // 8)
    assert set(seen) == {"none"}
    seen.clear()
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    stepped(AGENTS[name](hidden=LARGE), ROWS // 8)
    assert set(seen) == {"ieee"}


@pytest.mark.parametrize("name", AGENTS)
def test_what_is_learned_is_the_same_to_rounding(name: str) -> None:
    how = {"hidden": LARGE, "optimizer": torch.optim.SGD, "learning_rate": 0.1}  # Adam makes much of the least gradient
    by_default = stepped(AGENTS[name](**how), ROWS // 8)
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    try:
        by_mkl = stepped(AGENTS[name](**how), ROWS // 8)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    torch.testing.assert_close(by_default, by_mkl, atol=2e-6, rtol=2e-5)
