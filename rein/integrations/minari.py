"""Minari: datasets of others to learn from, and the environments that they are of."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from rein.envs.base.spaces import layout
from rein.loop import Loop
from rein.loop.state import State
from rein.networks.flatten import children
from rein.ops.trees import map_tree
from rein.types import Transition, Tree


class MinariData:
    """The transitions of a Minari dataset, episode by episode, as `rein.training.offline.fill` takes them.

        data = MinariData("mujoco/halfcheetah/medium-v0")
        loop = offline_loop(agent, data, epochs=100)
        evaluate(loop, agent.policy(), GymnasiumEnvironment(data.environment_spec, num_envs=10), episodes=10, every=10)
        report_score(loop, data)

    What Minari says of ends is kept: a terminated episode is not a truncated one, and one that was only cut short in
    recording is truncated. The next observation of its last transition is the episode's last one. Values have the types
    that `GymnasiumEnvironment` gives: float64 becomes float32.
    """

    def __init__(self, dataset: Any, episodes: Collection[int] | None = None) -> None:
        """`dataset` is the id of one that is on this machine, or a `minari.MinariDataset`; `episodes` the ids wanted.

        Raises ImportError without minari, FileNotFoundError where there is no such dataset, ValueError for an episode
        that is not there, and TypeError for spaces whose values are no tensors.
        """
        self.dataset = _load(dataset) if isinstance(dataset, str) else dataset
        self.observation_space: spaces.Space[Any] = self.dataset.observation_space
        self.action_space: spaces.Space[Any] = self.dataset.action_space
        known = {int(index) for index in self.dataset.episode_indices}
        if missing := sorted({int(index) for index in episodes or ()} - known):
            raise ValueError(f"{self.dataset.id}: no episode {missing[0]}; there are {len(known)}")
        self.episodes = sorted(known if episodes is None else {int(index) for index in episodes})
        for space in (self.observation_space, self.action_space):
            _check_tensors(space)

    def __repr__(self) -> str:
        return f"MinariData({self.dataset.id!r}: {len(self.episodes)} episodes)"

    def chunks(self, size: int = 1 << 16) -> Iterator[Transition]:
        """All transitions in order, (B, ...), whole episodes until there are `size` of them or more."""
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
        """What makes environments to evaluate in, for `GymnasiumEnvironment`; ValueError where the dataset has none.

        It is the dataset's own, or the one that it names for evaluation.
        """
        try:
            environment = self.dataset.recover_environment(eval_env=True)
        except ValueError as error:
            raise ValueError(f"{self.dataset.id} does not say of which environment it is; make one yourself") from error
        environment.close()
        return environment.spec

    @property
    def reference_scores(self) -> tuple[float, float] | None:
        """The returns that stand for 0 and for 100 in a normalized score; None where the dataset has none."""
        known = self.dataset.storage.metadata
        low, high = known.get("ref_min_score"), known.get("ref_max_score")
        return None if low is None or high is None else (float(low), float(high))

    def normalized_score(self, episode_return: float) -> float:
        """100 * (return - minimum) / (maximum - minimum) by the dataset's reference scores; ValueError without these.

        A policy that acts at random has about 0, an expert 100.

        Source: Fu et al. 2020 (D4RL), section 5.
        """
        if self.reference_scores is None:
            raise ValueError(f"{self.dataset.id} has no reference scores to normalize by")
        low, high = self.reference_scores
        return 100.0 * (episode_return - low) / (high - low)


def report_score(loop: Loop, data: MinariData, name: str = "evaluation") -> None:
    """The normalized score of each evaluation of that name as the metric `<name>_score`; attach it after `evaluate`.

    Raises ValueError where the dataset has no reference scores, and where nothing is evaluated.
    """
    data.normalized_score(0.0)

    @loop.event("evaluated")
    def report(state: State) -> None:
        latest = state.memory["evaluations"]
        if latest["name"] == name:
            state.metrics[f"{name}_score"] = data.normalized_score(latest["return"])


def _load(name: str) -> Any:
    try:
        import minari  # pyright: ignore[reportMissingImports]  # an extra
    except ImportError as error:
        raise ImportError(f"{name!r} is a dataset of Minari: pip install minari pillow") from error
    return minari.load_dataset(name)


def _check_tensors(space: spaces.Space[Any]) -> None:
    inner = children(space)
    for child in inner.values() if inner is not None else ():
        _check_tensors(child)
    if inner is None:
        layout(space)


def _tensors(values: Any, space: spaces.Space[Any]) -> Tree:
    """What Minari has of so many values of a space, as tensors: dictionaries for its dictionaries and tuples."""
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
