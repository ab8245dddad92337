"""Agents learn with oneDNN's matrix products if these are faster, with the same results up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch._dynamo.trace_rules import get_torch_obj_rule_map

import rein
from rein.accelerate import products
from rein.types import Transition

OBSERVATION, BOX, DISCRETE = spaces.Box(-1.0, 1.0, (5,), np.float32), spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(3)
ROWS, LARGE, SMALL = 256, (160, 160), (32, 32)  # 6.6 and 0.3 million multiplications
BOXES, DISCRETES = (rein.SAC, rein.TD3, rein.AWAC, rein.IQL, rein.BC), (rein.DQN, rein.IQN, rein.DiscreteSAC)


def ppo(**how: Any) -> rein.PPO:
    return rein.PPO(OBSERVATION, BOX, rollout_steps=8, update_epochs=1, minibatches=1, seed=0, **how)


def of_replay(kind: Any, space: spaces.Space[Any]) -> Callable[..., Any]:
    return lambda **how: kind(OBSERVATION, space, batch_size=ROWS, train_frequency=10**9, seed=0, **how)


AGENTS: dict[str, Callable[..., Any]] = {
    "PPO": ppo,
    **{kind.__name__: of_replay(kind, BOX) for kind in BOXES},
    **{kind.__name__: of_replay(kind, DISCRETE) for kind in DISCRETES},
}


def permitted() -> str:
    return torch.backends.mkldnn.matmul.fp32_precision


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the float32 precision setting at each product of hidden layers, as if oneDNN suited this machine."""
    monkeypatch.setattr(products, "suits_onednn", lambda: True)
    get_torch_obj_rule_map()  # fill torch's cache now, so that a later compilation in this process knows torch.baddbmm
    product, found = torch.baddbmm, []

    def recording_product(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
        if a.shape[-1] == b.shape[-1]:
            found.append(permitted())
        return product(bias, a, b)

    monkeypatch.setattr(torch, "baddbmm", recording_product)
    before = permitted()
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    yield found
    torch.backends.mkldnn.matmul.fp32_precision = before


def with_transitions(agent: Any) -> Any:
    """Record a batch of transitions, without an update, and return the agent."""
    drawing = torch.Generator().manual_seed(0)
    num_envs = ROWS // 8
    yes, no = torch.ones(num_envs, dtype=torch.bool), torch.zeros(num_envs, dtype=torch.bool)
    for _ in range(8):
        observation, reward = torch.rand(num_envs, 5, generator=drawing), torch.rand(num_envs, generator=drawing)
        action, extras = agent.select_action(observation)
        agent.record_observation(Transition(observation, action, reward, no, no, observation.flip(0), yes, extras))
    return agent


def learned(agent: Any) -> dict[str, Tensor]:
    """Return the networks after the first update."""
    agent.optimize_model() if isinstance(agent, rein.PPO) else agent.learn(1)
    assert agent.updates == 1
    return dict(agent.networks.state_dict())


@pytest.mark.parametrize("name", AGENTS)
def test_large_networks_act_with_mkl_and_learn_with_onednn(seen: list[str], name: str) -> None:
    agent = with_transitions(AGENTS[name](hidden=LARGE))
    agent.policy().select_action(torch.rand(ROWS, 5))
    assert set(seen) == {"none"}
    seen.clear()
    learned(agent)
    if name == "PPO":
        assert seen.pop(0) == "none"  # the bootstrap value is computed as while acting
    assert set(seen) == {"bf16"}
    assert permitted() == "none"


@pytest.mark.parametrize("name", AGENTS)
def test_small_networks_and_user_settings_use_mkl(seen: list[str], name: str) -> None:
    learned(with_transitions(AGENTS[name](hidden=SMALL)))
    assert set(seen) == {"none"}
    seen.clear()
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    learned(with_transitions(AGENTS[name](hidden=LARGE)))
    assert set(seen) == {"ieee"}


@pytest.mark.parametrize("name", AGENTS)
def test_guards_and_optimizers_can_query_the_matmul_precision(seen: list[str], name: str) -> None:
    """torch raises an error for this query while bfloat16 is enabled with its newer setting."""

    class QueryingOptimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            precisions.append(torch.get_float32_matmul_precision())

    def guard(metrics: Any, gradients: Any) -> bool:
        precisions.append(torch.get_float32_matmul_precision())
        return True

    precisions: list[str] = []
    learned(with_transitions(AGENTS[name](hidden=LARGE, optimizer=QueryingOptimizer, guard=guard)))
    assert "bf16" in seen
    assert len(precisions) >= 2 and set(precisions) == {"highest"}
