import errno
import hashlib
import io
import itertools
import os
import subprocess
import sys

import h5py
import numpy as np
import pytest

from rein.errors import StoreError
from rein.store.format import sealed
from rein.store.format.sealed import USER_BLOCK, compose, remove_leftovers, verify, write_whole


class FaultySystem:
    """Module `os` with some calls replaced."""

    def __init__(self, **replaced):
        self.__dict__.update(replaced)

    def __getattr__(self, name):
        return getattr(os, name)


def sealed_file():
    return compose(lambda file: file.create_dataset("x", data=np.arange(1000, dtype=np.float32)))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some.h5"
    write_whole(path, sealed_file())
    return path


def test_sealed_file_verifies_and_opens_with_h5py(file):
    verify(file)
    with h5py.File(file) as opened:
        assert opened.userblock_size == USER_BLOCK
        assert np.array_equal(opened["x"], np.arange(1000))


def test_user_block_is_text_with_the_sha256(file):
    content = file.read_bytes()
    block, image = content[:USER_BLOCK].rstrip(b"\0").decode().splitlines(), content[USER_BLOCK:]
    assert block[:2] == ["#rein-hdf5 format 2", f"length {len(image)}"]
    assert block[2] == f"sha256 {hashlib.sha256(image).hexdigest()}"
    assert image.startswith(b"\x89HDF\r\n\x1a\n")


def test_file_may_exceed_the_given_capacity():
    data = np.random.default_rng(0).integers(0, 256, 40_000_000, np.uint8)
    content = compose(lambda file: file.create_dataset("x", data=data))
    with h5py.File(io.BytesIO(content)) as file:
        assert np.array_equal(file["x"], data)


def test_every_flipped_byte_is_detected(file):
    good = file.read_bytes()
    for place in itertools.chain(range(USER_BLOCK + 64), range(USER_BLOCK + 64, len(good), 97)):
        file.write_bytes(good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :])
        with pytest.raises(StoreError, match=r"some\.h5"):
            verify(file)


def test_truncated_and_extended_files_are_detected(file):
    good = file.read_bytes()
    for length in {0, 1, 511, 512, 513, len(good) - 1, *range(0, len(good), 512)}:
        file.write_bytes(good[:length])
        with pytest.raises(StoreError, match=r"some\.h5"):
            verify(file)
    file.write_bytes(good + b"\0")
    with pytest.raises(StoreError, match="was truncated or extended"):
        verify(file)


def test_other_format_version_raises(file):
    file.write_bytes(file.read_bytes().replace(b"format 2", b"format 1", 1))
    with pytest.raises(StoreError, match="has format version 1; this rein reads version 2"):
        verify(file)


def test_foreign_files_raise_with_the_path(tmp_path):
    plain = tmp_path / "plain.h5"
    with h5py.File(plain, "w") as file:
        file["x"] = 1
    os.mkfifo(tmp_path / "pipe")
    for name, reason in {
        "plain.h5": "was written by another program",
        "pipe": "is not a regular file",
        ".": "is not a regular file",
        "missing": "No such file",
    }.items():
        with pytest.raises(StoreError, match=reason) as caught:
            verify(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)


def test_short_and_interrupted_writes_lose_no_data(tmp_path, monkeypatch):
    calls = itertools.count()

    def write(descriptor, data):
        if next(calls) % 3 == 1:
            raise InterruptedError(errno.EINTR, "Interrupted system call")
        return os.write(descriptor, data[:1000])

    monkeypatch.setattr(sealed, "os", FaultySystem(write=write))
    write_whole(tmp_path / "some.h5", sealed_file())
    assert (tmp_path / "some.h5").read_bytes() == bytes(sealed_file())
    assert next(calls) > 6


def test_write_of_zero_bytes_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(sealed, "os", FaultySystem(write=lambda descriptor, data: 0))
    with pytest.raises(StoreError, match="accepts no more bytes"):
        write_whole(tmp_path / "some.h5", b"data")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("existing", [None, b"old content"])
def test_failing_system_call_leaves_the_old_or_new_file(tmp_path, monkeypatch, code, existing):
    """Fail each call of a write in turn: StoreError with path and cause, no temporary file, no open descriptor."""
    path, names = tmp_path / "some.h5", ("open", "write", "fsync", "replace", "close")
    content, descriptors = bytes(sealed_file()), len(os.listdir("/dev/fd"))
    for failing in itertools.count():
        path.unlink(missing_ok=True)
        if existing is not None:
            path.write_bytes(existing)
        calls = itertools.count()

        def call(name, *arguments, failing=failing, calls=calls, **options):
            number = next(calls)
            if name == "write":
                arguments = (arguments[0], arguments[1][: len(content) // 3])
            if number == failing:
                if name == "close":  # Linux closes the descriptor before it reports the error
                    os.close(*arguments)
                raise OSError(code, os.strerror(code))
            return getattr(os, name)(*arguments, **options)

        replaced = {name: (lambda *a, name=name, call=call, **k: call(name, *a, **k)) for name in names}
        monkeypatch.setattr(sealed, "os", FaultySystem(**replaced))
        try:
            write_whole(path, content)
        except StoreError as error:
            assert str(path) in str(error)
            assert os.strerror(code) in str(error)
            assert "free some space" in str(error) or code != errno.ENOSPC
        else:
            break
        left = [entry.name for entry in tmp_path.iterdir()]
        assert left in ([], ["some.h5"])
        assert not left or path.read_bytes() in (existing, content)
        assert len(os.listdir("/dev/fd")) == descriptors
    assert failing >= 8  # open, 4 writes, fsync, close, replace, and three calls for the folder
    assert path.read_bytes() == content


def test_interrupt_leaves_no_temporary_file(tmp_path, monkeypatch):
    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(sealed, "os", FaultySystem(fsync=interrupt))
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "some.h5", b"data")
    assert list(tmp_path.iterdir()) == []


def test_data_is_synced_before_rename_and_folder_after(tmp_path, monkeypatch):
    """The data is on the disk before the name, and the name before the function returns."""
    trace = []

    def traced(name):
        def call(*arguments, **options):
            trace.append(name)
            return getattr(os, name)(*arguments, **options)

        return call

    monkeypatch.setattr(sealed, "os", FaultySystem(**{name: traced(name) for name in ("write", "fsync", "replace")}))
    write_whole(tmp_path / "some.h5", b"data")
    assert trace == ["write", "fsync", "replace", "fsync"]


def test_only_temporary_files_of_dead_processes_are_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    names = {
        f".some.h5.tmp-{dead.pid}": True,
        f".some.h5.tmp-{os.getpid()}": True,  # this process is not writing, so an earlier one with the same pid was
        f".some.h5.tmp-{os.getppid()}": False,
        f"some.h5.tmp-{dead.pid}": False,
        "000001-000002.h5": False,
        ".some.h5.tmp-abc": False,
    }
    for name in names:
        (tmp_path / name).touch()
    assert {path.name for path in remove_leftovers(tmp_path)} == {name for name, gone in names.items() if gone}
    assert {path.name for path in tmp_path.iterdir()} == {name for name, gone in names.items() if not gone}
    assert remove_leftovers(tmp_path / "missing") == []


def test_file_being_written_is_not_removed(tmp_path, monkeypatch):
    seen = []

    def fsync(descriptor):
        seen.append([entry.name for entry in tmp_path.iterdir()])
        assert remove_leftovers(tmp_path) == []
        os.fsync(descriptor)

    monkeypatch.setattr(sealed, "os", FaultySystem(fsync=fsync))
    write_whole(tmp_path / "some.h5", b"data")
    assert seen == [[f".some.h5.tmp-{os.getpid()}"], ["some.h5"]]
