"""Write a trace of some iterations with torch.profiler."""

from __future__ import annotations

import gzip
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch.profiler
from torch.profiler import ProfilerActivity

from rein.errors import StoreError
from rein.files import make_folder
from rein.loop import Loop
from rein.loop.checks import limit
from rein.loop.state import State
from rein.store.format.sealed import write_whole

logger = logging.getLogger("rein")
_running: list[torch.profiler.profile] = []  # of all loops, at most one


def profile(
    loop: Loop, path: str | os.PathLike[str] = "trace.json", *, skip: int = 10, iterations: int = 10, **options: Any
) -> None:
    """Profile some iterations of each run with `torch.profiler`, and write a trace.

    Open the trace with https://ui.perfetto.dev or chrome://tracing. Each span `ProfilerStep#n` is one iteration with
    its handlers. CUDA kernels are included if there is a GPU.

    Args:
        loop: Loop to profile.
        path: File of the trace. An existing file is replaced.
        skip: Number of iterations before the profile, at least 1. The profiler starts in the last of them.
        iterations: Number of iterations in the trace. A run that ends earlier writes those that it has made.
        options: Further options of `torch.profiler.profile`, such as `with_stack=True` or `profile_memory=True`.

    Raises:
        ValueError: If `skip` or `iterations` is less than 1.
        StoreError: When the trace is written, if the disk is full.
        RuntimeError: When a run begins, if another profile is running. PyTorch supports one at a time.
    """
    wait, active = (limit(f"profile({name})", value) for name, value in (("skip", skip), ("iterations", iterations)))
    target = Path(path).absolute()  # a handler may change the current folder

    def write(profiler: torch.profiler.profile) -> None:
        make_folder(target.parent)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            file = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(file))
            content = file.read_bytes()
        if not content.rstrip().endswith(b"}"):  # PyTorch ignores errors of the disk
            raise StoreError(f"{target}: only a part of the trace could be written; is the disk full?")
        write_whole(target, gzip.compress(content) if target.suffix == ".gz" else content)
        logger.info("wrote a trace of the profiler to %s", target)

    def start(state: State) -> None:
        if _running:  # PyTorch would crash
            raise RuntimeError("profile: another profile is running; call rein.profile for one loop, and only once")
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
        schedule = torch.profiler.schedule(wait=(wait or 1) - 1, warmup=1, active=active or 1, repeat=1)
        profiler = torch.profiler.profile(
            **{"activities": activities, **options}, schedule=schedule, on_trace_ready=write
        ).__enter__()
        _running.append(profiler)
        loop.cleanups.append(stop)

    def stop() -> None:
        profiler = _running.pop()
        profiler.__exit__(None, None, None)
        if profiler.step_num < (wait or 1):
            logger.warning("profile: no trace, because the run ended within the first %d iterations (skip=)", wait)

    loop.started.attach(start)
    loop.iteration_completed.attach(lambda state: _running[0].step())
