"""What files take that are read: descriptors, maps and decoded chunks, each no longer than it is of use."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rein.errors import StoreError
from rein.store.format import mapping
from rein.store.format.mapping import MappedFile
from rein.store.hdf5 import HDF5Store
from rein.store.reader import open_run
from rein.testing.store import assert_equal, make_trajectory

FILES = 80
STEPS = 400  # so that rewards take more than a page, and are mapped


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
from rein.store import windows
from rein.store.compact import compact
from rein.store.verify import verify_run
from rein.testing.store import assert_equal, make_trajectory

path, files = Path(sys.argv[1]), int(sys.argv[2])
windows._SMALL = 0  # every float is mapped, of every file at once
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


def test_a_run_of_more_files_than_a_process_may_open_is_read_verified_and_compacted(tmp_path):
    pytest.importorskip("resource")
    write(tmp_path / "run", FILES)
    command = [sys.executable, "-c", WITH_FEW_DESCRIPTORS, str(tmp_path / "run"), str(FILES)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def maps_of(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mapped")
def test_no_file_stays_mapped_for_its_tables_and_few_do_for_their_fields(tmp_path, monkeypatch):
    given = write(tmp_path / "run", 9)
    run = open_run(tmp_path / "run")
    assert len(run.epochs["number"]) == 9 and maps_of(tmp_path) == 0
    monkeypatch.setattr(mapping, "_MAPS", 3)
    for trajectory in run:
        del trajectory
    assert 0 < maps_of(tmp_path) <= 3
    held = list(run)
    assert maps_of(tmp_path) == 9  # as long as somebody has their arrays
    assert_equal(held, given)
    del held
    assert maps_of(tmp_path) <= 3
    del run
    assert maps_of(tmp_path) == 0


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux tells what is open")
def test_a_file_that_is_mapped_is_not_open(tmp_path):
    write(tmp_path / "run", 1)
    held = list(open_run(tmp_path / "run"))
    opened = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    assert held and not [name for name in opened if name.startswith(str(tmp_path))]


@pytest.mark.parametrize(
    ("code", "advice"), [(errno.EMFILE, "ulimit -n"), (errno.ENFILE, "fs.file-max"), (errno.ENOMEM, "vm.max_map_count")]
)
def test_a_map_that_the_system_refuses_is_a_store_error_that_says_what_to_do(tmp_path, monkeypatch, code, advice):
    write(tmp_path / "run", 1)

    def refuse(*arguments, **options):
        raise OSError(code, os.strerror(code))

    run = open_run(tmp_path / "run")
    assert len(run.files) == 1
    monkeypatch.setattr(mapping, "_map_file", refuse)
    with pytest.raises(StoreError, match=rf"000001-000001\.h5: cannot be mapped into memory: .*{advice}"):
        run.field("reward")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has another call")
def test_what_cannot_be_mapped_has_the_systems_own_reason(tmp_path):
    (tmp_path / "file").write_bytes(b"rein")
    with open(tmp_path / "file", "rb") as file, pytest.raises(OSError) as caught:
        mapping._map_file(file.fileno(), 1 << 62)
    assert caught.value.errno == errno.ENOMEM


@pytest.fixture
def decoded(monkeypatch):
    """The places of the chunks that are decoded, in order."""
    mapping._decoded.clear()
    found, original = [], MappedFile._decode_chunk

    def count(file, stored, offset, length):
        found.append((file.path, offset))
        return original(file, stored, offset, length)

    monkeypatch.setattr(MappedFile, "_decode_chunk", count)
    return found


def test_epochs_that_are_read_in_order_decode_each_chunk_once(tmp_path, decoded):
    given = write(tmp_path / "run", 20, max_epochs=10, steps=100)
    run = open_run(tmp_path / "run")
    assert_equal(list(run), given)
    assert len(run.files) == 2 and decoded
    assert len(decoded) == len(set(decoded))


def test_two_runs_that_are_read_side_by_side_decode_each_chunk_once(tmp_path, decoded):
    """Compaction compares two runs in this way."""
    for name in ("one", "other"):
        write(tmp_path / name, 10, max_epochs=10, steps=100)
    for one, other in zip(open_run(tmp_path / "one"), open_run(tmp_path / "other"), strict=True):
        assert_equal([one], [other])
    assert len(decoded) == len(set(decoded))


def test_what_is_read_in_any_order_is_what_was_written_however_few_chunks_are_kept(tmp_path, monkeypatch):
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


def test_arrays_that_were_given_are_not_those_that_are_kept(tmp_path):
    (first, second) = write(tmp_path / "run", 2, max_epochs=2, steps=100)
    run = open_run(tmp_path / "run")
    for field in (run.trajectory(1).fields["action"], run.trajectory(2).fields["action"]):
        field[...] = 0
    assert_equal([run.trajectory(1), run.trajectory(2)], [first, second])


def test_chunks_that_are_large_or_read_whole_are_not_kept(tmp_path, monkeypatch):
    write(tmp_path / "run", 2, max_epochs=2, steps=100)
    run = open_run(tmp_path / "run")
    mapping._decoded.clear()
    run.field("action")
    assert not mapping._decoded
    monkeypatch.setattr(mapping, "CHUNK", 100)
    run.trajectory(1)
    assert not mapping._decoded
