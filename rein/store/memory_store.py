"""Copy trajectories to NumPy arrays in host memory, and a store that keeps these copies.

Shapes: T steps, N environments, E episodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Space
from torch import Tensor

from rein.errors import StoreError
from rein.ops.trees import leaves, map_tree, pack, unpack
from rein.spaces import children
from rein.types import NAMED_TUPLES, Episodes, Trajectory, Tree

_LEVELS = 31  # of nested dictionaries: `rein.store.format.layout` reads at most 32 nested groups
_WIDENED = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # viewers cannot show half precision
_EPISODE_TYPES = dict(
    id=np.int64,
    environment=np.int64,
    first_step=np.int64,
    last_step=np.int64,
    seed=np.int64,
    episode_return=np.float64,
    length=np.int64,
    terminated=np.bool_,
    truncated=np.bool_,
)


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


def to_host(trajectory: Trajectory, names: Collection[str] | None = None) -> Trajectory:
    """Copy a trajectory, with the fields called `names` or all fields. The copy shares no memory with `trajectory`.

    Half precision becomes float32. Rows that are not `valid` become NaN, 0 or False. Without the field `observation`,
    next and final observations are dropped too. Raises ValueError with the name of a field that cannot be stored.
    """
    fields = _chosen(trajectory.fields, names)
    lead_TN = next((tuple(leaf.shape[:2]) for _, leaf in leaves(fields) if hasattr(leaf, "shape")), (0, 0))
    if len(lead_TN) != 2:
        raise ValueError(f"fields must be (T, N, ...); the first of {list(fields)} has the leading shape {lead_TN}")
    arrays: list[np.ndarray] = []
    copies = _copy(fields, "", lead_TN, arrays)
    if arrays and "valid" in trajectory.fields:
        valid_TN = copies["valid"] if "valid" in copies else _copy(trajectory.fields["valid"], "valid", lead_TN, [])
        if not valid_TN.all():
            _blank(arrays, ~valid_TN)
    observed = "observation" in fields
    return trajectory._replace(
        fields=copies,
        next_observation=_copy(trajectory.next_observation, "next_observation", lead_TN[1:], []) if observed else None,
        episodes=_copy_episodes(trajectory.episodes, observed),
        metrics=dict(trajectory.metrics),
        clocks=dict(trajectory.clocks),
    )


def check_names(space: Space[Any], path: str, level: int = 1) -> None:
    """Raise ValueError if a part of `space` cannot be stored because of its name or its level of nesting.

    `path` is the name of the field.
    """
    for name, inner in (children(space) or {}).items():
        try:
            _checked(name, path, level)
        except ValueError as error:
            advice = "rename it with an environment wrapper, or flatten observations with FlattenObservation"
            raise ValueError(f"{error}; {advice}") from None
        check_names(inner, f"{path}.{name}", level + 1)


def _chosen(fields: Mapping[str, Tree], names: Collection[str] | None) -> Mapping[str, Tree]:
    if names is None or not fields:  # an epoch whose body was skipped has no fields
        return fields
    if missing := [name for name in names if name not in fields]:
        raise ValueError(f"fields={list(names)}: the trajectory has no {missing}; it has {list(fields)}")
    return {name: fields[name] for name in fields if name in names or name == "valid"}


def _copy(tree: Any, path: str, lead: tuple[int, ...], arrays: list[np.ndarray], level: int = 0) -> Any:
    """Copy a tree of arrays with the leading shape `lead`. The copies are also appended to `arrays`."""
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        return {
            _checked(key, path, level): _copy(value, f"{path}.{key}" if path else key, lead, arrays, level + 1)
            for key, value in tree.items()
        }
    array = _array(tree, path)
    if array.shape[: len(lead)] != lead:
        raise ValueError(f"{path} has shape {array.shape}; it must begin with {lead} like the other fields")
    arrays.append(array)
    return array


def _array(value: Any, path: str) -> np.ndarray:
    if isinstance(value, Tensor):
        if value.is_cpu and not value.requires_grad and value.dtype not in _WIDENED and not value.is_complex():
            array = value.numpy().copy()
        else:
            array = np.array(value.to(dtype=_WIDENED.get(value.dtype)).numpy(force=True), order="C")
    elif isinstance(value, np.ndarray):
        native = value.dtype.newbyteorder("=")
        array = np.array(value, np.float32 if native == np.float16 else native, order="C")
    else:
        raise ValueError(f"{path} is a {type(value).__name__}; it must be a tensor or a (nested) dictionary of tensors")
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise ValueError(f"{path} has dtype {array.dtype}; only booleans, integers and floats can be stored")
    return array


def _copy_episodes(episodes: Episodes, observed: bool) -> Episodes:
    columns = {name: _column(getattr(episodes, name), name, kind) for name, kind in _EPISODE_TYPES.items()}
    count = columns["id"].shape
    if any(column.shape != count or column.ndim != 1 for column in columns.values()):
        shapes = {name: column.shape for name, column in columns.items()}
        raise ValueError(f"the columns of the episodes must be (E,), one entry for each episode; got {shapes}")
    final = episodes.final_observation if observed and count != (0,) else None
    options = None if episodes.options is None else np.array(episodes.options, "S")
    return Episodes(**columns, final_observation=_copy(final, "final_observation", count, []), options=options)


def _column(values: Any, name: str, kind: Any) -> np.ndarray:
    return np.array(_array(values, f"episodes.{name}") if isinstance(values, Tensor) else values, kind)


def _checked(name: Any, path: str, level: int) -> Any:
    if level > _LEVELS:
        raise ValueError(f"{path:.80} has more than {_LEVELS} levels of nested dictionaries, which cannot be stored")
    if not isinstance(name, str) or not name or name[0] == "." or "/" in name or "\0" in name:
        where = f" in {path}" if path else ""
        raise ValueError(f"invalid field name {name!r}{where}: names must be text without '/' and not begin with '.'")
    return name


def _blank(arrays: list[np.ndarray], invalid_TN: np.ndarray) -> None:
    for array in arrays:
        array[invalid_TN] = np.nan if array.dtype.kind == "f" else 0


def _to_tensor(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "S":
        return leaf.astype(str).tolist()
    return leaf if isinstance(leaf, (str, int, float)) else torch.from_numpy(leaf)
