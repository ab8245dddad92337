"""Write a line when an event fires."""

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
    """Write `message(state)` as a line to `file` when `event` fires.

    A line that cannot be written does not end the run: the first such error is logged. Characters that the encoding of
    the file lacks are escaped. An error in `message` ends the run, as in any handler.

    Args:
        loop: Loop to attach to.
        message: Function of the state that returns the line. Default: `default_message`.
        event: Name of the event.
        file: Open text file. Default: standard output.
        **filters: Filters of the event, such as `every=10`.

    Raises:
        TypeError: If `message` is not a function, or at a firing if it does not return a string.
    """
    text_of = default_message if message is None else message
    if not callable(text_of):
        raise TypeError(f"log(message=...): expected a function of the state that returns a line, got {message!r}")

    failed = False

    @loop.event(event)(**filters)
    def write_message(state: State) -> None:
        nonlocal failed
        text = text_of(state)
        if not isinstance(text, str):
            raise TypeError(f"log: message(state) returned {text!r}; it must return a string")
        error = write_line(text, file)
        if error is not None and not failed:
            failed = True
            logger.warning("log: a line could not be written (%r); the run continues", error)


def default_message(state: State) -> str:
    """Return counters and metrics: `epoch 3  iteration 200  env_steps 12,800  episode_return -10.25`."""
    values: dict[str, float] = {"epoch": state.epoch, "iteration": state.iteration}
    if state.clocks.env_steps:
        values["env_steps"] = state.clocks.env_steps
    values.update(state.metrics)
    return "  ".join(f"{name} {_short(value)}" for name, value in values.items())


def _short(value: float) -> str:
    """Format whole numbers in full and others with five digits."""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.5g}"
