"""The layout at the end of a trajectory file matches HDF5, and a hostile layout only raises StoreError."""

from __future__ import annotations

import hashlib
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from rein.errors import StoreError
from rein.store import hdf5
from rein.store.format import layout, trajectory_writer
from rein.store.format import trajectory_reader as mapping
from rein.store.format.layout import encode, read_json, read_layout
from rein.store.format.sealed import USER_BLOCK, user_block, write_whole
from rein.store.hdf5 import HDF5Store
from rein.store.reader import open_run
from rein.testing.store import assert_equal, make_trajectory, with_fields
from rein.types import Trajectory
from tests.store.trajectory_files import write

NAME = "000001-000002.h5"


@pytest.fixture
def given() -> list[Trajectory]:
    return [make_trajectory(epoch, steps=300) for epoch in (1, 2)]


@pytest.fixture
def path(tmp_path: Path, given: list[Trajectory]) -> Path:
    store = HDF5Store(tmp_path / "run")
    store.write_run({"seed": 0})
    for trajectory in given:
        store.append(trajectory)
    store.close()
    return store.path / "trajectories" / NAME


def seal(path: Path, image: bytes) -> None:
    path.write_bytes(user_block(len(image), hashlib.sha256(image).hexdigest()) + image)


def change(path: Path, function: Callable[[dict[str, Any]], object], more: bytes = b"") -> None:
    """Change the layout of a file, insert `more` bytes before it, and update the hash."""
    text, _ = read_json(path)
    found, image = json.loads(text), path.read_bytes()[USER_BLOCK:]
    end = len(image) - len(encode(found))
    function(found)
    seal(path, image[:end] + more + encode(found))


def read_all(path: Path) -> list[Trajectory]:
    run = open_run(path)
    for name in run.fields:
        run.field(name)
    run.transitions()[:16]
    return [run.trajectory(epoch) for epoch in run.epochs["number"]]


def test_layout_matches_hdf5(path: Path) -> None:
    def check(group: Any, tree: dict[str, Any]) -> int:
        assert set(group) == set(tree)
        return sum((check if isinstance(node, dict) else same)(group[name], node) for name, node in tree.items())

    def same(dataset: Any, stored: Any) -> int:
        assert (dataset.shape, dataset.dtype, dataset.chunks) == (stored.shape, stored.dtype, stored.chunk)
        if stored.pieces is None:
            assert stored.offset == dataset.id.get_offset()
            return 1
        for offset, length, *index in stored.pieces.tolist():
            info = dataset.id.get_chunk_info_by_coord(tuple(index))
            assert (info.byte_offset, info.size, info.filter_mask) == (offset, length, 0)
        assert len(stored.pieces) == dataset.id.get_num_chunks() > 0
        return 1

    found = read_layout(path)
    with h5py.File(path) as file:
        entry: Any = file["entry"]
        assert sum(check(entry[root], tree) for root, tree in found.items()) > 20


def test_large_field_has_several_chunks(tmp_path: Path) -> None:
    trajectory = make_trajectory(1, steps=70, num_envs=3)
    picture = np.random.default_rng(0).integers(0, 9, (70, 3, 90, 90, 3)).astype(np.uint8)
    store = HDF5Store(tmp_path / "run")
    store.append(given := with_fields(trajectory, picture=picture))  # pyright: ignore[reportArgumentType]
    store.close()
    (file,) = (tmp_path / "run/trajectories").iterdir()
    assert len(read_layout(file)["trajectory"]["picture"].pieces) > 2
    assert_equal(read_all(tmp_path / "run"), [given])


def test_reading_does_not_call_hdf5(path: Path, given: list[Trajectory], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h5py, "File", lambda *a, **k: pytest.fail("HDF5's parser was called"))
    assert_equal(read_all(path), given)


@pytest.mark.parametrize("locking", [None, True, False, "best-effort"])
def test_file_opened_by_another_reader_is_read(path: Path, given: list[Trajectory], locking: Any) -> None:
    with h5py.File(path, "r", locking=locking):
        assert_equal(read_all(path), given)


def test_files_have_at_most_max_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [make_trajectory(epoch, steps=steps) for epoch, steps in ((1, 10), (2, 25), (3, 5), (4, 4))]
    for module in (hdf5, trajectory_writer):
        monkeypatch.setattr(module, "MAX_ROWS", 30)
    write(tmp_path / "run", given)
    parts = [f"000002-part-0{number}.h5" for number in (1, 2, 3)]
    names = sorted(file.name for file in (tmp_path / "run/trajectories").iterdir())
    assert names == ["000001-000001.h5", *parts, "000003-000004.h5"]
    assert_equal(read_all(tmp_path / "run"), given)


def set_to(name: str, **described: Any) -> Callable[[Any], object]:
    return lambda found: found["datasets"][name].update(described)


def drop(*begins: str) -> Callable[[Any], object]:
    return lambda found: [found["datasets"].pop(path) for path in [*found["datasets"]] if path.startswith(begins)]


def shifted_chunk(found: Any) -> None:
    found["datasets"]["trajectory/action"]["chunks"][0][0] += 1 << 40


ACTION, REWARD = "trajectory/action", "trajectory/reward"
CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "outside the file": (set_to(REWARD, offset=1 << 30), "outside the file"),
    "inside the user block": (set_to(REWARD, offset=0), "outside the file"),
    "a negative offset": (set_to(REWARD, offset=-8), "outside the file"),
    "an offset that is not a number": (set_to(REWARD, offset="512"), "not an integer"),
    "a chunk outside": (shifted_chunk, "outside the file"),
    "a terabyte": (set_to(REWARD, shape=[1 << 38, 3]), "outside the file"),
    "a terabyte in chunks": (set_to(ACTION, shape=[1 << 38, 3]), "chunks"),
    "a terabyte in a chunk": (set_to(ACTION, shape=[1 << 38, 3], chunk=[1 << 38, 3]), "chunks of"),
    "a chunk of few bytes": (lambda f: f["datasets"][ACTION]["chunks"][0].__setitem__(1, 9), "cannot hold"),
    "an empty name": (lambda f: f["datasets"].update({"trajectory/": {}}), "not a path"),
    "many datasets": (lambda f: f["datasets"].update({f"trajectory/{n}": {} for n in range(9000)}), "datasets"),
    "many entries of no bytes": (set_to(REWARD, shape=[1 << 40, 3, 0]), "rows"),
    "a shape of negative numbers": (set_to(REWARD, shape=[-1, 3]), "not a shape"),
    "a shape that is not a list": (set_to(REWARD, shape=600), "not a shape"),
    "a shape beyond NumPy": (set_to(REWARD, shape=[0] * 70), "not a shape"),
    "a grid of no chunks": (set_to(ACTION, shape=[0, 1 << 40], chunk=[1, 1], chunks=[]), "rows"),
    "an object type": (set_to(REWARD, dtype="|O"), "type"),
    "another filter": (set_to(ACTION, filters=["lzf"]), "compressed in a way"),
    "overlapping datasets": (lambda f: f["datasets"].update({"trajectory/x": f["datasets"][REWARD]}), "overlap"),
    "a dataset inside a dataset": (
        lambda f: f["datasets"].update({REWARD + "/x": f["datasets"].pop("trajectory/valid")}),
        "inside a dataset",
    ),
    "a deep path": (lambda f: f["datasets"].update({"trajectory/" + "g/" * 400: {}}), "not a path"),
    "another root": (lambda f: f["datasets"].update({"x": f["datasets"][REWARD]}), "not a path"),
    "a name that cannot be printed": (lambda f: f["datasets"].update({"trajectory/\ud800": {}}), "surrogates"),
    "no datasets": (lambda f: f.clear(), "datasets"),
    "datasets that are a list": (lambda f: f.update(datasets=[]), "items"),
    "a field of other rows": (set_to(REWARD, shape=[599, 3]), "does not fit"),
    "no epochs": (drop("epochs"), "number"),
    "no episodes": (drop("episodes"), "id"),
    "no table": (drop("e", "trajectory"), "number"),
    "a missing column": (drop("epochs/status"), "status"),
    "a column inside a column": (
        lambda f: f["datasets"].update({"epochs/length/x": f["datasets"].pop("epochs/length")}),
        "length",
    ),
    "a column of other rows": (set_to("epochs/length", shape=[1]), "length"),
    "a column that is a number": (set_to("epochs/length", shape=[]), "length"),
    "a column of text": (set_to("epochs/length", dtype="|S8"), "column 'length' is invalid"),
    "a column of floats": (set_to("epochs/length", dtype="<f8"), "length"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_invalid_layout_raises(path: Path, name: str) -> None:
    function, reason = CHANGES[name]
    change(path, function)
    with pytest.raises(StoreError, match=rf"{NAME}: is not a valid trajectory file: .*({reason})"):
        read_all(path)


def test_file_without_a_layout_raises(path: Path) -> None:
    image = path.read_bytes()[USER_BLOCK:]
    for content in (image[:-1], image[: len(image) // 2], b"", b"\n#rein-layout 999999999999999999\n"):
        seal(path, content)
        with pytest.raises(StoreError, match=f"{NAME}: is not a valid trajectory file"):
            read_all(path)


def test_file_of_another_program_raises(tmp_path: Path) -> None:
    with h5py.File(tmp_path / NAME, "w") as file:
        file["entry/trajectory/reward"] = np.zeros((600, 3))
    with pytest.raises(StoreError, match=f"{NAME}: .* written by another program"):
        read_all(tmp_path / NAME)


def test_undecodable_chunk_raises(path: Path) -> None:
    offset, length = read_layout(path)["trajectory"]["action"].pieces[0, :2].tolist()
    content = bytearray(path.read_bytes())
    content[offset : offset + length] = bytes(length)
    seal(path, bytes(content[USER_BLOCK:]))
    with pytest.raises(StoreError, match=f"{NAME}: cannot be decoded"):
        open_run(path).field("action")


def test_decompression_is_bounded_by_the_chunk_size(path: Path) -> None:
    """Read a decompression bomb whose layout claims a small size."""
    bomb = zlib.compress(bytes(1 << 26))
    size = path.stat().st_size - len(encode(json.loads(read_json(path)[0])))
    change(path, set_to(ACTION, chunks=[[size, len(bomb)]]), bomb)
    with pytest.raises(StoreError, match=f"{NAME}: cannot be decoded: a chunk has 14401 bytes instead of 14400"):
        open_run(path).field("action")


def test_read_beyond_the_free_memory_raises(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_LARGE", 1000)
    monkeypatch.setattr(mapping, "free_bytes", lambda device: 10_000)
    with pytest.raises(StoreError, match=f"{NAME}: cannot be decoded: it takes 14,400 bytes but only 10,000 bytes"):
        open_run(path).field("action")


def test_oversized_layout_raises(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_LONGEST", 100)
    with pytest.raises(StoreError, match=f"{NAME}: is not a valid trajectory file: its layout has"):
        read_all(path)


def mutant(whole: bytes, draw: random.Random) -> bytes:
    """Change a few bytes, half of them in the layout."""
    content = bytearray(whole)
    for _ in range(draw.randrange(1, 4)):
        first = draw.choice([0, len(content) - 3000])
        content[draw.randrange(first, len(content))] = draw.choice([draw.randrange(256), *b"0123456789[]{},"])
    return bytes(content)


@pytest.mark.parametrize("count", [100, pytest.param(4000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_mutants_with_a_correct_hash_only_raise(tmp_path: Path, count: int) -> None:
    store = HDF5Store(tmp_path / "run")
    store.append(make_trajectory(1, steps=2, num_envs=1))
    store.close()
    whole = (store.path / "trajectories" / "000001-000001.h5").read_bytes()[USER_BLOCK:]
    draw, refused = random.Random(0), 0
    path = tmp_path / "000001-000001.h5"
    for _ in range(count):
        seal(tmp_path / "sealed", mutant(whole, draw))
        write_whole(path, (tmp_path / "sealed").read_bytes())
        try:
            read_all(path)
        except StoreError as error:
            refused += 1
            assert str(path) in str(error)
        except ValueError as error:  # only a name has changed
            assert "no field" in str(error)
    assert 0 < refused < count
    print(f"mutants of trajectory files with a correct hash: {count}, {refused} refused, the others harmless")
