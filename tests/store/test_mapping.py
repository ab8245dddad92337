"""Resources used for reading: descriptors, memory maps and decoded chunks are released when no longer needed."""

from __future__ import annotations

import errno
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from rein.errors import StoreError
from rein.store.format import trajectory_reader as mapping
from rein.store.format.trajectory_reader import MappedFile
from rein.store.hdf5 import HDF5Store
from rein.store.reader import open_run
from rein.testing.store import assert_equal, make_trajectory
from tests import programs

FILES = 80
STEPS = 400  # rewards take more than a page, so they are mapped


def write(path, count, max_epochs=1, steps=STEPS):
    store = HDF5Store(path, max_epochs=max_epochs)
    given = [make_trajectory(epoch, steps=steps) for epoch in range(1, count + 1)]
    for trajectory in given:
        store.append(trajectory)
    store.close()
    return given


WITH_FEW_DESCRIPTORS = """
import os, resource, sys
from pathlib import Path
import rein, torch
from rein.store import datasets
from rein.store.compact import compact
from rein.store.verify import verify_run
from rein.testing.store import assert_equal, make_trajectory

path, files = Path(sys.argv[1]), int(sys.argv[2])
datasets._SMALL = 0  # map the floats of all files at once
usual = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (files // 2, usual[1]))
run = rein.open_run(path)
held = list(run)
assert len(held) == len(run.files) == files
for dataset in (run.transitions(), run.sequences(3)):
    dataset[torch.arange(0, len(dataset), 100)]
assert run.field("reward").shape[0] == len(run.field("observation/state"))
found = verify_run(path)
resource.setrlimit(resource.RLIMIT_NOFILE, usual)
assert found == verify_run(path) and found.epochs == files
resource.setrlimit(resource.RLIMIT_NOFILE, (files // 2, usual[1]))
assert compact(path, path.with_name("compacted")).files < files / 4
assert_equal(held[::20], [make_trajectory(epoch, steps=400) for epoch in range(1, files + 1, 20)])
"""


def test_run_with_more_files_than_descriptors_is_read(tmp_path):
    pytest.importorskip("resource")
    write(tmp_path / "run", FILES)
    programs.run("-c", WITH_FEW_DESCRIPTORS, tmp_path / "run", FILES)


def maps_of(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/maps")
def test_number_of_mapped_files_is_bounded(tmp_path, monkeypatch):
    given = write(tmp_path / "run", 9)
    run = open_run(tmp_path / "run")
    assert len(run.epochs["number"]) == 9 and maps_of(tmp_path) == 0
    monkeypatch.setattr(mapping, "_MAPS", 3)
    for trajectory in run:
        del trajectory
    assert 0 < maps_of(tmp_path) <= 3
    held = list(run)
    assert maps_of(tmp_path) == 9  # the arrays keep the maps alive
    assert_equal(held, given)
    del held
    assert maps_of(tmp_path) <= 3
    del run
    assert maps_of(tmp_path) == 0


@pytest.mark.parametrize(
    ("code", "advice"), [(errno.EMFILE, "ulimit -n"), (errno.ENFILE, "fs.file-max"), (errno.ENOMEM, "vm.max_map_count")]
)
def test_refused_map_raises_with_advice(tmp_path, monkeypatch, code, advice):
    write(tmp_path / "run", 1)

    def refuse(*arguments, **options):
        raise OSError(code, os.strerror(code))

    run = open_run(tmp_path / "run")
    assert len(run.files) == 1
    monkeypatch.setattr(mapping, "_map_file", refuse)
    with pytest.raises(StoreError, match=rf"000001-000001\.h5: cannot be mapped into memory: .*{advice}"):
        run.field("reward")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows uses another system call")
def test_failed_map_raises_the_system_error(tmp_path):
    (tmp_path / "file").write_bytes(b"rein")
    with open(tmp_path / "file", "rb") as file, pytest.raises(OSError) as caught:
        mapping._map_file(file.fileno(), 1 << 62)
    assert caught.value.errno in (errno.ENOMEM, errno.EINVAL)  # the latter since Python 3.13


@pytest.fixture
def decoded(monkeypatch):
    """Record the offsets of decoded chunks in order."""
    mapping._decoded.clear()
    found, original = [], MappedFile._decode_chunk

    def count(file, stored, offset, length):
        found.append((file.path, offset))
        return original(file, stored, offset, length)

    monkeypatch.setattr(MappedFile, "_decode_chunk", count)
    return found


def test_reading_two_runs_alternately_decodes_each_chunk_once(tmp_path, decoded):
    """Compaction compares two runs this way."""
    for name in ("one", "other"):
        write(tmp_path / name, 10, max_epochs=10, steps=100)
    for one, other in zip(open_run(tmp_path / "one"), open_run(tmp_path / "other"), strict=True):
        assert_equal([one], [other])
    assert decoded and len(decoded) == len(set(decoded))


def test_random_reading_with_a_small_cache_is_correct(tmp_path, monkeypatch):
    given = write(tmp_path / "run", 12, max_epochs=4, steps=100)
    run = open_run(tmp_path / "run")
    for kept in (0, 1, 2, 32):
        monkeypatch.setattr(mapping, "_CHUNKS", kept)
        mapping._decoded.clear()
        for epoch in np.random.default_rng(0).permutation(np.arange(1, 13)).tolist():
            assert_equal([run.trajectory(epoch)], [given[epoch - 1]])
            assert len(mapping._decoded) <= kept
    (again,) = pickle.loads(pickle.dumps([run._contents[0].file]))
    assert np.array_equal(again.field("action"), run._contents[0].file.field("action"))


def test_returned_arrays_do_not_alias_the_cache(tmp_path):
    (first, second) = write(tmp_path / "run", 2, max_epochs=2, steps=100)
    run = open_run(tmp_path / "run")
    for field in (run.trajectory(1).fields["action"], run.trajectory(2).fields["action"]):
        field[...] = 0
    assert_equal([run.trajectory(1), run.trajectory(2)], [first, second])


def test_large_and_completely_read_chunks_are_not_cached(tmp_path, monkeypatch):
    write(tmp_path / "run", 2, max_epochs=2, steps=100)
    run = open_run(tmp_path / "run")
    mapping._decoded.clear()
    run.field("action")
    assert not mapping._decoded
    monkeypatch.setattr(mapping, "CHUNK", 100)
    run.trajectory(1)
    assert not mapping._decoded
