"""Clips without end, through torch's own loader and on the way to a device."""

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


def test_it_never_ends_and_goes_on_from_one_iteration_to_the_next() -> None:
    one, same, other = (ClipStream(filled(), 8, seed=seed) for seed in (0, 0, 1))
    first, then = rows(iter(one), 100), rows(iter(one))
    assert len(first) == 100
    assert rows(iter(same), 103) == first + then
    assert rows(iter(other)) != first[:3]


def test_each_batch_is_drawn_from_the_replay_as_it_is_then() -> None:
    replay = filled(4)
    batches = iter(ClipStream(replay, 64, seed=0))
    assert float(next(batches).reward.max()) == 3.5
    at, no = torch.tensor([9.0, 9.5]), torch.zeros(2, dtype=torch.bool)
    replay.append(Transition(at, at.long(), at, no, no, at, ~no, {"value": at}))
    assert float(next(batches).reward.max()) == 9.5


class TestState(StatefulContract):
    """Of what is drawn with: iterated anew each time."""

    def make(self) -> ClipStream:
        return ClipStream(filled(), 8, seed=0)

    def step(self, part: ClipStream) -> Clips:
        return next(iter(part))


def test_a_loader_hands_on_the_batches_as_they_are() -> None:
    loaded = DataLoader(ClipStream(filled(), 8, seed=0, begin=("value",)), batch_size=None)
    expected = ClipStream(filled(), 8, seed=0, begin=("value",))
    for one, other in itertools.islice(zip(loaded, expected, strict=True), 5):
        assert isinstance(one, Clips)
        assert first_difference(one, other) is None


def test_workers_draw_different_clips_and_the_same_ones_under_the_same_seed() -> None:
    def drawn(seed: int) -> list[list[int]]:
        how = {"num_workers": 2, "generator": torch.Generator().manual_seed(seed), "multiprocessing_context": "fork"}
        return rows(iter(DataLoader(ClipStream(filled(), 8, seed=0), batch_size=None, **how)), 4)

    one, same, other = drawn(0), drawn(0), drawn(1)
    assert one == same != other
    assert len({tuple(batch) for batch in one}) == 4


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_prefetching_hands_on_every_batch_in_its_order(count: int) -> None:
    batches = [{"at": torch.full((2,), float(k)), "name": k} for k in range(count)]
    found = list(prefetch(batches, "cpu"))
    assert first_difference(found, batches) is None


def test_the_next_batch_is_drawn_before_this_one_is_handed_on() -> None:
    asked = []

    def source() -> Iterator[torch.Tensor]:
        for k in range(4):
            asked.append(k)
            yield torch.tensor(k)

    seen = [(int(batch), len(asked)) for batch in prefetch(source(), "cpu")]
    assert seen == [(0, 2), (1, 3), (2, 4), (3, 4)]


def test_batches_arrive_on_the_device() -> None:
    (clips,) = prefetch([filled().clips(4, torch.Generator())], "meta")
    assert {clips.reward.device.type, clips.valid.device.type, clips.observation.device.type} == {"meta"}
    assert isinstance(clips, Clips)
