"""FrameReplay returns the same samples as Replay, to the bit, with less memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rein.envs.gridworld import Gridworld
from rein.envs.wrappers.observations import FrameStack
from rein.ops.random import generator
from rein.replay.frames import FrameReplay, PrioritizedFrameReplay, stack_axis
from rein.replay.prioritized import PrioritizedReplay
from rein.replay.replay import Replay
from rein.testing import StatefulContract
from rein.testing.stateful import copy_state, first_difference
from rein.types import Transition


class Episodes:
    """N environments of random stacked frames, with terminated, truncated, invalid and non-stacked rows."""

    def __init__(
        self,
        seed: int,
        num_envs: int,
        length: int,
        *,
        shape: tuple[int, ...] = (2,),
        values: int = 3,
        ends: float = 0.2,
        odd: float = 0.0,
        invalid: float = 0.1,
    ) -> None:
        self.drawn = generator(seed, "episodes")
        self.num_envs, self.length, self.shape, self.values = num_envs, length, shape, values
        self.ends, self.odd, self.invalid = ends, odd, invalid
        self.stack = self._begun(torch.zeros(num_envs, length, *shape, dtype=torch.uint8), self._often(1.0))

    def _often(self, probability: float) -> Tensor:
        return torch.rand(self.num_envs, generator=self.drawn) < probability

    def _frame(self, *more: int) -> Tensor:
        """Return random frames of few values, so that different frames are sometimes equal."""
        size = (self.num_envs, *more, *self.shape)
        return torch.randint(self.values, size, generator=self.drawn, dtype=torch.uint8)

    def _where(self, mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
        return torch.where(mask.view(-1, *[1] * (old.ndim - 1)), new, old)

    def _begun(self, stack: Tensor, mask: Tensor) -> Tensor:
        return self._where(mask, torch.stack([self._frame()] * self.length, 1), stack)

    def reset(self, mask: Tensor) -> None:
        self.stack = self._begun(self.stack, mask)

    def step(self) -> Transition:
        observation = self._where(self._often(self.odd), self._frame(self.length), self.stack)
        after = torch.cat((observation[:, 1:], self._frame()[:, None]), 1)
        after = self._where(self._often(self.odd), self._frame(self.length), after)
        terminated, valid = self._often(self.ends / 2), ~self._often(self.invalid)
        truncated = self._often(self.ends / 2) & ~terminated
        self.stack = self._begun(after, terminated | truncated | ~valid)
        action, reward = torch.arange(self.num_envs), torch.rand(self.num_envs, generator=self.drawn)
        return Transition(observation, action, reward, terminated, truncated, after, valid, {})


def played(episodes: Episodes, *replays: Replay, steps: int, resets: float = 0.1) -> Iterator[int]:
    """Append steps to the replays, with occasional resets outside a step."""
    for step in range(steps):
        transition = episodes.step()
        for replay in replays:
            replay.append(transition)
        if float(torch.rand((), generator=episodes.drawn)) < resets:
            mask = episodes._often(0.5)
            episodes.reset(mask)
            for replay in replays:
                replay.observe_reset(mask)
        yield step


def same(one: Any, other: Any) -> None:
    difference = first_difference(one, other)
    assert difference is None, difference


def samples(replay: Replay, seed: int, n_step: int) -> list[Any]:
    """Sample all rows without replacement and some with replacement."""
    drawn, options = generator(seed, "test", n_step), {"n_step": n_step, "gamma": 0.9, "fields": ("truncated",)}
    rows = len(replay)
    if not rows:
        return []
    return [replay.sample(rows, drawn, replacement=False, **options), replay.sample(8, drawn, **options)]


@pytest.mark.default_cases(every=5)
@pytest.mark.parametrize("odd", [0.0, 0.1, 1.0], ids=["stacks", "some whole", "all whole"])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_samples_equal_those_of_plain_replay(length, num_envs, odd):
    for slots in (1, 2, 16):
        episodes = Episodes(slots, num_envs, length, odd=odd)
        plain = Replay(slots * num_envs)
        frames = FrameReplay(slots * num_envs, length, (length, 2))
        for step in played(episodes, plain, frames, steps=45):
            if step % 4 == 3:
                same(samples(plain, step, 1), samples(frames, step, 1))
                same(samples(plain, step, 3), samples(frames, step, 3))


def test_float_stacks_in_last_axis_are_returned_bit_for_bit():
    values = torch.tensor([0.0, -0.0, float("nan")])
    episodes = Episodes(0, 2, 3, values=3, shape=(2, 1))
    plain, frames = Replay(80), FrameReplay(80, 3, (2, 1, 3))
    for _ in range(50):
        row = episodes.step()
        changed = {n: values[getattr(row, n).long()].movedim(1, -1) for n in ("observation", "next_observation")}
        for replay in (plain, frames):
            replay.append(row._replace(**changed))
    same(samples(plain, 0, 1), samples(frames, 0, 1))
    assert frames.sample(4, generator(0, "test")).observation.shape == (4, 2, 1, 3)


def test_observations_of_frame_stack_wrapper_are_returned():
    environment = FrameStack(Gridworld(num_envs=3, seed=0, max_episode_steps=7, observation="vector"), 4)
    plain, frames = Replay(60), FrameReplay(60, 4, environment.single_observation_space.shape)
    observation, drawn = environment.reset(), generator(0, "test")
    for _ in range(50):
        action = torch.randint(4, (3,), generator=drawn)
        now = environment.apply_action(action)
        row = (now.reward, now.terminated, now.truncated, now.final_observation, now.valid)
        for replay in (plain, frames):
            replay.append(Transition(observation, action, *row, {}))
        observation = now.observation
    same(samples(plain, 0, 1), samples(frames, 0, 1))
    assert frames.frames._ids < 50 * 3 * 0.4  # only stacks at the end of an episode were stored whole


@pytest.mark.parametrize("n_step", [1, 3])
def test_prioritized_samples_equal_those_of_prioritized_replay(n_step):
    episodes, drawn = Episodes(0, 2, 3), generator(0, "test")
    plain, frames = PrioritizedReplay(20), PrioritizedFrameReplay(20, 3, (3, 2), alpha=0.6)
    for _ in played(episodes, plain, frames, steps=40):
        if len(plain):
            found = [replay.sample(5, generator(1, "test"), n_step=n_step) for replay in (plain, frames)]
            same(*found)
            error_B = torch.rand(5, generator=drawn)
            for replay in (plain, frames):
                replay.update(found[0].row, error_B)


def test_rows_taken_between_appends_equal_those_of_plain_replay():
    episodes = Episodes(0, 1, 4, ends=0.0, invalid=0.0)
    plain, frames = Replay(10), FrameReplay(10, 4, (4, 2))
    for _ in played(episodes, plain, frames, steps=25, resets=0.0):
        plain.flush()
        index_B = torch.arange(min(plain.filled, 10))
        same(plain.take(index_B), frames.take(index_B))


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("length", [1, 2, 4])
def test_memory_is_a_fraction_of_that_of_plain_replay(length):
    episodes = Episodes(0, 2, length, shape=(36, 36), values=250, ends=0.01, invalid=0.0)
    plain, frames = Replay(2000), FrameReplay(2000, length, (length, 36, 36))
    for _ in played(episodes, plain, frames, steps=1100, resets=0.0):
        pass
    plain.flush(), frames.flush()
    taken = frames.frames.nbytes + frames._bytes.nbytes
    assert 1.0 <= taken / (plain._bytes.nbytes / (2 * length)) < 1.2


def test_memory_of_whole_stacks_is_reused():
    episodes = Episodes(0, 2, 3, ends=0.3)
    frames = FrameReplay(40, 3, (3, 2))
    sizes = [frames.frames.nbytes for _ in played(episodes, frames, steps=400)]
    assert frames.frames._ids > 3 * len(frames.frames._whole)
    assert sizes[60] == sizes[-1]


@pytest.mark.parametrize("slots", range(12, 20))
def test_whole_stack_is_kept_as_long_as_its_row(slots):
    drawn, yes = generator(slots, "test"), torch.ones(1, dtype=torch.bool)
    plain, frames = Replay(slots), FrameReplay(slots, 3, (3, 2))
    stacks = torch.randint(250, (60, 1, 3, 2), generator=drawn, dtype=torch.uint8)
    stacks[0] = stacks[0, :, :1]  # one repeated frame, which is not stored whole
    for before, after in itertools.pairwise(stacks):
        for replay in (plain, frames):
            replay.append(Transition(before, torch.zeros(1), torch.zeros(1), ~yes, ~yes, after, yes, {}))
        same(samples(plain, 0, 1), samples(frames, 0, 1))


def test_frames_are_stored_once_again_after_non_stacked_observation():
    episodes, frames = Episodes(0, 1, 4, ends=0.0, invalid=0.0, values=250), FrameReplay(40, 4, (4, 2))
    episodes.stack = episodes._frame(4)  # as in the middle of an episode
    kept = []
    for _ in range(8):
        frames.append(episodes.step())
        kept.append(frames.frames._ids)
    assert kept == [2, 3, 3, 3, 3, 3, 3, 3]  # stacks of the first steps are stored whole


class TestState(StatefulContract):
    kind: ClassVar[Any] = FrameReplay

    def make(self):
        self.episodes = Episodes(0, 2, 3)
        return self.kind(16, 3, (3, 2))

    def step(self, part):
        part.append(self.episodes.step())
        return samples(part, 0, 1) if self.kind is FrameReplay else None

    def test_loaded_part_continues_bit_for_bit(self):
        """Replaces the contract's test, because its parts would share one stream of episodes here."""
        for steps in range(1, 40, 6):
            episodes, part, other = Episodes(steps, 2, 3, odd=0.1), self.make(), self.make()
            for _ in range(steps):
                part.append(episodes.step())
            other.load_state_dict(copy_state(part.state_dict()))
            for _ in range(9):
                row = episodes.step()
                part.append(row), other.append(row)
                same(part.sample(9, generator(0, "test"), n_step=2), other.sample(9, generator(0, "test"), n_step=2))
            same(part.state_dict(), other.state_dict())


class TestPrioritizedState(TestState):
    kind = PrioritizedFrameReplay


def test_loading_empty_state_empties_replay():
    frames, empty = FrameReplay(8, 3, (3, 2)), FrameReplay(8, 3, (3, 2))
    episodes = Episodes(0, 2, 3)
    frames.append(episodes.step())
    frames.load_state_dict(empty.state_dict())
    assert len(frames) == 0
    for replay in (frames, empty):
        episodes = Episodes(1, 2, 3)
        for _ in range(20):
            replay.append(episodes.step())
    same(frames.state_dict(), empty.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["frames"].update(length=2), "length"),
        (lambda s: s["frames"].update(dtype="float32"), "float32"),
        (lambda s: s["frames"].update(dtype="load"), "load"),
        (lambda s: s["frames"].update(steps=3), "3 steps"),
        (lambda s: s["frames"].update(ids=10_000), "10000"),
        (lambda s: s["frames"].update(frames=[]), "0 rows"),
        (lambda s: s["frames"].update(depth=s["frames"]["depth"][:-1]), "depth"),
    ],
)
def test_unsuitable_state_raises(change, message):
    frames = FrameReplay(16, 3, (3, 2))
    for _ in played(Episodes(0, 2, 3), frames, steps=20):
        pass
    state = copy_state(frames.state_dict())
    change(state)
    with pytest.raises(ValueError, match=message):
        FrameReplay(16, 3, (3, 2)).load_state_dict(state)


def test_stack_axis_is_first_or_last():
    assert stack_axis((4, 84, 84), 4) == 1
    assert stack_axis((84, 84, 4), 4) == 3
    assert stack_axis((4, 84, 4), 4) == 1
    assert stack_axis((3,), 3) == 1
    for shape, frame_stack in (((84, 84, 3), 4), ((), 1), ((4, 84, 84), 0)):
        with pytest.raises(ValueError, match=f"frame_stack={frame_stack}"):
            FrameReplay(8, frame_stack, shape)
    with pytest.raises(ValueError, match=r"Dict, Tuple and scalar observations have no stack axis"):
        FrameReplay(8, 3, ())


def test_rows_of_other_shape_or_dtype_raise_and_change_nothing():
    frames, row = FrameReplay(8, 3, (3, 2)), Episodes(0, 2, 3).step()
    frames.append(row)
    for name in ("observation", "next_observation"):
        other = getattr(row, name)
        for wrong in (other.float(), other[:, :, :1], {"camera": other}):
            with pytest.raises(ValueError, match=name):
                frames.append(row._replace(**{name: wrong}))
    assert len(frames) == int(row.valid.sum())
