"""Attach a logger to a loop, and select the clock of its curves."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rein.loop import Loop
from rein.loop.clocks import CLOCKS
from rein.loop.info import run_info
from rein.loop.state import INTERRUPT, State
from rein.ops.trees import leaves
from rein.protocols import Logger

report = logging.getLogger("rein")


def attach(loop: Loop, logger: Logger, *, event: str = "epoch_ended", **filters: Any) -> None:
    """Call `logger.write(clocks, metrics)` when `event` fires, and `logger.close()` at the end of a run.

    Example::

        attach(loop, CSVLogger("mine.csv"), every=10)

    At the end of an epoch, `metrics` are the metrics of that epoch. With `every=`, they are means over the epochs since
    the last call (at most 1,000), without NaN and missing values; metrics named `..._100` have their last value. Any
    other event writes the current `state.metrics`. Within an epoch, these are the metrics of the epoch so far.
    Otherwise, they are the metrics of the last epoch and values assigned since.

    Rows are written at the next edge, after all handlers, so the order of handlers does not matter. An epoch that a
    failure leaves open is not written. A logger that raises does not end the run: the error is logged once, and the
    logger is not called again. If a loop runs several times, `write` is called again after `close`.

    Four more methods are optional:

    - `logger.describe(settings)` is called when the first run starts, with a flat dictionary of settings
      (`agent.gamma`, `environment.num_envs`, `epochs`, `versions.torch`, ...).
    - `logger.go_on(clocks)` is called when a run starts from a loaded state. Rows newer than these clocks will be
      written again.
    - `logger.begin()` is called whenever a run starts, before its first row.
    - `logger.finish(status)` is called before each `close`, with "completed", "halted", "interrupted" or "failed".

    Raises TypeError if `logger` lacks `write` or `close`.
    """
    if not isinstance(logger, Logger):
        raise TypeError(
            f"attach(loop, {type(logger).__name__}): a logger needs the methods write(clocks, metrics) and close()"
        )
    decorate = loop.event(event)(**filters)
    attachment = _Attachment(loop, logger)
    if filters.get("every"):  # collect every epoch that passes the other filters
        others = {name: value for name, value in filters.items() if name not in ("every", "unit")}
        unit = {"unit": filters.get("unit")} if others.keys() - {"when"} else {}
        loop.event(event).attach(attachment.gather, **others, **unit)

    @decorate
    def ask(state: State) -> None:
        attachment.ask(state)

    loop.started.attach(attachment.begin)


class _Attachment:
    """Logger of a loop, with the epochs that it has not written yet."""

    def __init__(self, loop: Loop, logger: Logger) -> None:
        kind = type(logger).__name__
        others = [getattr(handler, "__self__", None) for handler in loop.started.handlers]
        number = sum(isinstance(other, _Attachment) and other.kind == kind for other in others)
        self.kind = kind
        self._key = f"logger/{kind}/{number}"  # in state.memory: epochs since the last write
        self._loop, self._logger = loop, logger
        self._failed = self._described = False
        self._due: list[int] = []  # earlier epochs of the next write

    def begin(self, state: State) -> None:
        """Describe the run once, start the logger, and close it when the run ends. Handler of `started`."""
        if not self._described and hasattr(self._logger, "describe"):
            self._guarded(lambda: self._logger.describe(settings(self._loop)))  # type: ignore[attr-defined]  # optional method
        self._described = True
        # a run that continues in this process has written nothing newer than its clocks
        loaded = self._loop.resumed and state.clocks.iterations > 0
        if loaded and not self._failed and hasattr(self._logger, "go_on"):
            self._guarded(lambda: self._logger.go_on(state.clocks.as_dict()))  # type: ignore[attr-defined]  # optional method
        if not self._failed and hasattr(self._logger, "begin"):
            self._guarded(self._logger.begin)  # type: ignore[attr-defined]  # optional method
        if f"{self._key}/due" in state.memory:
            self._due = list(state.memory[f"{self._key}/due"])
            state.request(self.write_epochs)
        self._loop.cleanups.append(lambda: self._guarded(self._close, state))

    def gather(self, state: State) -> None:
        """Add the epoch to the epochs of the next write. Handler of the event without `every=`."""
        if state.epoch_open and state.epoch_status is not None:
            epochs = state.memory.setdefault(self._key, [])
            epochs.append(state.epoch)
            del epochs[: -(state.history.maxlen or 1)]

    def ask(self, state: State) -> None:
        """Request a write at the next edge: of the due epochs at the end of an epoch, otherwise of current metrics."""
        ends = state.epoch_open and state.epoch_status is not None
        if ends:
            self._due += state.memory.pop(self._key, [])  # now, because a checkpoint at this edge must not contain them
        if not self._failed:
            state.request(self.write_epochs if ends else self.write_metrics)

    def write_epochs(self, state: State) -> None:
        """Write the epoch that has just ended and the epochs not written before. Runs at an edge.

        If an interrupt postponed the end of the epoch, the next run writes them after ending it.
        """
        if state.epoch_open:
            state.memory[f"{self._key}/due"] = self._due
            state.request(self.write_epochs)
            return
        state.memory.pop(f"{self._key}/due", None)
        self._guarded(lambda: self._logger.write(state.clocks.as_dict(), self._take_epochs(state)))

    def write_metrics(self, state: State) -> None:
        """Write the current metrics. Runs at an edge."""
        self._guarded(lambda: self._logger.write(state.clocks.as_dict(), dict(state.metrics)))

    def _take_epochs(self, state: State) -> dict[str, float]:
        due, self._due = {*self._due, state.history[-1].epoch}, []
        records = [state.history[-1]] if len(due) == 1 else [record for record in state.history if record.epoch in due]
        return means([record.metrics for record in records])

    def _close(self, state: State) -> None:
        if hasattr(self._logger, "finish"):
            interrupted = state.status == "halted" and INTERRUPT in state.halts
            self._logger.finish("interrupted" if interrupted else state.status)  # type: ignore[attr-defined]  # optional method
        self._logger.close()

    def _guarded(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception:  # a logger must not end the run
            if not self._failed:
                report.exception("logger %s failed and is not called again; the run continues", self.kind)
            self._failed = True


def means(epochs: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the epochs that have it. Metrics named `..._100` have their last value."""
    values: dict[str, list[float]] = {}
    for metrics in epochs:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: found[-1] if name.endswith("_100") else _mean(found) for name, found in values.items()}


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    if len(known) < 2:
        return known[0] if known else math.nan
    return sum(known) / len(known)


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
