"""Have any logger take down a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from rein.loop import Loop
from rein.protocols import Logger
from rein.types import State

report = logging.getLogger("rein")


def attach(loop: Loop, logger: Logger, *, event: str = "epoch_ended", **filters: Any) -> None:
    """Call `logger.write(clocks, metrics)` when `event` fires, and `logger.close()` when a run is over.

        attach(loop, CSVLogger("mine.csv"), every=10)

    It is written to at the next edge, when all handlers have run, so their order does not matter; an epoch that a
    failure leaves open is not taken down. Logging changes no run: a logger that raises is reported once and no longer
    called. `filters` are those of every event. One loop may be run several times, and so a logger may be written to
    after it was closed. Raises TypeError for what is no logger.
    """
    if not isinstance(logger, Logger):
        raise TypeError(f"attach(loop, {type(logger).__name__}): a logger has write(clocks, metrics) and close()")
    failed: list[bool] = []

    def guarded(call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception:  # a logger must not end the run
            if not failed:
                report.exception("logger %s failed and is called no more; the run goes on", type(logger).__name__)
            failed[:] = [True]

    def write(state: State) -> None:
        guarded(write_now, state)

    def write_now(state: State) -> None:
        ended = not state.epoch_open and state.history
        logger.write(state.clocks.as_dict(), dict(state.history[-1].metrics if ended else state.metrics))

    @loop.event(event)(**filters)
    def ask(state: State) -> None:
        if not failed:
            state.request(write)

    @loop.started
    def close_when_over(state: State) -> None:
        loop.cleanups.append(lambda: guarded(logger.close))
