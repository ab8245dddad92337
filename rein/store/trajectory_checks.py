"""Check that the tables of trajectory files are consistent with each other and with the rows.

Shapes: R rows of a file, N environments, K epochs, E episodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rein.store.folder import file_name
from rein.store.format.layout import Stored
from rein.store.format.trajectory_reader import Content, read_options
from rein.store.format.trajectory_writer import Part

_AT_ONCE = 16 << 20  # bytes decoded at a time


def check_file(content: Content) -> Iterator[str]:
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


def check_sequence(contents: Sequence[Content], stride: int | None = 1) -> Iterator[tuple[Content, str]]:
    """Yield problems between consecutive files: missing or repeated epochs, steps and episodes out of order.

    Epochs must be `stride` apart. None allows any distance.
    """
    last = {"epoch": 0, "part": 1, "parts": 1, "step": 0, "episode": -1}
    for content in contents:
        epochs, ids = content.epochs, content.episodes["id"]
        number, part = epochs["number"], int(epochs["part"][0])
        if (number[0], part) != (last["epoch"], last["part"] + 1) and last["part"] < last["parts"]:
            yield (
                content,
                f"comes after part {last['part']} of {last['parts']} of epoch {last['epoch']}; one is missing",
            )
        if part > 1 and number[0] != last["epoch"]:
            yield content, f"is part {part} of epoch {number[0]}, but the part before it is missing"
        yield from ((content, wrong) for wrong in _gaps(number, part, last["epoch"], stride))
        if epochs["first_step"][0] < last["step"]:
            yield content, f"begins at step {epochs['first_step'][0]}, but the file before ends at step {last['step']}"
        if len(ids) and (ids[0] <= last["episode"] or (np.diff(ids) <= 0).any()):
            yield content, "has episodes whose ids do not increase"
        last = {"epoch": int(number[-1]), "part": part, "parts": int(epochs["parts"][0])} | {
            "step": int(epochs["first_step"][-1] + epochs["length"][-1]),
            "episode": int(ids[-1]) if len(ids) else last["episode"],
        }
    if last["part"] < last["parts"]:
        yield contents[-1], f"is part {last['part']} of {last['parts']}, but the next part is missing"


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
    valid_RN = _flags(content, "valid")
    if valid_RN is None:
        valid_RN = np.ones((content.rows, content.num_envs), bool)
    yield from _report(content, ~valid_RN[row_E, environment_E], "ended in a row that is not valid")
    ended_RN, known = np.zeros_like(valid_RN), True
    for name in ("terminated", "truncated"):
        flag_RN = _flags(content, name)
        if flag_RN is None:
            known = False
            continue
        ended_RN |= flag_RN & valid_RN
        yield from _report(
            content, flag_RN[row_E, environment_E] != table[name], f"has another {name} in the rows than in the table"
        )
    ended_RN[row_E, environment_E] = False
    if known and ended_RN.any():
        row, environment = np.argwhere(ended_RN)[0]
        yield f"an episode of environment {environment} ends in row {row} but is not in the table of episodes"
    yield from _check_sums(content, valid_RN, row_E)


def _check_sums(content: Content, valid_RN: np.ndarray, row_E: np.ndarray) -> Iterator[str]:
    """Yield differences in length or return, for the episodes that lie in this file from first to last step."""
    table, environment_E = content.episodes, content.episodes["environment"]
    first_E = row_E - (table["last_step"] - table["first_step"])
    step_R = np.repeat(content.epochs["first_step"] - content.epochs["first_row"], content.epochs["length"])
    step_R = step_R + np.arange(content.rows)
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


def _flags(content: Content, name: str) -> np.ndarray | None:
    """Return a flag (R, N), or None if it is not stored or has another shape."""
    stored = content.fields.get(name)
    if stored is None or len(stored.shape) != 2:
        return None
    return content.file.read(stored) != 0
