"""Batches that are copied to a CUDA device while it still computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import rein

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def reused(pinned: bool) -> Iterator[dict[str, Any]]:
    """Yield batches in memory that the next batch overwrites."""
    x = torch.empty(1 << 20, pin_memory=pinned)
    for number in range(20):
        yield {"x": x.fill_(number), "label": "text", "there": torch.full((3,), float(number), device="cuda")}


@pytest.mark.parametrize("pinned", [False, True])
def test_batches_in_reused_memory_arrive_unchanged(pinned: bool) -> None:
    weight, sums = torch.eye(1024, device="cuda"), []

    def step(state: rein.State) -> None:
        x = state.batch["x"].view(1024, 1024)
        for _ in range(20):  # the device is still busy when the next batch is copied
            x = x @ weight
        sums.append((x.min(), x.max(), state.batch["there"].max()))
        assert state.batch["label"] == "text"

    rein.Loop(step, device="cuda").run(reused(pinned), epochs=1)
    assert [[float(number) for number in each] for each in sums] == [[float(n)] * 3 for n in range(20)]


def test_gradients_reach_batches_that_require_them() -> None:
    x = torch.ones(3, requires_grad=True)
    rein.Loop(lambda state: state.batch.sum().backward(), device="cuda").run([x])
    assert x.grad is not None and x.grad.tolist() == [1.0, 1.0, 1.0]
