"""How batches are laid out for TorchRL. tensordict is no dependency: what it demands of its arguments stands in."""

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
    """As `tensordict.TensorDict`: every tensor begins with the shape of the batch."""

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


def test_what_follows_a_transition_is_under_next_with_a_dimension_for_rewards_and_ends(run):
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


def test_sequences_have_two_dimensions_of_a_batch_and_one_transition_none(run):
    assert to_tensordict(run.sequences(length=2)[:4]).batch_size == (4, 2)
    assert to_tensordict(run.transitions()[0]).batch_size == ()


def test_what_was_not_asked_for_is_not_there(run):
    found = to_tensordict(run.transitions(fields=["reward"])[:5])
    assert found.keys() == {"next"} and found["next"].keys() == {"reward"}
