"""A readable line whenever an event fires."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TextIO

from rein.handlers.output import write_line
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
    """Write `message(state)` as a line to `file` (standard output by default) when `event` fires.

    The default message is `default_message`. A line that cannot be written does not end the run: the first error is
    logged. Characters that the encoding of the file does not have are written as escapes. An error in `message` ends
    the run, as in any handler. Raises TypeError if `message` is not a function, and at the firing if it returns no
    string.
    """
    text_of = default_message if message is None else message
    if not callable(text_of):
        raise TypeError(f"log(message=...): a function of the state that returns a line, not {message!r}")

    failed = False

    @loop.event(event)(**filters)
    def write_message(state: State) -> None:
        nonlocal failed
        text = text_of(state)
        if not isinstance(text, str):
            raise TypeError(f"log: message(state) returned {text!r}; return the line to write, as a string")
        error = write_line(text, file)
        if error is not None and not failed:
            failed = True
            logger.warning("log: a line could not be written (%r); the run goes on", error)


def default_message(state: State) -> str:
    """`epoch 3  iteration 200  env_steps 12,800  episode_return -10.25`: counters, then every metric of the epoch."""
    values: dict[str, float] = {"epoch": state.epoch, "iteration": state.iteration}
    if state.clocks.env_steps:
        values["env_steps"] = state.clocks.env_steps
    values.update(state.metrics)
    return "  ".join(f"{name} {_short(value)}" for name, value in values.items())


def _short(value: float) -> str:
    """Whole numbers in full, others to five digits; nan and inf as these words."""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.5g}"
