"""Tests of the replay buffer: contract, n-step returns against a slow reference, memory, files and states."""

from __future__ import annotations

import gc
import os
import re
import tempfile
import weakref
from pathlib import Path

import pytest
import torch

from rein.ops.random import generator
from rein.replay import storage as allocation
from rein.replay.prioritized import PrioritizedReplay
from rein.replay.replay import Replay
from rein.testing import BufferContract
from rein.testing.buffer_contract import make_transition
from rein.testing.stateful import copy_state, first_difference
from rein.types import Transition

GAMMA = 0.9


class TestReplay(BufferContract):
    def make(self, capacity):
        return Replay(capacity)


class TestReplayOfOneEnvironment(TestReplay):
    num_envs = 1


@pytest.mark.slow
class TestReplayInAFile(TestReplay):
    num_envs = 5

    def make(self, capacity):
        return Replay(capacity, storage="memmap")


class TestPrioritizedReplay(BufferContract):
    """New rows have equal priorities, so sampling is uniform."""

    distinct = False

    def make(self, capacity):
        return PrioritizedReplay(capacity)


class Stream:
    """Random transitions of N environments, with terminated, truncated and invalid rows, and resets."""

    def __init__(self, num_envs: int, seed: int) -> None:
        self.num_envs, self._drawn = num_envs, generator(seed, "stream")
        self.rows: list[Transition] = []
        self.cut: list[list[bool]] = []  # whether an environment was reset outside a step after this row

    def step(self, replay: Replay) -> None:
        """Append one more step to the replay."""
        number = len(self.rows) * self.num_envs + torch.arange(self.num_envs)
        chance = torch.rand(5, self.num_envs, generator=self._drawn)
        place = number.float().unsqueeze(1)
        terminated, truncated, valid = chance[0] < 0.12, chance[1] < 0.12, chance[2] > 0.15
        row = Transition(
            place,
            number,
            torch.randn(self.num_envs, generator=self._drawn),
            terminated,
            truncated,
            place + 0.5,
            valid,
            {},
        )
        replay.append(row)
        self.rows.append(row)
        mask = (chance[3] < 0.1) & (chance[4, 0] < 0.5)
        if mask.any():
            replay.observe_reset(torch.zeros_like(mask))
            replay.observe_reset(mask)
        self.cut.append(mask.tolist())

    def expected(self, t: int, n: int, steps: int) -> tuple[float, bool, float, float]:
        """Compute the n-step return, terminated, the discount and the next observation."""
        total, discount, last = 0.0, 1.0, t
        for now in range(t, min(t + steps, len(self.rows))):
            row = self.rows[now]
            if not row.valid[n]:
                break
            total, discount, last = total + discount * float(row.reward[n]), discount * GAMMA, now
            if row.terminated[n] or row.truncated[n] or self.cut[now][n]:
                break
        ended = bool(self.rows[last].terminated[n])
        return total, ended, 0.0 if ended else discount, float(self.rows[last].next_observation[n, 0])


@pytest.mark.parametrize("n_step", [1, 2, 3, 7, 40])
@pytest.mark.parametrize(("num_envs", "slots", "lengths"), [(1, 30, (5, 30, 31, 77)), (4, 9, (3, 9, 14)), (3, 1, (4,))])
def test_n_step_returns_equal_slow_reference(num_envs, slots, lengths, n_step):
    for seed, length in enumerate(lengths):
        replay, stream = Replay(num_envs * slots), Stream(num_envs, seed)
        for _ in range(length):
            stream.step(replay)
        held = [(t, n) for t in range(max(0, length - slots), length) for n in range(num_envs)]
        held = [(t, n) for t, n in held if stream.rows[t].valid[n]]
        assert len(replay) == len(held)
        found = replay.take(torch.tensor([t % slots * num_envs + n for t, n in held]), n_step=n_step, gamma=GAMMA)
        assert found.action.tolist() == [t * num_envs + n for t, n in held]
        assert found.observation[:, 0].tolist() == [t * num_envs + n for t, n in held]
        expected = [stream.expected(t, n, n_step) for t, n in held]
        reward, terminated, discount, after = (list(column) for column in zip(*expected, strict=True))
        torch.testing.assert_close(found.reward.double(), torch.tensor(reward, dtype=torch.float64), rtol=0, atol=1e-5)
        assert found.terminated.tolist() == terminated
        assert found.next_observation[:, 0].tolist() == after
        if n_step > 1:
            torch.testing.assert_close(found.discount, torch.tensor(discount))
        else:
            assert found.discount == GAMMA


@pytest.mark.parametrize("n_step", [1, 4])
def test_sample_equals_take_of_its_rows(n_step):
    replay, stream = Replay(40), Stream(4, 0)
    for _ in range(27):
        stream.step(replay)
    sample = replay.sample(500, generator(0, "test"), n_step=n_step, gamma=GAMMA)
    taken = replay.take(sample.row, n_step=n_step, gamma=GAMMA)
    assert first_difference(sample._asdict(), taken._asdict()) is None
    assert len(sample.row.unique()) == len(replay)


@pytest.mark.parametrize("n_step", [1, 3])
def test_take_out_of_range_raises(n_step):
    replay, stream = Replay(8), Stream(2, 0)
    for _ in range(4):
        stream.step(replay)
    for index in (torch.tensor([-1]), torch.tensor([8])):
        with pytest.raises(IndexError):
            replay.take(index, n_step=n_step)


def test_reset_of_empty_replay_has_no_effect():
    replay = Replay(10)
    replay.observe_reset(torch.ones(2, dtype=torch.bool))
    replay.append(make_transition(0, 2))
    assert len(replay) == 2


def test_reset_leaves_terminated_row_terminated():
    replay = Replay(10)
    yes, no = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.bool)
    replay.append(make_transition(0, 2)._replace(terminated=yes, truncated=no))
    replay.observe_reset(yes)
    assert not replay.columns["truncated"].any()


def test_requested_fields_are_returned():
    replay = Replay(20)
    for step in range(7):
        row = make_transition(step, 2)
        replay.append(row._replace(extras={"log_prob": -row.reward}), value=2.0 * row.reward)
    for n_step in (1, 3):
        options = {"n_step": n_step, "fields": ("log_prob", "value", "reward")}
        sample = replay.sample(9, generator(0, "test"), **options)
        assert torch.equal(sample.fields["value"], -2.0 * sample.fields["log_prob"])
        assert torch.equal(sample.fields["reward"], sample.fields["value"] / 2.0)
    with pytest.raises(ValueError, match=r"rows have no entropy; their fields are action, .*log_prob"):
        replay.sample(1, generator(0, "test"), fields=("entropy",))


def test_wide_rows_are_written_at_once():
    held = []
    replay = Replay(6)
    for _ in range(3):
        wide = torch.zeros(2, 600_000, dtype=torch.uint8)
        replay.append(make_transition(0, 2)._replace(observation=wide, next_observation=wide))
        held.append(weakref.ref(wide))
        del wide
    assert [tensor() for tensor in held] == [None] * 3


def test_append_detaches_rows() -> None:
    replay, weight = Replay(10), torch.ones(1, requires_grad=True)
    row = make_transition(0, 2)
    replay.append(row._replace(reward=row.reward * weight))
    assert not replay.columns["reward"].requires_grad
    assert not replay.sample(4, generator(0, "test")).reward.requires_grad


def test_transition_without_environments_raises() -> None:
    with pytest.raises(ValueError, match="no environments"):
        Replay(10).append(make_transition(0, 0))


def test_staged_rows_keep_their_order():
    replay = Replay(2000)
    for step in range(1000):
        replay.append(make_transition(step, 2))
    assert torch.equal(replay.columns["reward"].flatten(), torch.arange(2000.0))


@pytest.mark.parametrize(("steps", "first"), [(3, 0.0), (7, 4.0)])
def test_chronological_rows_begin_with_the_oldest(steps, first):
    replay = Replay(10)
    for step in range(steps):
        replay.append(make_transition(step, 2))
    rows = replay.chronological()["reward"]
    assert rows.flatten().tolist() == list(range(int(first), 2 * steps))


def test_memmap_equals_memory_and_its_file_is_unnamed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    memory, file = Replay(200), Replay(200, storage="memmap")
    streams = [Stream(4, 0), Stream(4, 0)]
    for _ in range(130):
        for replay, stream in zip((memory, file), streams, strict=True):
            stream.step(replay)
    assert os.listdir(tmp_path) == []
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert mapped and all("deleted" in line for line in mapped)
    samples = [replay.sample(64, generator(0, "test"), n_step=3)._asdict() for replay in (memory, file)]
    assert first_difference(*samples) is None
    assert first_difference(memory.state_dict(), file.state_dict()) is None
    del replay, file, samples
    gc.collect()
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]


@pytest.mark.parametrize("storage", ["memory", "memmap"])
def test_capacity_that_does_not_fit_raises_with_bytes_needed(storage):
    row = make_transition(0, 2)
    small = Replay(2)
    small.append(row)
    bytes_needed = 10**15 // 2 * 2 * small._packed().row_bytes
    replay = Replay(10**15, storage=storage)
    with pytest.raises(MemoryError, match=re.escape(f"{bytes_needed:,} bytes")):
        replay.append(row)
    assert len(replay) == 0


def test_free_bytes_respects_container_limit(monkeypatch):
    cpu = torch.device("cpu")
    free = allocation.free_bytes(cpu)
    if free is not None:
        monkeypatch.setattr(allocation, "_group_limit", lambda: free // 2)
        assert allocation.free_bytes(cpu) == free // 2


BROKEN = {
    "next slot out of range": {"next_slot": 10},
    "more filled slots than slots": {"filled": 11},
    "rows for another number of slots": {"filled": 9},
    "unknown dtype": {"layout": [{"path": ["reward"], "dtype": "save", "shape": []}]},
    "other layout": {"layout": [{"path": ["reward"], "dtype": "float32", "shape": [50]}]},
}


@pytest.mark.parametrize("broken", BROKEN)
def test_damaged_state_raises(broken):
    replay = Replay(20)
    for step in range(12):
        replay.append(make_transition(step, 2))
    with pytest.raises(ValueError, match=r"."):
        Replay(20).load_state_dict(copy_state(replay.state_dict()) | BROKEN[broken])


def test_loading_empty_state_empties_replay():
    replay = Replay(20)
    for step in range(12):
        replay.append(make_transition(step, 2))
    replay.load_state_dict(Replay(20).state_dict())
    assert len(replay) == 0
    replay.append(make_transition(30, 2))
    assert sorted(replay.sample(50, generator(0, "test")).reward.unique().tolist()) == [60.0, 61.0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"capacity": 0}, "capacity=0: give 1 or more"),
        ({"capacity": 1, "storage": "disk"}, "storage='disk'"),
        ({"capacity": 1, "storage": "memmap", "device": "meta"}, "works on the CPU only"),
    ],
)
def test_invalid_arguments_raise(arguments, text):
    with pytest.raises(ValueError, match=text):
        Replay(**arguments)


def test_rows_with_large_errors_are_sampled_more_often():
    replay = PrioritizedReplay(40, alpha=1.0)
    for step in range(20):
        replay.append(make_transition(step, 2))
    index = torch.arange(40)
    replay.update(index, torch.where(index == 5, 39.0, 1.0))
    sample = replay.sample(4000, generator(0, "test"))
    assert 0.45 < (sample.reward == 5.0).double().mean() < 0.55
    weight = replay.weights(sample.probability, 1.0)
    assert torch.equal(weight < 1.0, sample.reward == 5.0)
    torch.testing.assert_close(weight[sample.reward == 5.0][0], torch.tensor(1 / 39.0), rtol=1e-4, atol=0)
