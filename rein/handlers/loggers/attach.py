"""Attach a logger to a loop, call it in a thread, and select the clock of its curves."""

from __future__ import annotations

import collections
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from rein.loop import Loop
from rein.loop.info import run_info
from rein.loop.state import CLOCKS, HALT_LOOP, INTERRUPT, State
from rein.ops.trees import leaves
from rein.protocols import Logger, missing_names

CALLS = 1_000  # maximum number of waiting calls
BYTES = 256 << 20  # maximum size of images and videos in waiting calls
PATIENCE = 60.0  # seconds without a finished call after which the end of a run no longer waits


class Call(NamedTuple):
    """Waiting call, the size of its data in bytes, and the row that it writes, if any."""

    function: Callable[[], None]
    size: int = 0
    row: Any = None


class Calls:
    """Makes calls in order, in a thread. `put` never waits. The functions must not raise."""

    def __init__(self, name: str) -> None:
        """Create a queue without calls. `name` is a part of the name of the thread."""
        self._name = name
        self._changed = threading.Condition()
        self._waiting: collections.deque[Call] = collections.deque()  # the first one may be in progress
        self._size = 0
        self._thread: threading.Thread | None = None
        self._ends = False
        self.last_row: Any = None  # last row of a finished call

    def put(self, call: Call, *, always: bool = False) -> bool:
        """Add a call. Return False if too many are waiting, unless `always`."""
        with self._changed:
            full = len(self._waiting) >= CALLS or (call.size and self._size + call.size > BYTES)
            if full and not always:
                return False
            self._waiting.append(call)
            self._size += call.size
            self._ends = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"rein-{self._name}", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def rows(self) -> tuple[Any, list[Any]]:
        """Return the last written row, and the rows that are not written yet."""
        with self._changed:
            return self.last_row, [call.row for call in self._waiting if call.row is not None]

    def finish(self) -> bool:
        """Wait for all calls and end the thread. Return False if no call finishes for `PATIENCE` seconds."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
            while self._thread is not None:
                if not self._changed.wait(PATIENCE):
                    return False
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ends)
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                call = self._waiting[0]
            call.function()
            with self._changed:
                self._waiting.popleft()
                self._size -= call.size
                if call.row is not None:
                    self.last_row = call.row
                self._changed.notify_all()
            del call  # it references the data


report = logging.getLogger("rein")

_MEDIA = ("write_text", "write_histogram", "write_image", "write_video")
_FAILURES = 3  # failed writes in a row after which a logger is not called again


def attach(loop: Loop, logger: Logger, *, event: str = "epoch_ended", **filters: Any) -> None:
    """Call `logger.write(clocks, metrics)` when `event` fires, and `logger.close()` at the end of a run.

    Example::

        attach(loop, CSVLogger("mine.csv"), every=10)

    At the end of an epoch, `metrics` are the metrics of that epoch. With `every=`, they are means over the epochs since
    the last call (at most 1,000), without NaN and missing values; metrics named `..._100` have their last value. The
    incomplete group at the end of a run is written too, unless the run fails or is interrupted: then the run that
    continues it completes the group. Any other event writes the current `state.metrics`. Within an epoch, these are the
    metrics of the epoch so far. Otherwise, they are the metrics of the last epoch and values assigned since.

    All methods of the logger are called in a thread, so training never waits for a logger. Loggers of one class share a
    thread. The end of a run waits until all rows are written. At most 1,000 calls, and 256 MiB of images and videos,
    wait for a slow logger; further ones are lost. A checkpoint contains the rows that are not written yet, and a
    resumed run writes them. A logger that raises does not end the run. The first error is logged, and at the end of the
    run the number of lost rows. After three failed writes in a row, or if another method fails, the logger is not
    called again.

    Rows are created at the next edge, after all handlers, so the order of handlers does not matter. An epoch that a
    failure leaves open is not written. If a loop runs several times, `write` is called again after `close`.

    More methods are optional:

    - `logger.describe(settings)` is called when the first run starts, with a flat dictionary of settings
      (`agent.gamma`, `environment.num_envs`, `epochs`, `versions.torch`, ...).
    - `logger.go_on(clocks)` is called when a run starts from a loaded state. Rows newer than these clocks will be
      written again.
    - `logger.begin()` is called whenever a run starts, before its first row.
    - `logger.finish(status)` is called before each `close`, with "completed", "halted", "interrupted" or "failed".
    - `logger.write_text(clocks, name, text)`, `write_histogram`, `write_image` and `write_video` receive the values of
      `state.log(name, value)`. A logger without the method for a value skips it; this is logged once.

    Raises TypeError if `logger` lacks `write` or `close`.
    """
    if missing_names(logger, Logger):
        raise TypeError(
            f"attach(loop, {type(logger).__name__}): a logger needs the methods write(clocks, metrics) and close()"
        )
    decorate = loop.event(event)(**filters)
    attachment = _Attachment(loop, logger)
    if filters.get("every"):  # collect every epoch that passes the other filters
        others = {name: value for name, value in filters.items() if name not in ("every", "unit")}
        unit = {"unit": filters.get("unit")} if others.keys() - {"when"} else {}
        loop.event(event).attach(attachment.gather, **others, **unit)
        for final in (loop.completed, loop.halted):
            final.wire(attachment.end_group)

    @decorate
    def ask(state: State) -> None:
        attachment.ask(state)

    loop.started.attach(attachment.begin)
    loop.state._receivers.append(attachment.receive)


class _Kind:
    """Attachments of one class of loggers to a loop. They share a thread, because they may write to the same file."""

    def __init__(self, loop: Loop, name: str) -> None:
        self.name, self.attachments = name, list[_Attachment]()
        self._loop = loop
        self.calls = Calls(name)
        self._key = f"logger/{name}/waiting"  # in state.memory: rows that are not written yet
        loop.before_saving.append(self.save)

    def save(self, state: State) -> None:
        """Create the rows of this edge, and keep all rows that are not written yet in the memory of the state."""
        for attachment in self.attachments:
            attachment.write_requested(state)
        after, rows = self.calls.rows()
        state.memory.pop(self._key, None)
        if rows:
            state.memory[self._key] = {
                "after": None if after is None else after[1],
                "rows": [list(row) for row in rows],
            }

    def load(self, state: State) -> Mapping[str, float]:
        """Return the clocks of the last row that the loaded run had written. A logger must remove newer rows."""
        saved = state.memory.get(self._key)
        clocks = state.clocks.as_dict()
        after = clocks if saved is None else saved["after"] or dict.fromkeys(clocks, 0)
        self.calls.last_row = (0, after, {})
        return after

    def write_waiting(self, state: State) -> None:
        """Write the rows that the loaded run had not written."""
        saved = state.memory.pop(self._key, None)
        for number, clocks, metrics in saved["rows"] if saved and self._loop.resumed else ():
            if number < len(self.attachments):
                self.attachments[number].put_row(clocks, metrics)

    def finish(self) -> None:
        """Wait until everything is written, and report lost rows."""
        responds = self.calls.finish()
        unwritten = [] if responds else self.calls.rows()[1]
        for number, attachment in enumerate(self.attachments):
            attachment.report_lost(sum(row[0] == number for row in unwritten), responds)


class _Attachment:
    """Logger of a loop, with the epochs that it has not written yet."""

    def __init__(self, loop: Loop, logger: Logger) -> None:
        name = type(logger).__name__
        attached = [getattr(handler, "__self__", None) for handler in loop.started.handlers]
        kinds = {other.kind.name: other.kind for other in attached if isinstance(other, _Attachment)}
        self.kind = kinds.get(name) or _Kind(loop, name)
        self._number = len(self.kind.attachments)
        self.kind.attachments.append(self)
        self._key = f"logger/{name}/{self._number}"  # in state.memory: epochs since the last write
        self._loop, self._logger = loop, logger
        self._failed = self._described = False
        self._failures = 0  # writes in a row
        self._reported = False  # whether an error was logged
        self._lost = 0  # rows
        self._skipped: set[type] = set()  # of values that the logger cannot write
        self._due: list[int] = []  # epochs of the next write
        self._metrics_due = False

    def begin(self, state: State) -> None:
        """Describe the run once, start the logger, and close it when the run ends. Handler of `started`."""
        if not self._described:
            self._put("describe", settings(self._loop))
        self._described = True
        if self._loop.resumed and state.clocks.iterations > 0:
            self._put("go_on", self.kind.load(state))
        self._put("begin")
        if f"{self._key}/due" in state.memory:
            self._due = list(state.memory[f"{self._key}/due"])
            state.request(self.write_epochs)
        if self is self.kind.attachments[-1]:
            self.kind.write_waiting(state)
            self._loop.cleanups.insert(0, self.kind.finish)  # after all loggers are asked to close
        self._loop.cleanups.append(lambda: self._close(state))

    def gather(self, state: State) -> None:
        """Add the epoch to the epochs of the next write. Handler of the event without `every=`."""
        if state.epoch_open and state.epoch_status is not None:
            epochs = state.memory.setdefault(self._key, [])
            epochs.append(state.epoch)
            del epochs[: -(state.history.maxlen or 1)]
            state.request(self.write_requested)

    def ask(self, state: State) -> None:
        """Request a write at the next edge: of the due epochs at the end of an epoch, otherwise of current metrics."""
        ends = state.epoch_open and state.epoch_status is not None
        if ends:
            self._due += [*state.memory.pop(self._key, []), state.epoch]
        else:
            self._metrics_due = True
        state.request(self.write_epochs if ends else self.write_metrics)

    def end_group(self, state: State) -> None:
        """Request a write of the incomplete group. Wiring of `completed` and `halted`."""
        if self._key in state.memory and INTERRUPT not in state.halts:
            self._due += state.memory.pop(self._key)
            state.request(self.write_epochs)

    def write_requested(self, state: State) -> None:
        """Write everything that is due, also the incomplete group if this epoch is the last one. Runs at an edge."""
        if not state.epoch_open:
            if HALT_LOOP in state.halts or (state.max_epochs is not None and state.clocks.epochs >= state.max_epochs):
                self.end_group(state)
            self.write_epochs(state)
        self.write_metrics(state)

    def write_epochs(self, state: State) -> None:
        """Write the epoch that has just ended and the epochs not written before. Runs at an edge.

        If an interrupt postponed the end of the epoch, the next run writes them after ending it.
        """
        if state.epoch_open:
            state.memory[f"{self._key}/due"] = self._due
            state.request(self.write_epochs)
            return
        state.memory.pop(f"{self._key}/due", None)
        due, self._due = {*self._due}, []
        if records := [record for record in state.history if record.epoch in due]:
            self.put_row(state.clocks.as_dict(), means([record.metrics for record in records]))

    def write_metrics(self, state: State) -> None:
        """Write the current metrics if they are due. Runs at an edge."""
        if self._metrics_due:
            self._metrics_due = False
            self.put_row(state.clocks.as_dict(), dict(state.metrics))

    def put_row(self, clocks: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Let the thread write a row."""
        if not self._put("write", clocks, metrics, row=(self._number, clocks, metrics)):
            self._lost += 1

    def receive(self, name: str, value: Any) -> None:
        """Let the thread write a value of `state.log`. Raises TypeError for a value of another kind."""
        method = "write_text" if isinstance(value, str) else getattr(value, "method", None)
        if method not in _MEDIA:
            raise TypeError(
                f"state.log({name!r}, {value!r:.80}): expected a number, a Histogram, an Image, a Video or a string"
            )
        if hasattr(self._logger, method):
            self._put(method, self._loop.state.clocks.as_dict(), name, value, size=getattr(value, "nbytes", 0))
        elif type(value) not in self._skipped:
            self._skipped.add(type(value))
            report.warning("%s has no method %s, so %r and similar values are skipped", self.kind.name, method, name)

    def report_lost(self, unwritten: int, responds: bool) -> None:
        """Log the number of lost rows. A logger that does not respond is not called again."""
        self._failed |= not responds
        lost, self._lost = self._lost + unwritten, 0
        if lost:
            message = "logger %s failed, did not respond or was too slow: %d row(s) of this run are lost"
            report.warning(message, self.kind.name, lost)

    def _close(self, state: State) -> None:
        self._metrics_due = False  # a failure drops the request
        interrupted = state.status == "halted" and INTERRUPT in state.halts
        self._put("finish", "interrupted" if interrupted else state.status)
        self._put("close")

    def _put(self, method: str, *arguments: Any, size: int = 0, row: Any = None) -> bool:
        """Let the thread call a method of the logger if it has it. Return False if the call is refused."""
        if self._failed or not hasattr(self._logger, method):
            return False
        data = row is not None or size > 0
        return self.kind.calls.put(Call(lambda: self._call(method, arguments), size, row), always=not data)

    def _call(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Call a method of the logger. Runs in the thread."""
        if self._failed:
            self._lost += method == "write"
            return
        try:
            getattr(self._logger, method)(*arguments)
            self._failures = 0
        except BaseException:  # a logger must not end the run, or the thread of other loggers
            self._lost += method == "write"
            self._failures += 1
            self._failed |= not method.startswith("write") or self._failures == _FAILURES
            if not self._reported:
                report.exception("logger %s failed in `%s`; the run continues", self.kind.name, method)
            self._reported = True


def means(epochs: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the epochs that have it. Metrics named `..._100` have their last value."""
    values: dict[str, list[float]] = {}
    for metrics in epochs:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: numbers[-1] if name.endswith("_100") else _mean(numbers) for name, numbers in values.items()}


def _mean(values: list[float]) -> float:
    numbers = [value for value in values if not math.isnan(value)]
    if len(numbers) < 2:
        return numbers[0] if numbers else math.nan
    return sum(numbers) / len(numbers)


def settings(loop: Loop) -> dict[str, Any]:
    """Return `run_info` as a flat dictionary; `parts.agent.config.gamma` is named `agent.gamma`."""
    info = run_info(loop)
    flat = {name: value for name, value in info.items() if name != "parts"}
    for name, part in info["parts"].items():
        flat |= {f"{name}.type": part["type"], name: part["config"]}
    return dict(leaves(flat))


_USUAL = (
    "env_steps",
    "iterations",
)  # env_steps advances in the first iteration or never, so a resumed run selects the same clock


class Axis:
    """Clock of a logger's curves: the given clock, or the first of `_USUAL` that has advanced.

    It is selected at the first row at which one of these has advanced, and then kept. Raises ValueError for an unknown
    clock; the message names `owner`.
    """

    def __init__(self, owner: str, clock: str | None) -> None:
        if clock is not None and clock not in CLOCKS:
            raise ValueError(f"{owner}(clock={clock!r}): unknown clock; the clocks are {', '.join(CLOCKS)}")
        self._clock = clock

    def step(self, clocks: Mapping[str, float]) -> int:
        """Return the x coordinate for these clocks."""
        if self._clock is None:
            self._clock = next((name for name in _USUAL if clocks.get(name)), None)
        return 0 if self._clock is None else int(clocks[self._clock])
