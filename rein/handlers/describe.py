"""Record what a run consists of in its `run.json`: versions, seeds, command line, configuration and code revision."""

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
