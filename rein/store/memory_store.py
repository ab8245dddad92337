"""Store that keeps trajectories in memory, for tests, notebooks and short runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Space

from rein.errors import StoreError
from rein.ops.trees import map_tree, pack, unpack
from rein.store.host_copy import check_names, to_host
from rein.types import NAMED_TUPLES, Trajectory


class MemoryStore:
    """Store that keeps a copy of every epoch in the list `trajectories`, as NumPy arrays."""

    def __init__(self) -> None:
        self.trajectories: list[Trajectory] = []
        self._closed = False

    @property
    def config(self) -> dict[str, Any]:
        """Configuration: empty."""
        return {}

    def __repr__(self) -> str:
        return f"MemoryStore({len(self.trajectories)} epochs)"

    def begin(self, epochs: int) -> None:
        """Prepare for a run that has ended `epochs` epochs. Raises ValueError if the store holds later epochs."""
        if self.trajectories and (last := self.trajectories[-1].epoch) > epochs:
            raise ValueError(
                f"MemoryStore: holds {last} epochs of another loop, but this loop has ended {epochs}; continue the "
                "other loop with loop.run(epochs=...), or use a separate store for this loop"
            )

    def check_spaces(self, spaces: Mapping[str, Space[Any]]) -> None:
        """Raise ValueError if the space of a field contains a name that cannot be stored."""
        for field, space in spaces.items():
            check_names(space, field)

    def append(self, trajectory: Trajectory) -> None:
        """Append a copy of one epoch."""
        if self._closed:
            raise StoreError("MemoryStore: the store is closed")
        if self.trajectories and trajectory.epoch <= (last := self.trajectories[-1].epoch):
            raise ValueError(f"MemoryStore: got epoch {trajectory.epoch} after epoch {last}; use one store per run")
        self.trajectories.append(to_host(trajectory))

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Refuse further epochs. The trajectories stay. A second call does nothing."""
        self._closed = True

    def state_dict(self) -> dict[str, Any]:
        """Return all trajectories."""
        return {"trajectories": [pack(map_tree(_to_tensor, trajectory)) for trajectory in self.trajectories]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the trajectories with those of `state`."""
        self.trajectories = [to_host(unpack(packed, NAMED_TUPLES)) for packed in state["trajectories"]]


def _to_tensor(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "S":
        return leaf.astype(str).tolist()
    return leaf if isinstance(leaf, (str, int, float)) else torch.from_numpy(leaf)
