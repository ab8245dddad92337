"""Write the description of a run to `run.json`: versions, seeds, command line, configuration, git commit and status."""

from __future__ import annotations

import logging
import sys
from typing import Any

from rein.errors import StoreError, text_of
from rein.handlers.output import status_of
from rein.loop import Loop
from rein.loop.info import run_info
from rein.loop.state import INTERRUPT, State

logger = logging.getLogger("rein")


def describe(loop: Loop, store: Any) -> None:
    """Call `store.write_run(info)` when the loop starts, and again when it ends.

    `info` describes the run, see `run_info`. At the end it also has `ended`: the status and its reason.
    """
    info: dict[str, Any] = {}

    @loop.started.wire
    def write_run(state: State) -> None:
        info.clear()  # in case the next line raises
        info.update(run_info(loop))
        store.write_run(info)

    def write_end(state: State) -> None:
        if not info:
            return
        try:
            store.write_run({**info, "ended": _end_of(state)})
        except (StoreError, OSError) as error:  # the results of the run are complete without it
            logger.warning("run.json has no status of the run: %s", error)

    for event in (loop.completed, loop.halted, loop.failed):
        event.wire(write_end, last=True)


def _end_of(state: State) -> dict[str, Any]:
    """Return the status and the reason of a run that ends."""
    error = sys.exception()
    if state.status == "failed":
        return {"status": "failed", "reason": None if error is None else text_of(error)[:1000]}
    if INTERRUPT in state.halts:
        return {"status": "interrupted", "reason": state.reason}
    status = "solved" if "solved" in state.memory else status_of(state)
    return {"status": status, "reason": state.reason if status == "halted" else None}
