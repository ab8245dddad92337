"""Verify a run or one file: hashes, layout, numbering, tables against rows, checkpoints, metrics.

Shapes: R rows of a file, N environments, K epochs, E episodes.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rein.errors import StoreError
from rein.files import TEXT, followed, inside, open_file, read_json
from rein.store.checkpoint_file import look, read_checkpoint
from rein.store.checkpoint_folder import FOLDER as CHECKPOINTS
from rein.store.checkpoint_folder import saved_files
from rein.store.folder import (
    TRAJECTORIES,
    epochs_of,
    file_name,
    first_epoch,
    is_locked,
    kept_by,
    list_files,
    missing_epochs,
    spans_of,
)
from rein.store.format import sealed
from rein.store.format.layout import Stored
from rein.store.format.trajectory_reader import MISREAD, Content, open_content, read_options
from rein.store.format.trajectory_writer import Part
from rein.store.metrics_files import EPOCHS, EVALUATIONS, PLOT, CSVTable, cells_of, columns_of, read_line
from rein.store.row_index import Stretch

_KEYS = {EPOCHS: ("epoch", "status"), EVALUATIONS: ("evaluation", "name")}  # columns: number of the row, and text
_SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # limits of the process or machine, not problems of a file
_AT_ONCE = 16 << 20  # bytes decoded at a time


class Problem(NamedTuple):
    """Problem of one file."""

    path: Path
    reason: str


class Report(NamedTuple):
    """Counts of the checked files, and the problems found."""

    files: int
    bytes: int
    epochs: int
    episodes: int
    problems: list[Problem]


def verify_run(path: str | Path) -> Report:
    """Check every file of the run in the folder `path`, or one file.

    Raises StoreError if there is no file to check, and if the system's limits prevent opening or mapping files.
    """
    path = followed(Path(path).expanduser())
    trajectories, checkpoints, others = _files_of(path)
    files = [*trajectories, *checkpoints, *others]
    if not files:
        raise StoreError(f"{path}: is neither the folder of a run nor a file of one")
    problems: list[Problem] = []
    contents: list[Content] = []
    for file in trajectories:
        _collect(problems, file, _open, file, contents)
    for content in contents:
        _collect(problems, content.file.path, _check_file, content)
    stride = _stride(path) if path.is_dir() else None
    epochs = {number for content in contents for number in content.epochs["number"].tolist()}
    first = None
    if path.is_dir():
        problems += _check_sequence(contents, stride)
        _collect(problems, path / EPOCHS, _check_oldest, path, contents, bool(checkpoints))
        _collect(problems, path / CHECKPOINTS / "latest", _check_latest, path / CHECKPOINTS)
        if path / PLOT in others and path / EPOCHS not in others:
            problems.append(Problem(path / EPOCHS, f"is missing, but {PLOT} was made from it"))
        first = first_epoch(path)
    for file in checkpoints:
        _collect(problems, file, _check_checkpoint, file, epochs, stride)
    for file in others:
        _collect(problems, file, _check_other, file, max(epochs, default=0), first)
    size = sum(file.lstat().st_size for file in files if os.path.lexists(file))
    return Report(len(files), size, len(epochs), sum(len(c.episodes["id"]) for c in contents), problems)


def _files_of(path: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """Return the trajectory files, the checkpoints and the other files of a run, or one file in one of the lists."""
    if path.is_dir():
        trajectories = list_files(inside(path, TRAJECTORIES)) or list_files(path)
        places = [inside(path, CHECKPOINTS, *names) for names in ((), ("best",))]
        others = [path / name for name in ("run.json", EPOCHS, EVALUATIONS, PLOT) if os.path.lexists(path / name)]
        return trajectories, [file for place in places for file in saved_files(place)], others
    if path.name in ("run.json", *_KEYS, PLOT):
        return [], [], [path]
    if look(path) is not None:  # a damaged checkpoint is reported as damaged, also as a trajectory file
        return [], [path], []
    return [path] * path.is_file(), [], []


def _collect(problems: list[Problem], path: Path, check: Callable[..., Iterable[Any]], *arguments: Any) -> None:
    """Add the problems of a file that `check` yields, as Problem or as text, and each error that it may have caused.

    Raises StoreError if the system's limits prevent the check, which is not a problem of the file.
    """
    try:
        problems.extend(
            problem if isinstance(problem, Problem) else Problem(path, problem) for problem in check(*arguments)
        )
    except StoreError as error:
        if _is_scarce(error):
            raise
        problems.append(Problem(path, str(error).removeprefix(f"{path}: ")))
    except OSError as error:
        if _is_scarce(error):
            raise StoreError(f"{path}: cannot be checked: {sealed.reason_of(error)}") from error
        problems.append(Problem(path, f"cannot be read: {error.strerror}"))
    except (*MISREAD, MemoryError, OverflowError, RecursionError) as error:
        problems.append(Problem(path, f"has invalid content: {error!r:.300}"))


def _is_scarce(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, reports a lack of descriptors, memory maps or memory."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _SCARCE:
            return True
        error = error.__cause__
    return False


def _open(path: Path, contents: list[Content]) -> Iterator[str]:
    """Add the file to `contents` if its hash, layout and tables are correct."""
    contents.append(open_content(path))
    yield from ()


def _stride(run: Path) -> int | None:
    """Return `every` of the run's store, or None if the store keeps no epochs or the best ones."""
    every, best = kept_by(run)
    return every if every and best is None else None


def _check_oldest(run: Path, contents: Sequence[Content], saved: bool) -> Iterator[Problem]:
    """Check that no trajectory files are missing at the beginning, by `metrics.csv` or by steps and episode ids.

    A folder without trajectory files is not a problem while a store writes to it.
    """
    files = list_files(inside(run, TRAJECTORIES))
    epoch_K = CSVTable(run / EPOCHS).refresh().get("epoch", np.empty(0))
    where, last = (files[0], epochs_of(files[0])[0]) if files else (run / TRAJECTORIES, sys.maxsize)
    if lost := missing_epochs(run, epoch_K.tolist(), last):
        if files or not is_locked(run):
            be, those = ("is", "epoch") if len(lost) == 1 else ("are", "epochs")
            before = f"before epoch {last}" if files else "and there is no trajectory file"
            yield Problem(where, f"{those} {spans_of(lost)} of {EPOCHS} {be} missing {before}")
    elif saved and contents and _stride(run) == 1 and not (run / EPOCHS).exists():
        step, ids = int(contents[0].epochs["first_step"][0]), contents[0].episodes["id"]
        if step > 0 or (len(ids) and ids[0] > 0):
            start = f"begins with step {step}" + (f" and episode {ids[0]}" if len(ids) else "")
            yield Problem(where, f"{start}: earlier files are missing, or {EPOCHS}, which lists the first epoch")


def _check_checkpoint(path: Path, stored: Collection[int], stride: int | None) -> Iterator[str]:
    """Read the whole state, and check that the epochs on which its store relies exist."""
    parts = read_checkpoint(path).state.get("parts")
    store = parts.get("store") if isinstance(parts, dict) else None
    epoch, best = (store.get("epoch"), store.get("best")) if isinstance(store, dict) else (None, None)
    if type(epoch) is not int:
        return
    last = max(stored, default=0)
    if stride is not None and epoch - epoch % stride > last:
        yield f"needs epochs up to {epoch}, but the trajectories end with epoch {last}"
    if isinstance(best, list):
        lost = sorted({int(number) for number, _ in best[-1]} - {*stored})
        if len(lost) > sum(number > epoch for number in stored):  # each newer epoch may have displaced one
            yield f"needs epochs {spans_of(lost)}, which are missing from the trajectories"


def _check_latest(folder: Path) -> Iterator[str]:
    latest = folder / "latest"
    if os.path.lexists(latest):
        with open_file(latest) as file:
            name = file.read(200).decode(errors="replace").strip()
        if name not in [path.name for path in saved_files(folder)]:
            yield f"names {name!r}, which does not exist"


def _check_other(path: Path, last: int, first: int | None) -> Iterator[str]:
    """Check a file of metrics or `run.json`.

    `first` is the first epoch of the run, `last` the last one of the trajectories, or 0 if they are not checked.
    """
    if path.name == PLOT:
        sealed.verify(path)
    elif path.name in _KEYS:
        first, last = (first, last) if path.name == EPOCHS else (None, 0)
        yield from _check_rows_of(path, *_KEYS[path.name], first, last)
    else:
        read_json(path)


def _check_rows_of(path: Path, key: str, text: str, first: int | None, last: int) -> Iterator[str]:
    """Yield the problems of a CSV file up to the first wrong line: invalid numbers, gaps, an incomplete last line.

    The rows must begin with `first` or earlier, if it is known, and end with `last` or later.
    """
    with open_file(path, limit=TEXT) as file:
        names = columns_of(read_line(file, path), path)
        if key not in names:
            yield f"has no column {key!r}"
            return
        before: int | None = None
        for number, line in enumerate(iter(lambda: read_line(file, path), b""), start=2):
            if not line.endswith(b"\n"):
                yield f"ends within line {number}, which the next start of the run removes"
                return
            if not (cells := cells_of(line)):
                yield f"line {number}: is damaged"
                return
            wrong = _check_row(dict(zip(names, cells, strict=False)), key, text, before)
            if len(cells) != len(names) or wrong:
                yield f"line {number}: {wrong or f'{len(cells)} cells of {len(names)}'}"
                return
            now = int(cells[names.index(key)])
            if before is None and first is not None and now > first:
                yield f"begins with {key} {now}, but the run begins with epoch {first}"
            before = now
        if (before or 0) < last:
            yield f"ends with {key} {before or 0}, but the trajectories end with epoch {last}"


def _check_row(row: dict[str, Any], key: str, text: str, before: int | None) -> str | None:
    for name, cell in row.items():
        try:
            _ = float(cell) if cell and name != text else None
        except ValueError:
            return f"{cell!r:.40} is not a number"
    if not row.get(key, "").isdecimal():
        return f"{row.get(key)!r:.40} is not a valid {key}"
    if before is not None and int(row[key]) != before + 1:
        return f"{key} {row[key]} comes after {key} {before}"
    return None


def _check_file(content: Content) -> Iterator[str]:
    """Yield the problems inside one file. Raises StoreError if a dataset cannot be decoded."""
    epochs = content.epochs
    number, part = epochs["number"], Part(int(epochs["part"][0]), int(epochs["parts"][0]))
    due = file_name(int(number[0]), int(number[-1]), part)
    if content.file.path.name != due:
        yield f"has the epochs of a file with the name {due}"
    if odd := sorted(set(epochs["status"].tolist()) - {"completed", "halted"}):
        yield f"has an epoch with the status {odd[0]!r:.40}"
    if (epochs["first_step"] < 0).any() or (np.diff(epochs["first_step"]) < epochs["length"][:-1]).any():
        yield "has epochs whose steps overlap"
    _decode_all(content, content.file.layout)
    wrong = [*_check_episodes(content), *_check_options(content)]
    yield from wrong or (_check_rows(content) if content.rows else ())


def _check_sequence(contents: Sequence[Content], stride: int | None) -> Iterator[Problem]:
    """Yield problems between consecutive files: missing or repeated epochs, steps and episodes out of order.

    Epochs must be `stride` apart. None allows any distance.
    """
    last = {"epoch": 0, "part": 1, "parts": 1, "step": 0, "episode": -1}
    for content in contents:
        epochs, ids = content.epochs, content.episodes["id"]
        yield from (Problem(content.file.path, reason) for reason in _check_next(content, last, stride))
        last = {
            "epoch": int(epochs["number"][-1]),
            "part": int(epochs["part"][0]),
            "parts": int(epochs["parts"][0]),
            "step": int(epochs["first_step"][-1] + epochs["length"][-1]),
            "episode": int(ids[-1]) if len(ids) else last["episode"],
        }
    if last["part"] < last["parts"]:
        reason = f"is part {last['part']} of {last['parts']}, but the next part is missing"
        yield Problem(contents[-1].file.path, reason)


def _check_next(content: Content, last: dict[str, int], stride: int | None) -> Iterator[str]:
    """Yield the problems of a file after a file that ended with the epoch, part, step and episode of `last`."""
    epochs, ids = content.epochs, content.episodes["id"]
    number, part = epochs["number"], int(epochs["part"][0])
    if (number[0], part) != (last["epoch"], last["part"] + 1) and last["part"] < last["parts"]:
        yield f"comes after part {last['part']} of {last['parts']} of epoch {last['epoch']}; one is missing"
    if part > 1 and number[0] != last["epoch"]:
        yield f"is part {part} of epoch {number[0]}, but the part before it is missing"
    yield from _gaps(number, part, last["epoch"], stride)
    if epochs["first_step"][0] < last["step"]:
        yield f"begins at step {epochs['first_step'][0]}, but the file before ends at step {last['step']}"
    if len(ids) and (ids[0] <= last["episode"] or (np.diff(ids) <= 0).any()):
        yield "has episodes whose ids do not increase"


def _gaps(number_K: np.ndarray, part: int, last: int, stride: int | None) -> Iterator[str]:
    """Yield the epochs that are missing between these. The first epoch of the run may have any number."""
    before_K = np.concatenate([[last], number_K[:-1]])
    for before, number in zip(before_K.tolist(), number_K.tolist(), strict=True):
        if before and number <= before and not (part > 1 and number == before):
            yield f"has epoch {number} after epoch {before}"
        if before and stride and number > before + stride:
            first, end = before + stride, number - stride
            between = f"epoch {first} is" if first == end else f"epochs {first} to {end} are"
            yield f"{between} missing before epoch {number}"


def _decode_all(content: Content, node: Any) -> None:
    for child in () if isinstance(node, Stored) else node.values():
        _decode_all(content, child)
    if isinstance(node, Stored) and not node.is_raw and node.shape:
        row_bytes = max(1, int(np.prod(node.shape[1:], dtype=object)) * node.dtype.itemsize)
        step = max(node.chunk[0] if node.chunk else 1, _AT_ONCE // row_bytes)
        for start in range(0, node.shape[0], step):
            content.file.read(node, slice(start, start + step))


def _check_episodes(content: Content) -> Iterator[str]:
    """Yield problems inside the table of episodes."""
    table, epochs, num_envs = content.episodes, content.epochs, content.num_envs
    k_E = _epoch_of(content)
    since_E = table["last_step"] - epochs["first_step"][k_E]
    span_E = table["last_step"] - table["first_step"] + 1
    for wrong_E, problem in (
        (
            (table["environment"] < 0) | (table["environment"] >= num_envs),
            f"has an environment outside 0 to {num_envs - 1}",
        ),
        ((table["first_step"] < 0) | (span_E < 1), "ends before it begins"),
        ((table["length"] < 1) | (table["length"] > span_E), "has a length that does not fit its steps"),
        (epochs["number"][k_E] != table["epoch"], "ended in an epoch that is not in this file"),
        ((since_E < 0) | (since_E >= epochs["length"][k_E]), "ended in a step that is not in its epoch"),
        (~(table["terminated"] | table["truncated"]), "is neither terminated nor truncated"),
    ):
        yield from _report(content, wrong_E, problem)


def _check_options(content: Content) -> Iterator[str]:
    """Yield episodes whose reset options are not JSON."""
    for id, text in zip(content.episodes["id"].tolist(), content.episodes["options"].tolist(), strict=True):
        try:
            read_options(text)
        except ValueError as error:
            yield f"episode {id}: {error}"


def _check_rows(content: Content) -> Iterator[str]:
    """Yield differences between the rows and the table of episodes."""
    table, epochs = content.episodes, content.epochs
    k_E, environment_E = _epoch_of(content), table["environment"]
    row_E = epochs["first_row"][k_E] + table["last_step"] - epochs["first_step"][k_E]
    stretch = Stretch([content], 0)
    valid_RN = stretch.flags("valid").T
    yield from _report(content, ~valid_RN[row_E, environment_E], "ended in a row that is not valid")
    ended_RN = np.zeros_like(valid_RN)
    names = [name for name in ("terminated", "truncated") if name in content.fields]
    for name in names:
        flag_RN = stretch.flags(name).T
        ended_RN |= flag_RN & valid_RN
        differs_E = flag_RN[row_E, environment_E] != table[name]
        yield from _report(content, differs_E, f"has another {name} in the rows than in the table")
    ended_RN[row_E, environment_E] = False
    if len(names) == 2 and ended_RN.any():
        row, environment = np.argwhere(ended_RN)[0]
        yield f"an episode of environment {environment} ends in row {row} but is not in the table of episodes"
    yield from _check_sums(content, valid_RN, stretch.step_R, row_E)


def _check_sums(content: Content, valid_RN: np.ndarray, step_R: np.ndarray, row_E: np.ndarray) -> Iterator[str]:
    """Yield differences in length or return, for the episodes that lie in this file from first to last step."""
    table, environment_E = content.episodes, content.episodes["environment"]
    first_E = row_E - (table["last_step"] - table["first_step"])
    here_E = first_E >= 0
    here_E[here_E] = step_R[first_E[here_E]] == table["first_step"][here_E]

    def sums(values_RN: np.ndarray) -> np.ndarray:
        total_RN = np.concatenate([np.zeros((1, content.num_envs)), np.cumsum(values_RN, axis=0, dtype=np.float64)])
        return total_RN[row_E + 1, environment_E] - total_RN[np.maximum(first_E, 0), environment_E]

    yield from _report(
        content, here_E & (sums(valid_RN) != table["length"]), "has another number of rows than its length"
    )
    name = "raw_reward" if "raw_reward" in content.fields else "reward"
    stored = content.fields.get(name)
    if stored is None or len(stored.shape) != 2 or stored.dtype.kind != "f":
        return
    reward_RN = np.where(valid_RN, content.file.read(stored), 0).astype(np.float64)
    if not np.isfinite(reward_RN).all():
        return
    size_E = sums(np.abs(reward_RN))
    off_E = np.abs(sums(reward_RN) - table["return"]) > 1e-4 * size_E + 1e-9 * np.abs(reward_RN).sum()
    yield from _report(content, here_E & off_E, "has another return than the sum of its rewards")


def _report(content: Content, wrong_E: np.ndarray, problem: str) -> Iterator[str]:
    if wrong_E.any():
        others = int(wrong_E.sum()) - 1
        more = f", and {others:,} more" if others else ""
        yield f"episode {content.episodes['id'][wrong_E][0]} {problem}{more}"


def _epoch_of(content: Content) -> np.ndarray:
    """Return the index (E,) of the epoch in which each episode ended, or of another epoch if it is not in the file."""
    number = content.epochs["number"]
    return np.minimum(np.searchsorted(number, content.episodes["epoch"]), len(number) - 1)
