"""Write the metrics of a run to `metrics.csv`, `evaluations.csv` and `metrics.h5` in its folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rein.errors import StoreError
from rein.handlers.loggers.csv import CSVLogger, merge
from rein.loop import Loop
from rein.loop.state import State
from rein.store.checkpoint_folder import FOLDER as CHECKPOINTS
from rein.store.folder import TRAJECTORIES, first_epoch, missing_epochs, move_aside, spans_of
from rein.store.format.nexus import write_learning_curves
from rein.store.format.sealed import compose, write_whole
from rein.store.metrics_files import EPOCHS, EVALUATIONS, PLOT, CSVTable, evaluations_of, newer_rows

_SECONDS = 10.0  # minimum seconds between two writes of metrics.h5
_SHARE = 0.01  # maximum share of the run time spent on writing it

logger = logging.getLogger("rein")


def record_metrics(loop: Loop, run: Path) -> None:
    """Write each epoch to `metrics.csv`, each evaluation to `evaluations.csv`, and both to `metrics.h5`.

    The files are in the folder `run`. A failed write is logged once, and the run continues without them.
    """
    files = loop.own("metrics_files", RunMetrics(run))

    @loop.started.wire
    def begin(state: State) -> None:
        files.begin(state)
        if "evaluation_completed" in loop.events and not files.observes_evaluations:
            loop.events["evaluation_completed"].wire(files.add_evaluation)
            files.observes_evaluations = True
        loop.cleanups.append(files.close)

    @loop.epoch_ended.wire
    def add_epoch(state: State) -> None:
        state.request(files.add_epoch)  # runs after all handlers, which may add metrics or fail


class RunMetrics:
    """Writes a row for every epoch and evaluation of a loop to the folder `run`.

    This part of a loop has no state: the loop's counts decide which rows belong to the run, and a checkpoint flushes
    the files. Errors never affect the run. A file that cannot be written is reported once and then no longer written.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._rows = {name: CSVLogger(run / name) for name in (EPOCHS, EVALUATIONS)}
        self._tables = [CSVTable(run / name) for name in self._rows]
        self._changed = False  # whether rows were added since metrics.h5 was written
        self._written_at = time.monotonic()
        self._cost = 0.0  # seconds of the last write of metrics.h5
        self.observes_evaluations = False
        self._warned: set[Path] = set()  # files whose gaps were reported
        self._failed: set[str] = set()  # files that are no longer written

    @property
    def config(self) -> dict[str, Any]:
        """Configuration: empty."""
        return {}

    def flush(self) -> None:
        """Wait until all rows are safe on the disk. Rewrites `metrics.h5` unless it was just written."""
        for name, rows in self._rows.items():
            self._guarded(name, rows.flush)
        self._plot_if(self._is_due(0.0))

    def close(self) -> None:
        """Write all rows and `metrics.h5`, and close the files. The next row opens them again."""
        self._plot_if(True)
        for name, rows in self._rows.items():
            self._guarded(name, rows.close)

    def begin(self, state: State) -> None:
        """Move newer rows of an earlier run aside, and mark `metrics.h5` as outdated if it is missing."""
        self._guarded(EPOCHS, self._begin, state)

    def _begin(self, state: State) -> None:
        files, cuts = newer_rows(self._run, state.clocks.epochs, evaluations_of(state.memory))
        move_aside(self._run, files, f"epoch-{state.clocks.epochs:06d}", cuts)
        self._tables = [CSVTable(self._run / name) for name in self._rows]
        rows = self._tables[0].refresh()
        self._warn_of_gaps(rows.get("epoch", np.empty(0)), state.clocks.epochs)
        self._changed = bool(rows) and not (self._run / PLOT).exists()
        self._written_at = time.monotonic()

    def _warn_of_gaps(self, epoch_K: np.ndarray, epochs: int) -> None:
        """Warn once about missing rows and trajectories of earlier epochs."""
        folders = [self._run / name for name in (TRAJECTORIES, CHECKPOINTS)]
        is_fresh = not len(epoch_K) and not any(path for folder in folders for path in folder.glob("*.h5"))
        first = first_epoch(self._run) or min(epoch_K, default=epochs + 1)
        absent = np.setdiff1d(np.arange(first, epochs + 1), epoch_K)
        if not is_fresh:
            self._warn_once(self._run / EPOCHS, "row", absent.tolist(), epochs)
        lost = missing_epochs(self._run, epoch_K.tolist(), epochs)
        self._warn_once(self._run / TRAJECTORIES, "trajectory", lost, epochs)

    def _warn_once(self, path: Path, kind: str, absent: list[int], epochs: int) -> None:
        if absent and path not in self._warned:
            self._warned.add(path)
            reason = f"has no {kind} of epoch{'s' * (len(absent) > 1)} {spans_of(absent)}"
            logger.warning("%s: %s; the run continues after epoch %d without", path, reason, epochs)

    def add_epoch(self, state: State) -> None:
        """Append the row of the epoch that has just ended."""
        if state.epoch_open:  # the end of the epoch was interrupted; the next run repeats it
            return
        self._guarded(EPOCHS, self._add_epoch, state)
        self._changed = True
        self._plot_if(self._is_due(_SECONDS))

    def _add_epoch(self, state: State) -> None:
        record = state.history[-1]
        row = {"epoch": record.epoch, "status": record.status, **_clock_columns(state.clocks.as_dict())}
        self._rows[EPOCHS].append(merge(row, record.metrics))

    def add_evaluation(self, state: State) -> None:
        """Append the row of the evaluation that has just ended."""
        self._guarded(EVALUATIONS, self._add_evaluation, state)

    def _add_evaluation(self, state: State) -> None:
        last: Mapping[str, Any] = state.memory["evaluations"]
        row = {"evaluation": last["number"], "name": last["name"], "epoch": state.evaluation.epoch}
        row |= _clock_columns(state.evaluation.clocks)  # the column `episodes` counts training episodes
        row |= {"return": last["return"], "length": last["length"], "played": last["episodes"]}
        row |= {name: value for name, value in last.items() if name.startswith(("return_", "success_"))}
        self._rows[EVALUATIONS].append(row)

    def _is_due(self, seconds: float) -> bool:
        return time.monotonic() - self._written_at >= max(seconds, self._cost / _SHARE)

    def _plot_if(self, due: bool) -> None:
        if due and self._changed:
            self._guarded(PLOT, self._plot)

    def _plot(self) -> None:
        began = time.monotonic()
        epochs, evaluations = (table.refresh() for table in self._tables)
        write_whole(self._run / PLOT, compose(lambda file: write_learning_curves(file, epochs, evaluations)))
        self._changed, self._written_at = False, time.monotonic()
        self._cost = self._written_at - began

    def _guarded(self, name: str, call: Callable[..., None], *arguments: Any) -> None:
        if name in self._failed:
            return
        try:
            call(*arguments)
        except (StoreError, OSError) as error:
            self._failed.add(name)
            path, reason = self._run / name, str(error).removeprefix(f"{self._run / name}: ")
            logger.error("%s: is no longer written; the run continues: %s", path, reason)
        except Exception:  # errors of these files must not end the run
            self._failed.add(name)
            logger.exception("%s: is no longer written; the run continues", self._run / name)


def _clock_columns(clocks: Mapping[str, float]) -> dict[str, float]:
    """Return the clocks without `epochs`, which is the column `epoch`."""
    return {name: round(value, 6) for name, value in clocks.items() if name != "epochs"}
