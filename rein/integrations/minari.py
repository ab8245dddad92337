"""Minari: offline datasets, their environments, and export of the episodes of a run.

Shapes: T steps of an epoch, N environments, L transitions of an episode.
"""

from __future__ import annotations

import copy
import inspect
import shutil
import warnings
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from rein.envs.acrobot import Acrobot
from rein.envs.cartpole import CartPole
from rein.envs.gymnasium.adapter import is_repr
from rein.envs.mountain_car import MountainCar, MountainCarContinuous
from rein.envs.pendulum import Pendulum
from rein.errors import optional_import
from rein.loop import Loop
from rein.loop.state import State
from rein.ops.trees import leaves, map_tree
from rein.spaces import children
from rein.spaces.conversion import layout
from rein.types import Trajectory, Transition, Tree

_ORIGINALS: dict[type, str] = {
    Acrobot: "Acrobot-v1",
    CartPole: "CartPole-v1",
    MountainCar: "MountainCar-v0",
    MountainCarContinuous: "MountainCarContinuous-v0",
    Pendulum: "Pendulum-v1",
}


class MinariData:
    """Transitions of a Minari dataset, for `rein.training.offline.fill_replay`.

    Terminated and truncated episodes are distinguished. An episode whose recording was cut short counts as truncated.
    The next observation of the last transition is the last observation of the episode. Dtypes are those of
    `GymnasiumEnvironment`: float64 becomes float32.

    Example::

        data = MinariData("mujoco/halfcheetah/medium-v0")
        loop = offline_loop(agent, data, epochs=100)
        environment = GymnasiumEnvironment(data.environment_spec, num_envs=10)
        evaluate_every(loop, agent.policy(), environment, episodes=10, every=10)
        report_score(loop, data)
    """

    def __init__(self, dataset: Any, episodes: Collection[int] | None = None) -> None:
        """Open a dataset.

        Args:
            dataset: id of a dataset on this machine, or a `minari.MinariDataset`.
            episodes: ids of the episodes to use; all by default.

        Raises:
            ImportError: without minari.
            FileNotFoundError: if the dataset is not on this machine.
            ValueError: if an episode does not exist.
            TypeError: if a space cannot be converted to tensors.
        """
        self.dataset = _load(dataset) if isinstance(dataset, str) else dataset
        self.observation_space: spaces.Space[Any] = self.dataset.observation_space
        self.action_space: spaces.Space[Any] = self.dataset.action_space
        available = {int(index) for index in self.dataset.episode_indices}
        if missing := sorted({int(index) for index in episodes or ()} - available):
            raise ValueError(f"{self.dataset.id}: no episode {missing[0]}; the dataset has {len(available)} episodes")
        self.episodes = sorted(available if episodes is None else {int(index) for index in episodes})
        for space in (self.observation_space, self.action_space):
            _check_tensors(space)

    def __repr__(self) -> str:
        return f"MinariData({self.dataset.id!r}: {len(self.episodes)} episodes)"

    def chunks(self, size: int = 1 << 16) -> Iterator[Transition]:
        """Yield all transitions in order, in batches (B, ...) of whole episodes. Only the last batch has B < `size`."""
        gathered, steps = [], 0
        for episode in self.dataset.iterate_episodes(self.episodes):
            if len(episode):
                gathered.append(self._transitions(episode))
            steps += len(episode)
            if steps >= size:
                yield _joined(gathered)
                gathered, steps = [], 0
        if gathered:
            yield _joined(gathered)

    def _transitions(self, episode: Any) -> Transition:
        steps = len(episode)
        observation = _tensors(episode.observations, self.observation_space)
        terminated, truncated = (
            torch.from_numpy(np.array(x, bool)) for x in (episode.terminations, episode.truncations)
        )
        truncated[-1] |= ~terminated[-1]
        return Transition(
            map_tree(lambda column: column[:steps], observation),
            _tensors(episode.actions, self.action_space),
            torch.from_numpy(np.array(episode.rewards, np.float32)),
            terminated,
            truncated,
            map_tree(lambda column: column[1 : steps + 1], observation),
            torch.ones(steps, dtype=torch.bool, device="cpu"),
            {},
        )

    @property
    def environment_spec(self) -> EnvSpec:
        """Spec of the evaluation environment of the dataset, or of its environment. For `GymnasiumEnvironment`.

        Raises ValueError if the dataset has no environment.
        """
        try:
            environment = self.dataset.recover_environment(eval_env=True)
        except ValueError as error:
            raise ValueError(f"{self.dataset.id} names no environment; make the environment yourself") from error
        environment.close()
        return environment.spec

    @property
    def reference_scores(self) -> tuple[float, float] | None:
        """Returns that correspond to the normalized scores 0 and 100, or None if the dataset has none."""
        metadata = self.dataset.storage.metadata
        low, high = metadata.get("ref_min_score"), metadata.get("ref_max_score")
        return None if low is None or high is None else (float(low), float(high))

    def normalized_score(self, episode_return: float) -> float:
        """Return 100 * (return - minimum) / (maximum - minimum), with the reference scores of the dataset.

        A random policy has about 0 and an expert 100. Raises ValueError if the dataset has no reference scores.

        Source: Fu et al. 2020 (D4RL), section 5.
        """
        if self.reference_scores is None:
            raise ValueError(f"{self.dataset.id} has no reference scores, so returns cannot be normalized")
        low, high = self.reference_scores
        return 100.0 * (episode_return - low) / (high - low)


def report_score(loop: Loop, data: MinariData, name: str = "evaluation") -> None:
    """Handler that records the normalized score of the evaluation `name` as the metric `<name>_score`.

    Attach it after `evaluate_every`. Raises ValueError if the dataset has no reference scores, or if `loop` has no
    evaluation.
    """
    data.normalized_score(0.0)
    loop.metrics.declare(f"{name}_score")

    @loop.event("evaluation_completed")
    def report(state: State) -> None:
        latest = state.memory["evaluations"]
        if latest["name"] == name:
            state.metrics[f"{name}_score"] = data.normalized_score(latest["return"])


def _load(name: str) -> Any:
    with optional_import(f"loading the Minari dataset {name!r} needs minari: pip install minari pillow"):
        import minari  # pyright: ignore[reportMissingImports]  # an extra
    return minari.load_dataset(name)


def _check_tensors(space: spaces.Space[Any]) -> None:
    inner = children(space)
    for child in inner.values() if inner is not None else ():
        _check_tensors(child)
    if inner is None:
        layout(space)


def _tensors(values: Any, space: spaces.Space[Any]) -> Tree:
    """Convert Minari's values of a space to tensors. Dictionaries and tuples become dictionaries."""
    if isinstance(space, spaces.Dict):
        return {key: _tensors(values[key], child) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return {
            str(place): _tensors(part, child) for place, (part, child) in enumerate(zip(values, space, strict=True))
        }
    shape, dtype = layout(space)
    return torch.from_numpy(np.array(values, dtype).reshape(-1, *shape))


def _joined(parts: list[Transition]) -> Transition:
    return map_tree(lambda *columns: torch.cat(columns), *parts)


_FLAGS = ("terminated", "truncated", "valid")  # part of the table of episodes, or used by rows only
_NOT_INFOS = ("observation", "action", "reward", *_FLAGS)


class Whole(NamedTuple):
    """A complete episode."""

    fields: dict[str, Tree]  # (L, ...)
    final_observation: Tree
    seed: int  # -1 if unknown
    terminated: bool
    truncated: bool


def export_minari(
    trajectories: Iterable[Trajectory],
    dataset_id: str,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    *,
    environment: str | EnvSpec | None = None,
    rows: Collection[int] | None = None,
    **about: Any,
) -> Any:
    """Create a Minari dataset from the complete episodes of a run.

    The export is lossless: dtypes and seeds are kept, and images are not compressed to JPEG. Terminated and truncated
    episodes are distinguished, and `observations` include the final one. Fields that the agent or the user added are in
    `infos`, with NaN, 0 or False in the last row, which has no value. Episodes may span several epochs. Episodes that
    have not ended, or whose first steps were not stored, are left out.

    Args:
        trajectories: trajectories of all epochs, such as a `rein.Run`.
        dataset_id: id of the new dataset.
        observation_space: space of one observation.
        action_space: space of one action.
        environment: id or spec of the Gymnasium environment that `dataset.recover_environment()` makes.
        rows: environments (0 to N - 1) whose episodes are exported, such as the rows of one agent of multi-agent
            worlds. By default all.
        **about: arguments of `minari.create_dataset_from_buffers`, such as `author`, `description`, `ref_max_score`.

    Returns:
        The new `minari.MinariDataset`.

    Raises:
        ImportError: without minari 0.5.4 or newer.
        ValueError: if the dataset exists, its id is invalid, the spaces do not fit, a field is missing, there is no
            complete episode, or there are reference scores without an environment. No dataset is left behind.

    Example::

        run = rein.open_run("runs/cartpole")
        export_minari(run, "cartpole/ppo-v0", agent.observation_space, agent.action_space, author="me")
    """
    with optional_import("exporting to Minari needs minari: pip install minari pillow"):
        import minari  # pyright: ignore[reportMissingImports]  # an extra
        from minari.data_collector.episode_buffer import EpisodeBuffer  # pyright: ignore[reportMissingImports]  # an extra
        from minari.dataset.minari_dataset import parse_dataset_id  # pyright: ignore[reportMissingImports]  # an extra
        from minari.storage import get_dataset_path  # pyright: ignore[reportMissingImports]  # an extra
    if "jpeg_encoding" not in inspect.signature(minari.create_dataset_from_buffers).parameters:
        raise ImportError(
            "exporting to Minari needs minari 0.5.4 or newer, which does not compress images: pip install -U minari"
        )
    parse_dataset_id(dataset_id)
    scores = [name for name in ("ref_min_score", "ref_max_score") if about.get(name) is not None]
    if scores and environment is None and about.get("eval_env") is None:  # Minari would drop the scores silently
        raise ValueError(f"{scores[0]}=...: reference scores need an environment; give environment=")
    path = get_dataset_path(dataset_id)
    if path.exists():
        raise ValueError(f"{dataset_id}: the dataset exists already, in {path}; give another name or version")
    narrow_spaces = {"observation_space": narrowed(observation_space), "action_space": narrowed(action_space)}
    episodes: Any = (  # a generator is enough: episodes are written one by one
        EpisodeBuffer(id=n, **_buffer(e, *narrow_spaces.values()))
        for n, e in enumerate(whole_episodes(trajectories, rows))
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* is (set to )?None")  # missing metadata
            dataset = minari.create_dataset_from_buffers(
                dataset_id,
                episodes,
                env=environment,
                jpeg_encoding=False,
                data_format="hdf5",
                **narrow_spaces,
                **about,
            )
        if not dataset.total_episodes:
            raise ValueError(f"{dataset_id}: no episode has ended in these trajectories, so there is nothing to export")
    except BaseException:  # re-raised; a partial dataset must not remain
        shutil.rmtree(path, ignore_errors=True)
        raise
    return dataset


def whole_episodes(trajectories: Iterable[Trajectory], chosen: Collection[int] | None = None) -> Iterator[Whole]:
    """Yield the complete episodes of the chosen environments in the order of their ends. Reads one epoch at a time."""
    begun: dict[int, list[tuple[int, Any]]] = {}  # by environment: first step and rows of each part of an open episode
    for trajectory in trajectories:
        first = trajectory.first_step
        rows, table = dict(trajectory.fields), trajectory.episodes
        length, num_envs = next((leaf.shape[:2] for _, leaf in leaves(rows)), (0, 0))
        ended = np.full(num_envs, first - 1)
        for index, (n, last) in enumerate(zip(table.environment.tolist(), table.last_step.tolist(), strict=True)):
            if chosen is not None and n not in chosen:
                continue
            pieces = [*begun.get(n, []), (first, map_tree(lambda leaf, n=n: leaf[:, n], rows))]
            fields = _cut(pieces, int(table.first_step[index]), last)
            ended[n] = max(ended[n], last)
            if next((len(leaf) for _, leaf in leaves(fields)), 0) == table.length[index]:
                final = map_tree(lambda leaf, i=index: leaf[i], table.final_observation)
                ends = bool(table.terminated[index]), bool(table.truncated[index])
                yield Whole(fields, final, int(table.seed[index]), *ends)
        for n in range(num_envs) if chosen is None else chosen:
            earlier = begun.get(n, []) if ended[n] < first else []
            start = int(ended[n]) + 1 - first
            rest = map_tree(lambda leaf, n=n, start=start: leaf[start:, n].copy(), rows)
            begun[n] = [*earlier, (first + start, rest)] if start < length else earlier


def narrowed(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the space with the dtypes of rein's tensors. See `rein.envs.base.spaces`."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: narrowed(child) for key, child in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([narrowed(child) for child in space.spaces])
    shape, dtype = layout(space)
    if not isinstance(space, spaces.Box) or dtype == space.dtype:
        return space
    limits = np.iinfo(dtype) if dtype.kind == "i" else np.finfo(dtype)
    low, high = (np.where(np.isfinite(x), np.clip(x, limits.min, limits.max), x) for x in (space.low, space.high))
    return spaces.Box(low.astype(dtype), high.astype(dtype), shape, dtype)


def spec_of(environment: Any) -> EnvSpec | None:
    """Return the Gymnasium spec of an environment, or None if Gymnasium cannot make it, as with a wrapper of rein.

    rein's own versions of Gymnasium's tasks have the spec of the original.
    """
    config = getattr(environment, "config", {})
    name, options = config.get("id"), config.get("make_kwargs")
    if type(environment) in _ORIGINALS:
        name, options = _ORIGINALS[type(environment)], {"max_episode_steps": config["max_episode_steps"]}
    if options is None or not isinstance(name, str) or name not in gymnasium.registry:
        return None
    if any(map(is_repr, options.values())):
        return None
    spec, options = copy.deepcopy(gymnasium.registry[name]), dict(options)
    for option in ("max_episode_steps", "disable_env_checker"):  # arguments of gymnasium.make that are fields of a spec
        if option in options:
            setattr(spec, option, options.pop(option))
    spec.kwargs |= options
    return spec


def _cut(pieces: list[tuple[int, Any]], first: int, last: int) -> Any:
    """Return the valid rows of the steps from `first` to `last`."""
    spans = [(slice(max(0, first - start), last + 1 - start), rows) for start, rows in pieces if start <= last]
    parts = [map_tree(lambda leaf, span=span: leaf[span], rows) for span, rows in spans]
    try:
        for part in parts[1:]:
            if changed := dict(leaves(part)).keys() ^ dict(leaves(parts[0])).keys():
                raise KeyError(min(changed))
        joined = map_tree(lambda *columns: np.concatenate(columns), *parts)
    except (KeyError, ValueError) as error:
        raise ValueError(f"the fields of an episode change from one epoch to the next: {error}") from error
    valid = joined.get("valid")
    return joined if valid is None or valid.all() else map_tree(lambda leaf: leaf[valid], joined)


def _buffer(episode: Whole, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> dict[str, Any]:
    """Return the arguments of Minari's `EpisodeBuffer` for an episode."""
    fields, final = episode.fields, episode.final_observation
    if missing := [name for name in ("observation", "action", "reward") if name not in fields]:
        raise ValueError(f"the trajectories have no field {missing[0]!r}, which a dataset requires")
    if final is None:
        raise ValueError("the trajectories have no final observations, which a dataset requires")
    steps = fields["reward"].shape[0]
    observations = map_tree(_ended_by, fields["observation"], final)
    ends = {"terminations": np.zeros(steps, bool), "truncations": np.zeros(steps, bool)}
    ends["terminations"][-1], ends["truncations"][-1] = episode.terminated, episode.truncated
    infos = {name: tree for name, tree in fields.items() if name not in _NOT_INFOS}
    return {
        "observations": _arranged(observations, observation_space, "observation"),
        "actions": _arranged(fields["action"], action_space, "action"),
        "rewards": fields["reward"],
        **ends,
        "seed": episode.seed if episode.seed >= 0 else None,
        "infos": map_tree(_padded, infos),
    }


def _ended_by(rows: np.ndarray, final: np.ndarray) -> np.ndarray:
    return np.concatenate([rows, final[None]])


def _arranged(tree: Tree, space: spaces.Space[Any], name: str) -> Any:
    """Convert values to Minari's structure of the space, with tuples for a Tuple. Raises ValueError for a misfit."""
    inner = children(space)
    if inner is not None:
        if not isinstance(tree, dict) or tree.keys() != inner.keys():
            raise ValueError(f"the {name} of the trajectories does not fit {space}")
        arranged = {key: _arranged(tree[key], child, f"{name}.{key}") for key, child in inner.items()}
        return tuple(arranged.values()) if isinstance(space, spaces.Tuple) else arranged
    if isinstance(tree, dict) or tree.shape[1:] != layout(space)[0]:
        raise ValueError(f"the {name} of the trajectories does not fit {space}")
    return tree


def _padded(rows: np.ndarray) -> np.ndarray:
    blank = np.full((1, *rows.shape[1:]), np.nan if rows.dtype.kind == "f" else 0, rows.dtype)
    return np.concatenate([rows, blank])
