"""End or save a run on operating system signals."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any, Protocol

from rein.loop import Loop
from rein.loop.state import State

_ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU")
_SAVING = ("SIGUSR1", "SIGUSR2")
_FORCING = (signal.SIGINT, signal.SIGTERM)  # the system may send the other signals repeatedly
_SHOW_CURSOR = b"\x1b[?25h"


class Asked(Protocol):
    """Object whose `ask()` takes a checkpoint at the next edge, such as the saver that `checkpoint` returns."""

    def ask(self) -> None:
        """Take a checkpoint at the next edge."""
        ...


def interrupts(loop: Loop, saver: Asked | None = None, *, force_after: float | None = None) -> Interrupts:
    """End a run at the next edge, or save it, when the process receives a signal.

    Example::

        interrupts(loop, checkpoint(loop, store, every=10))

    SIGINT (Ctrl-C), SIGTERM, SIGHUP (unless ignored, as under `nohup`) and SIGXCPU end the run. The epoch stays open,
    so a saved run resumes exactly in the middle of it. An evaluation ends at its next step, and the resumed run
    finishes it. On SIGUSR1 and SIGUSR2, `saver` saves the run, and the run continues. Attach `interrupts` after
    `checkpoint`, which saves at the end of every run.

    A second SIGINT raises KeyboardInterrupt immediately, and a second SIGTERM raises SystemExit(143). If the process
    still runs `force_after` seconds after that, it is ended. No file is damaged.

    Signal handlers are installed while the loop runs on the main thread. The previous ones are restored afterwards. The
    attribute `signal` of the returned object is the signal that ended the last run, or None.
    """
    caught = Interrupts(loop, saver, force_after)
    loop.started.attach(caught.install)
    return caught


def end_at_ctrl_c(loop: Loop, folder: Path | None) -> None:
    """End the run of a script at the first Ctrl-C, and raise KeyboardInterrupt. Attached to loops with a store.

    The last step is finished, and the run is saved if its store keeps checkpoints. A line on stderr states how to
    resume the run in `folder`. A second Ctrl-C raises KeyboardInterrupt at once. Nothing changes if the program handles
    SIGINT itself, with `interrupts` or `signal.signal`, or outside of the main thread.
    """
    caught = _CtrlC(loop, folder)

    @loop.started.wire
    def install(state: State) -> None:
        handlers = (getattr(handler, "__self__", None) for handler in loop.started.handlers)
        attached = any(isinstance(handler, Interrupts) for handler in handlers)
        if not attached and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            caught.install(state)


class Interrupts:
    """Signal handlers of one loop."""

    ending: tuple[str, ...] = _ENDING

    def __init__(self, loop: Loop, saver: Asked | None, force_after: float | None) -> None:
        self.signal: int | None = None
        self._loop, self._saver, self._force_after = loop, saver, force_after
        self._previous: dict[int, Any] = {}
        self._closing = False  # whether a signal arrived after the end of the run

    def install(self, state: State) -> None:
        """Install the signal handlers if this is the main thread. Handler of `started`."""
        self.signal, self._closing = None, False
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (*_numbers(self.ending), *(_numbers(_SAVING) if self._saver is not None else ())):
            if number not in _FORCING and signal.getsignal(number) == signal.SIG_IGN:  # as under nohup
                continue
            self._previous[number] = signal.signal(number, self._receive)
        self._loop.cleanups.insert(0, self.restore)  # runs last, so that signals do not interrupt other cleanups

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, frame: Any) -> None:
        """Only record the request: a signal can arrive in the middle of any operation."""
        if number in _numbers(_SAVING):
            assert self._saver is not None
            self._saver.ask()
        elif self.signal is not None or self._closing:
            if number in _FORCING:
                self._end(number)
        elif self._loop.state.status != "running":
            self._closing = self._loop.state._left = True  # ends an evaluation in the final event
        else:
            self.signal = number
            name, saved = signal.Signals(number).name, " and is saved" if _is_saved(self._loop) else ""
            self._loop.interrupt(f"interrupted by {name}")
            again = "; a second one ends it immediately" if number in _FORCING else ""
            _write(2, f"\nrein: {name}: the run ends after this iteration{saved}{again}\n".encode())

    def _end(self, number: int) -> None:
        self.signal = number
        self.restore()
        if self._force_after is not None:
            forced = threading.Timer(self._force_after, _exit, (128 + number,))
            forced.daemon = True
            forced.start()
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


class _CtrlC(Interrupts):
    """Signal handler of a script, which ends with KeyboardInterrupt after its run."""

    ending = ("SIGINT",)

    def __init__(self, loop: Loop, folder: Path | None) -> None:
        super().__init__(loop, None, None)
        self._folder = folder

    def restore(self) -> None:
        """Restore the previous signal handler. Raises KeyboardInterrupt if a signal has ended the run."""
        super().restore()
        if (self.signal is not None or self._closing) and self._loop.state.status in ("completed", "halted"):
            if not self._closing:
                _write(2, f"rein: the run is interrupted; {self._advice()}\n".encode())
            raise KeyboardInterrupt

    def _advice(self) -> str:
        if self._folder is None or not _is_saved(self._loop):
            return "rein.checkpoint(loop, rein.Checkpoints(folder)) would save it, so that it could be resumed"
        return f"to continue it, call rein.resume(loop, {str(self._folder)!r}) before loop.run()"


def _is_saved(loop: Loop) -> bool:
    """Return whether a checkpoint is saved when the run ends."""
    return "checkpoint_saved" in loop.events or hasattr(loop.parts.get("store"), "checkpoints")


def _numbers(names: tuple[str, ...]) -> list[int]:
    return [getattr(signal, name) for name in names if hasattr(signal, name)]  # Windows has only SIGINT and SIGTERM


def _exit(status: int) -> None:
    if os.isatty(1):
        _write(1, _SHOW_CURSOR)  # a progress bar may have hidden it
    os._exit(status)


def _write(descriptor: int, text: bytes) -> None:
    """Write without Python's buffers, which may be in use during a signal. Ignores a closed file."""
    try:
        os.write(descriptor, text)
    except OSError:
        return
