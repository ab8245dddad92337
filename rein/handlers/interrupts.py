"""What signals do to a run: end it where it can go on, or save it and go on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any, Protocol

from rein.loop import Loop
from rein.loop.state import State

_ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU")
_SAVING = ("SIGUSR1", "SIGUSR2")
_FORCING = (signal.SIGINT, signal.SIGTERM)  # the system may send the others several times
_SHOW_CURSOR = b"\x1b[?25h"


class Asked(Protocol):
    """Whatever takes a checkpoint at the next edge when it is asked to, as `checkpoint` returns it."""

    def ask(self) -> None:
        """Take one at the next edge."""
        ...


def interrupts(loop: Loop, saver: Asked | None = None, *, force_after: float | None = None) -> Interrupts:
    """Have signals end a run at the iteration's edge, or save it.

        interrupts(loop, checkpoint(loop, store, every=10))

    SIGINT (Ctrl-C), SIGTERM, SIGHUP (unless it is ignored, as under `nohup`) and SIGXCPU end the run. The epoch stays
    open, so a saved run resumes exactly in its middle. An evaluation ends at its next step, and the resumed run
    finishes it. SIGUSR1 and SIGUSR2 have `saver` save the run, which goes on. Attach `interrupts` after `checkpoint`,
    which saves at the end of every run.

    A second SIGINT raises KeyboardInterrupt and a second SIGTERM SystemExit(143), wherever the run is. With
    `force_after`, the process is ended after that many seconds if it still runs. No file is damaged by it.

    Signal handlers are installed while the loop runs on the main thread; the previous ones are restored afterwards. The
    attribute `signal` of the returned object is the signal that ended the last run, or None.
    """
    caught = Interrupts(loop, saver, force_after)
    loop.started.attach(caught.install)
    return caught


class Interrupts:
    """Receives the signals of one loop."""

    def __init__(self, loop: Loop, saver: Asked | None, force_after: float | None) -> None:
        self.signal: int | None = None
        self._loop, self._saver, self._force_after = loop, saver, force_after
        self._previous: dict[int, Any] = {}
        self._closing = False  # whether a signal came when the run had ended, and is not to be waited for any more

    def install(self, state: State) -> None:
        """Take over the signals, on the main thread; a handler."""
        self.signal, self._closing = None, False
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (*_numbers(_ENDING), *(_numbers(_SAVING) if self._saver is not None else ())):
            if number not in _FORCING and signal.getsignal(number) == signal.SIG_IGN:  # as under nohup
                continue
            self._previous[number] = signal.signal(number, self._receive)
        self._loop.cleanups.insert(0, self.restore)  # the last of all: what is being closed then is closed whole

    def restore(self) -> None:
        """Give the signals back."""
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, frame: Any) -> None:
        """Only ask here: a signal comes in the middle of anything."""
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
            name = signal.Signals(number).name
            self._loop.interrupt(f"interrupted by {name}")
            again = "; a second one ends it at once" if number in _FORCING else ""
            _say(f"\nrein: {name}: the run ends after this iteration and is saved{again}\n".encode())

    def _end(self, number: int) -> None:
        self.signal = number
        self.restore()
        if self._force_after is not None:
            forced = threading.Timer(self._force_after, _exit, (128 + number,))
            forced.daemon = True
            forced.start()
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def _numbers(names: tuple[str, ...]) -> list[int]:
    return [getattr(signal, name) for name in names if hasattr(signal, name)]  # Windows has only SIGINT and SIGTERM


def _exit(status: int) -> None:
    if sys.stdout.isatty():
        _say(_SHOW_CURSOR)  # a bar may have hidden it
    os._exit(status)


def _say(text: bytes) -> None:
    """Past Python's buffers, which may be in use where the signal came; a closed stderr is no reason to fail."""
    try:
        os.write(2, text)
    except OSError:
        return
