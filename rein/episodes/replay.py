"""Playing stored episodes again, and finding out whether they are the same to the bit.

Shapes: L transitions of an episode, N environments, O an observation, A an action. All of it is on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from rein.episodes.step import step_active
from rein.ops.trees import map_tree, to_device
from rein.types import TimeStep, Tree

_Path = tuple[str, ...]  # ("observation", "camera")
_HALF = (torch.float16, torch.bfloat16)  # which stores widen


class Recorded(Protocol):
    """An episode as it was stored: what `rein.open_run(path).episode(id)` gives."""

    @property
    def id(self) -> int:
        """Its number in the run."""
        ...

    @property
    def environment(self) -> int:
        """Which of the N environments it was played in."""
        ...

    @property
    def seed(self) -> int:
        """What it was reset with; -1 where unknown."""
        ...

    @property
    def length(self) -> int:
        """L."""
        ...

    @property
    def fields(self) -> Mapping[str, Tree]:
        """Numpy arrays (L, ...) by name; `action` is needed, the others are compared where they are there."""
        ...

    @property
    def final_observation(self) -> Tree:
        """(*O), or None where it was not stored."""
        ...


class Difference(NamedTuple):
    """Where an episode that was played again is first another one."""

    step: int  # of the episode, 0-based
    field: str  # its path, `observation.camera`
    amount: float  # the greatest difference of two numbers; 0 where only bits differ, NaN where one is not a number


class Replay(NamedTuple):
    """What came of playing one episode again."""

    id: int
    length: int  # transitions that were stored
    compared: tuple[str, ...]  # the fields that were
    difference: Difference | None  # None: all of them agree, bit for bit


def replay(
    environment: Any, episodes: Sequence[Recorded], *, film: Callable[[np.ndarray[Any, Any]], None] | None = None
) -> list[Replay]:
    """Play stored episodes again from their seeds and actions, and compare all that comes back with what was stored.

    `environment` is `Replayable` and used for nothing else; each episode is played in the row that it was recorded in
    (modulo N), up to N at once. An episode that training cut may end as truncated where the environment goes on.
    `film` takes the frame before each action: one for each transition until the first difference, of one episode.

    Raises ValueError for an episode that cannot be played again, or not in this environment.
    """
    if film is not None and len(episodes) != 1:
        raise ValueError(f"replay(film=...): {len(episodes)} episodes; a film is of one")
    if not (getattr(environment, "replayable", False) and hasattr(environment, "reset_to")):
        raise ValueError(f"{type(environment).__name__} is not replayable: a seed does not give its episodes again")
    rows: list[list[_Comparison]] = [[] for _ in range(environment.num_envs)]
    compared = [_Comparison(episode) for episode in episodes]
    for comparison in compared:
        rows[comparison.episode.environment % len(rows)].append(comparison)
    for turn in range(max(map(len, rows))):
        chosen = {index: row[turn] for index, row in enumerate(rows) if turn < len(row)}
        _play(environment, chosen, film)
    return [comparison.result for comparison in compared]


class _Comparison:
    """One stored episode, and how far it agrees with what is being played."""

    def __init__(self, episode: Recorded) -> None:
        self.episode = episode
        where = f"episode {episode.id}"
        if episode.seed < 0:
            raise ValueError(f"{where}: what it was reset with is not known, so it cannot be played again")
        if "action" not in episode.fields:
            raise ValueError(f"{where}: its actions were not stored, so it cannot be played again")
        self.actions: Tree = map_tree(np.asarray, episode.fields["action"])
        raw = "raw_reward" if "raw_reward" in episode.fields else "reward"  # what was learned is not the environment's
        self._fields = [name for name in ("observation", raw, "terminated", "truncated") if name in episode.fields]
        self._stored = {name: dict(_by_path(episode.fields[name], (name,))) for name in self._fields}
        self._difference: Difference | None = None

    @property
    def result(self) -> Replay:
        return Replay(self.episode.id, self.episode.length, tuple(self._fields), self._difference)

    def is_open(self, step: int) -> bool:
        """Whether there is a transition number `step` to play."""
        return self._difference is None and step < self.episode.length

    def see(self, step: int, observation: Tree) -> None:
        """Compare what the action of `step` is taken at."""
        self._compare(step, "observation", observation)

    def take(self, step: int, played: Mapping[str, Any], final_observation: Tree) -> None:
        """Compare what the action of `step` led to."""
        is_last = step == self.episode.length - 1
        cut = is_last and not (played["terminated"] or played["truncated"])
        for name in self._fields:
            if name != "observation" and not (name == "truncated" and cut):
                self._compare(step, name, played["reward" if name == "raw_reward" else name])
        stored = self.episode.final_observation
        if is_last and stored is not None:
            self._compare_leaves(step, dict(_by_path(stored, ("final_observation",))), final_observation, None)

    def _compare(self, step: int, name: str, played: Tree) -> None:
        if name in self._stored:
            self._compare_leaves(step, self._stored[name], played, step)

    def _compare_leaves(self, step: int, stored: Mapping[_Path, Any], played: Tree, index: int | None) -> None:
        if self._difference is not None:
            return
        found = dict(_by_path(played, next(iter(stored), ())[:1]))
        if found.keys() != stored.keys():
            has, gives = (", ".join(map(".".join, paths)) for paths in (stored, found))
            raise ValueError(f"episode {self.episode.id}: has {has}; this environment gives {gives}")
        for path, whole in stored.items():
            expected, got = np.asarray(whole if index is None else whole[index]), np.asarray(found[path])
            if expected.shape != got.shape:
                shapes = f"of shape {expected.shape}; this environment gives {got.shape}"
                raise ValueError(f"episode {self.episode.id}: {'.'.join(path)} is {shapes}")
            if expected.tobytes() != got.astype(expected.dtype, copy=False).tobytes():
                self._difference = Difference(step, ".".join(path), _distance(expected, got))
                return


def _play(
    environment: Any, chosen: Mapping[int, _Comparison], film: Callable[[np.ndarray[Any, Any]], None] | None
) -> None:
    """Play one episode in each row of `chosen`. Other rows, and rows whose episode is over, are not compared."""
    first = next(iter(chosen.values()))
    by_row = [chosen.get(row, first) for row in range(environment.num_envs)]
    seeds_N = torch.tensor(
        [comparison.episode.seed for comparison in by_row], dtype=torch.int64, device=environment.device
    )
    observation, step = _on_host(environment.reset_to(seeds_N)), 0
    while True:
        for row, comparison in chosen.items():
            if comparison.is_open(step):
                comparison.see(step, map_tree(lambda x, i=row: x[i], observation))
        still = {row: comparison for row, comparison in chosen.items() if comparison.is_open(step)}
        if not still:
            return
        if film is not None:
            film(environment.render(next(iter(still))))
        actions = [_action(comparison, step) for comparison in by_row]
        action = map_tree(lambda *rows: torch.from_numpy(np.stack(rows)), *actions)
        active_N = torch.tensor(
            [row in still for row in range(environment.num_envs)], dtype=torch.bool, device=environment.device
        )
        time_step = step_active(environment, to_device(action, environment.device), active_N)
        observation = _on_host(time_step.observation)
        _compare_rows(step, still, time_step)
        step += 1


def _compare_rows(step: int, still: Mapping[int, _Comparison], time_step: TimeStep) -> None:
    ends = {name: _on_host(getattr(time_step, name)) for name in ("reward", "terminated", "truncated")}
    final = _on_host(time_step.final_observation)
    for row, comparison in still.items():
        played = {name: column[row] for name, column in ends.items()}
        comparison.take(step, played, map_tree(lambda x, i=row: x[i], final))


def _by_path(tree: Tree, path: _Path) -> Iterator[tuple[_Path, Any]]:
    """Every array with its path: one of names, for a name may contain any character."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _by_path(value, (*path, name))
    else:
        yield path, tree


def _action(comparison: _Comparison, step: int) -> Tree:
    """The action of a step; the last one again where the episode is over and other rows go on."""
    return map_tree(lambda actions: actions[min(step, len(actions) - 1)], comparison.actions)


def _on_host(tree: Tree) -> Tree:
    """Numpy arrays as a store would have them: half precision becomes float32."""
    return map_tree(lambda x: (x.float() if x.dtype in _HALF else x).numpy(), to_device(tree, "cpu"))


def _distance(expected: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> float:
    if expected.size == 0:
        return 0.0
    return float(np.abs(expected.astype(np.float64) - got.astype(np.float64)).max())
