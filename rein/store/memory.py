"""Trajectories in memory: for tests, notebooks and short runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from gymnasium.spaces import Space

from rein.errors import StoreError
from rein.ops.trees import map_tree, pack, unpack
from rein.store.host_copy import check_names, to_host
from rein.types import NAMED_TUPLES, Trajectory


class MemoryStore:
    """Keeps every epoch in the list `trajectories`, as numpy arrays of its own."""

    def __init__(self) -> None:
        self.trajectories: list[Trajectory] = []
        self._closed = False

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON: nothing."""
        return {}

    def __repr__(self) -> str:
        return f"MemoryStore({len(self.trajectories)} epochs)"

    def begin(self, epochs: int) -> None:
        """A run begins, or goes on, that has had so many epochs. Raises ValueError where there are more of another."""
        if self.trajectories and (last := self.trajectories[-1].epoch) > epochs:
            raise ValueError(
                f"MemoryStore: it holds {last} epochs of another loop, and this one has had {epochs}: go on with that "
                "one, loop.run(epochs=...), or give this one a store of its own"
            )

    def check_spaces(self, spaces: Mapping[str, Space[Any]]) -> None:
        """Raises ValueError where a name in the spaces of these fields, by name, is none that it can hold."""
        for field, space in spaces.items():
            check_names(space, field)

    def append(self, trajectory: Trajectory) -> None:
        """Take in one epoch; the caller may reuse its memory at once."""
        if self._closed:
            raise StoreError("MemoryStore: the store is closed")
        if self.trajectories and trajectory.epoch <= (last := self.trajectories[-1].epoch):
            raise ValueError(f"MemoryStore: epoch {trajectory.epoch} after epoch {last}; a store keeps one run")
        self.trajectories.append(to_host(trajectory))

    def flush(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Take no more epochs; what is there stays. May be called twice."""
        self._closed = True

    def state_dict(self) -> dict[str, Any]:
        """Every trajectory."""
        return {"trajectories": [pack(map_tree(_to_tensor, trajectory)) for trajectory in self.trajectories]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold the trajectories of `state` and no others."""
        self.trajectories = [to_host(unpack(packed, NAMED_TUPLES)) for packed in state["trajectories"]]


def _to_tensor(leaf: Any) -> Any:
    return leaf if isinstance(leaf, (str, int, float)) else torch.from_numpy(leaf)
