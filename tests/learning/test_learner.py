"""Learner: micro-batches, threads, compilation and bfloat16 give the same optimizer step.

Shapes: T steps, N environments, M rows, F features.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rein.accelerate.fast_learner import FastLearner
from rein.agents.base.learner import Batch, Learner
from rein.agents.base.on_policy import METRICS, Coefficients, policy_loss
from rein.networks.actor_critic import ActorCritic
from rein.networks.recurrent import GRU, LSTM, MinimalGRU
from rein.ops.random import generator
from rein.testing.stateful import first_difference

T, N, F = 5, 12, 3
ACTIONS: dict[str, Any] = {"discrete": spaces.Discrete(3), "continuous": spaces.Box(-1.0, 1.0, (2,))}
CORES: dict[str, Any] = {kind.__name__: functools.partial(kind, features=5) for kind in (LSTM, GRU, MinimalGRU)}
COEFFICIENTS = Coefficients(0.2, 0.5, 0.01)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, "numbers"))


def networks(action: str = "discrete", core: str | None = None) -> ActorCritic:
    drawn = generator(0, "networks")
    return ActorCritic(
        spaces.Box(-1.0, 1.0, (F,)), ACTIONS[action], drawn, hidden=(8,), core=CORES[core] if core else None
    )


def batch(action: str = "discrete", core: str | None = None, masked: bool = False) -> Batch:
    """Return rows or sequences, with log probabilities and values of an older policy."""
    shape, made = (T, N), networks(action, core)
    x_TNF, carry, reset_TN = numbers(T, N, F), 0.1 * numbers(N, made.carry_size, seed=1), numbers(*shape, seed=2) < -1.0
    with torch.no_grad():
        distribution, value = made.distribution_and_value(x_TNF, carry, reset_TN) if core else made(x_TNF.flatten(0, 1))
        sample = distribution.sample(generator(3, "sample"))
        log_prob = distribution.log_prob(sample)
    rows = (-1,) if core is None else shape
    columns = [0.3 * numbers(*shape, seed=seed).reshape(rows) for seed in (4, 5, 6, 7)]
    return Batch(
        features=x_TNF if core else x_TNF.flatten(0, 1),
        sample=sample,
        log_prob=log_prob + columns[0],
        value=value + columns[1],
        advantage=columns[2],
        target=columns[3],
        valid=(numbers(*shape, seed=8) < 0.5).reshape(rows) if masked else None,
        reset=reset_TN if core else None,
        carry=carry if core else None,
    )


def learner(made: ActorCritic, **options: Any) -> Learner:
    """Return a learner that applies gradients without clipping, with learning rate 1."""
    optimizer = functools.partial(torch.optim.SGD, lr=1.0)
    kind: Any = FastLearner if options.keys() & {"threads", "compile"} else Learner
    return kind(made, policy_loss, optimizer, **{"max_grad_norm": None, **options})


def stepped(rows: Batch, action: str = "discrete", core: str | None = None, **options: Any) -> dict[str, Any]:
    """Return parameters and metrics after one step."""
    made = networks(action, core)
    metrics = learner(made, **options).step(rows, COEFFICIENTS)
    assert set(metrics) == {*METRICS, "grad_norm", *(["log_std"] if action == "continuous" else [])}
    return {"networks": dict(made.state_dict()), "metrics": metrics}


def assert_close(one: dict[str, Any], other: dict[str, Any], atol: float = 1e-6, rtol: float = 1e-4) -> None:
    torch.testing.assert_close(one["networks"], other["networks"], atol=atol, rtol=rtol)
    torch.testing.assert_close(one["metrics"], other["metrics"], atol=10 * atol, rtol=10 * rtol)


@pytest.mark.default_cases(every=5)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("core", [None, *CORES])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("micro_batch", [1, 7, 20, 59])
def test_micro_batches_change_rounding_only(action: str, core: str | None, masked: bool, micro_batch: int) -> None:
    rows = batch(action, core, masked)
    whole, parts = stepped(rows, action, core), stepped(rows, action, core, micro_batch=micro_batch)
    assert first_difference(dict(networks(action, core).state_dict()), whole["networks"]) is not None
    assert_close(whole, parts)


@pytest.mark.parametrize("core", [None, "LSTM"])
def test_threads_do_not_change_results(core: str | None) -> None:
    rows = batch("continuous", core, masked=True)
    alone, *together = (stepped(rows, "continuous", core, micro_batch=7, threads=threads) for threads in (1, 2, 3))
    assert all(first_difference(alone, other) is None for other in together)


def test_error_in_a_thread_is_raised() -> None:
    rows = batch()._replace(features=torch.zeros(T * N, F + 1))
    with pytest.raises(RuntimeError):
        stepped(rows, micro_batch=7, threads=2)


@pytest.mark.parametrize("core", [None, "LSTM"])
@pytest.mark.parametrize("masked", [False, True])
def test_micro_batches_of_invalid_rows_have_no_weight(core: str | None, masked: bool) -> None:
    """Micro-batches can consist of invalid rows only. If all rows are invalid, nothing is learned."""
    rows = batch(core=core)
    valid = torch.zeros_like(rows.value, dtype=torch.bool)
    if masked:
        valid[..., : valid.shape[-1] // 2] = True
    rows = rows._replace(valid=valid)
    parts = stepped(rows, core=core, micro_batch=T)
    assert_close(stepped(rows, core=core), parts)
    initial = dict(networks(core=core).state_dict())
    assert (first_difference(initial, parts["networks"]) is None) == (not masked)


@pytest.mark.default_cases("None-True")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("core", [None, "MinimalGRU"])
@pytest.mark.filterwarnings("ignore:.*autograd functions are all static")  # raised by torch
def test_compiled_loss_is_one_graph_with_the_same_results(
    core: str | None, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule does not trigger recompilation. Uses a fast backend that traces the same program."""
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count, fullgraph=True))
    rows = batch("continuous", core, masked)
    assert_close(stepped(rows, "continuous", core), stepped(rows, "continuous", core, compile=True))
    made = networks("continuous", core)
    compiled = learner(made, compile=True)
    for k in range(4):
        compiled.step(rows, Coefficients(0.2 - 0.01 * k, 0.5, 0.01 - 0.001 * k))
    assert len(graphs) == 1
    for node in graphs[0].graph.nodes:  # no number is copied to the CPU, as a tensor alpha would be
        assert node.target != "item" and not isinstance(node.kwargs.get("alpha"), torch.fx.Node)


@pytest.mark.parametrize("compile", [False, True])
def test_grad_norm_is_computed_only_if_needed(compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    made = learner(networks(), compile=compile)
    assert "grad_norm" not in made.step(batch(), COEFFICIENTS, report=False)
    assert made.step(batch(), COEFFICIENTS)["grad_norm"] > 0


@pytest.mark.parametrize("core", [None, *CORES])
@pytest.mark.parametrize("action", ACTIONS)
def test_bfloat16_changes_rounding_only(action: str, core: str | None) -> None:
    rows = batch(action, core)
    exact, rough = stepped(rows, action, core), stepped(rows, action, core, precision="bfloat16")
    torch.testing.assert_close(exact["networks"], rough["networks"], atol=0.02, rtol=0.05)
    assert first_difference(exact["networks"], rough["networks"]) is not None
    assert all(tensor.dtype == torch.float32 for tensor in rough["networks"].values())


def test_reporting_metrics_does_not_change_the_step() -> None:
    found = []
    for report in (True, False):
        made = networks()
        metrics = learner(made, micro_batch=7).step(batch(), COEFFICIENTS, report=report)
        assert ("policy_loss" in metrics) == ("grad_norm" in metrics) == report
        found.append(dict(made.state_dict()))
    assert first_difference(*found) is None


@pytest.mark.parametrize("micro_batch", [None, 7])
def test_step_works_under_no_grad(micro_batch: int | None) -> None:
    expected = stepped(batch(), micro_batch=micro_batch)
    with torch.no_grad():
        assert first_difference(stepped(batch(), micro_batch=micro_batch), expected) is None


def test_guard_receives_norm_and_reported_metrics() -> None:
    received = []
    guarded = learner(networks(), guard=lambda metrics, gradients: received.append(set(metrics)) is None)
    for report in (False, True):
        guarded.step(batch(), COEFFICIENTS, report=report)
    assert received == [{"grad_norm"}, {*METRICS, "grad_norm"}]


def test_rows_by_index_equal_rows_by_slice() -> None:
    for core in (None, "LSTM"):
        rows = batch(core=core, masked=True)
        size = rows.size
        assert size == (N if core else T * N)
        by_slice, by_index = rows.rows(slice(2, 7)), rows.rows(torch.arange(2, 7))
        assert first_difference(by_slice, by_index) is None
        assert by_slice.size == 5 and by_slice.value.shape == ((T, 5) if core else (5,))
