"""Write the description of a run to `run.json`: versions, seeds, command line, configuration and git commit."""

from __future__ import annotations

from typing import Any

from rein.loop import Loop
from rein.loop.info import run_info
from rein.loop.state import State


def describe(loop: Loop, store: Any) -> None:
    """Call `store.write_run(info)` when the loop starts. `info` describes the run, see `run_info`."""

    @loop.started.wire
    def write_run(state: State) -> None:
        store.write_run(run_info(loop))
