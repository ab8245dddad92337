"""`rein train RECIPE --seeds 0-9`: run a recipe with several seeds, each in its own process."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.table import Table

from rein.cli.config import FILE, config_of
from rein.cli.options import several, source
from rein.cli.output import say
from rein.cli.plan import Plan, flags_of, free, plan, take, usual_folder
from rein.cli.processes import METRICS, Display, Job, error_of, jobs_of, limit_of, run_jobs
from rein.cli.recipes import Recipe
from rein.files import make_folder
from rein.ops.random import generator
from rein.ops.statistics import bootstrap_interval, interquartile_mean
from rein.store.folder import keep_stores_out
from rein.store.format.sealed import write_whole

_MOST = 10_000  # maximum number of seeds
_RANGE = re.compile(r"(\d{1,19})(?:-(\d{1,19}))?")


def train_seeds(name: str, words: Sequence[str], before: Recipe | None, origin: Sequence[str]) -> None:
    """Run `rein train NAME --seeds SEEDS`.

    `words` are the words after the name, without `origin`, the words that name the file from which `before` was read.
    """
    planned = plan(name, list(words), before, also=(source, several))
    seeds = seeds_of(planned.options["seeds"])
    for option in ("seed", "store"):
        if option not in planned.own:
            raise ValueError(f"--seeds: {name} has no parameter `{option}`")
    if "--seed" in planned.given and (before is None or "--seed" in flags_of(words)):
        raise ValueError("--seeds and --seed: give one of the two")
    at_most, folder, rest = jobs_of(planned, len(seeds)), _folder(planned), list(words)
    for flag in ("--seeds", "--jobs", "--run"):
        take(rest, flag)
    rest = [word for word in rest if word not in ("--quiet", "--resume")]
    make_folder(folder)
    with keep_stores_out(folder):
        write_whole(folder / FILE, config_of(planned.recipe))
        again = ["--config", str(folder / FILE)] if before is not None else []
        resumes = ["--resume"] if planned.options["resume"] else []
        limit, jobs = limit_of(planned), list[Job]()
        for seed in seeds:
            run = folder / f"seed-{seed}"
            changed = ["--seed", str(seed), "--run", str(run), "--quiet"]
            jobs.append(Job(f"seed {seed}", run, ["train", name, *rest, *again, *resumes, *changed], limit))
        stopped = run_jobs(iter(jobs), at_most, Display(len(jobs), quiet=planned.options["quiet"]))
    say(table_of(jobs))
    for line in summary_of(jobs):
        say(line)
    if stopped is not None:
        once_more = ["rein", "train", name, *rest, *origin, "--seeds", planned.options["seeds"], "--run", str(folder)]
        say(f"continue with: {shlex.join([*once_more, '--resume'])}")
        raise SystemExit(128 + stopped)
    if any(job.columns for job in jobs):
        say(f"plot: rein plot {shlex.quote(str(folder))}/seed-*")
    if any(job.status not in ("finished", "solved") for job in jobs):
        raise SystemExit(1)


def seeds_of(text: str) -> list[int]:
    """Return the seeds in a text such as `0-9` or `0,3,5`, in ascending order."""
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < first + _MOST:
            raise ValueError(f"--seeds {text}: give seeds such as 0-9 or 0,3,5, at most {_MOST:,}")
        found.update(range(first, last + 1))
    return sorted(found)


def table_of(jobs: Sequence[Job]) -> Table:
    """Return a table with a row for each run."""
    shown = [metric for metric in METRICS if any(not math.isnan(job.score(metric)) for job in jobs)]
    table = Table("run", *shown, "env steps", "status", box=None, pad_edge=False, header_style="bold")
    for job in jobs:
        scores = ["-" if math.isnan(value := job.score(metric)) else f"{value:.5g}" for metric in shown]
        table.add_row(job.label, *scores, f"{job.env_steps:,}", job.status)
    return table


def summary_of(jobs: Sequence[Job]) -> list[str]:
    """Return lines with the interquartile means of the completed runs, and with the errors of the others."""
    lines: list[str] = []
    for metric in METRICS:
        scores = [job.score(metric) for job in jobs if job.status in ("finished", "solved")]
        scores = [score for score in scores if not math.isnan(score)]
        if scores:
            score_ST = torch.tensor(scores, dtype=torch.float64, device="cpu").unsqueeze(-1)
            low, high = bootstrap_interval(score_ST, generator(0, "bootstrap")).tolist()
            mean = interquartile_mean(score_ST).item()
            interval = f"interquartile mean {mean:.5g}, 95 % interval {low:.5g} to {high:.5g}"
            lines.append(f"{metric}: {interval}, {len(scores)} run{'s' * (len(scores) > 1)}")
    return [*lines, *(f"{job.label} failed: {error_of(job)}; see {job.log}" for job in jobs if job.status == "failed")]


def _folder(planned: Plan) -> Path:
    """Return the folder for the folders of the runs."""
    run, resumes = planned.options["run"], planned.options["resume"]
    if run is None:
        return free(usual_folder(planned.name))
    if not resumes and run.expanduser().exists():
        raise ValueError(f"{run} exists; continue its runs with --resume, or give another --run")
    return run.expanduser()
