"""List the runs in a folder, from their small files: `run.json`, `metrics.csv` and the lock of the folder."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rein.errors import StoreError
from rein.files import absolute, read_json
from rein.store.folder import TRAJECTORIES, is_locked
from rein.store.metrics_files import EPOCHS, EVALUATIONS, CSVTable

RETURNS = ("episode_return_100", "episode_return", "evaluation_return")
_IGNORED = ("threads", "run", "resume", "quiet", "debug")  # options of a recipe that do not change results
_EVALUATED = ("return", "length", "success_rate")  # columns of evaluations.csv, by their first letters
NUMBERS = ("return", "evaluation", "env steps", "time")  # columns of a table that are aligned to the right
OPTIONS = 5  # maximum number of options in a table
CHARACTERS = 40  # of an option in a printed list of runs
_COLUMNS = {"time": "seconds", "recipe": "name", "recipe_or_agent": "name"}  # of a table -> in a record
_STATUSES = ("completed", "solved", "halted", "interrupted", "failed")  # that `run.json` can contain


@attrs.frozen
class RunSummary:
    """Summary of a run, see `rein.list_runs`.

    Attributes:
        path: Folder of the run.
        status: "running", "solved" (reached the target of `rein.record_solved`), "completed" (reached its limit),
            "halted", "interrupted" (can be resumed), "failed" (raised an exception), "killed" (ended without a status),
            or "damaged".
        note: Reason of a halt or an interrupt, exception of a failure, or what is damaged; None without one.
        name: Recipe, or agent and environment.
        options: Options of the recipe, or of the agent and the environment, by name.
        metrics: Last finite value of each metric, and of each clock. Those of evaluations are from the last evaluation,
            also if it ended after the last epoch.
    """

    path: Path
    status: str
    note: str | None = None
    name: str = ""
    options: Mapping[str, Any] = attrs.field(factory=dict)
    metrics: Mapping[str, float] = attrs.field(factory=dict)

    @property
    def mean_return(self) -> float:
        """Mean return of the last 100 training episodes, or of the last epoch before 100 have ended; NaN if unknown."""
        return next((self.metrics[name] for name in RETURNS if name in self.metrics), math.nan)

    @property
    def env_steps(self) -> int:
        """Number of env steps at the end of the last epoch."""
        return int(self.metrics.get("env_steps", 0))

    @property
    def seconds(self) -> float:
        """Seconds of running, over all resumes, at the end of the last epoch."""
        return self.metrics.get("seconds", 0.0)

    @property
    def record(self) -> dict[str, Any]:
        """Summary as JSON, with null for numbers that are not finite."""
        returns = {"return": self.mean_return, "evaluation": self.metrics.get("evaluation_return", math.nan)}
        return {
            "path": str(self.path),
            "status": self.status,
            "reason": self.note,
            "name": self.name,
            **_finite(returns),
            "env_steps": self.env_steps,
            "seconds": self.seconds,
            "options": dict(self.options),
            "metrics": _finite(self.metrics),
        }


class RunList(list[RunSummary]):
    """Summaries of the runs in a folder. Printing it shows a table."""

    def __init__(self, runs: Iterable[RunSummary], folder: Path) -> None:
        super().__init__(runs)
        self.folder = folder

    def name(self, run: RunSummary) -> str:
        """Return the name of a run: its path in the folder."""
        return run.path.name if run.path == self.folder else str(run.path.relative_to(self.folder))

    def columns(self, options: Sequence[str]) -> list[tuple[str, list[str]]]:
        """Return the headings and the cells of a table. The last columns are `options` of the runs."""
        columns = [
            ("run", [self.name(run) for run in self]),
            ("status", [run.status for run in self]),
            ("return", [_number(run.mean_return) for run in self]),
            ("evaluation", [_number(run.metrics.get("evaluation_return", math.nan)) for run in self]),
            ("env steps", ["-" if run.status == "damaged" else f"{run.env_steps:,}" for run in self]),
            ("time", ["-" if run.status == "damaged" else _duration(run.seconds) for run in self]),
            ("recipe or agent", [run.name or "-" for run in self]),
        ]
        for option in options:
            heading = option.removeprefix("agent.").replace("_", " ")
            columns.append((heading, [_value(run.options[option]) if option in run.options else "-" for run in self]))
        left_out = [] if any("evaluation_return" in run.metrics for run in self) else ["evaluation"]
        left_out += [] if len({run.name for run in self if run.status != "damaged"}) > 1 else ["recipe or agent"]
        return [(heading, cells) for heading, cells in columns if heading not in left_out]

    def __repr__(self) -> str:
        """Return the table as text."""
        if not self:
            return f"no runs in {self.folder}"
        return "\n".join(self.table(differing(self)[:OPTIONS])[0])

    def table(self, options: Sequence[str], width: float = math.inf) -> tuple[list[str], list[str]]:
        """Return the lines of the table, and the headings of the last columns, which do not fit in `width` characters.

        Run, status and return are always there, and long options are cut.
        """
        aligned, left_out, used = [], [], 0
        for place, (heading, cells) in enumerate(self.columns(options)):
            texts = [_printable(text if heading == "run" else text[:CHARACTERS]) for text in (heading, *cells)]
            size = max(map(len, texts))
            used += size + 2 * (place > 0)
            if left_out or (used > width and place > 2):
                left_out.append(heading)
            else:
                aligned.append([text.rjust(size) if heading in NUMBERS else text.ljust(size) for text in texts])
        return ["  ".join(row).rstrip() for row in zip(*aligned, strict=True)], left_out

    def sorted_by(self, column: str) -> RunList:
        """Return the runs sorted by a column, an option or a metric. Large numbers come first, runs without it last.

        Raises ValueError if no run has it.
        """
        name = column.replace("-", "_").replace(" ", "_")
        values = [_value_of(run, _COLUMNS.get(name, name)) for run in self]
        if self and all(value is None for value in values):
            names = dict.fromkeys(heading.replace(" ", "_") for heading, _ in self.columns(())[1:])
            raise ValueError(f"no run has a column, option or metric {column!r}; the columns are {', '.join(names)}")
        order = sorted(range(len(self)), key=lambda place: _order(values[place]))
        return RunList((self[place] for place in order), self.folder)


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _value_of(run: RunSummary, name: str) -> Any:
    """Return a value of a run by the name of a column, an option or a metric; None if it has none, or NaN."""
    record = {**run.metrics, **{key.removeprefix("agent."): value for key, value in run.options.items()}, **run.options}
    value = (record | run.record).get(name)
    return None if isinstance(value, float) and math.isnan(value) else value


def _order(value: Any) -> tuple[int, float, str]:
    if value is None:
        return 2, 0.0, ""
    return (0, -float(value), "") if isinstance(value, int | float) else (1, 0.0, _value(value))


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.5g}"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _printable(text: str) -> str:
    """Return a text, which may come from a received file, without control characters."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _duration(seconds: float) -> str:
    """Return seconds as `12 s`, `3m 05s` or `1h 02m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60:,}h {minutes % 60:02d}m"


def list_runs(folder: str | os.PathLike[str] = "runs") -> RunList:
    """Return a summary of each run in a folder and its subfolders, sorted by path. Print it to see a table.

    The folder may be the folder of one run. Folders inside of a run, such as recorded evaluations, are not listed. A
    run that cannot be read has the status "damaged". A run that has not ended is "running" if a process has locked its
    folder, and "killed" otherwise. On file systems without locks, running runs are shown as killed.

    Example:
        >>> [run.path for run in rein.list_runs("runs") if run.status == "killed"]

    Raises:
        StoreError: If the folder does not exist.
    """
    folder = absolute(folder)
    if not folder.is_dir():
        what = "it is not a folder" if folder.exists() else "the folder does not exist"
        raise StoreError(f"{folder}: no runs, because {what}")
    return RunList([_summary(path) for path in sorted(_folders(folder), key=_natural)], folder)


def differing(runs: Sequence[RunSummary]) -> list[str]:
    """Return the names of the options that have several values among the runs that have them."""
    values: dict[str, set[str]] = {}
    for run in runs:
        for name, value in run.options.items():
            values.setdefault(name, set()).add(json.dumps(value, sort_keys=True))
    return [name for name, texts in values.items() if len(texts) > 1]


def _folders(folder: Path) -> Iterator[Path]:
    for path, inner, files in os.walk(folder):
        if "run.json" in files or EPOCHS in files or TRAJECTORIES in inner:
            inner.clear()
            yield Path(path)
        inner[:] = [name for name in inner if not name.startswith(".")]
        links = [Path(path, name) for name in inner if Path(path, name).is_symlink()]  # not followed by os.walk
        yield from (link for link in links if (link / "run.json").is_file())


def _natural(path: Path) -> list[Any]:
    """Return a key that sorts `seed-2` before `seed-10`."""
    return [
        [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)] for name in path.parts
    ]


def _summary(path: Path) -> RunSummary:
    try:
        info = _info(path)
        name, options = _described(info)
        metrics = {}
        for column, values in CSVTable(path / EPOCHS).refresh().items():
            if values.dtype.kind == "f" and len(finite := values[np.isfinite(values)]):
                metrics[column] = float(finite[-1])
        metrics |= _last_evaluation(path)
        ended = info.get("ended")
        ended = ended if isinstance(ended, Mapping) and ended.get("status") in _STATUSES else None
        if ended is not None:
            status, reason = str(ended["status"]), ended.get("reason")
            return RunSummary(path, status, None if reason is None else str(reason), name, options, metrics)
        return RunSummary(path, "running" if is_locked(path) else "killed", None, name, options, metrics)
    except StoreError as error:
        return RunSummary(path, "damaged", str(error))
    except Exception as error:  # files of a run may contain anything, and one run must not end the listing
        return RunSummary(path, "damaged", f"its files cannot be read: {error!r}")


def _last_evaluation(path: Path) -> dict[str, float]:
    """Return the metrics of the last evaluation named "evaluation", which may have ended after the last epoch."""
    table = CSVTable(path / EVALUATIONS).refresh()
    named = np.flatnonzero(table["name"] == b"evaluation") if "name" in table else np.zeros(0, np.int64)
    if not len(named):
        return {}
    last = {name: float(column[named[-1]]) for name, column in table.items() if name.startswith(_EVALUATED)}
    return {f"evaluation_{name}": value for name, value in last.items() if math.isfinite(value)}


def _info(path: Path) -> dict[str, Any]:
    try:
        return read_json(path / "run.json")
    except (OSError, ValueError) as error:
        raise StoreError(f"run.json cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _described(info: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of a run from its `run.json`."""
    parts = info["parts"]
    if "recipe" in parts:
        recipe = parts["recipe"]["config"]
        return str(recipe["name"]), {k: v for k, v in recipe["options"].items() if k not in _IGNORED}
    configs = {part: parts.get(part, {}).get("config", {}) for part in ("agent", "environment")}
    kinds = [str(parts.get(part, {}).get("type", "?")).rpartition(".")[2] for part in configs]
    kinds[1] = str(configs["environment"].get("id", kinds[1]))
    options = {f"{part}.{name}": value for part, config in configs.items() for name, value in config.items()}
    if options.get("environment.seed") == options.get("agent.seed"):
        options.pop("environment.seed", None)
    return " in ".join(kinds), options
