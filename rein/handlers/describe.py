"""What a run was: versions, seeds, command line, configuration and the state of the code, for its `run.json`."""

from __future__ import annotations

from typing import Any

from rein.loop import Loop
from rein.loop.info import run_info
from rein.loop.state import State


def describe(loop: Loop, store: Any) -> None:
    """Have `store.write_run(info)` called when the loop starts, with all that is known of the run then."""

    @loop.started.wire
    def write_run(state: State) -> None:
        store.write_run(run_info(loop))
