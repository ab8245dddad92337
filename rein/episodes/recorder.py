"""Episodes that are played outside of training, taken down as epochs of a store of their own.

Shapes: N environments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rein.episodes.statistics import EpisodeStatistics
from rein.ops.trees import map_tree
from rein.protocols import Store
from rein.replay.rollout import RowBuffer
from rein.types import TimeStep, Trajectory, Tree


class Recorder:
    """Hands `store` an epoch for each round in which every environment plays one episode.

        recorder = Recorder(rein.HDF5Store("runs/played"), environment.num_envs)
        evaluate(policy, environment, episodes=100, recorder=recorder)

    Epochs, steps and episodes are counted on from round to round. What an environment does after the end of its episode
    is not valid, nor is an episode that was not asked for, in a last round of fewer episodes than environments.
    """

    def __init__(self, store: Store, num_envs: int) -> None:
        self.store = store
        self._rows = RowBuffer()
        self._statistics = EpisodeStatistics(num_envs, self._rows)
        self._rounds = self._steps = 0
        self._num_envs = num_envs
        self.failure: Exception | None = None  # what the store raised

    def begin(self) -> None:
        """A round begins; all environments have just been reset. Nothing is left of one that broke off."""
        self._rows.clear()
        self._statistics.observe_reset()
        self._statistics.begin_epoch(self._steps)

    def record(
        self,
        observation: Tree,
        action: Tree,
        extras: Mapping[str, Tree],
        time_step: TimeStep,
        valid: Tensor,
        truncated: Tensor,
        seed: Tensor,
    ) -> None:
        """One step of all environments, on their device; `seed` (N,) is what their episodes were reset with.

        Raises ValueError for another number of environments, and for extras that have the names of what is kept anyway.
        """
        if len(valid) != self._num_envs:
            raise ValueError(f"Recorder(num_envs={self._num_envs}): was given a step of {len(valid)} environments")
        row: dict[str, Any] = {"observation": observation, "action": action, "reward": time_step.reward}
        row |= {"terminated": time_step.terminated & valid, "truncated": truncated & valid, "valid": valid}
        row |= {"next_observation": time_step.final_observation, "seed": seed}
        if taken := sorted(row.keys() & extras.keys()):
            raise ValueError(f"the policy's extras {taken} have names that every step has; call them otherwise")
        self._rows.append({**row, **extras})
        self._steps += 1

    def end(self, observation: Tree) -> None:
        """The round is over; `observation` is what would have been acted on next."""
        fields = {name: rows for name, rows in self._rows.fields().items() if name not in ("next_observation", "seed")}
        metrics = {name: self._statistics.read(name) for name in ("episode_return", "episode_length")}
        episodes = self._statistics.episodes()
        clocks = {"vector_steps": self._steps, "env_steps": self._steps * len(fields["valid"][0])}
        round = Trajectory(
            epoch=self._rounds + 1,
            status="halted",  # as an epoch in which all environments have ended
            first_step=self._statistics.first_row_step,
            fields=fields,
            next_observation=map_tree(Tensor.clone, observation),
            episodes=episodes,
            metrics=metrics,
            clocks={**clocks, "epochs": self._rounds + 1},
        )
        try:
            self.store.append(round)
        except Exception as error:  # remembered and raised again
            self.failure = error
            raise
        self._rounds += 1
        self.begin()  # so that nothing but the counts has to be saved

    @property
    def config(self) -> dict[str, Any]:
        """Nothing that a run depends on: the store is a part of its own."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """How far it is, between two rounds."""
        return {"rounds": self._rounds, "steps": self._steps, "statistics": self._statistics.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the rounds of `state`."""
        self._rows.clear()
        self._rounds, self._steps = int(state["rounds"]), int(state["steps"])
        self._statistics.load_state_dict(state["statistics"])
