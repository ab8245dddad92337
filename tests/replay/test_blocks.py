"""Blocks of rows: equal marks imply equal bytes."""

from __future__ import annotations

import copy
import gc
import io
import random

import pytest
import torch

from rein.replay import storage as module
from rein.replay.frames import FrameReplay
from rein.replay.prioritized import PrioritizedReplay
from rein.replay.replay import Replay
from rein.replay.sequences import SequenceReplay
from rein.replay.storage import Blocks, mark_of
from rein.testing.buffer_contract import make_transition


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 400)


def marks(blocks):
    return [mark_of(block) for block in blocks]


def changed(before, after):
    return [one is not other for one, other in zip(before, after, strict=True)]


def test_write_changes_only_marks_of_written_blocks():
    rows = torch.zeros(95, 40, dtype=torch.uint8)
    blocks = Blocks(rows)
    assert [len(block) for block in blocks.split(95)] == [10] * 9 + [5]
    for first, last, touched in ((0, 1, [0]), (9, 11, [0, 1]), (10, 20, [1]), (94, 95, [9]), (89, 97, [8, 9, 0])):
        before = marks(blocks.split(95))
        with blocks.writing(first, last):
            rows[first:last] = 1
        assert changed(before, marks(blocks.split(95))) == [block in touched for block in range(10)], (first, last)
    before = marks(blocks.split(95))
    assert changed(before, marks(blocks.split(95))) == [False] * 10


def test_unannounced_write_changes_every_mark():
    rows = torch.zeros(30, 40, dtype=torch.uint8)
    blocks = Blocks(rows)
    before = marks(blocks.split(30))
    rows.view(torch.float32)[3] = 1.0
    assert changed(before, marks(blocks.split(30))) == [True] * 3
    before = marks(blocks.split(30))
    rows[3] = 2
    with blocks.writing(20, 30):
        rows[20] = 1
    assert changed(before, marks(blocks.split(30))) == [True] * 3


def test_fill_accepts_any_block_lengths_and_rejects_bad_blocks():
    rows = torch.zeros(30, 40, dtype=torch.uint8)
    blocks = Blocks(rows)
    before, given = marks(blocks.split(30)), torch.arange(800).to(torch.uint8).view(20, 40)
    blocks.fill("rows", [given[:17], given[17:]], 20)
    assert torch.equal(rows[:20], given) and changed(before, marks(blocks.split(30))) == [True] * 3
    for bad, count, message in (
        ([given], 19, "rows in the state has 20 rows, not 19"),
        ([given, given.float()], 40, r"rows\.1 in the state is .*float32\)"),
        ([given.view(40, 20)], 40, r"rows\.0 in the state is \(\(20,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            blocks.fill("rows", bad, count)


def test_copies_of_block_have_no_mark():
    """A copy can be written without changing the mark of its source."""
    blocks = Blocks(torch.zeros(30, 40, dtype=torch.uint8))
    first = blocks.split(30)[0]
    assert mark_of(first) is not None
    file = io.BytesIO()
    torch.save(first, file)
    file.seek(0)
    for other in (first.clone(), first[:], copy.deepcopy(first), torch.load(file, weights_only=True)):
        assert mark_of(other) is None and torch.equal(other, first)
    gc.collect()
    before = len(module._marks)
    del first
    assert len(module._marks) < before


REPLAYS = {
    "in memory": lambda: Replay(100),
    "in a file": lambda: Replay(100, storage="memmap"),
    "prioritized": lambda: PrioritizedReplay(100),
    "of sequences": lambda: SequenceReplay(100, 3),
    "of frames": lambda: FrameReplay(60, 3, (3, 2)),
}


def every_block(replay):
    state = replay.state_dict()
    frames = state["frames"] if state.get("frames") else {"frames": [], "kept": []}
    return [*state["blocks"], *frames["frames"], *frames["kept"]]


def unchanged(replay, kept):
    """Return the number of blocks with a known mark, and check that their bytes are as before."""
    same = 0
    for block in every_block(replay):
        mark = mark_of(block)
        assert mark is not None
        if mark in kept:
            assert torch.equal(kept[mark], block)
            same += 1
        kept[mark] = block.clone()
    return same


def step(replay, number, draw):
    transition = make_transition(number, 5)
    if isinstance(replay, FrameReplay):
        stack = torch.tensor([[draw.randrange(3) for _ in range(6)] for _ in range(10)]).view(2, 5, 3, 2)
        transition = transition._replace(observation=stack[0], next_observation=stack[1])
    replay.append(transition)


@pytest.mark.parametrize("kind", REPLAYS)
def test_replay_blocks_with_equal_marks_have_equal_bytes(kind):
    """Covers writes, the end of the ring, resets outside a step, loaded states, and rows changed from outside."""
    replay, draw, kept, same, saved = REPLAYS[kind](), random.Random(0), {}, 0, None
    for number in range(300):
        step(replay, number, draw)
        if number % 7 == 0:
            same += unchanged(replay, kept)
            replay.observe_reset(torch.rand(5, generator=torch.Generator().manual_seed(number)) < 0.5)
        if number % 50 == 20:
            replay.columns["reward"].neg_()
        if number == 130:
            saved = {**replay.state_dict(), "blocks": [block.clone() for block in replay.state_dict()["blocks"]]}
        if number == 200 and not isinstance(replay, FrameReplay):
            replay.load_state_dict(saved)
        if draw.random() < 0.5:
            same += unchanged(replay, kept)
    assert same > 100
