"""PyTorch datasets of the transitions of a run, and of sequences of transitions.

The datasets work in forked and spawned workers. They hold no open file, and each worker maps the files that it reads.
Small fields are held in memory, by position (see `rein.store.row_index`), so that a sequence is copied as one block.

Shapes: B transitions or sequences of a batch, L transitions of a sequence, N environments, R rows of a file.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.data._utils import collate  # documented as the way to extend `default_collate`

from rein.ops.trees import map_tree
from rein.store.format.trajectory_reader import Content, Table
from rein.store.row_index import RowIndex
from rein.types import Transition

_SPECIAL = "/special"  # not a path of a field
_NARROW = 8  # bytes of a row
_SMALL = 32 << 20  # bytes of a field of a run; up to this size, one gather from memory is faster than one per file


class Samples(Sequence[Transition]):
    """Sequence of samples that were gathered as one batch. `whole` is the batch, which `DataLoader` uses directly."""

    def __init__(self, whole: Transition) -> None:
        self.whole = whole

    def __len__(self) -> int:
        return len(self.whole.valid)

    @overload
    def __getitem__(self, index: int) -> Transition: ...
    @overload
    def __getitem__(self, index: slice) -> Samples: ...
    def __getitem__(self, index: int | slice) -> Transition | Samples:
        part = map_tree(operator.itemgetter(index), self.whole)
        return Samples(part) if isinstance(index, slice) else part


def _collate(batch: Any, *, collate_fn_map: Any = None) -> Transition:
    """Collate transitions. A batch that was gathered at once is returned without splitting and stacking it."""
    if isinstance(batch, Samples):
        return batch.whole
    return map_tree(lambda *tensors: collate.default_collate(list(tensors)), batch[0], *batch[1:])


collate.default_collate_fn_map[Transition] = _collate


class _WindowDataset(Dataset[Transition]):
    """Base class of the datasets: windows of `length` rows, gathered from all files by index."""

    _begin: Any  # (len,) position of the first row of each element
    _count: Any = None  # (len,) transitions of each element, if some are padded
    _flat = False  # whether to drop the dimension L, which is 1

    def __init__(
        self, contents: Sequence[Content], length: int, fields: Collection[str] | None, episodes: Table | None
    ) -> None:
        if isinstance(fields, str):
            raise ValueError(f"fields={fields!r}: must be a list of names, or None for all fields")
        self._contents = list(contents)
        self._length = length
        self._episodes = episodes  # table of the selected episodes
        self._paths = _chosen(contents, fields)
        self._observations = [path for path in self._paths if path.split("/")[0] == "observation"]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without cached data, which each worker computes."""
        cached = [name for name in dir(type(self)) if isinstance(getattr(type(self), name), functools.cached_property)]
        return {name: value for name, value in self.__dict__.items() if name not in cached}

    def __len__(self) -> int:
        return len(self._begin)

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor | np.ndarray) -> Transition:
        """Return one element, or a batch for a slice, a list, a tensor or an array of indices."""
        if isinstance(index, slice):
            return self.gather(index)
        if isinstance(index, list | tuple | Tensor | np.ndarray) and np.ndim(index):
            return self.__getitems__(index).whole
        return self.__getitems__([operator.index(index)])[0]  # type: ignore[arg-type]  # SupportsIndex, which has no __index__ here

    def __getitems__(self, indices: Sequence[int] | Tensor | np.ndarray) -> Samples:
        """Gather the samples of these indices at once. `.whole` is the batch. Raises IndexError."""
        index = np.asarray(indices)
        if index.dtype == bool or (index.dtype.kind not in "iu" and index.size):
            raise TypeError(f"indices must be integers, got {index.dtype}")
        try:
            return Samples(self.gather(index.astype(np.int64, copy=False)))
        except IndexError as error:
            received = f"got indices from {index.min()} to {index.max()}"
            raise IndexError(f"{type(self).__name__} has {len(self)} elements; {received}") from error

    def chunks(self, size: int = 1 << 16) -> Iterator[Transition]:
        """Yield all elements in order, as batches of `size` elements. The last batch may be smaller."""
        for start in range(0, len(self), size):
            yield self[start : start + size]

    def gather(self, index: slice | np.ndarray) -> Transition:
        """Gather the windows (B, L, ...) of these elements."""
        begin_B = self._begin[index]
        packed_BL = self._copy(self._packed.view(np.uint8).reshape(len(self._packed), -1), begin_B)
        packed_BL = packed_BL.view(self._packed.dtype)[..., 0]
        names = self._packed.dtype.names or ()
        fields = {path: packed_BL[path].copy() if path in names else self._take(path, begin_B) for path in self._paths}
        following = {path: self._take(path, begin_B + 1) for path in self._observations}
        if following:
            window, row = packed_BL[_SPECIAL].nonzero()
            source = self._index.links.source[self._special_places.searchsorted(begin_B[window] + row)]
            for path, array in following.items():
                array[window, row] = self._others[path][source]
        valid_BL = np.ones((len(begin_B), self._length), bool)
        if self._count is not None:
            valid_BL = np.arange(self._length) < self._count[index][:, None]
            for array in (*fields.values(), *following.values()):
                array[~valid_BL] = 0
        if self._flat:
            valid_BL = valid_BL[:, 0]
            fields, following = ({path: array[:, 0] for path, array in x.items()} for x in (fields, following))
        tree = _nest(fields)
        named = {name: tree.pop(name, None) for name in ("observation", "action", "reward", "terminated", "truncated")}
        next_observation = _nest(following).get("observation")
        return Transition(**named, next_observation=next_observation, valid=torch.from_numpy(valid_BL), extras=tree)

    def _take(self, path: str, begin_B: np.ndarray) -> np.ndarray:
        """Copy the windows (B, L, ...) of a field that begin at these positions."""
        if (column := self._columns[path]) is not None:
            return self._copy(column, begin_B)
        position_BL = begin_B[:, None] + np.arange(self._length)
        first = self._contents[0].fields[path]
        taken = np.zeros((position_BL.size, *first.shape[2:]), first.dtype.newbyteorder("="))
        for file, which, place in self._index.locate(np.minimum(position_BL, self._index.size - 1).reshape(-1)):
            taken[which] = self._contents[file].file.field(path)[place]
        return taken.reshape(*position_BL.shape, *first.shape[2:])

    def _copy(self, column: np.ndarray, begin_B: np.ndarray) -> np.ndarray:
        """Copy the windows (B, L, ...) of a column that begin at these positions."""
        length, shape = self._length, column.shape[1:]
        strides = (column.strides[0], *column.strides)
        windows = np.ndarray((len(column) + 1 - length, length, *shape), column.dtype, column, 0, strides)
        return windows.take(begin_B, axis=0, mode="clip") if length == 1 else windows[begin_B]  # faster for single rows

    @functools.cached_property
    def _index(self) -> RowIndex:
        return RowIndex(self._contents, bool(self._observations), self._episodes)

    @functools.cached_property
    def _columns(self) -> dict[str, np.ndarray | None]:
        """Fields by position, or None for a large raw field, which is read from the files."""
        columns: dict[str, np.ndarray | None] = {}
        for path in self._paths:
            stored = [content.fields[path] for content in self._contents]
            if all(one.is_raw for one in stored) and sum(one.nbytes for one in stored) > _SMALL:
                columns[path] = None
                continue
            parts = (content.file.field(path) for content in self._contents)
            dtype = stored[0].dtype.newbyteorder("=")  # torch accepts no other
            columns[path] = self._index.arrange(parts, stored[0].shape[2:], dtype, self._length)
        return columns

    @functools.cached_property
    def _packed(self) -> np.ndarray:
        """Narrow fields, interleaved by row, and whether the next observation of the row is in `_others`.

        Memory latency dominates random access. Observations are separate, because they are gathered twice.
        """
        columns = {
            path: column
            for path, column in self._columns.items()
            if column is not None and 0 < column.nbytes <= _NARROW * len(column) and path not in self._observations
        }
        for path in columns:
            del self._columns[path]
        columns[_SPECIAL] = np.pad(self._index.links.special_P, (0, self._length))
        packed = np.empty(self._index.size + self._length, [(p, c.dtype, c.shape[1:]) for p, c in columns.items()])
        for path, column in columns.items():
            packed[path] = column
        return packed

    @functools.cached_property
    def _special_places(self) -> np.ndarray:
        return np.flatnonzero(self._index.links.special_P)

    @functools.cached_property
    def _others(self) -> dict[str, np.ndarray]:
        """All final observations, then all next observations, in the order of `Links.source`."""
        tables = [(name, content) for name in ("episodes", "epochs") for content in self._contents]
        return {
            path: np.concatenate([_following(content, path, n) for n, content in tables]) for path in self._observations
        }


class Transitions(_WindowDataset):
    """Dataset of all transitions of a run: valid rows with a known next observation, in chronological order.

    `dataset[i]` is a `rein.types.Transition` of torch tensors. A slice, a list or a tensor of indices gives a batch,
    gathered at once. `torch.utils.data.DataLoader` needs no `collate_fn`. Fields that were not stored or not requested
    are None. `extras` holds the fields that the agent and the user added.

    The next observation is the observation in the environment's next row. At the end of an episode it is the episode's
    final observation, at the end of an epoch the epoch's next observation.

    Raises ValueError if the files differ in a requested field.
    """

    _flat = True

    def __init__(
        self, contents: Sequence[Content], fields: Collection[str] | None = None, episodes: Table | None = None
    ) -> None:
        super().__init__(contents, 1, fields, episodes)

    @functools.cached_property
    def _begin(self) -> np.ndarray:
        return self._index.chronological(self._index.links.whole_P)


class Sequences(_WindowDataset):
    """Dataset of windows of `length` consecutive transitions of one environment. No window crosses a reset.

    Windows begin at the first stored transition of every episode and at every `stride`-th transition after it. A
    remainder shorter than `length` is dropped, unless `pad` is set. It is then padded: all fields of the rows after
    the last transition are zero, and `valid` is False. With `stride=length`, every transition is in one window. An
    element is a `Transition` with tensors of shape (L, ...). A window may cross the borders of
    epochs and files. Otherwise the class behaves like `Transitions`.
    """

    def __init__(
        self,
        contents: Sequence[Content],
        length: int,
        stride: int = 1,
        fields: Collection[str] | None = None,
        episodes: Table | None = None,
        pad: bool = False,
    ) -> None:
        if length < 1 or stride < 1:
            raise ValueError(f"sequences({length=}, {stride=}): both must be positive")
        super().__init__(contents, length, fields, episodes)
        self._stride = stride
        self._pad = pad

    @functools.cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        return self._index.windows(self._length, self._stride, self._pad)

    @functools.cached_property
    def _begin(self) -> np.ndarray:
        return self._places[0]

    @functools.cached_property
    def _count(self) -> np.ndarray | None:
        return self._places[1] if self._pad else None


def to_torch(tree: Any) -> Any:
    """Copy a tree of arrays, such as `run.trajectory(3).fields`, to torch tensors."""
    return map_tree(lambda array: torch.from_numpy(np.array(array)), tree)


def to_tensordict(transition: Transition) -> Any:
    """Convert a batch to a `TensorDict` in TorchRL's layout: `("next", "observation")`, `("next", "reward")`, ...

    Raises ImportError if tensordict is not installed.
    """
    try:
        from tensordict import TensorDict  # pyright: ignore[reportMissingImports]  # optional dependency
    except ImportError as error:
        raise ImportError("to_tensordict needs tensordict: pip install tensordict") from error
    ends = {name: getattr(transition, name) for name in ("reward", "terminated", "truncated")}
    following = {"observation": transition.next_observation, **ends}
    if ends["terminated"] is not None and ends["truncated"] is not None:
        following["done"] = ends["terminated"] | ends["truncated"]
    present = {"observation": transition.observation, "action": transition.action, **transition.extras}
    # in TorchRL, rewards and end flags have a trailing dimension of size 1
    following = {
        k: v.unsqueeze(-1) if isinstance(v, Tensor) and k != "observation" else v for k, v in following.items()
    }
    nested = {**present, "next": {name: value for name, value in following.items() if value is not None}}
    return TensorDict({k: v for k, v in nested.items() if v is not None}, batch_size=transition.valid.shape)


class Streams(Transitions):
    """`Transitions` sorted by environment: all of environment 0 in chronological order, then environment 1, and so on.

    n-step returns need this order. The fields are those that agents learn from.
    """

    FIELDS = ("observation", "action", "reward", "terminated", "truncated")

    def __init__(self, transitions: Transitions) -> None:
        """Raises ValueError if a file lacks one of these fields, or has it in another shape."""
        super().__init__(transitions._contents, self.FIELDS, transitions._episodes)

    @functools.cached_property
    def _begin(self) -> np.ndarray:
        return self._index.by_environment(np.flatnonzero(self._index.links.whole_P))


def _chosen(contents: Sequence[Content], fields: Collection[str] | None) -> list[str]:
    """Return the paths of these fields. Raises ValueError if a file lacks a field or has it in another shape."""
    kinds = [{p: (s.dtype, s.shape[2:]) for p, s in content.fields.items()} for content in contents]
    every = kinds[0] if kinds else {}
    names = dict.fromkeys(path.split("/")[0] for path in every)
    if missing := [name for name in fields or () if kinds and name not in names]:
        raise ValueError(f"fields={list(fields or ())}: no field {missing}; the fields are {list(names)}")
    wanted = set(names if fields is None else fields) - {"valid"}  # gathered rows are always valid
    paths = [path for path in every if path.split("/")[0] in wanted]
    for content, kind in zip(contents, kinds, strict=True):
        differ = [path for path in paths if kind.get(path) != every[path]]
        if fields is None:
            differ += [path for path in kind if path not in every]
        if differ:
            raise ValueError(f"{content.file.path}: the field {differ[0]} differs from {contents[0].file.path}")
    return paths


def _nest(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Convert arrays by path to a tree of tensors."""
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        if "/" not in path:
            tree[path] = torch.from_numpy(array)
            continue
        *inner, name = path.split("/")
        functools.reduce(lambda node, key: node.setdefault(key, {}), inner, tree)[name] = torch.from_numpy(array)
    return tree


def _following(content: Content, path: str, table: str) -> np.ndarray:
    """Return the final or the next observations of a file, one in each row. They are placeholders if it has none."""
    field, inner = content.fields[path], path.split("/")[1:]
    if table == "episodes":
        stored, count = content.file.node(table, "final_observation", *inner), len(content.episodes["id"])
    else:
        stored, count = content.file.node(table, "next_observation", *inner), len(content.epochs["number"])
        count *= content.num_envs
    if stored is None:
        return np.zeros((count, *field.shape[2:]), field.dtype)
    return content.file.read(stored).reshape(count, *field.shape[2:])
