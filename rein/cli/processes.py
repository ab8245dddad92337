"""Run several commands, each in its own process, with one progress display."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import attrs
import numpy as np

from rein.cli.output import say
from rein.cli.plan import Plan
from rein.store.folder import is_locked
from rein.store.metrics_files import EPOCHS, CSVTable

METRICS = ("episode_return_100", "evaluation_return")  # scores of a run, in order of preference
LOGS = "logs"  # folder for the output of the processes
_POLL = 0.1  # seconds
_SAVED = (129, 130, 143, 152)  # exit statuses of a run that was saved after a signal


class Limit(NamedTuple):
    """Column of `metrics.csv` and its value at the end of a run."""

    column: str
    value: float


@attrs.define(eq=False)
class Job:
    """A run in its own process."""

    label: str
    folder: Path
    words: list[str]  # of `rein`
    limit: Limit | None = None
    status: str = "not started"
    code: int | None = None  # exit status of the process
    _table: CSVTable = attrs.field(
        init=False, default=attrs.Factory(lambda self: CSVTable(self.folder / EPOCHS), takes_self=True)
    )
    columns: dict[str, np.ndarray] = attrs.field(init=False, factory=dict)

    @property
    def log(self) -> Path:
        """File with the output of the process."""
        return self.folder.parent / LOGS / f"{self.folder.name}.txt"

    @property
    def env_steps(self) -> int:
        """Number of env steps at the end of the last epoch."""
        return int(self._last("env_steps", 0.0))

    @property
    def share(self) -> float:
        """Completed share of the run, 0 to 1; NaN if the limit is unknown."""
        return math.nan if self.limit is None else min(1.0, self._last(self.limit.column, 0.0) / self.limit.value)

    def refresh(self) -> None:
        """Read the new rows of `metrics.csv`."""
        self.columns = self._table.refresh()

    def score(self, metric: str) -> float:
        """Return the last finite value of a metric, or NaN."""
        column = self.columns.get(metric, np.empty(0))
        return float(column[np.isfinite(column)][-1]) if np.isfinite(column).any() else math.nan

    def text(self) -> str:
        """Return env steps and score."""
        scores = [f"{metric} {value:.5g}" for metric in METRICS if not math.isnan(value := self.score(metric))]
        return ", ".join([f"{self.env_steps:,} env steps", *scores[:1]])

    def output(self) -> list[str]:
        """Return the lines that the process has written."""
        return self.log.read_text(errors="replace").splitlines() if self.log.exists() else []

    def _last(self, column: str, default: float) -> float:
        return float(self.columns[column][-1]) if len(self.columns.get(column, ())) else default


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def jobs_of(planned: Plan, count: int) -> int:
    """Return the number of simultaneous processes: `--jobs`, or the number of cores; at most `count`."""
    jobs = planned.options["jobs"]
    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs {jobs}: must be 1 or more")
    return min(count, jobs or cores())


def limit_of(planned: Plan) -> Limit | None:
    """Return the limit at which the runs end if they are not solved earlier; None if only the recipe knows it."""
    if planned.env_steps is not None:
        return Limit("env_steps", planned.env_steps)
    epochs = planned.options["epochs"]
    return None if epochs is None else Limit("epoch", epochs)


def run_jobs(
    jobs: Iterator[Job],
    at_most: int,
    display: Display,
    *,
    is_hopeless: Callable[[Job], bool] | None = None,
    ended: Callable[[Job], None] = lambda job: None,
    command: tuple[str, ...] = (sys.executable, "-m", "rein.cli.child"),
) -> int | None:
    """Run the jobs, at most `at_most` at a time. Returns the signal that ended them early, or None.

    SIGINT, SIGTERM and SIGHUP are sent to all processes, which save their runs, and no further job starts. A job for
    which `is_hopeless` returns True is ended and gets the status "pruned". `ended` is called after each job.
    """
    environment = {"OMP_NUM_THREADS": str(max(1, cores() // at_most)), **os.environ}
    running: dict[Job, subprocess.Popen[bytes]] = {}
    stopped: int | None = None
    with _caught() as signals, display:
        try:
            while True:
                while stopped is None and len(running) < at_most and (job := next(jobs, None)) is not None:
                    running[job] = _start(job, [*command, *job.words], environment, signals)
                    display.begin(job)
                if not running:
                    return stopped
                time.sleep(_POLL)
                while signals:
                    stopped = signals.pop(0)
                    display.stop(stopped)
                    for process in running.values():
                        process.send_signal(stopped)
                for job, process in list(running.items()):
                    job.code = process.poll()  # before the rows are read, so that none is missed
                    job.refresh()
                    if job.code is not None:
                        del running[job]
                        _end(job, process, stopped)
                        display.end(job)
                        ended(job)
                    elif is_hopeless is not None and job.status == "running" and stopped is None and is_hopeless(job):
                        job.status = "pruned"
                        process.terminate()
                display.draw(running)
        finally:
            for process in running.values():  # only after an error
                process.terminate()
                process.communicate()


def _start(job: Job, command: list[str], environment: dict[str, str], signals: list[int]) -> subprocess.Popen[bytes]:
    while (
        job.folder.is_dir() and is_locked(job.folder) and not signals
    ):  # the process of a killed parent is saving the run
        time.sleep(_POLL)
    job.log.parent.mkdir(parents=True, exist_ok=True)
    job.status = "running"
    with job.log.open("wb") as log:  # a new session, so that Ctrl-C reaches only this process, which passes it on
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
        )


def _end(job: Job, process: subprocess.Popen[bytes], stopped: int | None) -> None:
    """Set the status of a job whose process has ended."""
    assert process.stdin is not None
    process.stdin.close()
    if job.status == "pruned":
        return
    if job.code == 0:
        job.status = "solved" if any(line.startswith("solved: ") for line in job.output()) else "finished"
    else:  # before its signal handlers are installed, a process dies of the signal
        killed = stopped is not None and job.code is not None and job.code < 0
        job.status = "interrupted" if killed or job.code in _SAVED else "failed"


def error_of(job: Job) -> str:
    """Return the last line that a failed process has written, or its exit status."""
    lines = [line for line in job.output() if line.strip()]
    return lines[-1].removeprefix("rein: ") if lines else f"exit status {job.code}"


@contextlib.contextmanager
def _caught() -> Iterator[list[int]]:
    """Collect signals in the list that is yielded, instead of ending the process."""
    signals: list[int] = []
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    ignored = hangup is None or signal.getsignal(hangup) == signal.SIG_IGN  # as under nohup
    numbers = [signal.SIGINT, signal.SIGTERM, *([] if ignored else [hangup])]
    previous = {number: signal.signal(number, lambda number, frame: signals.append(number)) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Display:
    """Bars for the running jobs on a terminal, and a line for each job that has ended."""

    def __init__(self, total: int, *, quiet: bool) -> None:
        self._total, self._quiet, self._ended = total, quiet, 0
        self._progress: Any = None
        self._tasks: dict[Job | None, Any] = {}

    def __enter__(self) -> None:
        if self._quiet or not sys.stdout.isatty():
            return
        from rich.progress import BarColumn, Progress, TextColumn

        columns = [TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[text]")]
        self._progress = Progress(columns[0], BarColumn(20), columns[1], auto_refresh=False, transient=True)
        self._progress.start()
        self._tasks[None] = self._progress.add_task("all", total=self._total, text="")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, job: Job) -> None:
        """Show a job that has started."""
        if self._progress is not None:
            self._tasks[job] = self._progress.add_task(job.label, total=None, text="")

    def draw(self, running: dict[Job, Any]) -> None:
        """Draw the bars."""
        if self._progress is None:
            return
        for job in running:
            if not math.isnan(job.share):
                self._progress.update(self._tasks[job], total=1.0, completed=job.share)
            self._progress.update(self._tasks[job], text=job.text())
        share = self._ended + sum(job.share for job in running if not math.isnan(job.share))
        self._progress.update(self._tasks[None], completed=share, text=f"{self._ended} of {self._total}")
        self._progress.refresh()

    def stop(self, number: int) -> None:
        """Print a line for a signal."""
        again = "; a second signal ends them immediately"
        say(f"rein: {signal.Signals(number).name}: the runs end after this iteration and are saved{again}", error=True)

    def end(self, job: Job) -> None:
        """Print a line for a job that has ended."""
        self._ended += 1
        if self._progress is not None:
            self._progress.remove_task(self._tasks.pop(job))
        if not self._quiet:
            say(f"{job.label}: {job.status}, {job.text()}" + (f": {error_of(job)}" if job.status == "failed" else ""))
