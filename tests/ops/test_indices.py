from __future__ import annotations

import pytest
import torch

from rein.ops.random import generator
from rein.ops.statistics import minibatches


@pytest.mark.parametrize(("rows", "count"), [(12, 1), (12, 4), (12, 12), (13, 4), (15, 4)])
def test_minibatches_have_equal_size_and_disjoint_rows(rows: int, count: int) -> None:
    index = minibatches(rows, count, generator(0, "agent"))
    assert index.shape == (count, rows // count)
    assert index.dtype == torch.int64
    rows_used = index.flatten().tolist()
    assert len(set(rows_used)) == len(rows_used)
    assert set(rows_used) <= set(range(rows))


def test_dropped_rows_vary_between_calls_without_preference() -> None:
    stream, calls, rows = generator(0, "agent"), 3_000, 7
    count = torch.zeros(rows, dtype=torch.int64)
    for _ in range(calls):
        count += minibatches(rows, 3, stream).flatten().bincount(minlength=rows)
    share = 6 / 7
    assert ((count - calls * share).abs() < 4.0 * (calls * share * (1.0 - share)) ** 0.5).all()


def test_equal_generators_give_equal_minibatches_and_then_new_ones() -> None:
    stream = generator(0, "agent")
    first, second = minibatches(100, 4, stream), minibatches(100, 4, stream)
    assert torch.equal(first, minibatches(100, 4, generator(0, "agent")))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("count", [0, -1, 6])
def test_empty_minibatch_raises(count: int) -> None:
    with pytest.raises(ValueError, match="5 rows, or sequences, cannot be cut"):
        minibatches(5, count, generator(0, "agent"))
