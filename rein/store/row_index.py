"""Index of the rows of a run: which rows are transitions, and where their next observations and successors are.

Every row of every environment has a position. The rows of an environment are consecutive, so the row after p is p + 1.
Consecutive files with the same N form a stretch of N x R positions.

Shapes: R rows of a stretch, N environments, E episodes, P = the sum of N x R, B positions of a batch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rein.store.format.trajectory_reader import Content, Table

_NEXT_ROW, _UNKNOWN = -1, -2  # sources of next observations that are not in a table


class Stretch:
    """Consecutive files with the same number of environments."""

    def __init__(self, contents: Sequence[Content], start: int) -> None:
        self.contents = contents
        self.num_envs = contents[0].num_envs
        self.start = start  # position of the first row
        self.step_R = np.concatenate([_steps_of(content) for content in contents])
        self.first_rows = np.cumsum([0, *(content.rows for content in contents)])  # of each file, and R
        self.rows = len(self.step_R)

    def flags(self, name: str) -> np.ndarray:
        """Return a flag (N, R). By default, if it is not stored, every row is valid and no row ended."""
        return np.concatenate([_flag(content, name) for content in self.contents]).T

    def rows_at(self, column: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return row and environment of the step in a column of the table of episodes, for the episodes that have one.

        The third array is a mask (E,) of these episodes.
        """
        tables = [content.episodes for content in self.contents]
        step_E, environment_E = (np.concatenate([table[name] for table in tables]) for name in (column, "environment"))
        row_E = np.searchsorted(self.step_R, step_E)
        stored_E = (row_E < self.rows) & (environment_E < self.num_envs)
        stored_E[stored_E] = self.step_R[row_E[stored_E]] == step_E[stored_E]
        return row_E[stored_E], environment_E[stored_E], stored_E

    def spans(self, episodes: Table) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return index, environment, first row and end row of each episode with an environment in this stretch."""
        index = np.flatnonzero(episodes["environment"] < self.num_envs)
        begin = np.searchsorted(self.step_R, episodes["first_step"][index])
        end = np.searchsorted(self.step_R, episodes["last_step"][index], "right")
        return index, episodes["environment"][index], begin, end

    def rows_of(self, episodes: Table) -> np.ndarray:
        """Return a mask (N, R) of the rows of these episodes."""
        _, environment_E, begin_E, end_E = self.spans(episodes)
        marks = np.zeros((self.num_envs, self.rows + 1), np.int32)
        np.add.at(marks, (environment_E, begin_E), 1)
        np.add.at(marks, (environment_E, end_E), -1)
        return np.cumsum(marks[:, :-1], axis=1) > 0


class Links(NamedTuple):
    """Properties of the rows by position."""

    whole_P: np.ndarray  # bool: a valid row with a known next observation
    follows_P: np.ndarray  # bool: the next row is the next transition of the same episode
    special_P: np.ndarray  # bool: its next observation is not the observation of the next row
    source: np.ndarray  # (special.sum(),) index into all final observations of the files, then all next observations


class RowIndex:
    """Positions of the rows of trajectory files, see the description of the module.

    With `observed`, a transition needs a next observation. `episodes` restricts the transitions to these episodes.
    """

    def __init__(self, contents: Sequence[Content], observed: bool = True, episodes: Table | None = None) -> None:
        self.stretches = stretches_of(contents)
        self._observed = observed
        self._episodes = episodes
        self._starts = np.array([stretch.start for stretch in self.stretches])
        self.size = sum(stretch.num_envs * stretch.rows for stretch in self.stretches)

    @functools.cached_property
    def links(self) -> Links:
        """The transitions and their successors."""
        final, following = 0, sum(len(c.episodes["id"]) for stretch in self.stretches for c in stretch.contents)
        parts = []
        for stretch in self.stretches:
            source_NR, ended_NR = _sources(stretch, final, following)
            final += sum(len(content.episodes["id"]) for content in stretch.contents)
            following += sum(len(content.epochs["number"]) for content in stretch.contents) * stretch.num_envs
            parts.append(self._connect(stretch, source_NR, ended_NR))
        whole, follows, source = (np.concatenate([p[i].reshape(-1) for p in parts] or [_NONE > 0]) for i in range(3))
        return Links(whole, follows, source >= 0, source[source >= 0])

    def _connect(self, stretch: Stretch, source_NR: np.ndarray, ended_NR: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return `whole`, `follows` and the source of the next observation of each row; each (N, R)."""
        valid_NR = stretch.flags("valid")
        continues_NR = valid_NR & ~ended_NR
        # a reset outside a step resets all environments at once: an episode begins after an unfinished row
        reset_R = (_begins(stretch)[:, 1:] & continues_NR[:, :-1]).any(axis=0)
        follows_NR = np.zeros_like(valid_NR)
        follows_NR[:, :-1] = continues_NR[:, :-1] & valid_NR[:, 1:] & ~reset_R & (np.diff(stretch.step_R) == 1)
        whole_NR = valid_NR
        if self._observed:
            whole_NR = valid_NR & ((source_NR >= 0) | (follows_NR & (source_NR == _NEXT_ROW)))
        if self._episodes is not None:
            chosen_NR = stretch.rows_of(self._episodes)
            whole_NR, follows_NR = whole_NR & chosen_NR, follows_NR & chosen_NR
        return whole_NR, follows_NR, source_NR if self._observed else np.full_like(source_NR, _NEXT_ROW)

    def chronological(self, mask_P: np.ndarray) -> np.ndarray:
        """Return the positions in a mask, ordered by row, and by environment within a row."""
        parts = []
        for stretch, mask_NR in zip(self.stretches, self._by_stretch(mask_P), strict=True):
            row, environment = np.nonzero(mask_NR.T)
            parts.append(stretch.start + environment * stretch.rows + row)
        return np.concatenate(parts or [_NONE])

    def by_environment(self, position: np.ndarray) -> np.ndarray:
        """Sort ascending positions by environment."""
        stretch = np.searchsorted(self._starts, position, "right") - 1
        rows = np.array([one.rows for one in self.stretches])
        return position[np.argsort((position - self._starts[stretch]) // rows[stretch], kind="stable")]

    def windows(self, length: int, stride: int, pad: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Find the windows of `length` consecutive transitions that begin at every `stride`-th row of an episode.

        Returns the first position and the number of transitions of each window, in chronological order. With `pad`,
        windows at the end of an episode have fewer transitions, but one at least.
        """
        mask_P, count_P = np.zeros(self.size, bool), np.zeros(self.size, np.int64)
        each = (self._by_stretch(array) for array in (self.links.whole_P, self.links.follows_P, mask_P, count_P))
        for whole_NR, follows_NR, mask_NR, count_NR in zip(*each, strict=True):
            follows_NR = follows_NR & whole_NR
            row_R = np.arange(whole_NR.shape[1])
            last_NR = np.where(follows_NR, len(row_R), row_R)[:, ::-1]
            end_NR = np.minimum.accumulate(last_NR, axis=1)[:, ::-1]  # last connected row
            continues_NR = np.zeros_like(whole_NR)
            continues_NR[:, 1:] = follows_NR[:, :-1]
            begin_NR = np.maximum.accumulate(np.where(continues_NR, 0, row_R), axis=1)
            end_NR = end_NR - ~np.take_along_axis(whole_NR, end_NR, 1)  # the last one may have no next observation
            count_NR[...] = np.minimum(end_NR - row_R + 1, length)
            mask_NR[...] = whole_NR & (count_NR >= (1 if pad else length)) & ((row_R - begin_NR) % stride == 0)
        first = self.chronological(mask_P)
        return first, count_P[first]

    def arrange(self, fields: Iterable[np.ndarray], shape: tuple[int, ...], dtype: np.dtype, spare: int) -> np.ndarray:
        """Arrange a field (R * N, ...) of each file by position, and append `spare` rows of zeros."""
        arranged, remaining = np.empty((self.size + spare, *shape), dtype), iter(fields)  # huge pages, unlike np.zeros
        arranged[self.size :] = 0
        for stretch, part_NR in zip(self.stretches, self._by_stretch(arranged[: self.size]), strict=True):
            for first, end in itertools.pairwise(stretch.first_rows.tolist()):
                rows_RN = next(remaining).reshape(end - first, stretch.num_envs, *shape)
                part_NR[:, first:end] = rows_RN.swapaxes(0, 1)
        return arranged

    def locate(self, position_B: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield the number of each file that has some of these positions, which ones, and their places in the file.

        The place of a row in its file is row * N + environment.
        """
        stretch_B = np.searchsorted(self._starts, position_B, "right") - 1
        for number, which in _groups(stretch_B):
            stretch = self.stretches[number]
            environment, row = np.divmod(position_B[which] - stretch.start, stretch.rows)
            file_B = np.searchsorted(stretch.first_rows, row, "right") - 1
            before = sum(len(one.contents) for one in self.stretches[:number])
            for file, inner in _groups(file_B):
                place = (row[inner] - stretch.first_rows[file]) * stretch.num_envs + environment[inner]
                yield before + file, which[inner], place

    def _by_stretch(self, array_P: np.ndarray) -> list[np.ndarray]:
        """Return views (N, R, ...) of an array by position."""
        each = [(s.start, s.num_envs, s.rows) for s in self.stretches]
        return [array_P[at : at + n * r].reshape(n, r, *array_P.shape[1:]) for at, n, r in each]


_NONE = np.zeros(0, np.int64)


def stretches_of(contents: Sequence[Content]) -> list[Stretch]:
    """Join the files that have rows to stretches."""
    parts, start = [], 0
    for _, group in itertools.groupby(contents, lambda content: content.num_envs):
        parts.append(Stretch(list(group), start))
        start += parts[-1].num_envs * parts[-1].rows
    return parts


def whole_episodes(contents: Sequence[Content], episodes: Table) -> np.ndarray:
    """Return a mask (E,) of the episodes of which every transition is stored.

    The tables suffice in almost all cases. The flags `valid` are read only for an episode with missing rows that is
    shorter than its span of vector steps.
    """
    stretches, stored_E = stretches_of(contents), np.zeros(len(episodes["id"]), np.int64)
    for stretch in stretches:
        index, _, begin, end = stretch.spans(episodes)
        stored_E[index] += end - begin
    whole_E = stored_E == episodes["last_step"] - episodes["first_step"] + 1
    if len(unclear := np.flatnonzero(~whole_E & (stored_E >= episodes["length"]))):
        chosen: Table = {name: column[unclear] for name, column in episodes.items()}
        valid_E = np.zeros(len(unclear), np.int64)
        for stretch in stretches:
            index, environment, begin, end = stretch.spans(chosen)
            count_NR = np.pad(np.cumsum(stretch.flags("valid"), axis=1), ((0, 0), (1, 0)))
            valid_E[index] += count_NR[environment, end] - count_NR[environment, begin]
        whole_E[unclear] = valid_E == chosen["length"]
    return whole_E


def _sources(stretch: Stretch, final: int, following: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of the next observation of each row, and whether an episode ended there; each (N, R).

    `final` and `following` are the indices of the first final and the first next observation of the stretch.
    """
    ended_NR = stretch.flags("valid") & (stretch.flags("terminated") | stretch.flags("truncated"))
    source_NR = np.full(ended_NR.shape, _NEXT_ROW)
    lasts = []
    for first, content in zip(stretch.first_rows.tolist(), stretch.contents, strict=False):
        epochs = content.epochs
        filled_K = epochs["length"] > 0
        last_K = first + (epochs["first_row"] + epochs["length"] - 1)[filled_K]
        numbers = following + np.flatnonzero(filled_K) * stretch.num_envs + np.arange(stretch.num_envs)[:, None]
        source_NR[:, last_K] = _UNKNOWN if content.file.node("epochs", "next_observation") is None else numbers
        following += len(epochs["number"]) * stretch.num_envs
        lasts.append(final + np.arange(len(content.episodes["id"])))
        if content.file.node("episodes", "final_observation") is None:
            lasts[-1][:] = _UNKNOWN
        final += len(lasts[-1])
    source_NR[ended_NR] = _UNKNOWN  # unless the table of episodes has the final observation
    row_E, environment_E, stored_E = stretch.rows_at("last_step")
    ended_NR[environment_E, row_E] = True
    source_NR[environment_E, row_E] = np.concatenate(lasts)[stored_E]
    return source_NR, ended_NR


def _begins(stretch: Stretch) -> np.ndarray:
    """Return a mask (N, R) of the first rows of all finished episodes, including those that ended in another file."""
    begins_NR = np.zeros((stretch.num_envs, stretch.rows), bool)
    row_E, environment_E, _ = stretch.rows_at("first_step")
    begins_NR[environment_E, row_E] = True
    return begins_NR


def _steps_of(content: Content) -> np.ndarray:
    """Return the vector step (R,) of each row."""
    epochs = content.epochs
    return np.repeat(epochs["first_step"] - epochs["first_row"], epochs["length"]) + np.arange(content.rows)


def _flag(content: Content, name: str) -> np.ndarray:
    if name not in content.fields:
        return np.full((content.rows, content.num_envs), name == "valid")
    return content.file.field(name).reshape(content.rows, content.num_envs) != 0


def _groups(number_B: np.ndarray) -> Iterator[tuple[int, Any]]:
    """Yield each number and the indices at which it occurs."""
    if len(number_B):
        order = np.argsort(number_B, kind="stable")
        for part in np.split(order, np.flatnonzero(np.diff(number_B[order])) + 1):
            yield int(number_B[part[0]]), part
