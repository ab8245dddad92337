"""Programs: a replay may overwrite earlier outputs, but results are preserved, and agents learn the same."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch

import rein
from rein.accelerate import compiled
from rein.networks.recurrent import GRU
from tests.captures import Repeated
from tests.envs.masked_grid import MaskedGrid

CPU = torch.device("cpu")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Repeated:
    """Programs on the CPU, without a compiler."""
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    capture = Repeated()
    monkeypatch.setitem(compiled.CAPTURES, "cpu", capture)
    return capture


def test_results_are_not_overwritten_by_the_next_call(graphs: Repeated) -> None:
    double = compiled.Program(lambda x: (2 * x, {"twice": [4 * x]}), CPU)
    results = [double(torch.full((3,), float(n))) for n in range(5)]
    assert graphs.replays == 3
    assert [result[0].tolist() for result in results] == [[2.0 * n] * 3 for n in range(5)]
    assert results[2][1]["twice"][0].tolist() == [8.0] * 3


def test_each_set_of_constants_and_shapes_has_its_own_program(graphs: Repeated) -> None:
    scaled = compiled.Program(lambda x, factor: factor * x, CPU)
    for factor, rows in ((2.0, 3), (3.0, 3), (3.0, 4)):
        for _ in range(4):
            assert scaled(torch.ones(rows), factor).tolist() == [factor] * rows
    assert graphs.replays == 3 * 2


def test_failed_capture_runs_the_function_after_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(function: Any) -> Any:
        raise RuntimeError("the device is busy")

    monkeypatch.setitem(compiled.CAPTURES, "cpu", fail)
    double = compiled.Program(lambda x: 2 * x, CPU)
    with caplog.at_level(logging.WARNING, "rein"):
        assert [double(torch.tensor(float(n))).item() for n in range(5)] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert [record.message for record in caplog.records if "the device is busy" in record.message] != []
    assert len(caplog.records) == 1


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
def test_agent_learns_the_same_with_graphs(agent: Any, options: dict[str, Any], kind: Any, graphs: Repeated) -> None:
    def learned(compile: bool) -> tuple[list[torch.Tensor], list[Any]]:
        environment = kind(num_envs=4, seed=0)
        spaces = environment.single_observation_space, environment.single_action_space
        made = agent(*spaces, rollout_steps=8, hidden=(8,), seed=0, compile=compile, **options)
        final = rein.train(made, environment, epochs=5, iterations=8, seed=0)
        return [*made.networks.parameters()], [dict(record.metrics) for record in final.history]

    eager, eager_metrics = learned(False)
    assert graphs.replays == 0
    graphed, graphed_metrics = learned(True)
    assert graphs.replays > 10  # acting and learning
    for one, other in zip(eager, graphed, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)
    for one, other in zip(eager_metrics, graphed_metrics, strict=True):
        assert one == pytest.approx(other, nan_ok=True, abs=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by the compiler
def test_real_compiler_on_the_cpu() -> None:
    double = compiled.compiled(lambda x: (2 * x).sin(), CPU)
    for n in range(3):
        x = torch.full((5,), float(n))
        assert torch.allclose(double(x), (2 * x).sin())
