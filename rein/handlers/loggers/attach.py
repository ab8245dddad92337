"""Attach a logger to a loop, and choose the clock of its curves."""

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
    """Call `logger.write(clocks, metrics)` when `event` fires, and `logger.close()` when a run is over.

        attach(loop, CSVLogger("mine.csv"), every=10)

    At an epoch's end it is told the metrics of that epoch; with `every=`, their means over the epochs since it was last
    told (NaN and what an epoch did not have left out; of the `..._100` the last; of at most the last 1,000). Anywhere
    else it is told `state.metrics` as they are then: in the middle of an epoch, of the epoch so far; outside of one, as
    in `completed`, of the last epoch and with what was set since.

    It is written to at the next edge, when all handlers have run, so their order does not matter; an epoch that a
    failure leaves open is not taken down. Logging changes no run: a logger that raises is reported once and no longer
    called. `filters` are those of every event. One loop may be run several times, and so a logger may be written to
    after it was closed. Raises TypeError for what is no logger.

    Four more methods are optional. `logger.describe(settings)` is called when the first run starts, with its settings
    by name (`agent.gamma`, `environment.num_envs`, `epochs`, `versions.torch`, ...). `logger.go_on(clocks)` is called
    when a run starts from a loaded state; rows that are newer than these clocks will be written again.
    `logger.begin()` is called whenever a run starts, before its first row. `logger.finish(status)` is called before
    each close, with "completed", "halted", "interrupted" or "failed".
    """
    if not isinstance(logger, Logger):
        raise TypeError(f"attach(loop, {type(logger).__name__}): a logger has write(clocks, metrics) and close()")
    decorate = loop.event(event)(**filters)
    attachment = _Attachment(loop, logger)
    if filters.get("every"):  # it is told of every epoch that the other filters let through
        others = {name: value for name, value in filters.items() if name not in ("every", "unit")}
        unit = {"unit": filters.get("unit")} if others.keys() - {"when"} else {}
        loop.event(event).attach(attachment.gather, **others, **unit)

    @decorate
    def ask(state: State) -> None:
        attachment.ask(state)

    loop.started.attach(attachment.begin)


class _Attachment:
    """A logger of a loop, and the epochs that it has not been told of."""

    def __init__(self, loop: Loop, logger: Logger) -> None:
        kind = type(logger).__name__
        others = [getattr(handler, "__self__", None) for handler in loop.started.handlers]
        number = sum(isinstance(other, _Attachment) and other.kind == kind for other in others)
        self.kind = kind
        self._key = f"logger/{kind}/{number}"  # in state.memory: epochs since the last write
        self._loop, self._logger = loop, logger
        self._failed = self._described = False
        self._due: list[int] = []  # epochs that the next write is of, besides the one that it is in

    def begin(self, state: State) -> None:
        """Describe the run, once, begin it, and have the logger closed at its end; a handler."""
        if not self._described and hasattr(self._logger, "describe"):
            self._guarded(lambda: self._logger.describe(settings(self._loop)))  # type: ignore[attr-defined]  # one of its own
        self._described = True
        # a run that goes on in this process has told nothing that is newer, whatever else the logger holds
        loaded = self._loop.resumed and state.clocks.iterations > 0
        if loaded and not self._failed and hasattr(self._logger, "go_on"):
            self._guarded(lambda: self._logger.go_on(state.clocks.as_dict()))  # type: ignore[attr-defined]  # one of its own
        if not self._failed and hasattr(self._logger, "begin"):
            self._guarded(self._logger.begin)  # type: ignore[attr-defined]  # one of its own
        if f"{self._key}/due" in state.memory:
            self._due = list(state.memory[f"{self._key}/due"])
            state.request(self.write_epochs)
        self._loop.cleanups.append(lambda: self._guarded(self._close, state))

    def gather(self, state: State) -> None:
        """Remember an epoch; a handler."""
        if state.epoch_open and state.epoch_status is not None:
            epochs = state.memory.setdefault(self._key, [])
            epochs.append(state.epoch)
            del epochs[: -(state.history.maxlen or 1)]

    def ask(self, state: State) -> None:
        """Have it written at the next edge: the epochs that are due where one ends, else what there is."""
        ends = state.epoch_open and state.epoch_status is not None
        if ends:
            self._due += state.memory.pop(self._key, [])  # now: a checkpoint of this edge must not have them
        if not self._failed:
            state.request(self.write_epochs if ends else self.write_metrics)

    def write_epochs(self, state: State) -> None:
        """Write the epoch that has just ended, and those that were not written before; at an edge.

        If an interrupt has postponed the end of the epoch, they are written when the next run has ended it.
        """
        if state.epoch_open:
            state.memory[f"{self._key}/due"] = self._due
            state.request(self.write_epochs)
            return
        state.memory.pop(f"{self._key}/due", None)
        self._guarded(lambda: self._logger.write(state.clocks.as_dict(), self._take_epochs(state)))

    def write_metrics(self, state: State) -> None:
        """Tell the logger the metrics as they are; at an edge."""
        self._guarded(lambda: self._logger.write(state.clocks.as_dict(), dict(state.metrics)))

    def _take_epochs(self, state: State) -> dict[str, float]:
        due, self._due = {*self._due, state.history[-1].epoch}, []
        told = [state.history[-1]] if len(due) == 1 else [one for one in state.history if one.epoch in due]
        return means([record.metrics for record in told])

    def _close(self, state: State) -> None:
        if hasattr(self._logger, "finish"):
            interrupted = state.status == "halted" and INTERRUPT in state.halts
            self._logger.finish("interrupted" if interrupted else state.status)  # type: ignore[attr-defined]  # one of its own
        self._logger.close()

    def _guarded(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception:  # a logger must not end the run
            if not self._failed:
                report.exception("logger %s failed and is called no more; the run goes on", self.kind)
            self._failed = True


def means(epochs: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of the metrics of some epochs one each: the mean of the values that are there, the last of what runs on."""
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
    """What `run_info` says, in one level: that of its `parts.agent.config.gamma` is called `agent.gamma`."""
    info = run_info(loop)
    told = {name: value for name, value in info.items() if name != "parts"}
    for name, part in info["parts"].items():
        told |= {f"{name}.type": part["type"], name: part["config"]}
    return dict(leaves(told))


_USUAL = ("env_steps", "iterations")  # the one advances in the first iteration or never, so a resumed run has the same


class Axis:
    """The clock over which a logger draws: the one that is given, else the first of `_USUAL` that has advanced.

    It is chosen at the first step at which one of them has, and stays. Raises ValueError for no clock, in the name of
    `owner`.
    """

    def __init__(self, owner: str, clock: str | None) -> None:
        if clock is not None and clock not in CLOCKS:
            raise ValueError(f"{owner}(clock={clock!r}): the clocks are {', '.join(CLOCKS)}")
        self._clock = clock

    def step(self, clocks: Mapping[str, float]) -> int:
        """Where a point of that time stands."""
        if self._clock is None:
            self._clock = next((name for name in _USUAL if clocks.get(name)), None)
        return 0 if self._clock is None else int(clocks[self._clock])
