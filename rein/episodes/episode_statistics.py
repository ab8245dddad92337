"""Returns and lengths of episodes, and the episodes that end in a step.

`EpisodeStatistics` processes the rows of an epoch when it is read, in order and in float64. It costs nothing per step,
and its results do not depend on when it is read.

Shapes: T vector steps, N environments, E episodes, L transitions of an episode, W multi-agent worlds.
"""

from __future__ import annotations

import collections
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rein.ops.trees import Read, map_tree, read_together
from rein.replay.rollout import RowBuffer
from rein.types import Episode, Episodes, Tree

WINDOW = 100  # episodes in the `..._100` metrics


class EpisodeStatistics:
    """Running sums of N open episodes, episodes that ended in this epoch, and the last 100 ended episodes.

    Args:
        num_envs: number of environments N.
        rows: record to read. Call `begin_epoch` before clearing it.
        worlds: number of multi-agent worlds W, for statistics of whole worlds; 0 for none.
        groups: rows of the agents of each group, for statistics of groups.
        learners: number of learners with equal numbers of environments, for statistics of each; 0 for a single one.
    """

    def __init__(
        self,
        num_envs: int,
        rows: RowBuffer,
        *,
        worlds: int = 0,
        groups: Mapping[str, Tensor] | None = None,
        learners: int = 0,
    ) -> None:
        self._rows = rows
        self._learner_returns = [collections.deque[float](maxlen=WINDOW) for _ in range(learners)]  # newest last
        self._groups = {name: frozenset(members.tolist()) for name, members in (groups or {}).items()}
        self._agents = num_envs // worlds if worlds else 0
        self._world_return_W, self._world_length_W = np.zeros(worlds), np.zeros(worlds, np.int64)
        self._worlds_ended: list[tuple[float, int]] = []  # (sum of the returns of its agents, length)
        self._return_N = np.zeros(num_envs)  # float64
        self._length_N = np.zeros(num_envs, np.int64)
        self._ended: list[tuple[int, int, float, int]] = []  # (row, environment, return, length)
        self._window: list[tuple[float, int]] = []  # (return, length), newest last
        self._first_row_step = 0  # vector step of row 0
        self._caught_up = 0  # number of processed rows
        self._ended_before = 0  # episodes that ended before this epoch

    def begin_epoch(self, vector_steps: int) -> None:
        """Prepare for cleared rows. Row 0 will be vector step `vector_steps` of the run."""
        self.catch_up()
        self._ended_before += len(self._ended)
        self._ended, self._caught_up, self._first_row_step = [], 0, vector_steps
        self._worlds_ended = []

    def observe_reset(self) -> None:
        """Discard open episodes after a reset of all environments outside a step.

        The last row of an open episode becomes invalid, because its next observation was not stored.
        """
        self.catch_up()
        self._return_N[:] = 0.0
        self._length_N[:] = 0
        self._world_return_W[:] = 0.0
        self._world_length_W[:] = 0
        if self._rows.length:
            valid_N, terminated_N, truncated_N = (self._rows[name][-1] for name in ("valid", "terminated", "truncated"))
            valid_N &= terminated_N | truncated_N

    @property
    def first_row_step(self) -> int:
        """Vector step of row 0, counted over the whole run."""
        return self._first_row_step

    def catch_up(self) -> None:
        """Process the rows added since the last call."""
        read_together(self.reads())

    def reads(self) -> Iterator[Read]:
        """Yield the rows added since the last call, so that they are read together with other values."""
        if self._caught_up != self._rows.length:
            names = "raw_reward" if "raw_reward" in self._rows else "reward", "valid", "terminated", "truncated"
            yield [self._rows[name][self._caught_up :] for name in names], self._process

    def _process(self, *columns: Tensor) -> None:
        start, stop = self._caught_up, self._rows.length
        raw_TN, valid_TN, terminated_TN, truncated_TN = (column.numpy() for column in columns)
        reward_TN: np.ndarray = np.where(valid_TN, raw_TN, 0.0).astype(np.float64)
        row_E, environment_E = np.nonzero((terminated_TN | truncated_TN) & valid_TN)
        lost_TN = truncated_TN & ~valid_TN  # the rest of the episode was lost when a worker failed
        lost_rows = set(np.nonzero(lost_TN)[0].tolist())
        first_T = np.searchsorted(row_E, np.arange(stop - start + 1)).tolist()  # first end in each row
        ended_episodes: list[tuple[int, int, float, int]] = []
        for t, (a, b) in enumerate(itertools.pairwise(first_T)):
            self._return_N += reward_TN[t]
            self._length_N += valid_TN[t]
            if t in lost_rows:
                self._return_N[lost_TN[t]] = 0.0
                self._length_N[lost_TN[t]] = 0
            if self._agents:
                self._world_return_W += reward_TN[t].reshape(-1, self._agents).sum(1)
                self._world_length_W += valid_TN[t].reshape(-1, self._agents).any(1)
            if a < b:
                ended = environment_E[a:b]
                columns = ended.tolist(), self._return_N[ended].tolist(), self._length_N[ended].tolist()
                ended_episodes += zip(itertools.repeat(start + t), *columns)
                self._return_N[ended] = 0.0
                self._length_N[ended] = 0
                if self._agents:
                    self._end_worlds(np.unique(ended // self._agents))
        self._ended += ended_episodes
        self._window = [*self._window, *(end[2:] for end in ended_episodes)][-WINDOW:]
        if self._learner_returns:
            size = len(self._return_N) // len(self._learner_returns)
            for _, environment, episode_return, _ in ended_episodes:
                self._learner_returns[environment // size].append(episode_return)
        self._caught_up = stop

    def _end_worlds(self, world_R: np.ndarray) -> None:
        """Record those of these worlds in which no agent has an open episode."""
        over_R = world_R[~self._length_N.reshape(-1, self._agents)[world_R].any(1)]
        columns = self._world_return_W[over_R].tolist(), self._world_length_W[over_R].tolist()
        self._worlds_ended += zip(*columns, strict=True)
        self._world_return_W[over_R] = 0.0
        self._world_length_W[over_R] = 0

    def forget_returns(self, learner: int) -> None:
        """Remove the past episodes of a learner from its metric, because they are not of its current policy."""
        self.catch_up()
        self._learner_returns[learner].clear()

    def open_returns(self) -> np.ndarray:
        """Return the sum of the rewards of each open episode so far, (N,) float64; 0 in an episode without a step."""
        self.catch_up()
        return self._return_N.copy()

    def open_lengths(self) -> np.ndarray:
        """Return the number of transitions of each open episode so far, (N,) int64."""
        self.catch_up()
        return self._length_N.copy()

    def ended_in_last_row(self) -> list[tuple[int, int, float, int]]:
        """Return id, environment, return and length of each episode that ended in the last row."""
        self.catch_up()
        last = self._rows.length - 1
        return [(self._ended_before + i, *e[1:]) for i, e in enumerate(self._ended) if e[0] == last]

    def read(self, metric: str) -> float:
        """Return the current value of a metric in `metrics`; NaN without episodes."""
        self.catch_up()
        if metric in WORLD_METRICS:
            return _mean([world[WORLD_METRICS[metric]] for world in self._worlds_ended])
        if metric.startswith(LEARNER_RETURN):
            return _mean([*self._learner_returns[int(metric.removeprefix(LEARNER_RETURN))]])
        if metric not in METRICS:
            rows = self._groups[metric.removeprefix("return_")]
            return _mean([episode_return for _, n, episode_return, _ in self._ended if n in rows])
        column, windowed = METRICS[metric]
        if windowed:
            return _mean([e[column] for e in self._window]) if len(self._window) == WINDOW else math.nan
        return _mean([e[2 + column] for e in self._ended])

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of all metrics: `METRICS`, and those of worlds, groups and learners if there are any."""
        groups = (f"return_{name}" for name in self._groups)
        learners = (f"{LEARNER_RETURN}{number}" for number in range(len(self._learner_returns)))
        return (*METRICS, *(WORLD_METRICS if self._agents else ()), *groups, *learners)

    def episodes(self) -> Episodes:
        """Return the episodes that ended in this epoch so far, with final observations if the rows contain them."""
        self.catch_up()
        ended = self._ended
        row_E, environment_E = _column(ended, 0, np.int64), _column(ended, 1, np.int64)
        length_E, rows = _column(ended, 3, np.int64), self._rows

        def at_end(field: str) -> Tree:
            return map_tree(lambda column: _host(column)[row_E, environment_E], rows[field])

        stored = bool(rows.length) and "next_observation" in rows
        flags = {name: at_end(name) if rows.length else np.zeros(0, bool) for name in ("terminated", "truncated")}
        return Episodes(
            id=self._ended_before + np.arange(len(ended)),
            environment=environment_E,
            first_step=self._first_row_step + row_E - length_E + 1,  # the transitions of an episode are consecutive
            last_step=self._first_row_step + row_E,
            seed=at_end("seed") if stored else np.full(len(ended), -1),
            episode_return=_column(ended, 2, np.float64),
            length=length_E,
            final_observation=at_end("next_observation") if stored else None,
            options=np.array([rows.options.get(e[:2], "") for e in ended], "S") if rows.options else None,
            **flags,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return sums, ended episodes and the window. The rows are saved separately."""
        worlds = {
            "world_return": torch.from_numpy(self._world_return_W.copy()),
            "world_length": torch.from_numpy(self._world_length_W.copy()),
            "worlds_ended": [list(world) for world in self._worlds_ended],
        }
        learners = {"learner_returns": [list(returns) for returns in self._learner_returns]}
        return {
            **(worlds if self._agents else {}),
            **(learners if self._learner_returns else {}),
            "return": torch.from_numpy(self._return_N.copy()),
            "length": torch.from_numpy(self._length_N.copy()),
            "ended": [list(e) for e in self._ended],
            "window": [list(e) for e in self._window],
            "first_row_step": self._first_row_step,
            "caught_up": self._caught_up,
            "ended_before": self._ended_before,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`. Raises ValueError if the number of environments differs."""
        if len(state["return"]) != len(self._return_N):
            raise ValueError(
                f"the state has {len(state['return'])} environments, but the loop has {len(self._return_N)}"
            )
        self._return_N = state["return"].numpy(force=True).copy()
        self._length_N = state["length"].numpy(force=True).copy()
        self._ended = [(int(r), int(n), float(g), int(k)) for r, n, g, k in state["ended"]]
        self._window = [(float(g), int(k)) for g, k in state["window"]]
        self._first_row_step, self._caught_up = int(state["first_row_step"]), int(state["caught_up"])
        self._ended_before = int(state["ended_before"])
        if self._agents:
            self._world_return_W = state["world_return"].numpy(force=True).copy()
            self._world_length_W = state["world_length"].numpy(force=True).copy()
            self._worlds_ended = [(float(total), int(length)) for total, length in state["worlds_ended"]]
        for returns, saved in zip(self._learner_returns, state.get("learner_returns", ()), strict=False):
            returns.clear()
            returns.extend(saved)


# name -> (0 for returns or 1 for lengths, True for the last 100 episodes instead of those of this epoch)
METRICS = {
    "episode_return": (0, False),
    "episode_length": (1, False),
    "episode_return_100": (0, True),
    "episode_length_100": (1, True),
}


WORLD_METRICS = {"world_return": 0, "world_length": 1}  # name -> 0 for sums of returns or 1 for lengths
LEARNER_RETURN = "learner_return/"  # followed by the number of a learner


def _mean(values: list[Any]) -> float:
    return sum(values) / len(values) if values else math.nan


def _column(rows: list[Any], index: int, dtype: Any) -> np.ndarray:
    return np.array([row[index] for row in rows], dtype)


def _host(rows: Tensor) -> np.ndarray:
    return rows.numpy(force=True)  # copies only if the rows are on another device


class CompletedEpisodes:
    """Reads the episodes that ended in the last row, with all their transitions.

    The rows of the loop belong to the current epoch. Rows of episodes that began in an earlier epoch are kept here if
    the event has handlers when the next epoch begins.
    """

    def __init__(self, rows: RowBuffer, statistics: EpisodeStatistics) -> None:
        self._rows, self._statistics = rows, statistics
        self._earlier: dict[str, Tree] = {}  # (T, N, ...), the rows directly before row 0

    def begin_epoch(self, keep: bool) -> None:
        """Copy the rows of open episodes before the rows are cleared, or none of them."""
        longest = int(self._statistics.open_lengths().max()) if keep else 0
        if not longest:
            self._earlier = {}
        elif self._rows.length:
            self._earlier = map_tree(lambda *parts: torch.cat(parts)[-longest:].clone(), *self._recorded())

    def read(self) -> list[Episode]:
        """Return the episodes that ended in the last row, without those whose first transitions were not kept."""
        if "next_observation" not in self._rows:  # the first handler was attached during this epoch
            return []
        recorded = self._recorded()
        stored_rows = sum(len(trees["valid"]) for trees in recorded)
        return [
            self._episode(recorded, *ended)
            for ended in self._statistics.ended_in_last_row()
            if ended[-1] <= stored_rows
        ]

    def _recorded(self) -> list[dict[str, Any]]:
        """Return the fields of the earlier rows, if these can be joined, and of the rows of this epoch."""
        fields, earlier = self._rows.fields(), self._earlier
        if earlier and "raw_reward" in fields:  # rewards were not shaped before
            earlier = {"raw_reward": earlier["reward"], **earlier}
        if earlier.keys() != fields.keys():
            return [fields]
        return [{name: earlier[name] for name in fields}, fields]

    def _episode(
        self, recorded: list[dict[str, Any]], id: int, environment: int, episode_return: float, length: int
    ) -> Episode:
        here = min(length, self._rows.length)

        def transitions(*earlier_and_now: Any) -> np.ndarray:
            *earlier, now = earlier_and_now
            parts = [now[len(now) - here :, environment]]
            if earlier and length > here:
                parts.insert(0, earlier[0][-(length - here) :, environment])
            return torch.cat(parts).numpy(force=True)  # copies

        columns: dict[str, Any] = map_tree(transitions, *recorded)
        final_observation = map_tree(lambda column: column[-1], columns.pop("next_observation"))
        last_step = self._statistics.first_row_step + self._rows.length - 1
        return Episode(
            id=id,
            environment=environment,
            first_step=last_step - length + 1,
            last_step=last_step,
            seed=int(columns.pop("seed")[-1]),
            episode_return=episode_return,
            length=length,
            terminated=bool(columns["terminated"][-1]),
            truncated=bool(columns["truncated"][-1]),
            fields=columns,
            final_observation=final_observation,
            options=json.loads(self._rows.options.get((self._rows.length - 1, environment), "null")),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the rows of open episodes from earlier epochs."""
        return {"earlier": self._earlier}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._earlier = map_tree(torch.Tensor.clone, dict(state["earlier"]))
