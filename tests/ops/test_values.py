from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rein.ops.random import generator
from rein.ops.values import (
    mask_values,
    rescale,
    sequence_priority,
    sequence_targets,
    share_of_duplicates,
    step_toward_,
    td_target,
    unscale,
)

CELLS = 12


def test_terminated_row_does_not_bootstrap() -> None:
    reward_N, next_value_N = torch.tensor([1.0, 1.0]), torch.tensor([10.0, 10.0])
    target_N = td_target(reward_N, torch.tensor([True, False]), next_value_N, gamma=0.5)
    assert target_N.tolist() == [1.0, 6.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_next_value_of_a_terminated_row_is_ignored(value: float) -> None:
    target_N = td_target(torch.tensor([2.0]), torch.tensor([True]), torch.tensor([value]), gamma=0.9)
    assert target_N.tolist() == [2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rescaling_matches_its_equation_and_is_undone(dtype: torch.dtype) -> None:
    value = torch.tensor([0.0, 1e-3, -1.0, 3.0, 500.0, -1e5], dtype=dtype)
    exact = value.double()
    expected = exact.sign() * ((exact.abs() + 1).sqrt() - 1) + 1e-3 * exact
    torch.testing.assert_close(rescale(value).double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(unscale(rescale(value)), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_sequence_targets_match_a_sum_per_step(n: int) -> None:
    drawn, steps, length = generator(0, "sequences"), 5, [5, 3, 1]
    reward, next_value = torch.randn(2, steps, 3, generator=drawn)
    valid = torch.arange(steps).unsqueeze(1) < torch.tensor(length)
    terminated = torch.zeros(steps, 3, dtype=torch.bool)
    terminated[2, 1] = True
    next_value[2, 1] = torch.nan
    found = sequence_targets(reward, terminated, valid, next_value, 0.9, n)
    for b in range(3):
        for t in range(length[b]):
            last = min(t + n, length[b]) - 1
            expected = sum(0.9 ** (i - t) * float(reward[i, b]) for i in range(t, last + 1))
            if not terminated[last, b]:
                expected += 0.9 ** (last + 1 - t) * float(next_value[last, b])
            assert float(found[t, b]) == pytest.approx(expected, abs=1e-5)


def test_priority_of_a_sequence_mixes_its_largest_and_its_mean_error() -> None:
    error, valid = torch.tensor([[1.0], [-3.0], [9.0]]), torch.tensor([[True], [True], [False]])
    assert sequence_priority(error, valid).tolist() == pytest.approx([0.9 * 3.0 + 0.1 * 2.0])


def step(value_C: torch.Tensor, index_N: torch.Tensor, target_N: torch.Tensor, **options: object) -> torch.Tensor:
    """Call `step_toward_` and check that its scratch memory is zero afterwards."""
    valid_N = options.get("valid_N", torch.ones_like(index_N, dtype=torch.bool))
    count_C = torch.zeros(len(value_C), dtype=torch.int64)
    share = share_of_duplicates(options.get("learning_rate", 0.3), len(index_N), "cpu")
    error_N = step_toward_(value_C, index_N, target_N, valid_N, share, count_C)
    assert not count_C.any()
    return error_N


@given(
    rows=st.lists(st.tuples(st.integers(0, CELLS - 1), st.floats(-100, 100), st.booleans()), min_size=1, max_size=40),
    learning_rate=st.floats(0.001, 1.0),
)
def test_duplicates_move_a_cell_toward_the_mean_of_their_targets(
    rows: list[tuple[int, float, bool]], learning_rate: float
) -> None:
    cells, targets, valids = zip(*rows, strict=True)
    value_C = torch.linspace(-1.0, 1.0, CELLS)
    expected_C = value_C.double()
    for cell in set(cells):
        own = [torch.tensor(t, dtype=torch.float32).double() for c, t, valid in rows if c == cell and valid]
        if own:
            mean = torch.stack(own).mean()
            expected_C[cell] += (1.0 - (1.0 - learning_rate) ** len(own)) * (mean - expected_C[cell])
    step(
        value_C,
        torch.tensor(cells),
        torch.tensor(targets, dtype=torch.float32),
        valid_N=torch.tensor(valids),
        learning_rate=learning_rate,
    )
    torch.testing.assert_close(value_C.double(), expected_C, rtol=1e-5, atol=2e-4)


def test_invalid_rows_change_no_value_for_any_targets() -> None:
    value_C = torch.tensor([0.5, 0.25])
    valid_N = torch.tensor([False, False, True])
    error_N = step(value_C, torch.tensor([0, 1, 1]), torch.tensor([float("nan"), 1e30, 1.25]), valid_N=valid_N)
    assert value_C[0] == 0.5
    assert value_C[1].item() == pytest.approx(0.25 + 0.3 * 1.0)
    assert error_N.tolist() == [0.0, 0.0, 1.0]


def test_errors_are_those_before_the_step() -> None:
    error_N = step(torch.tensor([1.0, 2.0]), torch.tensor([0, 0, 1]), torch.tensor([3.0, 0.0, 2.0]))
    assert error_N.tolist() == [2.0, -1.0, 0.0]


def test_masked_values_are_finite_and_below_all_others() -> None:
    value_BA = torch.tensor([[1.0, 2.0, 3.0], [-1e30, 0.0, 1.0], [4.0, 5.0, 6.0]])
    mask_BA = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    found = mask_values(value_BA, mask_BA)
    assert torch.isfinite(found).all()
    assert found.argmax(1).tolist() == [1, 0, 2]
    assert torch.equal(found.amax(1), torch.tensor([2.0, -1e30, 6.0]))
    assert torch.isfinite(found.sum(1)).all()
    assert mask_values(value_BA, None) is value_BA
