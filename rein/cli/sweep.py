"""`rein sweep RECIPE --param ...`: search for good options of a recipe with Optuna.

Only this process uses Optuna. Each trial is a run of `rein train` in its own process, whose `metrics.csv` is read while
it runs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from rich.table import Table

from rein.cli.arguments import named, source, sweeping
from rein.cli.jobs import Display, Job, count_processes, limit_of, run_jobs
from rein.cli.plans import (
    CONFIG,
    PARAM_EXAMPLES,
    Plan,
    Recipe,
    Space,
    flags_of,
    make_plan,
    read_source,
    refuse_repeated,
    take,
    take_all,
    usual_folder,
    words_of,
)
from rein.cli.terminal import say
from rein.errors import StoreError
from rein.files import make_folder, open_file
from rein.ops.random import stream_seed
from rein.store.folder import keep_stores_out
from rein.store.format.sealed import write_whole

BEST, STUDY = "best.toml", "study.db"
_RUNGS = 10  # a run is compared with the others at each tenth of its limit
_FIRST_RUNG = 2  # not before a fifth of the run
_SHOWN = 10  # trials in the table


@attrs.frozen
class Sweep:
    """Recipe, fixed options and spaces of a sweep."""

    plan: Plan
    before: Recipe | None  # options from a file
    words: list[str]  # options of every trial
    spaces: list[Space]
    folder: Path

    @property
    def identity(self) -> dict[str, Any]:
        """Description of the sweep, which must not change when it is continued."""
        recipe = self.plan.recipe.config
        spaces = {space.name: space.text for space in self.spaces}
        search = {name: self.plan.options[name] for name in ("metric", "prune")}
        return {"recipe": recipe["name"], "options": recipe["options"], "values": spaces, **search}

    def job(self, number: int, params: Mapping[str, Any]) -> Job:
        """Return the run of a trial. Runs use their whole budget unless the user has decided about it."""
        folder = self.folder / f"trial-{number}"
        words = [*self.words, *words_of(params)]
        if "stop_when_solved" in self.plan.parameters and "--stop-when-solved" not in self.plan.flags:
            words += [] if "--no-stop-when-solved" in self.plan.flags else ["--no-stop-when-solved"]
        words += ["--config", str(self.folder / CONFIG)] if self.before is not None else []
        words += ["--run", str(folder), "--resume", "--quiet"]
        names = self.plan.experiment.words
        return Job(f"trial {number}", folder, ["train", *names, *words], limit_of(self.plan))

    def config(self, params: Mapping[str, Any]) -> bytes:
        """Return the configuration file of a trial."""
        return make_plan(self.plan.experiment, [*self.words, *words_of(params)], self.before).recipe.toml


class Search:
    """The study of Optuna in the folder of a sweep."""

    def __init__(self, sweep: Sweep, optuna: Any) -> None:
        self._sweep = sweep
        self._optuna = optuna
        self._metric = sweep.plan.options["metric"]
        self._trials: dict[Job, Any] = {}
        self._reported: dict[Job, int] = {}  # last rung
        self.unscored: list[Job] = []
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._storage, self._study = _open_study(sweep.folder / STUDY, optuna)
            number = stream_seed(sweep.plan.options.get("seed", 0), "sweep", len(self._study.trials))
            self._study.sampler = optuna.samplers.TPESampler(seed=number, constant_liar=True)

    def close(self) -> None:
        """Close the file of the study."""
        self._storage.remove_session()

    def left(self) -> int:
        """Return the number of trials that have not ended."""
        return max(0, self._sweep.plan.options["trials"] - len(self._ended()))

    def jobs(self) -> Iterator[Job]:
        """Yield the jobs of the trials that were interrupted, and then of new trials."""
        states = self._optuna.trial.TrialState
        trial_of = self._optuna.trial.Trial
        begun = self._study.get_trials(deepcopy=False, states=[states.RUNNING])
        again = (trial_of(self._study, trial._trial_id) for trial in begun)
        new = iter(self._study.ask, None)
        for trial in itertools.islice(itertools.chain(again, new), self.left()):
            job = self._sweep.job(trial.number, {space.name: space.suggest(trial) for space in self._sweep.spaces})
            self._trials[job] = trial
            yield job

    def is_hopeless(self, job: Job) -> bool:
        """Report the score at each tenth of the run. Returns whether the pruner ends the trial."""
        trial = self._trials[job]
        metric = self._metric
        if job.limit is None or job.limit.column not in job.columns or metric not in job.columns:
            return False
        reported = trial.study.trials[trial.number].intermediate_values if job not in self._reported else {}
        last = self._reported.setdefault(job, max(reported, default=_FIRST_RUNG - 1))
        share = job.columns[job.limit.column] / job.limit.value
        score = job.columns[metric]
        for rung in range(last + 1, _RUNGS):
            reached = np.flatnonzero((share >= rung / _RUNGS) & np.isfinite(score))
            if not len(reached):
                return False
            self._reported[job] = rung
            trial.report(float(score[reached[0]]), rung)
            if trial.should_prune():
                return True
        return False

    def tell(self, job: Job) -> None:
        """Record the result of a trial. An interrupted trial is left open, so that it is continued."""
        states = self._optuna.trial.TrialState
        trial = self._trials[job]
        score = job.score(self._metric)
        if job.status == "interrupted":
            return
        trial.set_user_attr("env_steps", job.env_steps)
        if job.status == "pruned":
            self._study.tell(trial, state=states.PRUNED)
        elif job.status == "failed" or math.isnan(score):
            self._study.tell(trial, state=states.FAIL)
            self.unscored.append(job)
        else:
            self._study.tell(trial, score)

    def best(self) -> Any:
        """Return the completed trial with the highest score, or None."""
        done = [trial for trial in self._ended() if trial.state.name == "COMPLETE"]
        return max(done, key=lambda trial: trial.value, default=None)

    def table(self) -> Table:
        """Return a table of the best trials."""
        names = [space.name for space in self._sweep.spaces]
        headings = ["trial", self._metric, *names, "env steps", "status"]
        table = Table(*headings, box=None, pad_edge=False, header_style="bold")
        scored = [trial for trial in self._ended() if trial.value is not None]
        scored.sort(key=lambda trial: (trial.state.name == "COMPLETE", trial.value), reverse=True)
        for trial in scored[:_SHOWN]:
            values = [trial.params.get(name) for name in names]
            texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
            status = "pruned" if trial.state.name == "PRUNED" else "completed"
            steps = f"{trial.user_attrs.get('env_steps', 0):,}"
            table.add_row(str(trial.number), f"{trial.value:.5g}", *texts, steps, status)
        return table

    def counts(self) -> str:
        """Return a line with the number of trials in each state."""
        states = [trial.state.name for trial in self._study.trials]
        words = {"COMPLETE": "completed", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "interrupted"}
        return ", ".join(f"{states.count(name):,} {word}" for name, word in words.items() if name in states)

    def _ended(self) -> list[Any]:
        return [trial for trial in self._study.trials if trial.state.is_finished()]

    def check(self) -> None:
        """Raise ValueError if the study in the folder is of another sweep."""
        identity = json.loads(json.dumps(self._sweep.identity))
        earlier = self._study.user_attrs.get("sweep", identity)
        earlier = earlier if isinstance(earlier, dict) else {}  # a damaged file may contain anything
        for key, value in identity.items():
            if earlier.get(key) != value:
                was, now = _difference(earlier.get(key), value)
                where = self._sweep.folder
                raise ValueError(f"{where}: is a sweep with other {key}: {was}, not {now}; give another --run")
        self._study.set_user_attr("sweep", identity)


def sweep_command(arguments: Sequence[str]) -> None:
    """Run `rein sweep RECIPE`."""
    sweep = _parse_sweep(arguments)
    optuna = _import_optuna()
    options = sweep.plan.options
    command = shlex.join(["rein", "sweep", *arguments])
    make_folder(sweep.folder)
    with keep_stores_out(sweep.folder), contextlib.closing(Search(sweep, optuna)) as search:
        search.check()
        write_whole(sweep.folder / CONFIG, sweep.plan.recipe.toml)
        left = search.left()
        at_most = count_processes(sweep.plan, max(1, left))
        is_hopeless = search.is_hopeless if options["prune"] else None
        display = Display(left, quiet=options["quiet"])
        stopped = run_jobs(search.jobs(), at_most, display, is_hopeless=is_hopeless, ended=search.tell)
        say(search.table())
        say(f"{search.counts()}, in {sweep.folder}")
        for job in search.unscored:
            missing = f"its run has no value of {options['metric']}; use a longer run, or another --metric"
            reason = job.error() if job.status == "failed" else missing
            say(f"{job.label} has no score: {reason}; see {job.log}")
        best = search.best()
        if best is not None:
            write_whole(sweep.folder / BEST, sweep.config(best.params))
    if best is not None:
        names = sweep.plan.experiment.foreign_words
        again = shlex.join(["rein", "train", *names, "--config", str(sweep.folder / BEST), "--seeds", "100-104"])
        say(f"best: trial {best.number}. Train it with new seeds: {again}")
    if stopped is not None:
        say(f"continue with: {command}")
        raise SystemExit(128 + stopped)
    if best is None:
        raise SystemExit(1)


def _parse_sweep(words: Sequence[str]) -> Sweep:
    """Return the sweep that `words` describe. Raises ValueError or TypeError if they do not fit."""
    rest = list(words)
    experiment, before, _ = read_source(rest, "sweep")
    name = experiment.name
    texts = take_all(rest, "--param")
    plan = make_plan(experiment, rest, before, "sweep", (named, source, sweeping))
    if not texts:
        raise ValueError(f"rein sweep {name}: give the values of one option or more, {PARAM_EXAMPLES}")
    if plan.options["resume"]:
        raise ValueError("--resume: rein sweep continues the sweep in its folder without it; remove it")
    if plan.options["trials"] < 1:
        raise ValueError(f"--trials {plan.options['trials']}: must be 1 or more")
    if "store" not in plan.parameters:
        raise ValueError(f"rein sweep {name}: the function has no parameter `store`")
    folder = plan.options["run"] or usual_folder(name).with_name(f"{usual_folder(name).name}-sweep")
    folder = folder.expanduser()
    if folder.exists() and not (folder / STUDY).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not the folder of a sweep; give another --run")
    for flag in ("--trials", "--jobs", "--run", "--metric"):
        take(rest, flag)
    rest = [word for word in rest if word not in ("--quiet", "--prune", "--no-prune")]
    names = {*plan.parameters} - {"store"}
    spaces = [
        Space.parse(text, names, lambda more: make_plan(experiment, [*rest, *more], before, "sweep")) for text in texts
    ]
    refuse_repeated(spaces, flags_of(rest))
    return Sweep(plan, before, rest, spaces, folder)


def _difference(earlier: Any, now: Any) -> tuple[Any, Any]:
    """Return two values, or only the entries in which two dictionaries differ."""
    if not isinstance(earlier, dict) or not isinstance(now, dict):
        return earlier, now
    names = [name for name in {**earlier, **now} if earlier.get(name) != now.get(name)]
    return {name: earlier.get(name) for name in names}, {name: now.get(name) for name in names}


def _open_study(file: Path, optuna: Any) -> tuple[Any, Any]:
    """Open or create the study in a file of SQLite. Returns its storage and the study. Raises StoreError."""
    from sqlalchemy.engine import URL  # pyright: ignore[reportMissingImports]  # installed with Optuna
    from sqlalchemy.pool import NullPool  # pyright: ignore[reportMissingImports]

    try:
        if os.path.lexists(file):
            open_file(file).close()
        url = str(URL.create("sqlite", database=str(file)))  # encodes ? and %
        storage = optuna.storages.RDBStorage(url, {"poolclass": NullPool})  # no connection stays open after a session
        pruner = optuna.pruners.MedianPruner(n_startup_trials=5)
        options = {"study_name": "rein", "direction": "maximize", "load_if_exists": True, "pruner": pruner}
        study = optuna.create_study(storage=storage, **options)
        study.get_trials(deepcopy=False)  # reads the whole file
    except Exception as error:  # a damaged file can raise anything
        reason = next(iter(str(error).splitlines()), "").strip(" .") or type(error).__name__
        advice = "move it away to start the sweep again"
        raise StoreError(f"{file}: cannot be read as the study of a sweep: {reason}; {advice}") from error
    return storage, study


def _import_optuna() -> Any:
    try:
        import optuna  # pyright: ignore[reportMissingImports]  # optional
    except ImportError as error:
        raise ImportError("rein sweep needs Optuna: pip install optuna") from error
    return optuna
