import os
import threading
import time

import pytest

from rein.errors import StoreError
from rein.store.writer_thread import WriterThread


def nothing():
    pass


@pytest.fixture
def writer():
    writer = WriterThread(max_bytes=100, idle=nothing, interval=10.0)
    yield writer
    writer.close()


def test_submit_blocks_while_max_bytes_are_unfinished(writer):
    may_end, submitted = threading.Event(), threading.Event()
    writer.submit(may_end.wait, size=60)
    writer.submit(nothing, size=40)

    def submit_one_more():
        writer.submit(nothing, size=1)
        submitted.set()

    thread = threading.Thread(target=submit_one_more)
    thread.start()
    assert not submitted.wait(0.1)
    may_end.set()
    assert submitted.wait()
    thread.join()


def test_job_larger_than_max_bytes_is_accepted_alone(writer):
    done = []
    for size in (1000, 1000):
        writer.submit(lambda size=size: done.append(size), size)
    writer.wait()
    assert done == [1000, 1000]


def test_first_error_stops_the_writer_and_is_raised(writer):
    done, may_fail = [], threading.Event()

    def fail():
        may_fail.wait()
        raise OSError(28, "No space left on device")

    writer.submit(fail, size=1)
    writer.submit(lambda: done.append("after the error"), size=1)
    may_fail.set()
    for call in (writer.wait, writer.check, lambda: writer.submit(nothing, 1)):
        with pytest.raises(StoreError, match="No space left on device"):
            call()
    assert done == []
    writer.close()  # the error was already raised


def test_blocked_submit_raises_the_error(writer):
    def fail():
        time.sleep(0.05)
        raise RuntimeError("no more")

    writer.submit(fail, size=100)
    with pytest.raises(StoreError, match="no more"):
        writer.submit(nothing, size=100)


def test_end_does_not_wait_and_loses_no_jobs():
    """A store may be garbage-collected in any thread, including the writer's thread."""
    writer, may_end, done = WriterThread(max_bytes=1, idle=nothing, interval=10.0), threading.Event(), []
    writer.submit(may_end.wait, size=100)
    writer.submit(writer.end, size=100, wait=False)
    writer.submit(lambda: done.append("the last"), size=100, wait=False)
    writer.end()
    may_end.set()
    writer._thread.join()
    assert not writer._thread.is_alive()
    assert done == ["the last"]


def test_use_in_a_forked_process_raises(writer, monkeypatch):
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    for call in (writer.check, writer.wait, lambda: writer.submit(nothing, 1)):
        with pytest.raises(StoreError, match="open a new store in each forked process"):
            call()
    writer.close()  # does nothing: the thread belongs to the parent
    monkeypatch.undo()
    writer.submit(nothing, 1)
    writer.wait()
