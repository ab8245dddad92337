"""Measure the time of a run: seconds per phase, rates, and traces of torch.profiler."""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.profiler
from torch.profiler import ProfilerAction, ProfilerActivity

from rein.episodes import PHASES
from rein.errors import StoreError
from rein.files import make_folder
from rein.handlers.output import rate
from rein.loop import Loop
from rein.loop.checks import limit
from rein.loop.state import Handler, State
from rein.store.format.sealed import write_whole

logger = logging.getLogger("rein")

_UNTIMED = ("started", "epoch_completed", "epoch_halted", "epoch_ended", "completed", "halted", "failed")
_BEGAN = "timing/began"  # key of state.memory: clocks at the start of the epoch
_CLOCKS = ("env_steps", "updates")


def timing(loop: Loop, *, phases: bool = False) -> None:
    """Sum the seconds between events of an iteration over each epoch, in `state.times[<event>]`.

    A phase ends when the handlers of its event have run. The phase `iteration_started` includes fetching the batch. The
    end events of the epoch also provide `state.times["epoch"]` and the metrics `iterations_per_second`,
    `env_steps_per_second` and `updates_per_second`, which are NaN if the epoch took no measurable time. Times are
    measured on the host, without synchronizing with a GPU. Events defined during a run are timed from the next run on.
    `phases` also provides the seconds of each phase as the metrics `seconds_<event>`.

    Raises ValueError if the loop is already timed.
    """
    if any(isinstance(getattr(handler, "__self__", None), _Stopwatch) for handler in loop.started.handlers):
        raise ValueError("timing(loop): the loop is already timed; attach timing once")
    watch = _Stopwatch(loop, phases)
    loop.started.attach(watch.start)
    loop.on("epoch_completed", "epoch_halted")(watch.report)  # before handlers of epoch_ended read it


class _Stopwatch:
    """Time of the last event, and the timed events."""

    def __init__(self, loop: Loop, phases: bool) -> None:
        self._loop, self._phases = loop, phases
        self._attached: set[str] = set(_UNTIMED)
        self._last = 0.0

    def start(self, state: State) -> None:
        """Attach to all events that the loop has now, after their handlers. Handler of `started`."""
        for name, event in self._loop.events.items():
            if name not in self._attached:
                self._attached.add(name)
                event.attach(self.begin_epoch if name == "epoch_started" else self._phase(name))
        self._last = time.perf_counter()  # a run may start in the middle of an epoch

    def _phase(self, name: str) -> Handler:
        def time_phase(state: State) -> None:
            last, self._last = self._last, time.perf_counter()
            state.times[name] = state.times.get(name, 0.0) + self._last - last

        return time_phase

    def begin_epoch(self, state: State) -> None:
        """Store the clocks at the start of the epoch."""
        state.memory[_BEGAN] = {name: getattr(state.clocks, name) for name in _CLOCKS}
        self._last = time.perf_counter()

    def report(self, state: State) -> None:
        """Set the rates of the epoch. Those of env_steps and updates are missing if timing was attached within it."""
        seconds = state.times["epoch"]
        state.metrics["iterations_per_second"] = rate(state.iteration, seconds)
        for name, began in state.memory.pop(_BEGAN, {}).items():
            state.metrics[f"{name}_per_second"] = rate(getattr(state.clocks, name) - began, seconds)
        if self._phases:
            state.metrics.update({f"seconds_{name}": spent for name, spent in state.times.items() if name != "epoch"})


_running: list[torch.profiler.profile] = []  # of all loops, at most one


def profile(
    loop: Loop, path: str | os.PathLike[str] = "trace.json", *, skip: int = 10, iterations: int = 10, **options: Any
) -> None:
    """Profile some iterations of each run with `torch.profiler`, and write a trace.

    Open the trace with https://ui.perfetto.dev or chrome://tracing. Each span `ProfilerStep#n` is one iteration with
    its handlers, and the spans within it are its phases: `action_selected` ends when that event fires. CUDA kernels are
    included if there is a GPU.

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
            content = file.read_bytes() if file.exists() else b""
        if not content.rstrip().endswith(b"}"):  # PyTorch ignores errors of the disk
            raise StoreError(f"{target}: only a part of the trace could be written; is the disk full?")
        write_whole(target, gzip.compress(content) if target.suffix == ".gz" else content)
        logger.info("wrote a trace of the profiler to %s", target)

    def start(state: State) -> None:
        if _running:  # PyTorch would crash
            raise RuntimeError("profile: another profile is running; profile one loop, and only once")
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
        schedule = torch.profiler.schedule(wait=(wait or 1) - 1, warmup=1, active=active or 1, repeat=1)
        profiler = torch.profiler.profile(
            **{"activities": activities, **options}, schedule=schedule, on_trace_ready=write
        ).__enter__()
        _running.append(profiler)
        loop.cleanups.append(stop)

    def stop() -> None:
        spans.close()
        profiler = _running.pop()
        profiler.__exit__(None, None, None)
        if profiler.step_num < (wait or 1):
            logger.warning("profile: no trace, because the run ended within the first %d iterations (skip=)", wait)

    loop.started.attach(start)
    spans = _Spans()
    for name in ("iteration_started", *PHASES, "iteration_completed"):
        if name in loop.events:
            loop.event(name).attach(spans.end_phase(name))


class _Spans:
    """Spans of the phases in the trace. The order of the phases is that of the iterations before the profile."""

    def __init__(self) -> None:
        self._open, self._last = contextlib.ExitStack(), ""
        self._following: dict[str, str] = {}
        self.close = self._open.close

    def end_phase(self, name: str) -> Handler:
        """Return a handler of the event that ends a phase. It begins the span of the next one."""

        def begin_next(state: State) -> None:
            self.close()
            self._following[self._last] = name
            self._last = name
            if name == "iteration_completed":
                _running[0].step()
            if _running[0].current_action is not ProfilerAction.NONE:
                self._open.enter_context(torch.profiler.record_function(self._following.get(name, name)))

        return begin_next
