from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rein.ops.random import generator
from rein.ops.returns import n_step_returns
from rein.ops.values import NStep, n_step

GAMMA = 0.9


def window(
    reward: list[float], terminated: int | None = None, truncated: int | None = None, invalid: int = -1
) -> NStep:
    """Return one window with events in the given rows."""
    rows = torch.arange(len(reward)).unsqueeze(-1)
    never = -1
    return n_step(
        torch.tensor(reward).unsqueeze(-1),
        rows == (never if terminated is None else terminated),
        rows == (never if truncated is None else truncated),
        rows != invalid,
        gamma=0.5,
    )


def slow(reward: Tensor, terminated: Tensor, truncated: Tensor, valid: Tensor) -> tuple[float, float, int, int, bool]:
    """Compute one window row by row."""
    total, discount, steps, ended = 0.0, 1.0, 0, False
    for r, end, cut, data in zip(*(x.tolist() for x in (reward, terminated, truncated, valid)), strict=True):
        if not data:
            break
        total, discount, steps, ended = total + discount * r, discount * GAMMA, steps + 1, end
        if end or cut:
            break
    return total, 0.0 if ended or not steps else discount, max(steps - 1, 0), steps, ended


def test_rows_after_the_end_are_ignored() -> None:
    result = window([1.0, 2.0, float("nan")], terminated=1)
    assert result.return_.item() == 2.0
    result = window([1.0, float("nan"), float("inf")], invalid=1)
    assert result.return_.item() == 1.0


@pytest.mark.parametrize("n", [1, 2, 5, 20])
def test_windows_match_a_slow_loop(n: int) -> None:
    stream, windows = generator(n, "windows"), 500
    reward_nB = torch.randn((n, windows), generator=stream, dtype=torch.float64)
    terminated_nB, truncated_nB, invalid_nB = torch.rand((3, n, windows), generator=stream) < 0.08
    result = n_step(reward_nB, terminated_nB, truncated_nB, ~invalid_nB, gamma=GAMMA)
    for b in range(windows):
        expected = slow(reward_nB[:, b], terminated_nB[:, b], truncated_nB[:, b], ~invalid_nB[:, b])
        assert [x[b].item() for x in result] == pytest.approx(list(expected), rel=1e-12)


def test_windows_match_the_returns_along_time() -> None:
    stream, length, n = generator(0, "windows"), 30, 4
    reward_TN, value_TN = torch.randn((2, length, 8), generator=stream, dtype=torch.float64)
    terminated_TN, truncated_TN = torch.rand((2, length, 8), generator=stream) < 0.1
    expected_TN = n_step_returns(reward_TN, terminated_TN, truncated_TN, value_TN, gamma=GAMMA, n=n)
    for t in range(length - n + 1):
        rows = slice(t, t + n)
        result = n_step(reward_TN[rows], terminated_TN[rows], truncated_TN[rows], gamma=GAMMA)
        value_N = value_TN[rows].gather(0, result.last.unsqueeze(0)).squeeze(0)
        assert torch.allclose(result.return_ + result.discount * value_N, expected_TN[t])


def test_results_have_the_dtype_of_the_rewards() -> None:
    result = window([1.0, 2.0])
    assert (result.return_.dtype, result.discount.dtype) == (torch.float32, torch.float32)
    assert (result.last.dtype, result.steps.dtype, result.terminated.dtype) == (torch.int64, torch.int64, torch.bool)
