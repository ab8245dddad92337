"""Tests of sequence sampling: clips stay within one episode, and their first rows are sampled uniformly.

Shapes: T steps of a clip, B clips, N environments.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rein.ops.random import generator
from rein.replay.replay import Replay
from rein.replay.sequences import Clips, PrioritizedSequenceReplay, SequenceReplay
from rein.testing import StatefulContract
from rein.testing.stateful import first_difference
from rein.training.offline import extend
from rein.types import Transition

N = 3


class Stream:
    """Random transitions, and a diary with the episode of each row, None for invalid rows.

    The reward of row n of step t is t * N + n, which identifies the row. It is NaN for invalid rows.
    """

    def __init__(self, seed: int = 0, ends: float = 0.12, invalid: float = 0.06, resets: float = 0.06) -> None:
        self.drawn, self.ends, self.invalid, self.resets = generator(seed, "stream"), ends, invalid, resets
        self.diary: list[list[int | None]] = []
        self.episode = [0] * N

    def some(self, share: float) -> Tensor:
        return torch.rand(N, generator=self.drawn) < share

    def feed(self, replay: Any, steps: int) -> Any:
        for _ in range(steps):
            t = len(self.diary)
            valid_N = ~self.some(self.invalid)
            terminated_N, truncated_N = self.some(self.ends), self.some(self.ends / 2)
            name_N = torch.arange(t * N, t * N + N, dtype=torch.float32)
            reward_N = torch.where(valid_N, name_N, torch.nan)
            observation = {"at": reward_N.unsqueeze(1), "seen": torch.full((N, 2, 2), float(t))}
            ends = terminated_N, truncated_N
            row = Transition(observation, torch.zeros(N, dtype=torch.int64), reward_N, *ends, observation, valid_N, {})
            replay.append(row, carry=name_N.unsqueeze(1) + 0.5)
            self.diary.append([self.episode[n] if valid_N[n] else None for n in range(N)])
            reset_N = self.some(self.resets) if t % 4 == 2 else torch.zeros(N, dtype=torch.bool)
            if bool(reset_N.any()):
                replay.observe_reset(reset_N)
            for n in (terminated_N | truncated_N | ~valid_N | reset_N).nonzero().flatten().tolist():
                self.episode[n] += 1
        return replay

    def row(self, replay: Any, t: int, n: int) -> bool:
        """Whether a row is valid and not overwritten."""
        return max(0, len(self.diary) - replay.slots) <= t < len(self.diary) and self.diary[t][n] is not None

    def clip(self, replay: Any, t: int, n: int) -> list[float | None]:
        """Return the rewards of the clip whose first row, after the `before` rows, is row n of step t."""
        found: list[float | None] = []
        for k in range(-replay.before, replay.length):
            at = t + k * replay.stride
            same = self.row(replay, at, n) and self.diary[at][n] == self.diary[t][n]
            found.append(float(at * N + n) if same else None)
        return found

    def starts(self, replay: Any) -> dict[int, list[float | None]]:
        """Return all possible clips by the reward of their first row."""
        rows = [(t, n) for t in range(len(self.diary)) for n in range(N) if self.row(replay, t, n)]
        clips = {t * N + n: self.clip(replay, t, n) for t, n in rows}
        return {name: clip for name, clip in clips.items() if not replay.whole or None not in clip[replay.before :]}


def names(clips: Clips) -> list[list[float | None]]:
    """Return the rewards of each clip, None for padding."""
    columns = torch.where(clips.valid, clips.reward, -1.0).t().tolist()
    return [[None if name < 0 else name for name in column] for column in columns]


OPTIONS: list[dict[str, Any]] = [
    {"length": 4},
    {"length": 5, "before": 3},
    {"length": 3, "stride": 2, "before": 2},
    {"length": 3, "whole": True},
    {"length": 3, "stride": 2, "before": 1, "whole": True},
    {"length": 1, "whole": True},
]
FED = [20, 35, 36, 71, 150]  # steps, with 35 slots: partly full, full, and after one or more rounds of the ring


@pytest.mark.parametrize("steps", FED)
@pytest.mark.parametrize("options", OPTIONS)
def test_clips_are_correct_and_sampled_uniformly(options: dict[str, Any], steps: int) -> None:
    stream = Stream()
    replay = stream.feed(SequenceReplay(35 * N, **options), steps)
    expected = stream.starts(replay)
    each = 40
    clips = replay.clips(each * len(expected), generator(1, "clips"))
    assert len(replay) == len(expected)
    seen = dict.fromkeys(expected, 0)
    for clip in names(clips):
        start = clip[replay.before]
        assert start is not None
        assert clip == expected[int(start)]
        seen[int(start)] += 1
    chi_square = sum((count - each) ** 2 / each for count in seen.values())
    freedom = len(expected) - 1
    assert chi_square < freedom + 5.0 * math.sqrt(2.0 * freedom)


@pytest.mark.parametrize("before", [0, 2])
def test_all_whole_clips_of_endless_episode_are_sampled(before: int) -> None:
    """All rows have enough earlier rows of their episode, but the oldest of these are overwritten."""
    stream = Stream(ends=0.0, invalid=0.0, resets=0.0)
    replay = stream.feed(SequenceReplay(20 * N, 4, before=before, whole=True), 47)
    expected = stream.starts(replay)
    assert len(replay) == len(expected) == 17 * N
    found = names(replay.clips(4000, generator(0, "clips")))
    assert {clip[before] for clip in found} == set(expected)
    assert all(clip == expected[int(clip[before] or 0)] for clip in found)


@pytest.mark.parametrize("steps", FED)
@pytest.mark.parametrize("options", OPTIONS)
def test_newest_clip_ends_with_newest_row(options: dict[str, Any], steps: int) -> None:
    """A whole clip ends with the newest row that has enough earlier rows."""
    stream = Stream()
    replay = stream.feed(SequenceReplay(35 * N, **options), steps)
    found, starts, stride = names(replay.newest()), stream.starts(replay), replay.stride

    def last(clip: list[float | None]) -> float:
        return max(name for name in clip if name is not None)

    for n in range(N):
        ends = {last(clip): clip for name, clip in sorted(starts.items(), reverse=True) if name % N == n}
        clip = found[n]
        assert last(clip) == max(ends)
        rows = [name for name in clip if name is not None]
        assert all(b - a == stride * N for a, b in itertools.pairwise(rows))
        assert clip == starts[int(clip[replay.before] or 0)]
        if len(rows) < len(clip):  # a shorter clip has all rows of the episode
            t = int(rows[0]) // N - stride
            begun = rows[0] // N
            assert not stream.row(replay, t, n) or stream.diary[t][n] != stream.diary[int(begun)][n]


def test_newest_without_whole_clip_is_invalid() -> None:
    replay = Stream(ends=0.0, invalid=0.0, resets=0.0).feed(SequenceReplay(60, 4, whole=True), 4)
    replay.observe_reset(torch.tensor([True, True, True]))
    assert replay.newest().valid.all()
    replay = Stream(ends=0.0, invalid=0.0, resets=0.0).feed(SequenceReplay(60, 4, whole=True), 3)
    assert not replay.newest().valid.any()


def test_begin_fields_are_of_first_step() -> None:
    stream = Stream()
    replay = stream.feed(SequenceReplay(35 * N, 4, before=3), 80)
    clips = replay.clips(300, generator(0, "clips"), fields=("carry", "truncated"), begin=("carry", "reward"))
    columns = torch.arange(300)
    assert clips.valid[clips.first, columns].all()
    assert (clips.valid[:3].sum(0) == 3 - clips.first).all()
    assert sorted(set(clips.first.tolist())) == [0, 1, 2, 3]
    assert torch.equal(clips.begin["reward"], clips.reward[clips.first, columns])
    assert torch.equal(clips.begin["carry"][:, 0], clips.begin["reward"] + 0.5)
    assert torch.equal(clips.fields["carry"][..., 0], clips.reward + 0.5)
    assert set(clips.fields) == {"carry", "truncated"}


def test_nested_observations_are_time_major() -> None:
    clips = Stream().feed(SequenceReplay(90, 4, before=1), 25).clips(6, generator(0, "clips"))
    assert {name: tuple(part.shape) for name, part in clips.observation.items()} == {
        "at": (5, 6, 1),
        "seen": (5, 6, 2, 2),
    }
    assert torch.equal(clips.observation["at"][..., 0], clips.reward)
    assert torch.equal(clips.observation["seen"][..., 0, 0], torch.div(clips.reward, N, rounding_mode="floor"))


def test_padding_repeats_rows_of_same_clip() -> None:
    """The NaN values of invalid rows are never returned."""
    clips = Stream(invalid=0.3).feed(SequenceReplay(90, 6, before=4), 100).clips(300, generator(0, "clips"))
    assert not clips.valid.all()
    for t, column in zip(*(x.tolist() for x in (~clips.valid).nonzero(as_tuple=True)), strict=True):
        rows = clips.row[:, column][clips.valid[:, column]]
        assert clips.row[t, column] in rows
    assert torch.isfinite(clips.reward).all()


@pytest.mark.parametrize(
    ("options", "match"),
    [({"length": 0}, "length=0"), ({"length": 1, "before": -1}, "before=-1"), ({"length": 2, "stride": 0}, "stride=0")],
)
def test_invalid_arguments_raise(options: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SequenceReplay(100, **options)


def test_clips_raises_without_possible_clip() -> None:
    with pytest.raises(ValueError, match="the replay is empty"):
        SequenceReplay(100, 3).clips(1, generator(0, "clips"))
    longer_than_the_ring = Stream(ends=0.0, invalid=0.0, resets=0.0).feed(SequenceReplay(5 * N, 6, whole=True), 40)
    with pytest.raises(ValueError, match="15 rows, but no whole clip of 6 rows that can be sampled"):
        longer_than_the_ring.clips(1, generator(0, "clips"))
    no_data = Stream(invalid=1.0).feed(SequenceReplay(5 * N, 6), 3)
    with pytest.raises(ValueError, match="9 rows, but no clip that can be sampled"):
        no_data.clips(1, generator(0, "clips"))
    assert len(SequenceReplay(100, 3, whole=True)) == len(longer_than_the_ring) == len(no_data) == 0


@pytest.mark.parametrize("steps", FED)
def test_state_equals_that_of_plain_replay(steps: int) -> None:
    """A state can be loaded with other clip options."""
    stream, plain = Stream(), Replay(35 * N)
    stream.feed(plain, steps)
    for options in OPTIONS:
        other = Stream(ends=0.01).feed(SequenceReplay(35 * N, **options), 40)  # replaced by the loaded rows
        other.load_state_dict(plain.state_dict())
        assert first_difference(other.state_dict(), plain.state_dict()) is None
        assert {int(clip[other.before] or 0) for clip in names(other.clips(2000, generator(0, "clips")))} == set(
            stream.starts(other)
        )


def test_clips_of_recorded_transitions() -> None:
    at = torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0])
    no = torch.zeros(5, dtype=torch.bool)
    ended = torch.tensor([False, False, True, False, False])
    replay = SequenceReplay(5, 3)
    extend(replay, Transition(at, at.long(), at, ended, no, at + 1.0, ~no, {}))
    found = {tuple(clip) for clip in names(replay.clips(200, generator(0, "clips")))}
    assert found == {(0, 1, 2), (1, 2, None), (2, None, None), (0, 1, None), (1, None, None)}


class TestState(StatefulContract):
    """Saves before the ring is full. The state is that of a plain replay."""

    options: ClassVar[dict[str, Any]] = {"length": 4, "before": 2}
    stream: ClassVar[dict[str, float]] = {}
    steps_before = 7

    def make(self) -> _Fed:
        return _Fed(SequenceReplay(12 * N, **self.options), **self.stream)

    def step(self, part: _Fed) -> Any:
        return part.step()


class TestStateOfAFullRing(TestState):
    steps_before = 29


class TestStateOfWholeClips(TestStateOfAFullRing):
    options: ClassVar[dict[str, Any]] = {"length": 3, "stride": 2, "whole": True}
    stream: ClassVar[dict[str, float]] = {"ends": 0.05, "invalid": 0.03, "resets": 0.1}


class TestStateOfWholeClipsInAnEpisodeWithoutEnd(TestStateOfWholeClips):
    """Only rows whose clips are partly overwritten are excluded; the state does not have their number."""

    stream: ClassVar[dict[str, float]] = {"ends": 0.0, "invalid": 0.0, "resets": 0.0}


class _Fed:
    """A replay fed with random steps that depend on the step number only."""

    def __init__(self, replay: SequenceReplay, **stream: float) -> None:
        self.replay, self.steps, self.options = replay, 0, stream

    def step(self) -> Any:
        stream = Stream(self.steps, **self.options)
        stream.diary = [[None] * N] * self.steps
        stream.feed(self.replay, 1)
        self.steps += 1
        if self.steps < 7:
            return None
        return self.replay.clips(16, generator(self.steps, "clips"), begin=("carry",)), self.replay.newest()

    def state_dict(self) -> dict[str, Any]:
        return {**self.replay.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]
        self.replay.load_state_dict(state)


def test_prioritized_clips_are_drawn_by_the_priority_of_their_first_row() -> None:
    replay, drawn = PrioritizedSequenceReplay(20, 3, before=1, alpha=1.0), generator(0, "clips")
    no, yes = torch.zeros(2, dtype=torch.bool), torch.ones(2, dtype=torch.bool)
    for step in range(8):
        x = torch.full((2, 1), float(step))
        replay.append(Transition(x, no.long(), x[:, 0], no, no, x, yes, {}))
    clips = replay.clips(200, drawn)
    assert len(clips.row[1].unique()) == 16
    replay.update(clips.row, torch.where(clips.row[1] == 5, 3.0, 0.0))
    again = replay.clips(50, drawn)
    assert again.row[1].unique().tolist() == [5]
    assert again.row[:, 0].tolist() == [3, 5, 7, 9]  # two environments
    torch.testing.assert_close(again.probability, torch.ones(50, dtype=torch.float64), rtol=1e-4, atol=0.0)
    restored = PrioritizedSequenceReplay(20, 3, before=1, alpha=1.0)
    restored.load_state_dict(replay.state_dict())
    assert restored.clips(9, drawn).row[1].unique().tolist() == [5]
