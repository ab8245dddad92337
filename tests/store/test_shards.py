"""Row files of replay buffers: written once, shared by checkpoints, and kept as long as a checkpoint needs them."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

import rein
from rein.errors import CheckpointError
from rein.replay import storage as blocks
from rein.replay.replay import Replay
from rein.store import checkpoint_file as shards
from rein.store.checkpoint_file import look, read_checkpoint, write_checkpoint
from rein.store.checkpoint_folder import Checkpoints
from rein.store.format import sealed
from rein.store.format.state_codec import Held, Shard
from rein.store.loading import load, save
from rein.testing.buffer_contract import make_transition
from rein.testing.stateful import first_difference


@pytest.fixture(autouse=True)
def small(monkeypatch: Any) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 600)
    monkeypatch.setattr(shards, "LEAST", 300)


class Part:
    """Agent with a replay buffer and a weight. `learn` appends rows up to a number of steps."""

    seed = config = None

    def __init__(self) -> None:
        self.replay, self.weight, self.steps = Replay(200), torch.zeros(400), 0

    def learn(self, steps: int) -> None:
        while self.steps < steps:
            self.replay.append(make_transition(self.steps, 4))
            self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"replay": self.replay.state_dict(), "weight": self.weight, "steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.replay.load_state_dict(state["replay"])
        self.weight.copy_(state["weight"])
        self.steps = state["steps"]


def make(part: Part | None = None, scores: Any = None) -> rein.Loop:
    """Return a loop whose agent appends 10 steps of 4 rows in each epoch."""
    loop = rein.Loop(lambda state: None, iterations=1)
    agent = loop.own("agent", part or Part())
    loop.epoch_started(lambda state: agent.learn(10 * state.epoch))
    loop.epoch_ended(lambda state: state.metrics.update(score=float((scores or {}).get(state.epoch, 0.0))))
    return loop


def taken(folder: Path, epochs: int, scores: Any = None, **rules: Any) -> tuple[Checkpoints, rein.Loop]:
    """Take a checkpoint after each epoch, and wait until it is written."""
    store, loop = Checkpoints(folder), make(scores=scores)
    store.begin(loop)
    for epoch in range(1, epochs + 1):
        loop.run(epochs=epoch)
        store.take(loop, rules)
        store.flush()
    return store, loop


def rows_in(folder: Path) -> dict[str, int]:
    return {path.stem: path.stat().st_ino for path in (folder / "rows").glob("*.h5")}


def names_in(path: Path) -> list[str]:
    about = look(path)
    return about.get("rows", []) if about is not None else []


def listed(*paths: Path) -> set[str]:
    return {name for path in paths for name in names_in(path)}


def saved(path: Path) -> Any:
    return read_checkpoint(path).state["parts"]["agent"]


def expected(steps: int) -> dict[str, Any]:
    part = Part()
    part.learn(steps)
    return part.state_dict()


def test_large_blocks_are_stored_in_separate_files(tmp_path):
    taken(tmp_path, 3)
    path = tmp_path / "epoch-000003.h5"
    found = read_checkpoint(path)
    assert first_difference(expected(30), found.state["parts"]["agent"]) is None
    blocks = found.state["parts"]["agent"]["replay"]["blocks"]
    assert len(found.about["rows"]) == len([block for block in blocks if block.nbytes >= 300]) > 3
    with h5py.File(path) as file:
        agent: Any = file["entry/state/parts/agent"]
        assert agent["weight"].shape == (400,)
        assert sum(x.nbytes for x in agent.get("replay/blocks", {}).values()) < 300
    for name, block in zip(found.about["rows"], blocks, strict=False):
        shard = tmp_path / f"rows/{name}.h5"
        sealed.verify(shard)
        assert sealed.promised_hash(shard) == name
        with h5py.File(shard) as file:
            stored: Any = file["entry/state/rows"]
            assert torch.equal(torch.from_numpy(stored[()]), block)
            assert file["entry/views"].attrs["default"] == "largest"


def blocks_in(leaves: list[Any]) -> int:
    return len([x for x in leaves if isinstance(x, torch.Tensor) and x.ndim == 2 and x.nbytes >= 300])


def test_unchanged_blocks_are_neither_copied_nor_written_again(tmp_path, monkeypatch):
    copied = []
    hold = shards.hold
    monkeypatch.setattr(shards, "hold", lambda leaf: copied.append(leaf) or hold(leaf))
    store, loop = taken(tmp_path, 4, last=None)
    before, count = rows_in(tmp_path), blocks_in(copied)
    loop.run(epochs=5)
    store.take(loop, {"last": None})
    store.take(loop, {"last": None}, "again")
    store.close()
    after = rows_in(tmp_path)
    assert before.items() <= after.items()
    new = len(after) - len(before)
    assert 40 // (600 // 96) <= new <= 40 // (600 // 96) + 2  # blocks of the 40 new rows, of 96 bytes each
    assert blocks_in(copied) - count == new
    assert names_in(tmp_path / "again.h5") == names_in(tmp_path / "epoch-000005.h5")


def test_copies_are_freed_after_writing(tmp_path):
    store, _ = taken(tmp_path, 3)
    gc.collect()
    alive = [thing for thing in gc.get_objects() if type(thing) is Shard and thing.name in rows_in(tmp_path)]
    assert alive and all(shard.held is None and shard.nbytes == 0 for shard in alive)
    store.close()


def test_new_process_does_not_rewrite_existing_rows(tmp_path):
    taken(tmp_path, 3)[0].close()
    before = rows_in(tmp_path)
    loop = make()
    rein.resume(loop, tmp_path)
    store = Checkpoints(tmp_path)
    store.begin(loop)
    store.take(loop, {}, "again")
    store.close()
    assert rows_in(tmp_path) == before
    assert names_in(tmp_path / "again.h5") == names_in(tmp_path / "epoch-000003.h5")


def test_rows_are_removed_with_their_last_checkpoint(tmp_path):
    """With all rules: the newest, the best in `best/`, and every n-th epoch."""
    rules = {"last": 1, "every": 4, "best": ("score", "max")}
    store, loop = taken(tmp_path, 11, {3: 9.0, 11: 1.0}, **rules)
    kept = [tmp_path / f"epoch-{n:06d}.h5" for n in (4, 8, 11)] + [tmp_path / "best/epoch-000003.h5"]
    assert all(path.exists() for path in kept)
    assert set(rows_in(tmp_path)) == listed(*kept)
    for path in kept:
        number = int(path.stem[-6:])
        assert first_difference(expected(10 * number), saved(path)) is None
    kept[0].unlink()
    store.begin(loop)
    assert set(rows_in(tmp_path)) == listed(*kept[1:]) != set()
    store.close()


def test_rows_of_queued_checkpoints_are_not_removed(tmp_path):
    """When a checkpoint removes rows, the descriptions of queued checkpoints do not exist yet."""
    store, loop = Checkpoints(tmp_path), make()
    store.begin(loop)
    for epoch in range(1, 12):
        loop.run(epochs=epoch)
        store.take(loop, {"last": 1})
    store.close()
    assert first_difference(expected(110), saved(tmp_path / "epoch-000011.h5")) is None
    assert set(rows_in(tmp_path)) == listed(tmp_path / "epoch-000011.h5")


def test_rows_in_use_stay_when_another_run_begins(tmp_path):
    """They are not copied again, so their files must exist."""
    store, loop = taken(tmp_path / "checkpoints", 3)
    store.begin(make())  # moves the checkpoints aside
    store.take(loop, {})
    store.close()
    assert first_difference(expected(30), saved(tmp_path / "checkpoints/epoch-000003.h5")) is None


def test_equal_blocks_share_one_file(tmp_path):
    loop = rein.Loop(lambda state: None, iterations=1)
    part, first = Part(), make_transition(0, 4)
    for _ in range(50):
        part.replay.append(first)
    loop.own("agent", part)
    store = Checkpoints(tmp_path)
    store.take(loop, {})
    store.close()
    found = store.newest()
    assert found is not None and len(found.about["rows"]) < len(found.state["parts"]["agent"]["replay"]["blocks"]) - 1
    assert first_difference(part.state_dict(), found.state["parts"]["agent"]) is None


def test_checkpoint_copied_without_rows_raises_with_the_path(tmp_path):
    taken(tmp_path / "run", 3)
    alone = shutil.copy(tmp_path / "run/epoch-000003.h5", tmp_path)
    missing = tmp_path / "rows" / f"{names_in(tmp_path / 'epoch-000003.h5')[0]}.h5"
    with pytest.raises(CheckpointError, match=rf"epoch-000003\.h5: its rows {re.escape(str(missing))} are missing"):
        read_checkpoint(alone)
    shutil.copytree(tmp_path / "run/rows", tmp_path / "rows")
    assert first_difference(expected(30), saved(alone)) is None


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "other"])
def test_checkpoint_with_damaged_rows_is_skipped(tmp_path, caplog, damage):
    store, _ = taken(tmp_path, 3)
    older, newer = (listed(tmp_path / f"epoch-00000{n}.h5") for n in (2, 3))
    path, other = (tmp_path / f"rows/{sorted(names)[0]}.h5" for names in (newer - older, older))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"flip": content, "cut": content[:-600], "other": other.read_bytes()}[damage])
    with caplog.at_level(logging.WARNING):
        resumed = make()
        assert rein.resume(resumed, tmp_path).path.name == "epoch-000002.h5"
    assert path.name in caplog.text and "skipping" in caplog.text
    assert first_difference(expected(20), resumed.parts["agent"].state_dict()) is None
    again = Checkpoints(tmp_path)
    again.begin(resumed)
    resumed.run(epochs=3)
    again.take(resumed, {})
    again.close()  # rewrites the damaged rows
    assert first_difference(expected(30), saved(tmp_path / "epoch-000003.h5")) is None
    store.close()


def test_checkpoints_moved_aside_keep_their_rows(tmp_path):
    folder = tmp_path / "checkpoints"
    taken(folder, 4, {4: 1.0}, best=("score", "max"))
    loop = make()
    rein.resume(loop, folder / "epoch-000002.h5")
    store = Checkpoints(folder)
    store.begin(loop)
    store.close()
    aside = tmp_path / "aside/epoch-000002"
    for name in ("epoch-000003.h5", "epoch-000004.h5", "best-epoch-000004.h5"):
        found = read_checkpoint(aside / name)
        steps = 10 * int(name[-4])
        assert first_difference(expected(steps), found.state["parts"]["agent"]) is None
    assert set(rows_in(folder)) == listed(folder / "epoch-000001.h5", folder / "epoch-000002.h5")
    assert first_difference(expected(20), saved(folder / "epoch-000002.h5")) is None


def test_checkpoints_moved_aside_by_resume_keep_their_rows(tmp_path):
    def composed() -> rein.Loop:
        loop = make()
        loop.own("store", rein.HDF5Store(tmp_path, exist="resume"))
        return loop

    loop = composed()
    checkpoints = loop.parts["store"].checkpoints
    for epoch in (1, 2, 3):
        loop.run(epochs=epoch)
        checkpoints.take(loop, {})
    loop.parts["store"].close()
    rein.resume(composed(), tmp_path / "checkpoints/epoch-000001.h5")
    assert first_difference(expected(30), saved(tmp_path / "aside/epoch-000001/epoch-000003.h5")) is None


def test_rows_are_copied_aside_without_hard_links(tmp_path, monkeypatch):
    def refuse(*_: Any) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    test_checkpoints_moved_aside_keep_their_rows(tmp_path)


def test_removed_rows_raise_and_are_rewritten_next_time(tmp_path):
    store, loop = taken(tmp_path, 2)
    shutil.rmtree(tmp_path / "rows")
    store.take(loop, {}, "without")
    with pytest.raises(CheckpointError, match=r"rows/[0-9a-f]{64}\.h5: was removed"):
        store.flush()
    store.take(loop, {}, "with")
    store.close()
    assert not (tmp_path / "without.h5").exists()
    assert first_difference(expected(20), saved(tmp_path / "with.h5")) is None


def test_checkpoint_after_a_failed_write_is_complete(tmp_path, monkeypatch, caplog):
    store, loop = taken(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(sealed.os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        loop.run(epochs=3)
        store.take(loop, {}, on_failure="warn")
        store.flush()
    assert "No space left" in caplog.text
    loop.run(epochs=4)
    store.take(loop, {"last": 1}, on_failure="warn")
    store.close()
    assert first_difference(expected(40), saved(tmp_path / "epoch-000004.h5")) is None
    assert set(rows_in(tmp_path)) == listed(tmp_path / "epoch-000004.h5")


def test_saved_part_is_one_file(tmp_path):
    part, other = Part(), Part()
    part.learn(30)
    save(part, tmp_path / "part.h5")
    assert [path.name for path in tmp_path.iterdir()] == ["part.h5"]
    load(other, tmp_path / "part.h5")
    assert first_difference(part.state_dict(), other.state_dict()) is None


def test_part_is_loaded_from_a_checkpoint_with_rows(tmp_path):
    taken(tmp_path, 3)
    part = Part()
    load(part, tmp_path / "epoch-000003.h5")
    assert first_difference(expected(30), part.state_dict()) is None


def test_only_row_files_are_removed(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/mine.h5").write_text("mine")
    (tmp_path / f"rows/{'0' * 64}.h5").write_text("unused")
    (tmp_path / "rows/.some.h5.tmp-999999999").write_text("of a dead process")
    taken(tmp_path, 1)
    assert sorted(path.stem for path in (tmp_path / "rows").iterdir() if path.stem not in rows_in(tmp_path)) == []
    assert set(rows_in(tmp_path)) == {"mine", *listed(tmp_path / "epoch-000001.h5")}
    assert (tmp_path / "rows/mine.h5").read_text() == "mine"


def test_unreadable_checkpoint_prevents_removal_of_rows(tmp_path, monkeypatch):
    """The rows that it needs are unknown."""
    store, loop = taken(tmp_path, 3, {3: 1.0}, last=1, best=("score", "max"))
    before = rows_in(tmp_path)
    (tmp_path / "best/odd.h5").write_bytes(b"")
    monkeypatch.setattr(store, "newer", lambda than: [])
    (tmp_path / "epoch-000003.h5").unlink()
    (tmp_path / "best/epoch-000003.h5").unlink()
    store.begin(loop)
    assert rows_in(tmp_path) == before
    (tmp_path / "best/odd.h5").unlink()
    store.begin(loop)
    store.close()
    del store, loop
    gc.collect()
    fresh = Checkpoints(tmp_path)
    fresh.begin(make())
    assert rows_in(tmp_path) == {}


def forged(path: Path, rows: Any) -> Path:
    """Write a checkpoint with a correct hash that lists these rows."""
    shard = Shard(Held(torch.zeros(3, 4, dtype=torch.uint8), "cpu"))
    shard.name = rows.pop("file", "0" * 64)
    shard.described |= rows
    write_checkpoint(path, {"x": shard}, {"kind": "run"})
    return path


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ({"file": "../../secret"}, "not a valid name"),
        ({"file": f"../rows/{'0' * 64}"}, "not a valid name"),
        ({"file": "0" * 63}, "not a valid name"),
        ({"file": ""}, "not a valid name"),
        ({"file": "0" * 64}, "are missing"),
        ({"shape": [3, 5]}, "have another shape or dtype"),
        ({"dtype": "float32"}, "have another shape or dtype"),
        ({"dtype": "pickle"}, "structure is invalid"),
        ({"device": ["cpu"]}, "invalid device"),
    ],
)
def test_checkpoint_with_invalid_rows_raises(tmp_path, rows, reason):
    good = Shard(Held(torch.arange(12, dtype=torch.uint8).view(3, 4), "cpu"))
    (name,) = shards.Shards(tmp_path).write({"x": good})
    assert read_checkpoint(forged(tmp_path / "good.h5", {"file": name})).state["x"].tolist()[0] == [0, 1, 2, 3]
    with pytest.raises(CheckpointError, match=rf"odd\.h5: .*{reason}"):
        read_checkpoint(forged(tmp_path / "odd.h5", {"file": name} | rows))


def test_row_files_cannot_refer_to_other_files(tmp_path):
    inner = Shard(Held(torch.zeros(3, 4, dtype=torch.uint8), "cpu"))
    inner.name = "1" * 64
    write_checkpoint(tmp_path / "some.h5", {"rows": inner}, {"kind": "rows"})
    name = sealed.promised_hash(tmp_path / "some.h5")
    (tmp_path / "rows").mkdir()
    (tmp_path / "some.h5").rename(tmp_path / f"rows/{name}.h5")
    with pytest.raises(CheckpointError, match="it refers to another file, which is not allowed here"):
        read_checkpoint(forged(tmp_path / "odd.h5", {"file": name}))


def test_names_of_ignores_invalid_names():
    odd = ["../x", 3, None, "A" * 64, "0" * 64, "0" * 64]
    assert shards.names_of([None, {}, {"rows": "0" * 64}, {"rows": odd}, json.loads("{}")]) == ["0" * 64]
