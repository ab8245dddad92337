"""Record episodes played outside training, as epochs of a separate store.

Shapes: N environments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rein.episodes.episode_statistics import EpisodeStatistics
from rein.episodes.step import record_options
from rein.ops.trees import map_tree
from rein.protocols import Store
from rein.replay.rollout import RowBuffer
from rein.types import TimeStep, Trajectory, Tree


class Recorder:
    """Writes an epoch to `store` for each round in which every environment plays one episode.

    Example::

        recorder = Recorder(rein.HDF5Store("runs/played"), environment.num_envs)
        evaluate(policy, environment, episodes=100, recorder=recorder)

    Epochs, steps and episodes are counted over all rounds. Steps of an environment after the end of its episode are
    invalid. In a last round with fewer episodes than environments, the surplus episodes are invalid too.
    """

    def __init__(self, store: Store, num_envs: int) -> None:
        self.store = store
        self._rows = RowBuffer()
        self._statistics = EpisodeStatistics(num_envs, self._rows)
        self._rounds = self._steps = 0
        self._num_envs = num_envs
        self.failure: Exception | None = None  # error raised by the store

    def begin(self) -> None:
        """Start a round after a reset of all environments. Discards an unfinished round."""
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
        options: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> None:
        """Record one step of all environments, on their device.

        `seed` (N,) are the seeds of their episodes, and `options` the reset options.

        Raises ValueError if the number of environments differs, or if extras have the names of recorded fields.
        """
        if len(valid) != self._num_envs:
            raise ValueError(f"Recorder(num_envs={self._num_envs}): got a step of {len(valid)} environments")
        row: dict[str, Any] = {"observation": observation, "action": action, "reward": time_step.reward}
        row |= {"terminated": time_step.terminated & valid, "truncated": truncated, "valid": valid}
        row |= {"next_observation": time_step.final_observation, "seed": seed}
        if taken := sorted(row.keys() & extras.keys()):
            raise ValueError(f"extras of the policy have reserved names {taken}; rename them")
        self._rows.append({**row, **extras})
        if options is not None:
            record_options(self._rows, options, row["terminated"] | row["truncated"])
        self._steps += 1

    def end(self, observation: Tree) -> None:
        """End the round. `observation` is the observation after the last step."""
        fields = {name: rows for name, rows in self._rows.fields().items() if name not in ("next_observation", "seed")}
        metrics = {name: self._statistics.read(name) for name in ("episode_return", "episode_length")}
        episodes = self._statistics.episodes()
        clocks = {"vector_steps": self._steps, "env_steps": self._steps * len(fields["valid"][0])}
        round = Trajectory(
            epoch=self._rounds + 1,
            status="halted",  # like an epoch in which all environments have ended
            first_step=self._statistics.first_row_step,
            fields=fields,
            next_observation=map_tree(Tensor.clone, observation),
            episodes=episodes,
            metrics=metrics,
            clocks={**clocks, "epochs": self._rounds + 1},
        )
        try:
            self.store.append(round)
        except Exception as error:  # stored for evaluate_every and raised again
            self.failure = error
            raise
        self._rounds += 1
        self.begin()  # so that only the counters have to be saved

    @property
    def config(self) -> dict[str, Any]:
        """Empty: no option affects a run, and the store is a separate part."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the counters between two rounds."""
        return {"rounds": self._rounds, "steps": self._steps, "statistics": self._statistics.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the rounds of `state`."""
        self._rows.clear()
        self._rounds, self._steps = int(state["rounds"]), int(state["steps"])
        self._statistics.load_state_dict(state["statistics"])
