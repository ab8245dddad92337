"""Find the rows of a run that are complete transitions, their next observations, and their successors.

Rows are numbered across all files by g: row by row, and by environment within a row. In a file with N environments, the
row after g of the same environment is g + N. This also holds across files with the same N.

Shapes: R rows of the files, N environments, K epochs or parts of one, E episodes, G = the sum of R x N.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rein.store.format.trajectory_reader import Content, Table


class TransitionRows(NamedTuple):
    """Rows of a run that are transitions."""

    base: np.ndarray  # (files + 1,) first row number of each file
    whole_G: np.ndarray  # bool: valid, with a known next observation
    special_G: np.ndarray  # bool: its next observation is not the observation of the next row
    source: np.ndarray  # (special.sum(),) index into all final observations of the files, then all next observations
    follows_G: np.ndarray  # bool: the next row is the next transition of the same episode


class _Stretch(NamedTuple):
    """Rows of consecutive files with the same number of environments."""

    valid_RN: np.ndarray
    ended_RN: np.ndarray
    source_RN: np.ndarray  # index of the next observation; -1 if it is in the next row, -2 if it is unknown
    step_R: np.ndarray


def find_rows(contents: Sequence[Content], observed: bool) -> TransitionRows:
    """Find the transitions in these files. With `observed`, a transition needs a next observation."""
    counts = [content.rows * content.num_envs for content in contents]
    finals = sum(len(content.episodes["id"]) for content in contents)
    final, following, found = 0, finals, []
    for num_envs, group in itertools.groupby(contents, lambda content: content.num_envs):
        stretches = []
        for content in group:
            stretches.append(_stretch_of(content, final, following, observed))
            final += len(content.episodes["id"])
            following += len(content.epochs["number"]) * num_envs
        joined = _Stretch(*map(np.concatenate, zip(*stretches, strict=True)))
        found.append(_connect(joined, _begins(contents, joined.step_R, num_envs), observed))
    whole, source, follows = (np.concatenate([f[i] for f in found] or [np.zeros(0, bool)]) for i in range(3))
    special = source >= 0
    return TransitionRows(np.cumsum([0, *counts]), whole, special, source[special], follows)


def find_windows(
    rows: TransitionRows, envs: np.ndarray, length: int, stride: int, pad: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Find the windows of `length` consecutive transitions that begin at every `stride`-th row of an episode.

    Returns the first row and the number of transitions of each window. With `pad`, windows at the end of an episode
    have fewer transitions, but one at least. `envs` (files,) is N of each file.
    """
    found, counts, base = [], [], rows.base
    for num_envs, group in itertools.groupby(range(len(envs)), lambda file: envs[file]):
        files = list(group)
        span = slice(base[files[0]], base[files[-1] + 1])
        whole_RN, follows_RN = (array[span].reshape(-1, num_envs) for array in (rows.whole_G, rows.follows_G))
        follows_RN = follows_RN & whole_RN
        row_R = np.arange(len(whole_RN))[:, None]
        end_RN = np.minimum.accumulate(np.where(follows_RN, len(whole_RN), row_R)[::-1])[::-1]  # last connected row
        continues_RN = np.zeros_like(whole_RN)
        continues_RN[1:] = follows_RN[:-1]
        begin_RN = np.maximum.accumulate(np.where(continues_RN, 0, row_R))
        end_RN = end_RN - ~np.take_along_axis(whole_RN, end_RN, 0)  # the last one may have no next observation
        count_RN = np.minimum(end_RN - row_R + 1, length)
        fits_RN = whole_RN & (count_RN >= (1 if pad else length)) & ((row_R - begin_RN) % stride == 0)
        found.append(span.start + np.flatnonzero(fits_RN))
        counts.append(count_RN[fits_RN])
    none = [np.zeros(0, np.int64)]
    return np.concatenate(found or none), np.concatenate(counts or none)


def rows_of_episodes(contents: Sequence[Content], environment_E: np.ndarray, span_E: np.ndarray) -> np.ndarray:
    """Return a mask (G,) of the rows of these episodes. `span_E` (E, 2) are their first and last vector steps."""
    masks = []
    for content in contents:
        num_envs, step_R = content.num_envs, _steps(content)
        marks = np.zeros((content.rows + 1, num_envs), np.int32)
        order = np.argsort(step_R, kind="stable")
        inside_E = environment_E < num_envs
        first_E, last_E = span_E[inside_E].T
        begin, end = np.searchsorted(step_R[order], first_E), np.searchsorted(step_R[order], last_E, "right")
        np.add.at(marks, (begin, environment_E[inside_E]), 1)
        np.add.at(marks, (end, environment_E[inside_E]), -1)
        mask = np.empty((content.rows, num_envs), bool)
        mask[order] = np.cumsum(marks[:-1], axis=0) > 0
        masks.append(mask.reshape(-1))
    return np.concatenate(masks or [np.zeros(0, bool)])


def whole_episodes(contents: Sequence[Content], episodes: Table) -> np.ndarray:
    """Return a mask (E,) of the episodes of which every transition is stored.

    The tables suffice in almost all cases. The flags `valid` are read only for an episode with missing rows that is
    shorter than its span of vector steps.
    """
    environment_E, first_E, last_E = (episodes[name] for name in ("environment", "first_step", "last_step"))
    stored_E = np.zeros(len(first_E), np.int64)
    for num_envs in {content.num_envs for content in contents}:
        alike = [content.epochs for content in contents if content.num_envs == num_envs]
        begin_K, length_K = (np.concatenate([epochs[name] for epochs in alike]) for name in ("first_step", "length"))
        stored_E += (environment_E < num_envs) * _stored_steps(begin_K, length_K, first_E, last_E)
    whole_E = stored_E == last_E - first_E + 1
    unclear = np.flatnonzero(~whole_E & (stored_E >= episodes["length"]))
    if len(unclear):
        span_E2 = np.stack([first_E, last_E], axis=1)[unclear]
        valid_E = _valid_steps(contents, environment_E[unclear], span_E2)
        whole_E[unclear] = valid_E == episodes["length"][unclear]
    return whole_E


def _stored_steps(begin_K: np.ndarray, length_K: np.ndarray, first_E: np.ndarray, last_E: np.ndarray) -> np.ndarray:
    """Return the number (E,) of vector steps in [first, last] that lie in these epochs."""
    order = np.argsort(begin_K, kind="stable")
    begin_K, length_K = begin_K[order], length_K[order]
    before_K = np.cumsum(length_K) - length_K

    def stored_before(step_E: np.ndarray) -> np.ndarray:
        k_E = np.searchsorted(begin_K, step_E) - 1
        return np.where(k_E < 0, 0, before_K[k_E] + np.minimum(step_E - begin_K[k_E], length_K[k_E]))

    return stored_before(last_E + 1) - stored_before(first_E)


def _valid_steps(contents: Sequence[Content], environment_E: np.ndarray, span_E2: np.ndarray) -> np.ndarray:
    """Return the number (E,) of stored valid rows of these episodes."""
    valid_E = np.zeros(len(environment_E), np.int64)
    for content in contents:
        step_R = _steps(content)
        order = np.argsort(step_R, kind="stable")
        count_RN = np.cumsum(_flags(content, "valid")[order], axis=0)
        count_RN = np.concatenate([np.zeros((1, content.num_envs), np.int64), count_RN])
        here = np.flatnonzero(environment_E < content.num_envs)
        begin = np.searchsorted(step_R[order], span_E2[here, 0])
        end = np.searchsorted(step_R[order], span_E2[here, 1], "right")
        valid_E[here] += count_RN[end, environment_E[here]] - count_RN[begin, environment_E[here]]
    return valid_E


def _stretch_of(content: Content, final: int, following: int, observed: bool) -> _Stretch:
    """Return the rows of one file. `final` and `following` are the indices of its first final and next observation."""
    rows, num_envs, epochs = content.rows, content.num_envs, content.epochs
    valid_RN, terminated_RN, truncated_RN = (_flags(content, name) for name in ("valid", "terminated", "truncated"))
    ended_RN = valid_RN & (terminated_RN | truncated_RN)
    filled_K = epochs["length"] > 0
    last_K = (epochs["first_row"] + epochs["length"] - 1)[filled_K]
    source_RN = np.full((rows, num_envs), -1)
    if content.file.node("epochs", "next_observation") is None:
        source_RN[last_K] = -2
    else:
        source_RN[last_K] = following + np.flatnonzero(filled_K)[:, None] * num_envs + np.arange(num_envs)
    source_RN[ended_RN] = -2  # unless the table of episodes has the final observation
    row_E, environment_E, known_E = _ends(content)
    ended_RN[row_E, environment_E] = True
    has_final = content.file.node("episodes", "final_observation") is not None
    source_RN[row_E, environment_E] = final + np.flatnonzero(known_E) if has_final else -2
    return _Stretch(valid_RN, ended_RN, source_RN if observed else np.full_like(source_RN, -1), _steps(content))


def _connect(stretch: _Stretch, begins_RN: np.ndarray, observed: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `whole`, `source` and `follows` of a stretch, flattened."""
    valid_RN, ended_RN, source_RN, step_R = stretch
    goes_on_RN = valid_RN & ~ended_RN
    # a reset outside a step resets all environments at once; an episode that begins after an unfinished row reveals it
    reset_R = (begins_RN[1:] & goes_on_RN[:-1]).any(axis=1)
    follows_RN = np.zeros_like(valid_RN)
    follows_RN[:-1] = goes_on_RN[:-1] & valid_RN[1:] & (~reset_R & (np.diff(step_R) == 1))[:, None]
    whole_RN = valid_RN.copy()
    if observed:
        whole_RN &= (source_RN >= 0) | (follows_RN & ~ended_RN & (source_RN == -1))
    return whole_RN.reshape(-1), source_RN.reshape(-1), follows_RN.reshape(-1)


def _begins(contents: Sequence[Content], step_R: np.ndarray, num_envs: int) -> np.ndarray:
    """Return a mask (R, N) of the first rows of all finished episodes, including those that ended in another file."""
    begins_RN = np.zeros((len(step_R), num_envs), bool)
    first_E = np.concatenate([content.episodes["first_step"] for content in contents])
    environment_E = np.concatenate([content.episodes["environment"] for content in contents])
    order = np.argsort(step_R, kind="stable")
    row_E = np.searchsorted(step_R[order], first_E)
    found_E = (row_E < len(step_R)) & (environment_E >= 0) & (environment_E < num_envs)
    row_E = order[np.minimum(row_E, len(step_R) - 1)]
    found_E &= step_R[row_E] == first_E
    begins_RN[row_E[found_E], environment_E[found_E]] = True
    return begins_RN


def _ends(content: Content) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows and environments in which episodes ended, and a mask (E,) of the episodes whose row is stored."""
    epochs, episodes = content.epochs, content.episodes
    k_E = np.minimum(np.searchsorted(epochs["number"], episodes["epoch"]), len(epochs["number"]) - 1)
    since_E = episodes["last_step"] - epochs["first_step"][k_E]
    known_E = (epochs["number"][k_E] == episodes["epoch"]) & (since_E >= 0) & (since_E < epochs["length"][k_E])
    known_E &= (episodes["environment"] >= 0) & (episodes["environment"] < content.num_envs)
    return (epochs["first_row"][k_E] + since_E)[known_E], episodes["environment"][known_E], known_E


def _steps(content: Content) -> np.ndarray:
    """Return the vector step (R,) of each row."""
    epochs = content.epochs
    return np.repeat(epochs["first_step"] - epochs["first_row"], epochs["length"]) + np.arange(content.rows)


def _flags(content: Content, name: str) -> np.ndarray:
    """Return a flag (R, N). By default, if it is not stored, every row is valid and no row terminated or truncated."""
    if name not in content.fields:
        return np.full((content.rows, content.num_envs), name == "valid")
    return content.file.field(name).reshape(content.rows, content.num_envs) != 0
