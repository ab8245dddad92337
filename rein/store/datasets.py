"""Transitions of a run, and sequences of them, as PyTorch datasets.

They work in forked and in spawned workers: they carry no open file, and each worker maps what it reads.

Shapes: B transitions or sequences of a batch, L transitions of a sequence, N environments, G rows of all environments.
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
from torch.utils.data._utils import collate  # documented as the place to teach `default_collate` another type

from rein.ops.trees import map_tree
from rein.store.format.trajectory_reader import Content
from rein.store.rows import find_windows
from rein.store.windows import Windows
from rein.types import Transition


class Samples(Sequence[Transition]):
    """What `__getitems__` returns: a batch that is a list of samples for whoever asks, and whole for `DataLoader`."""

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
    """A batch of transitions: spares `DataLoader` taking apart and stacking what was gathered as one."""
    if isinstance(batch, Samples):
        return batch.whole
    return map_tree(lambda *tensors: collate.default_collate(list(tensors)), batch[0], *batch[1:])


collate.default_collate_fn_map[Transition] = _collate


class _Indexed(Windows, Dataset[Transition]):
    """What the datasets have in common: their elements by index."""

    def __len__(self) -> int:
        return len(self._first)

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor | np.ndarray) -> Transition:
        """One element, or a batch of those of a slice, a list, a tensor or an array of indices."""
        if isinstance(index, slice):
            return self.gather(index)
        if isinstance(index, list | tuple | Tensor | np.ndarray) and np.ndim(index):
            return self.__getitems__(index).whole
        return self.__getitems__([operator.index(index)])[0]  # type: ignore[arg-type]  # SupportsIndex, which has no __index__ here

    def __getitems__(self, indices: Sequence[int] | Tensor | np.ndarray) -> Samples:
        """The samples of these indices, gathered at once; `.whole` is them as one batch. Raises IndexError."""
        index = np.asarray(indices)
        if index.dtype == bool or (index.dtype.kind not in "iu" and index.size):
            raise TypeError(f"indices are integers, not {index.dtype}")
        try:
            return Samples(self.gather(index.astype(np.int64, copy=False)))
        except IndexError as error:
            of = f"{index.min()} to {index.max()} were asked for"
            raise IndexError(f"{type(self).__name__} has {len(self)} elements; {of}") from error

    def chunks(self, size: int = 1 << 16) -> Iterator[Transition]:
        """All of it in order, as batches of `size` elements; the last one may be smaller."""
        for start in range(0, len(self), size):
            yield self[start : start + size]


class Transitions(_Indexed):
    """Every transition of a run: valid rows whose next observation is known, in the order of time, file after file.

    `dataset[i]` is a `rein.types.Transition` of torch tensors; a slice, a list or a tensor of indices gives a batch of
    them, gathered at once. With `torch.utils.data.DataLoader` it needs no `collate_fn`. What the next observation is:
    that of the environment's next row, the final one where an episode ended, the epoch's where the epoch did. Fields
    that were not stored, or not asked for, are None; what the agent and the user added is in `extras`.

    Raises ValueError for fields that are not there in all files, and of the same kind.
    """

    def __init__(
        self,
        contents: Sequence[Content],
        fields: Collection[str] | None = None,
        episodes: tuple[np.ndarray, ...] | None = None,
    ) -> None:
        super().__init__(contents, 1, fields, episodes)
        self._flat = True

    @functools.cached_property
    def _first(self) -> np.ndarray:
        return np.flatnonzero(self._rows.whole_G)


class Sequences(_Indexed):
    """Windows of `length` transitions of one environment that follow each other, none of them across a reset.

    They begin at the first transition of every episode, or of what there is of it, and at every `stride`-th one after
    it; what is shorter than `length` is left out. An element is a `Transition` whose tensors are (L, ...). Epochs and
    files do not interrupt an episode. Everything else is as with `Transitions`.
    """

    def __init__(
        self,
        contents: Sequence[Content],
        length: int,
        stride: int = 1,
        fields: Collection[str] | None = None,
        episodes: tuple[np.ndarray, ...] | None = None,
    ) -> None:
        if length < 1 or stride < 1:
            raise ValueError(f"sequences({length=}, {stride=}): give numbers above 0")
        super().__init__(contents, length, fields, episodes)
        self._stride = stride

    @functools.cached_property
    def _first(self) -> np.ndarray:
        return find_windows(self._rows, self._envs, self._length, self._stride)


def to_torch(tree: Any) -> Any:
    """A tree of arrays, such as `run.trajectory(3).fields`, as tensors that share no memory with it."""
    return map_tree(lambda array: torch.from_numpy(np.array(array)), tree)


def to_tensordict(transition: Transition) -> Any:
    """A batch as a `TensorDict` laid out as TorchRL's are: `("next", "observation")`, `("next", "reward")`, ...

    Raises ImportError where tensordict is not installed.
    """
    try:
        from tensordict import TensorDict  # pyright: ignore[reportMissingImports]  # may be missing: TensorDict is asked for by name
    except ImportError as error:
        raise ImportError("to_tensordict needs tensordict: pip install tensordict") from error
    ends = {name: getattr(transition, name) for name in ("reward", "terminated", "truncated")}
    following = {"observation": transition.next_observation, **ends}
    if ends["terminated"] is not None and ends["truncated"] is not None:
        following["done"] = ends["terminated"] | ends["truncated"]
    known = {"observation": transition.observation, "action": transition.action, **transition.extras}
    # there rewards and ends have a dimension of their own
    following = {
        k: v.unsqueeze(-1) if isinstance(v, Tensor) and k != "observation" else v for k, v in following.items()
    }
    nested = {**known, "next": {name: value for name, value in following.items() if value is not None}}
    return TensorDict({k: v for k, v in nested.items() if v is not None}, batch_size=transition.valid.shape)


class Streams(Transitions):
    """`Transitions` in another order: all of environment 0 in the order of time, then all of environment 1, and so on.

    Transitions of one environment follow each other, which n-step returns need. The fields are those
    that agents learn from.
    """

    FIELDS = ("observation", "action", "reward", "terminated", "truncated")

    def __init__(self, transitions: Transitions) -> None:
        """Raises ValueError if a file does not have these fields, or has fields of another shape."""
        super().__init__(transitions._contents, self.FIELDS, transitions._episodes)

    @functools.cached_property
    def _first(self) -> np.ndarray:
        row = np.flatnonzero(self._rows.whole_G)
        file = np.searchsorted(self._rows.base, row, "right") - 1
        environment = (row - self._rows.base[file]) % self._envs[file]
        return row[np.argsort(environment, kind="stable")]
