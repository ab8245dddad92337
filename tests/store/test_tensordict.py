"""Layout of batches for TorchRL. tensordict is not a dependency, so a stand-in checks the arguments."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rein.ops.trees import leaves
from rein.store.datasets import to_tensordict
from rein.store.hdf5 import HDF5Store
from rein.store.reader import Run, open_run
from rein.testing.store import make_trajectory, with_fields


class StandIn(dict[str, Any]):
    """Stand-in for `tensordict.TensorDict`: every tensor must have the batch size as leading shape."""

    def __init__(self, source: dict[str, Any], batch_size: torch.Size) -> None:
        super().__init__(source)
        self.batch_size = batch_size
        for path, leaf in leaves(source):
            assert isinstance(leaf, torch.Tensor) and leaf.shape[: len(batch_size)] == batch_size, path


@pytest.fixture
def run(tmp_path, monkeypatch) -> Run:
    monkeypatch.setitem(sys.modules, "tensordict", SimpleNamespace(TensorDict=StandIn))
    store = HDF5Store(tmp_path / "run")
    ends = {name: torch.zeros(9, 3, dtype=torch.bool) for name in ("terminated", "truncated")}
    ends["terminated"][-1, 0] = ends["truncated"][-1, 1:] = True
    store.append(with_fields(make_trajectory(1, steps=9), value=torch.ones(9, 3), **ends))
    store.close()
    return open_run(store.path)


def test_next_has_rewards_and_ends_with_trailing_dimension(run):
    batch = run.transitions()[:]
    assert batch.terminated.any() and batch.truncated.any()
    found = to_tensordict(batch)
    assert found.batch_size == (27,)
    assert found.keys() == {"observation", "action", "value", "next"}
    assert found["next"].keys() == {"observation", "reward", "terminated", "truncated", "done"}
    assert torch.equal(found["observation"]["state"], batch.observation["state"])
    assert torch.equal(found["next"]["observation"]["camera"]["left"], batch.next_observation["camera"]["left"])
    assert torch.equal(found["value"], batch.extras["value"])
    for name in ("reward", "terminated", "truncated"):
        assert torch.equal(found["next"][name], getattr(batch, name)[:, None]), name
    assert torch.equal(found["next"]["done"], (batch.terminated | batch.truncated)[:, None])


def test_batch_size_matches_the_leading_shape(run):
    assert to_tensordict(run.sequences(length=2)[:4]).batch_size == (4, 2)
    assert to_tensordict(run.transitions()[0]).batch_size == ()


def test_unrequested_fields_are_absent(run):
    found = to_tensordict(run.transitions(fields=["reward"])[:5])
    assert found.keys() == {"next"} and found["next"].keys() == {"reward"}
