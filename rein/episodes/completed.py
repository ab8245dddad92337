"""Episodes that end in a step, for handlers of `episodes_completed`.

Shapes: T rows, N environments, L transitions of an episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rein.episodes.statistics import EpisodeStatistics
from rein.ops.trees import map_tree
from rein.replay.rollout import Rows
from rein.types import Episode, Tree


class CompletedEpisodes:
    """Reads the episodes that ended in the last row, with all their transitions.

    The rows of the loop are those of the current epoch. The rows of episodes that began in an earlier epoch are kept
    here, if the event has handlers when the next epoch begins.
    """

    def __init__(self, rows: Rows, statistics: EpisodeStatistics) -> None:
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
        kept = sum(len(trees["valid"]) for trees in recorded)
        return [self._episode(recorded, *ended) for ended in self._statistics.ended_in_last_row() if ended[-1] <= kept]

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
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the rows of open episodes from earlier epochs."""
        return {"earlier": self._earlier}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._earlier = map_tree(torch.Tensor.clone, dict(state["earlier"]))
