"""Replay stored episodes and compare them bit by bit.

Shapes: L transitions of an episode, N environments, O an observation, A an action, K agents of a world (1 without
multi-agent worlds). All arrays are on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from rein.envs.base.contract import agents_per_world
from rein.envs.base.rendering import as_frame
from rein.episodes.step import step_active
from rein.ops.trees import map_tree, to_device
from rein.types import Episode, TimeStep, Tree

if TYPE_CHECKING:
    from rein.store.reader import Run

_Path = tuple[str, ...]  # ("observation", "camera")
_HALF = (torch.float16, torch.bfloat16)  # stores convert these to float32


class Difference(NamedTuple):
    """First difference between a stored episode and its replay."""

    step: int  # of the episode, 0-based
    field: str  # its path, `observation.camera`
    amount: float  # largest difference of two numbers; 0 if only bits differ, NaN if one is NaN


class Replay(NamedTuple):
    """Result of replaying one episode."""

    id: int
    length: int  # number of stored transitions
    compared: tuple[str, ...]  # compared fields
    difference: Difference | None  # None if all fields agree bit by bit


def replay(
    environment: Any,
    episodes: Sequence[Episode],
    *,
    film: Callable[[np.ndarray[Any, Any]], None] | None = None,
    run: Run | None = None,
) -> list[Replay]:
    """Replay stored episodes from their seeds and actions, and compare the results with the stored data.

    Each episode is played in the row in which it was recorded (modulo N), up to N at once. An episode that was cut by
    training may end as truncated although the environment continues. An episode of an agent in a multi-agent world is
    replayed with the actions of all agents of the world.

    Args:
        environment: A `Replayable` environment that is used for nothing else.
        episodes: Episodes to replay, such as `rein.open_run(path).episode(id)`.
        film: Function that receives the frame before each action, up to the first difference. Requires a single
            episode. If an agent leaves a multi-agent world early, the frames continue until the last agent leaves.
        run: Run of the episodes. Required for multi-agent worlds, to read the actions of the other agents.

    Raises:
        ValueError: If an episode cannot be replayed, or not in this environment.
    """
    if film is not None and len(episodes) != 1:
        raise ValueError(f"replay(film=...): got {len(episodes)} episodes; pass a single one")
    if not (getattr(environment, "replayable", False) and hasattr(environment, "reset_to")):
        raise ValueError(f"{type(environment).__name__} is not replayable: a seed does not reproduce an episode")
    agents = agents_per_world(environment)
    if agents > 1 and run is None:
        raise ValueError(
            "replay: an episode of a multi-agent world needs run=, to read the actions of the other agents"
        )
    compared = [_Comparison(episode, environment.num_envs, agents, run, film is not None) for episode in episodes]
    queues: list[list[_Comparison]] = [[] for _ in range(environment.num_envs // agents)]  # of environments or worlds
    for comparison in compared:
        queues[comparison.row // agents].append(comparison)
    for turn in range(max(map(len, queues))):
        _play(environment, {index: queue[turn] for index, queue in enumerate(queues) if turn < len(queue)}, film)
    return [comparison.result for comparison in compared]


class Clip(NamedTuple):
    """Stored episode with its frames."""

    frames: np.ndarray[Any, Any]  # (L, height, width, 3) uint8: frames[t] shows the state of action t
    episode: Episode  # its fields, such as `observation`, have L rows


def clip(environment: Any, episode: Episode, *, run: Run | None = None) -> Clip:
    """Return a stored episode with its frames, which the environment renders in a replay. See `replay`.

    Example::

        frames, episode = clip(rein.make("CartPole-v1", render_mode="rgb_array"), run.episode(17))

    Raises ValueError if the replay differs from the stored episode.
    """
    frames: list[np.ndarray[Any, Any]] = []
    (result,) = replay(environment, [episode], run=run, film=lambda x: frames.append(as_frame(x, environment).copy()))
    if result.difference is not None:
        raise ValueError(
            f"episode {episode.id}: its replay differs in {result.difference.field} at step {result.difference.step}; "
            "pass the environment of the run, with the same options"
        )
    return Clip(np.stack(frames[: episode.length]), episode)


class _Comparison:
    """Stored episode and its agreement with the replay so far."""

    def __init__(
        self, episode: Episode, num_envs: int = 1, agents: int = 1, run: Run | None = None, filmed: bool = False
    ) -> None:
        self.episode = episode
        self.row = episode.environment % num_envs  # in which the episode is replayed
        name = f"episode {episode.id}"
        if episode.seed < 0:
            raise ValueError(f"{name}: cannot be replayed, because its seed is unknown")
        if "action" not in episode.fields:
            raise ValueError(f"{name}: cannot be replayed, because its actions were not stored")
        self.actions: Tree = map_tree(lambda x: np.asarray(x)[:, None], episode.fields["action"])  # (L, K, *A)
        self._steps = episode.length  # to play
        if agents > 1:
            self._steps = _steps_of_world(episode, agents, run) if filmed else episode.length
            self.actions = _actions_of_world(episode, agents, run, self._steps)
        raw = "raw_reward" if "raw_reward" in episode.fields else "reward"  # the environment's reward
        self._fields = [name for name in ("observation", raw, "terminated", "truncated") if name in episode.fields]
        self._stored = {name: dict(_by_path(episode.fields[name], (name,))) for name in self._fields}
        self._difference: Difference | None = None

    @property
    def result(self) -> Replay:
        return Replay(self.episode.id, self.episode.length, tuple(self._fields), self._difference)

    def is_open(self, step: int) -> bool:
        """Return whether transition `step` still has to be played."""
        return self._difference is None and step < self.episode.length

    def is_played(self, step: int) -> bool:
        """Return whether transition `step` has to be played, for the comparison or for the video of the world."""
        return self._difference is None and step < self._steps

    def see(self, step: int, observation: Tree) -> None:
        """Compare the observation before the action of `step`."""
        self._compare(step, "observation", observation)

    def take(self, step: int, played: Mapping[str, Any], final_observation: Tree) -> None:
        """Compare the results of the action of `step`."""
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
        arrays = dict(_by_path(played, next(iter(stored), ())[:1]))
        if arrays.keys() != stored.keys():
            expected, returned = (", ".join(map(".".join, paths)) for paths in (stored, arrays))
            raise ValueError(f"episode {self.episode.id}: has {expected}; this environment returns {returned}")
        for path, whole in stored.items():
            expected, got = np.asarray(whole if index is None else whole[index]), np.asarray(arrays[path])
            if expected.shape != got.shape:
                shapes = f"of shape {expected.shape}; this environment returns {got.shape}"
                raise ValueError(f"episode {self.episode.id}: {'.'.join(path)} is {shapes}")
            if expected.tobytes() != got.astype(expected.dtype, copy=False).tobytes():
                self._difference = Difference(step, ".".join(path), _distance(expected, got))
                return


def _play(
    environment: Any, chosen: Mapping[int, _Comparison], film: Callable[[np.ndarray[Any, Any]], None] | None
) -> None:
    """Play one episode in each environment or world of `chosen`. Others and finished episodes are not compared."""
    agents = agents_per_world(environment)
    first = next(iter(chosen.values()))
    played = [chosen.get(index, first) for index in range(environment.num_envs // agents)]
    by_row = [comparison.episode for comparison in played for _ in range(agents)]
    seeds_N = torch.tensor([episode.seed for episode in by_row], dtype=torch.int64, device=environment.device)
    options = [getattr(episode, "options", None) for episode in by_row]
    if any(each is not None for each in options):
        if not hasattr(environment, "set_options"):
            raise ValueError(
                f"episode {first.episode.id}: was recorded with reset options, but {type(environment).__name__} has no "
                "set_options"
            )
        observation = environment.reset_to(seeds_N, options)
    else:
        observation = environment.reset_to(seeds_N)
    observation, step = _on_host(observation), 0
    while True:
        for comparison in chosen.values():
            if comparison.is_open(step):
                comparison.see(step, map_tree(lambda x, i=comparison.row: x[i], observation))
        open_episodes = {c.row: c for c in chosen.values() if c.is_open(step)}
        open_worlds = {index for index, comparison in chosen.items() if comparison.is_played(step)}
        if not open_worlds:
            return
        if film is not None:
            film(environment.render(first.row))
        actions = [_action(comparison, step) for comparison in played]
        action = map_tree(lambda *parts: torch.from_numpy(np.concatenate(parts)), *actions)
        active = [row // agents in open_worlds for row in range(environment.num_envs)]
        active_N = torch.tensor(active, dtype=torch.bool, device=environment.device)
        time_step = step_active(environment, to_device(action, environment.device), active_N)
        observation = _on_host(time_step.observation)
        _compare_rows(step, open_episodes, time_step)
        step += 1


def _compare_rows(step: int, open_episodes: Mapping[int, _Comparison], time_step: TimeStep) -> None:
    ends = {name: _on_host(getattr(time_step, name)) for name in ("reward", "terminated", "truncated")}
    final = _on_host(time_step.final_observation)
    for row, comparison in open_episodes.items():
        played = {name: column[row] for name, column in ends.items()}
        comparison.take(step, played, map_tree(lambda x, i=row: x[i], final))


def _by_path(tree: Tree, path: _Path) -> Iterator[tuple[_Path, Any]]:
    """Yield all arrays with their paths. A path is a tuple, because names may contain any character."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _by_path(value, (*path, name))
    else:
        yield path, tree


def _steps_of_world(episode: Any, agents: int, run: Any) -> int:
    """Return the number of steps from the start of an episode to the last stored end of an agent of its world."""
    table = run.episodes
    same_E = (table["environment"] // agents == episode.environment // agents) & (table["seed"] == episode.seed)
    same_E &= table["first_step"] == episode.first_step
    return int(table["last_step"][same_E].max()) - episode.first_step + 1


def _actions_of_world(episode: Any, agents: int, run: Any, steps: int) -> Tree:
    """Return the actions (L, K, *A) of all agents in the first steps of the world in which an episode was played.

    The action of an agent that has left is not stored. It is replaced by the first action of the agent.
    """
    epochs = run.epochs
    epoch = np.searchsorted(epochs["first_step"], episode.first_step, "right") - 1
    row = int(epochs["first_row"][epoch] + episode.first_step - epochs["first_step"][epoch])
    begin = episode.environment // agents * agents
    rows, world = slice(row, row + steps), slice(begin, begin + agents)
    actions = map_tree(lambda x: x[:, world], run.field("action", rows))
    if "valid" not in run.fields:
        return actions
    step_LK = np.arange(steps)[:, None] * run.field("valid", rows)[:, world]
    return map_tree(lambda x: x[step_LK, np.arange(agents)], actions)


def _action(comparison: _Comparison, step: int) -> Tree:
    """Return the actions (K, *A) of a step. After the end of the episode the last action is repeated."""
    return map_tree(lambda actions: actions[min(step, len(actions) - 1)], comparison.actions)


def _on_host(tree: Tree) -> Tree:
    """Return numpy arrays as a store writes them: half precision becomes float32."""
    return map_tree(lambda x: (x.float() if x.dtype in _HALF else x).numpy(), to_device(tree, "cpu"))


def _distance(expected: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> float:
    if expected.size == 0:
        return 0.0
    return float(np.abs(expected.astype(np.float64) - got.astype(np.float64)).max())
