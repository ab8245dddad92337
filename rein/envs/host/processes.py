"""Worker processes: pipes that never block, so that every wait for a worker has a deadline, and how processes end."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

GARBAGE_ADVICE = "the environment, or a library that it uses, has written to the pipe of rein"
PICKLE = b"\x80"  # first byte of a pickled value
_LONG = b"\xff\xff\xff\xff"  # begins the header of a message of 2 GiB or more
_LONGEST = 2e6  # seconds: poll(2) is limited to 2**31 milliseconds
_PR_SET_PDEATHSIG = 1  # of Linux's prctl(2)
_CHUNK = 1 << 18  # bytes of a read, about as many as the system keeps


class GarbageError(Exception):
    """Raised if a worker has sent data that is not a message. The message of the error describes the data."""


class Pipe:
    """The main process's end of a pipe to a worker. Its methods return at once, also in the middle of a message.

    Messages have the format of `multiprocessing.connection.Connection`, which is the other end. `wait` waits for them.

    Args:
        end: connection whose descriptor is used from now on.
        first: bytes with which a message may begin. Anything else is garbage, which is noticed without its end.
    """

    def __init__(self, end: Connection, first: bytes = PICKLE) -> None:
        self._end, self._first = end, first
        os.set_blocking(end.fileno(), False)
        self._received, self._unsent = bytearray(), bytearray()
        self._at_end = False

    def put(self, data: bytes) -> None:
        """Send a message. `wait` sends the rest of it, if the pipe is full."""
        size = len(data)
        self._unsent += (size.to_bytes(4) if size < 1 << 31 else _LONG + size.to_bytes(8)) + data
        self.send_rest()

    def put_descriptor(self, descriptor: int) -> None:
        """Send a file descriptor, with one byte, before any message."""
        with self._as_socket() as end:
            socket.send_fds(end, [b"\0"], [descriptor])

    def take(self) -> bytes | None:
        """Return the next message, or None if it is not complete.

        Raises EOFError at the end of the pipe, and GarbageError for data that is not a message.
        """
        if (place := self._place()) is not None:
            message = bytes(self._received[place])
            del self._received[: place.stop]
            return message
        if self._at_end:
            raise EOFError("the other end of the pipe is closed")
        return None

    @property
    def has_result(self) -> bool:
        """Whether `take` returns a message or raises, without a look into the pipe."""
        try:
            return self._at_end or self._place() is not None
        except GarbageError:
            return True

    @property
    def unsent(self) -> bool:
        """Whether a part of a message was not sent."""
        return bool(self._unsent)

    def read(self) -> None:
        """Read what is in the pipe."""
        while not self._at_end:
            try:
                data = os.read(self.fileno(), _CHUNK)
            except BlockingIOError:
                return
            except OSError:  # such as ECONNRESET
                data = b""
            self._at_end = not data
            self._received += data
            if len(data) < _CHUNK:
                return

    def send_rest(self) -> None:
        """Send as much as the pipe takes. A closed pipe takes everything, because reading it reports the end."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self.fileno(), self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def end(self) -> None:
        """End both directions, also if other processes have inherited the descriptor."""
        with contextlib.suppress(OSError), self._as_socket() as end:
            end.shutdown(socket.SHUT_RDWR)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._end.closed

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._end.fileno()

    def close(self) -> None:
        """Close the descriptor. A second call does nothing."""
        self._end.close()

    def _place(self) -> slice | None:
        """Return the place of the next message in the received data, or None if it is not complete."""
        data = self._received
        begin = 12 if data.startswith(_LONG) else 4
        if len(data) <= begin:
            return None
        size = int.from_bytes(data[begin - 8 : begin] if begin > 4 else data[:begin])
        if not size or data[begin] not in self._first:
            raise GarbageError(f"sent data that is not an answer: {bytes(data[:40])!r}")
        return slice(begin, begin + size) if len(data) >= begin + size else None

    @contextlib.contextmanager
    def _as_socket(self) -> Iterator[socket.socket]:
        end = socket.socket(fileno=self.fileno())
        try:
            yield end
        finally:
            end.detach()


_Pipe = TypeVar("_Pipe", bound=Pipe)


def wait(pipes: Sequence[_Pipe], seconds: float) -> list[_Pipe]:
    """Return the pipes with a message, an end or garbage, after `seconds` at most. Also sends the rest of messages."""
    ready = [pipe for pipe in pipes if pipe.has_result]
    if ready:
        return ready
    poller = select.poll()
    for pipe in pipes:
        poller.register(pipe, select.POLLIN | select.POLLOUT if pipe.unsent else select.POLLIN)
    events = dict(poller.poll(max(seconds, 0.0) * 1000.0))
    for pipe in pipes:
        event = events.get(pipe.fileno(), 0)
        if event & select.POLLOUT:
            pipe.send_rest()
        if event & ~select.POLLOUT:
            pipe.read()
    return [pipe for pipe in pipes if pipe.has_result]


def has_ended(process: Any) -> bool:
    """Return whether a process has ended. If SIGCHLD is ignored, the kernel removes it, and its exit code is lost."""
    if process.exitcode is not None:
        return True
    try:
        os.kill(process.pid, 0)
    except OSError:
        return True
    return False


def refuse_on_windows(option: str, instead: str) -> None:
    """Raise ValueError, which names `option`, on Windows, whose pipes cannot be read with a deadline."""
    if sys.platform == "win32":
        raise ValueError(f"{option}: this needs Linux or macOS; use {instead}")


def check_timeout(timeout: float | None) -> None:
    """Raise ValueError for a timeout that is not above 0, or too long for poll(2)."""
    if timeout is not None and not 0 < timeout <= _LONGEST:
        raise ValueError(f"timeout={timeout}: give seconds above 0 and at most {_LONGEST:g}, or None for no limit")


def check_descriptors(option: str, processes: int) -> None:
    """Raise OSError, which names `option`, before any process is started if there are too few file descriptors."""
    needed = 4 * processes + 8  # per process a pipe, shared memory, and two descriptors of multiprocessing
    held: list[int] = []
    try:
        held.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(needed))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        message = f"{option} needs {needed} file descriptors; raise the limit with `ulimit -n`"
        raise OSError(errno.EMFILE, message) from None
    finally:
        for descriptor in held:
            os.close(descriptor)


def ending(exitcode: int | None) -> str:
    """Return an exit code as text, for instance `killed by SIGKILL`."""
    if exitcode is None:
        return ""
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        return f"killed by {signal.Signals(-exitcode).name}"
    except ValueError:  # most of the real-time signals have no name
        return f"killed by signal {-exitcode}"


def begin_worker(parent_is_main_thread: bool) -> None:
    """Let this process, a worker, ignore Ctrl-C and end together with its parent.

    The kernel's "parent" is the thread that starts a process, so the worker of another thread must survive its end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler of the main process is inherited
    if parent_is_main_thread and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
