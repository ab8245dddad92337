"""Write a table of metrics, or a custom line, when an event fires."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TextIO

from rein.handlers.output import ending, short_number, table, verdict, width_of, write_line
from rein.loop import Loop
from rein.loop.state import State

logger = logging.getLogger("rein")


def log(
    loop: Loop,
    message: Callable[[State], str] | None = None,
    *,
    event: str = "epoch_ended",
    file: TextIO | None = None,
    **filters: Any,
) -> None:
    """Write a table of all metrics, or the line `message(state)`, to `file` when `event` fires.

    Metrics are grouped by their names, and NaN is left out. If the run has a target, the last line shows whether it was
    reached; see `rein.record_solved`.

    A line that cannot be written does not end the run: the first such error is logged. Characters that the encoding of
    the file lacks are escaped. An error in `message` ends the run, as in any handler.

    Args:
        loop: Loop to attach to.
        message: Function of the state that returns the line. Default: counters and a table of the metrics.
        event: Name of the event.
        file: Open text file. Default: standard output.
        **filters: Filters of the event, such as `every=10`.

    Raises:
        TypeError: If `message` is not a function, or at a firing if it does not return a string.
    """
    if message is not None and not callable(message):
        raise TypeError(f"log(message=...): expected a function of the state that returns a line, got {message!r}")

    failed = False

    def write(text: str) -> None:
        nonlocal failed
        error = write_line(text, file)
        if error is not None and not failed:
            failed = True
            logger.warning("log: a line could not be written (%r); the run continues", error)

    @loop.event(event)(**filters)
    def write_message(state: State) -> None:
        text = default_message(state, width_of(file)) if message is None else message(state)
        if not isinstance(text, str):
            raise TypeError(f"log: message(state) returned {text!r}; it must return a string")
        write(text)

    def write_ending(loop: Loop, state: State) -> None:
        if message is None and verdict(state) is not None:
            write(ending(state))

    for final in (loop.completed, loop.halted, loop.failed):
        final.observe(write_ending)


def default_message(state: State, width: int) -> str:
    """Return counters, and a table of the metrics that fits into `width` columns."""
    counters = {"epoch": state.epoch, "iteration": state.iteration, "env_steps": state.clocks.env_steps}
    title = "  ".join(
        f"{name} {short_number(count)}" for name, count in counters.items() if count or name != "env_steps"
    )
    return table(title, state.metrics, width)
