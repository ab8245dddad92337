"""`AdaptiveExploration`, an amount of exploration that adapts to episode returns."""

from __future__ import annotations

import statistics

import pytest
import torch

from rein.agents.base.action_noise import AdaptiveExploration, as_amount
from rein.ops.random import generator
from rein.schedules import Schedule, linear
from rein.testing import StatefulContract


def slow(returns: list[float], start: float, low: float, high: float, up: float, down: float, window: int, threshold):
    """Apply the rule to one episode after another."""
    value, values = start, []
    for end in range(1, len(returns) + 1):
        last = returns[max(0, end - window) : end]
        half = len(last) // 2
        if half:
            difference = statistics.fmean(last[-half:]) - statistics.fmean(last[-2 * half : -half])
            value = min(max(value * (up if abs(difference) < threshold else down), low), high)
        values.append(value)
    return values


@pytest.mark.parametrize("window", [2, 6, 500])
@pytest.mark.parametrize("at_once", [1, 7, 60])
def test_batched_returns_equal_sequential_returns(window: int, at_once: int) -> None:
    options = {"low": 0.01, "high": 1.0, "up": 1.3, "down": 0.8, "window": window, "threshold": 0.2}
    returns = torch.randn(60, generator=generator(0, "returns"), dtype=torch.float64)
    expected = slow(returns.tolist(), 0.5, **options)
    assert len(set(expected)) > 5
    plateau = AdaptiveExploration(0.5, **options)
    for end, part in enumerate(returns.split(at_once), start=1):
        plateau.observe(part)
        assert plateau() == pytest.approx(expected[min(end * at_once, 60) - 1], rel=1e-12)
    plateau.observe(torch.zeros(0))
    assert plateau() == pytest.approx(expected[-1], rel=1e-12)


def test_difference_equal_to_threshold_is_not_a_plateau() -> None:
    for second, factor in ((0.25, 0.5), (0.2, 1.5), (-0.25, 0.5), (-0.2, 1.5)):
        plateau = AdaptiveExploration(0.1, low=0.01, up=1.5, down=0.5, threshold=0.25)
        plateau.observe([0.0, second])
        assert plateau() == pytest.approx(0.1 * factor)


def test_plateau_is_called_like_a_schedule() -> None:
    plateau, schedule = AdaptiveExploration(0.3), linear(1.0, 0.1, env_steps=10)
    for amount in (plateau, schedule):
        assert as_amount(amount) is amount
        low, high = amount.bounds
        assert low <= amount(env_steps=5, updates=7) <= high
        assert amount.config
    assert plateau() == 0.3
    assert isinstance(as_amount(0.5), Schedule)
    assert AdaptiveExploration(**plateau.config).config == plateau.config


def test_observed_returns_are_copied() -> None:
    plateau, returns = AdaptiveExploration(0.5, window=4), torch.zeros(4, dtype=torch.float64)
    plateau.observe(returns)
    returns.fill_(1e9)
    before = plateau()
    plateau.observe([0.0])
    assert plateau() > before


@pytest.mark.parametrize(
    "invalid",
    [
        {"low": 0.0},
        {"low": 0.5, "start": 0.4},
        {"high": 0.9},
        {"high": float("inf")},
        {"up": 0.9},
        {"down": 1.1},
        {"down": 0.0},
        {"window": 0},
        {"window": 5},
        {"threshold": -1.0},
        {"threshold": float("nan")},
    ],
)
def test_arguments_out_of_range_are_rejected(invalid: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(invalid))):
        AdaptiveExploration(**invalid)


class TestState(StatefulContract):
    def make(self):
        return AdaptiveExploration(0.5, up=1.3, down=0.8, window=6, threshold=0.3)

    def step(self, plateau):
        seed = int(plateau.state_dict()["returns"].abs().sum() * 1e6)
        plateau.observe(torch.randn(2, generator=generator(seed, "returns")))
        return plateau()
