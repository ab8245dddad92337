"""Compiled functions as CUDA graphs: a call may overwrite earlier outputs, but results are preserved."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rein
from rein.accelerate import compiled, fast_learner
from rein.networks.recurrent import GRU
from rein.ops.trees import leaves, map_tree
from tests.envs.masked_grid import MaskedGrid

CPU = torch.device("cpu")


class Graphs:
    """Replacement for `torch.compile` that overwrites the outputs of a function when the next call begins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self._last = 0, []
        monkeypatch.setattr(torch, "compile", self._compile)
        monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", self._begin)
        for user in (compiled, fast_learner):
            monkeypatch.setattr(user, "has_graphs", lambda device: True)

    def _compile(self, function: Callable[..., Any], dynamic: bool, mode: str) -> Callable[..., Any]:
        assert mode == "reduce-overhead"

        def run(*inputs: Any, **options: Any) -> Any:
            self.calls += 1
            found = map_tree(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, function(*inputs, **options))
            self._last += [leaf.detach() for _, leaf in leaves(found) if isinstance(leaf, torch.Tensor)]
            return found

        return run

    def _begin(self) -> None:
        for output in self._last:
            output.fill_(float("nan") if output.is_floating_point() else 99)
        self._last = []


def test_results_are_not_overwritten_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    Graphs(monkeypatch)
    double = compiled.compiled(lambda x: (2 * x, {"twice": [4 * x]}), CPU)
    first = double(torch.ones(3))
    double(torch.zeros(3))
    assert first[0].tolist() == [2.0] * 3
    assert first[1]["twice"][0].tolist() == [4.0] * 3


@pytest.mark.parametrize(
    ("agent", "options", "kind"),
    [
        (rein.PPO, {"minibatches": 2, "micro_batch": 8}, rein.envs.CartPole),
        (rein.PPO, {"minibatches": 2, "shared": True, "precision": "bfloat16"}, rein.envs.CartPole),
        (rein.PPO, {"minibatches": 2, "core": functools.partial(GRU, features=8)}, rein.envs.CartPole),
        (rein.A2C, {}, rein.envs.CartPole),
        (rein.PQN, {"minibatches": 2}, rein.envs.CartPole),
        (rein.PPO, {"minibatches": 2}, MaskedGrid),
    ],
)
def test_agent_learns_the_same_with_graphs(
    agent: Any, options: dict[str, Any], kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def learned(compile: bool) -> tuple[list[torch.Tensor], list[Any]]:
        environment = kind(num_envs=4, seed=0)
        spaces = environment.single_observation_space, environment.single_action_space
        made = agent(*spaces, rollout_steps=8, hidden=(8,), seed=0, compile=compile, **options)
        final = rein.train(made, environment, epochs=3, iterations=8, seed=0)
        return [*made.networks.parameters()], [dict(record.metrics) for record in final.history]

    eager, eager_metrics = learned(False)
    graphs = Graphs(monkeypatch)
    graphed, graphed_metrics = learned(True)
    assert graphs.calls >= 3 * (8 + 1)  # acting and learning
    for one, other in zip(eager, graphed, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)
    for one, other in zip(eager_metrics, graphed_metrics, strict=True):
        assert one == pytest.approx(other, nan_ok=True, abs=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by the compiler
def test_real_compiler_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "has_graphs", lambda device: True)
    double = compiled.compiled(lambda x: (2 * x).sin(), CPU)
    for n in range(3):
        x = torch.full((5,), float(n))
        assert torch.allclose(double(x), (2 * x).sin())
