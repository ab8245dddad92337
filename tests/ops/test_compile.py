"""Every pure function compiles to one graph: the host reads no tensor, and no branch depends on data.

A generator cannot be traced (torch 2.13), so functions that draw from one are not compiled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from rein.ops import losses, returns, statistics
from rein.ops import statistics as indices
from rein.ops.distributions import BallNormal, Categorical, Distribution, MultiDiscrete, Normal, SquashedNormal
from rein.ops.random import generator
from rein.ops.trees import leaves

T, N, A = 5, 6, 3


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, "numbers"))


def flags(*shape: int, seed: int = 0) -> Tensor:
    return numbers(*shape, seed=seed) < -0.5


ENDS = flags(T, N, seed=1), flags(T, N, seed=2)
REWARD, VALUE, NEXT_VALUE, RATIO = (numbers(T, N, seed=seed) for seed in range(4))
VALID = ~flags(T, N, seed=3)
LAMBDA = {"gamma": 0.9, "lambda_": 0.8}
ROWS = numbers(N, A, seed=9)
MOMENTS = statistics.update_moments(statistics.empty_moments((A,)), numbers(N, A))

CASES: dict[Callable[..., Any], Callable[[], Any]] = {
    returns.discounted_returns: lambda: returns.discounted_returns(REWARD, *ENDS, NEXT_VALUE, VALID, gamma=0.9),
    returns.n_step_returns: lambda: returns.n_step_returns(REWARD, *ENDS, NEXT_VALUE, VALID, gamma=0.9, n=3),
    returns.lambda_returns: lambda: returns.lambda_returns(REWARD, *ENDS, NEXT_VALUE, VALID, **LAMBDA),
    returns.gae: lambda: returns.gae(REWARD, *ENDS, VALUE, NEXT_VALUE, VALID, **LAMBDA),
    returns.smooth_rewards: lambda: returns.smooth_rewards(REWARD, *ENDS, VALID, decay=0.9),
    returns.vtrace: lambda: returns.vtrace(RATIO, REWARD, *ENDS, VALUE, NEXT_VALUE, VALID, **LAMBDA),
    losses.clipped_surrogate: lambda: losses.clipped_surrogate(VALUE[0], REWARD[0], RATIO[0], 0.2),
    losses.clipped_surrogate_slope: lambda: losses.clipped_surrogate_slope(VALUE[0], REWARD[0], RATIO[0], 0.2),
    losses.clipped_value_slope: lambda: losses.clipped_value_slope(VALUE[0], REWARD[0], RATIO[0], 0.2),
    losses.clipped_value_loss: lambda: losses.clipped_value_loss(VALUE[0], REWARD[0], RATIO[0], 0.2),
    losses.huber: lambda: losses.huber(VALUE[0], 0.5),
    losses.log_cosh: lambda: losses.log_cosh(VALUE[0]),
    losses.categorical_hinge: lambda: losses.categorical_hinge(VALUE, torch.zeros(len(VALUE), dtype=torch.int64)),
    losses.expectile: lambda: losses.expectile(VALUE[0], 0.7),
    losses.quantile_huber: lambda: losses.quantile_huber(VALUE, torch.linspace(0.1, 0.9, N), NEXT_VALUE),
    statistics.masked_mean: lambda: statistics.masked_mean(VALUE, VALID),
    statistics.masked_std: lambda: statistics.masked_std(VALUE, VALID),
    statistics.standardize: lambda: statistics.standardize(VALUE, VALID),
    statistics.explained_variance: lambda: statistics.explained_variance(VALUE, REWARD, VALID),
    statistics.empty_moments: lambda: statistics.empty_moments((A,)),
    statistics.update_moments: lambda: statistics.update_moments(MOMENTS, ROWS, VALID[0]),
    statistics.deviation: lambda: statistics.deviation(MOMENTS),
    statistics.normalize: lambda: statistics.normalize(ROWS, MOMENTS),
    statistics.global_norm: lambda: statistics.global_norm([VALUE, REWARD]),
    statistics.interquartile_mean: lambda: statistics.interquartile_mean(ROWS),
    statistics.clip_by_norm_: lambda: statistics.clip_by_norm_([VALUE.clone()], VALUE.norm(), 0.5),
}

LOGITS, MASK = numbers(N, A), torch.tensor([True, True, False]).expand(N, A)
LOW, HIGH = -torch.ones(A), torch.ones(A)
DISTRIBUTIONS: dict[str, Callable[[], Distribution]] = {
    "categorical": lambda: Categorical.from_logits(LOGITS, MASK),
    "multi-discrete": lambda: MultiDiscrete.from_logits(LOGITS, (2, 1), MASK),
    "normal": lambda: Normal(LOGITS, LOW),
    "clipped normal": lambda: Normal(LOGITS, LOW, LOW, HIGH),
    "ball normal": lambda: BallNormal(LOGITS, LOW, HIGH[0]),
    "squashed normal": lambda: SquashedNormal(LOGITS, LOW, LOW, HIGH),
}


def draws(function: Callable[..., Any]) -> bool:
    return "generator" in inspect.signature(function).parameters


def public_functions(*modules: ModuleType) -> set[Callable[..., Any]]:
    return {
        function
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }


def equal_in_one_graph(function: Callable[[], Any]) -> None:
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    expected, result = dict(leaves({"": function()})), dict(leaves({"": compiled()}))
    assert expected.keys() == result.keys()
    for path, leaf in expected.items():
        torch.testing.assert_close(result[path], leaf)


def test_every_function_that_does_not_draw_has_a_case() -> None:
    found = public_functions(returns, losses, statistics, indices)
    assert {function for function in found if not draws(function)} == CASES.keys()
    assert {function for function in found if draws(function)} == {indices.minibatches, statistics.bootstrap_interval}


@pytest.mark.default_cases(every=3)
@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_function_compiles_to_one_graph(function: Callable[..., Any]) -> None:
    equal_in_one_graph(CASES[function])


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distribution_compiles_to_one_graph_after_drawing_noise(name: str) -> None:
    make = DISTRIBUTIONS[name]
    noise = make().noise(generator(0, "agent"))
    methods = {
        method for method, _ in inspect.getmembers(Distribution, inspect.isfunction) if not method.startswith("_")
    }

    def everything() -> dict[str, Any]:
        distribution = make()
        sample = distribution.sample_from(noise)
        action = distribution.to_action(sample)
        return {
            "distribution": distribution,
            "sample_from": sample,
            "mode": distribution.mode(),
            "log_prob": distribution.log_prob(sample),
            "entropy": distribution.entropy(),
            "kl": distribution.kl(make()),
            "to_action": action,
            "from_action": distribution.from_action(action),
        }

    assert methods - everything().keys() == {"noise", "sample"}
    equal_in_one_graph(everything)
