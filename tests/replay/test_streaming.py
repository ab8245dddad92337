"""Tests of ClipStream, with torch's DataLoader, and of prefetch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader

from rein.replay.sequences import Clips, ClipStream, SequenceReplay, prefetch
from rein.testing import StatefulContract
from rein.testing.stateful import first_difference
from rein.types import Transition


def filled(steps: int = 40) -> SequenceReplay:
    replay = SequenceReplay(100, 4)
    for t in range(steps):
        at, no = torch.tensor([float(t), t + 0.5]), torch.zeros(2, dtype=torch.bool)
        replay.append(Transition(at, at.long(), at, no, no, at, ~no, {"value": at}))
    return replay


def rows(batches: Iterator[Clips], count: int = 3) -> list[list[int]]:
    return [clips.row[0].tolist() for clips in itertools.islice(batches, count)]


def test_stream_is_infinite_and_continues_between_iterations() -> None:
    one, same, other = (ClipStream(filled(), 8, seed=seed) for seed in (0, 0, 1))
    first, then = rows(iter(one), 100), rows(iter(one))
    assert len(first) == 100
    assert rows(iter(same), 103) == first + then
    assert rows(iter(other)) != first[:3]


def test_batch_is_sampled_from_current_replay() -> None:
    replay = filled(4)
    batches = iter(ClipStream(replay, 64, seed=0))
    assert float(next(batches).reward.max()) == 3.5
    at, no = torch.tensor([9.0, 9.5]), torch.zeros(2, dtype=torch.bool)
    replay.append(Transition(at, at.long(), at, no, no, at, ~no, {"value": at}))
    assert float(next(batches).reward.max()) == 9.5


class TestState(StatefulContract):
    """Creates a new iterator for each step."""

    def make(self) -> ClipStream:
        return ClipStream(filled(), 8, seed=0)

    def step(self, part: ClipStream) -> Clips:
        return next(iter(part))


def test_data_loader_returns_batches_unchanged() -> None:
    loaded = DataLoader(ClipStream(filled(), 8, seed=0, begin=("value",)), batch_size=None)
    expected = ClipStream(filled(), 8, seed=0, begin=("value",))
    for one, other in itertools.islice(zip(loaded, expected, strict=True), 5):
        assert isinstance(one, Clips)
        assert first_difference(one, other) is None


def test_workers_sample_different_clips_reproducibly() -> None:
    def drawn(seed: int) -> list[list[int]]:
        options = {
            "num_workers": 2,
            "generator": torch.Generator().manual_seed(seed),
            "multiprocessing_context": "fork",
        }
        return rows(iter(DataLoader(ClipStream(filled(), 8, seed=0), batch_size=None, **options)), 4)

    one, same, other = drawn(0), drawn(0), drawn(1)
    assert one == same != other
    assert len({tuple(batch) for batch in one}) == 4


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_prefetch_keeps_batches_and_order(count: int) -> None:
    batches = [{"at": torch.full((2,), float(k)), "name": k} for k in range(count)]
    found = list(prefetch(batches, "cpu"))
    assert first_difference(found, batches) is None


def test_prefetch_reads_one_batch_ahead() -> None:
    read = []

    def source() -> Iterator[torch.Tensor]:
        for k in range(4):
            read.append(k)
            yield torch.tensor(k)

    seen = [(int(batch), len(read)) for batch in prefetch(source(), "cpu")]
    assert seen == [(0, 2), (1, 3), (2, 4), (3, 4)]


def test_prefetch_moves_batches_to_device() -> None:
    (clips,) = prefetch([filled().clips(4, torch.Generator())], "meta")
    assert {clips.reward.device.type, clips.valid.device.type, clips.observation.device.type} == {"meta"}
    assert isinstance(clips, Clips)
