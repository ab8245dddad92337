"""Runs of several seeds or trials, each in its own process, with one progress display and a table of the results."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import attrs
import numpy as np
import torch
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column, Table

from rein.cli import END_WITH_PARENT
from rein.cli.arguments import named, several, source
from rein.cli.experiment import Experiment
from rein.cli.plans import CONFIG, Plan, Recipe, flags_of, free_folder, make_plan, take, usual_folder
from rein.cli.terminal import say
from rein.files import make_folder
from rein.ops.random import generator
from rein.ops.statistics import bootstrap_interval, interquartile_mean
from rein.store.folder import is_locked, keep_stores_out
from rein.store.format.sealed import write_whole
from rein.store.metrics_files import EPOCHS, CSVTable

METRICS = ("episode_return_100", "evaluation_return")  # scores of a run, in order of preference
LOGS = "logs"  # folder for the output of the processes
_POLL = 0.1  # seconds
_MOST_SEEDS = 10_000
_SEEDS = re.compile(r"(\d{1,19})(?:-(\d{1,19}))?")
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
    columns: dict[str, np.ndarray] = attrs.field(init=False, factory=dict)  # of `metrics.csv`
    _table: CSVTable = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._table = CSVTable(self.folder / EPOCHS)

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

    @property
    def progress(self) -> list[str]:
        """Env steps, and the score if there is one."""
        scores = [f"{metric} {value:.5g}" for metric in METRICS if not math.isnan(value := self.score(metric))]
        return [f"{self.env_steps:,} env steps", *scores[:1]]

    def output(self) -> list[str]:
        """Return the lines that the process has written."""
        return self.log.read_text(errors="replace").splitlines() if self.log.exists() else []

    def error(self) -> str:
        """Return the last line that a failed process has written, or its exit status."""
        lines = [line for line in self.output() if line.strip()]
        return lines[-1].removeprefix("rein: ") if lines else f"exit status {self.code}"

    def _last(self, column: str, default: float) -> float:
        return float(self.columns[column][-1]) if len(self.columns.get(column, ())) else default


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_processes(plan: Plan, count: int) -> int:
    """Return the number of simultaneous processes: `--jobs`, or the number of cores; at most `count`."""
    jobs = plan.options["jobs"]
    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs {jobs}: must be 1 or more")
    return min(count, jobs or cores())


def limit_of(plan: Plan) -> Limit | None:
    """Return the limit at which the runs end if they are not solved earlier; None if only the recipe knows it."""
    if plan.env_steps is not None:
        return Limit("env_steps", plan.env_steps)
    epochs = plan.options["epochs"]
    return None if epochs is None else Limit("epoch", epochs)


def run_jobs(
    jobs: Iterator[Job],
    at_most: int,
    display: Display,
    *,
    is_hopeless: Callable[[Job], bool] | None = None,
    ended: Callable[[Job], None] = lambda job: None,
    command: tuple[str, ...] = (sys.executable, "-m", "rein", END_WITH_PARENT),
) -> int | None:
    """Run the jobs, at most `at_most` at a time. Returns the signal that ended them early, or None.

    SIGINT, SIGTERM and SIGHUP are sent to all processes, which save their runs, and no further job starts. A job for
    which `is_hopeless` returns True is ended and gets the status "pruned". `ended` is called after each job.
    """
    environment = {"OMP_NUM_THREADS": str(max(1, cores() // at_most)), **os.environ}
    running: dict[Job, subprocess.Popen[bytes]] = {}
    stopped: int | None = None
    with _collect_signals() as signals, display:
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
                        _stop(process, stopped)
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
    # the process of a killed parent may still be saving the run
    while job.folder.is_dir() and is_locked(job.folder) and not signals:
        time.sleep(_POLL)
    job.log.parent.mkdir(parents=True, exist_ok=True)
    job.status = "running"
    with job.log.open("wb") as log:  # a new session, so that Ctrl-C reaches only this process, which passes it on
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
        )


def _stop(process: subprocess.Popen[bytes], number: int) -> None:
    """Let a process save its run and end. Windows cannot send it a signal, but it also ends when its input closes."""
    if sys.platform == "win32":
        assert process.stdin is not None
        process.stdin.close()
    else:
        process.send_signal(number)


def _end(job: Job, process: subprocess.Popen[bytes], stopped: int | None) -> None:
    """Set the status of a job whose process has ended."""
    assert process.stdin is not None
    process.stdin.close()
    if job.status == "pruned":
        return
    if job.code == 0:
        job.status = "solved" if any(line.startswith("solved: ") for line in job.output()) else "completed"
    else:  # before its signal handlers are installed, a process dies of the signal
        killed = stopped is not None and job.code is not None and job.code < 0
        job.status = "interrupted" if killed or job.code in _SAVED else "failed"


@contextlib.contextmanager
def _collect_signals() -> Iterator[list[int]]:
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
        self._total = total
        self._quiet = quiet
        self._ended = 0
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(20),
            TextColumn("{task.fields[steps]}", table_column=Column(justify="right")),
            TextColumn("{task.fields[score]}"),
            auto_refresh=False,
            transient=True,
        )
        self._tasks: dict[Job, TaskID] = {}
        self._all = self._bars.add_task("all", total=total, steps="", score="")

    def __enter__(self) -> None:
        if not self._quiet and sys.stdout.isatty():
            self._bars.start()

    def __exit__(self, *error: object) -> None:
        if self._bars.live.is_started:
            self._bars.stop()

    def begin(self, job: Job) -> None:
        """Show a job that has started."""
        self._tasks[job] = self._bars.add_task(job.label, total=None, steps="", score="")

    def draw(self, running: Collection[Job]) -> None:
        """Draw the bars."""
        shares = {job: job.share for job in running if not math.isnan(job.share)}
        for job in running:
            texts = dict(zip(("steps", "score"), job.progress, strict=False))
            total = 1.0 if job in shares else None  # a bar without a limit pulses
            self._bars.update(self._tasks[job], total=total, completed=shares.get(job, 0.0), **texts)
        completed = self._ended + sum(shares.values())
        self._bars.update(self._all, completed=completed, steps=f"{self._ended} of {self._total}")
        self._bars.refresh()

    def stop(self, number: int) -> None:
        """Print a line for a signal."""
        again = "; a second signal ends them immediately"
        say(f"rein: {signal.Signals(number).name}: the runs end after this iteration and are saved{again}", error=True)

    def end(self, job: Job) -> None:
        """Print a line for a job that has ended."""
        self._ended += 1
        self._bars.remove_task(self._tasks.pop(job))
        if not self._quiet:
            error = f": {job.error()}" if job.status == "failed" else ""
            say(f"{job.label}: {', '.join([job.status, *job.progress])}{error}")


def train_seeds(experiment: Experiment, words: Sequence[str], before: Recipe | None, origin: Sequence[str]) -> None:
    """Run `rein train ... --seeds SEEDS`: a run for each seed, each in its own process.

    `words` do not include those that name the experiment, and `origin`, the file from which `before` was read.
    """
    plan = make_plan(experiment, words, before, also=(named, source, several))
    seeds = parse_seeds(plan.options["seeds"])
    for option in ("seed", "store"):
        if option not in plan.parameters:
            raise ValueError(f"--seeds: {plan.name} has no parameter `{option}`")
    if "--seed" in plan.flags and (before is None or "--seed" in flags_of(words)):
        raise ValueError("--seeds and --seed: give one of the two")
    at_most = count_processes(plan, len(seeds))
    folder = _folder_of_runs(plan)
    rest = [word for word in words if word not in ("--quiet", "--resume")]
    for flag in ("--seeds", "--jobs", "--run"):
        take(rest, flag)
    make_folder(folder)
    with keep_stores_out(folder):
        write_whole(folder / CONFIG, plan.recipe.toml)
        same = ["--config", str(folder / CONFIG)] if before is not None else []
        same += ["--resume"] if plan.options["resume"] else []
        jobs: list[Job] = []
        for seed in seeds:
            run = folder / f"seed-{seed}"
            changed = ["--seed", str(seed), "--run", str(run), "--quiet"]
            jobs.append(Job(f"seed {seed}", run, ["train", *experiment.words, *rest, *same, *changed], limit_of(plan)))
        stopped = run_jobs(iter(jobs), at_most, Display(len(jobs), quiet=plan.options["quiet"]))
    say(_table(jobs))
    for line in _summary(jobs):
        say(line)
    if stopped is not None:
        same = ["--seeds", plan.options["seeds"], "--run", str(folder), "--resume"]
        say(f"continue with: {shlex.join(['rein', 'train', *experiment.words, *rest, *origin, *same])}")
        raise SystemExit(128 + stopped)
    if any(job.columns for job in jobs):
        say(f"plot: rein plot {shlex.quote(str(folder))}/seed-*")
    if any(job.status not in ("completed", "solved") for job in jobs):
        raise SystemExit(1)


def parse_seeds(text: str) -> list[int]:
    """Return the seeds in a text such as `0-9` or `0,3,5`, in ascending order."""
    seeds: set[int] = set()
    for part in text.split(","):
        match = _SEEDS.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < first + _MOST_SEEDS:
            raise ValueError(f"--seeds {text}: give seeds such as 0-9 or 0,3,5, at most {_MOST_SEEDS:,}")
        seeds.update(range(first, last + 1))
    return sorted(seeds)


def _folder_of_runs(plan: Plan) -> Path:
    """Return the folder for the folders of the runs."""
    run = plan.options["run"]
    resumes = plan.options["resume"]
    if run is None:
        return free_folder(usual_folder(plan.name))
    if not resumes and run.expanduser().exists():
        raise ValueError(f"{run} exists; continue its runs with --resume, or give another --run")
    return run.expanduser()


def _table(jobs: Sequence[Job]) -> Table:
    """Return a table with a row for each run."""
    metrics = [metric for metric in METRICS if any(not math.isnan(job.score(metric)) for job in jobs)]
    table = Table("run", *metrics, "env steps", "status", box=None, pad_edge=False, header_style="bold")
    for job in jobs:
        scores = ["-" if math.isnan(value := job.score(metric)) else f"{value:.5g}" for metric in metrics]
        table.add_row(job.label, *scores, f"{job.env_steps:,}", job.status)
    return table


def _summary(jobs: Sequence[Job]) -> list[str]:
    """Return lines with the interquartile means of the completed runs, and with the errors of the others."""
    lines: list[str] = []
    for metric in METRICS:
        scores = [job.score(metric) for job in jobs if job.status in ("completed", "solved")]
        scores = [score for score in scores if not math.isnan(score)]
        if scores:
            score_ST = torch.tensor(scores, dtype=torch.float64, device="cpu").unsqueeze(-1)
            low, high = bootstrap_interval(score_ST, generator(0, "bootstrap")).tolist()
            mean = interquartile_mean(score_ST).item()
            interval = f"interquartile mean {mean:.5g}, 95 % interval {low:.5g} to {high:.5g}"
            lines.append(f"{metric}: {interval}, {len(scores)} run{'s' * (len(scores) > 1)}")
    return [*lines, *(f"{job.label} failed: {job.error()}; see {job.log}" for job in jobs if job.status == "failed")]
