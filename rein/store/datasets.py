"""PyTorch datasets of the transitions of a run, and of sequences of transitions.

The datasets work in forked and spawned workers. They hold no open file, and each worker maps the files that it reads.

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
from torch.utils.data._utils import collate  # documented as the way to extend `default_collate`

from rein.ops.trees import map_tree
from rein.store.format.trajectory_reader import Content
from rein.store.rows import find_windows
from rein.store.windows import Windows
from rein.types import Transition


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


class _Indexed(Windows, Dataset[Transition]):
    """Base class of the datasets: access to elements by index."""

    def __len__(self) -> int:
        return len(self._first)

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


class Transitions(_Indexed):
    """Dataset of all transitions of a run: valid rows with a known next observation, in chronological order.

    `dataset[i]` is a `rein.types.Transition` of torch tensors. A slice, a list or a tensor of indices gives a batch,
    gathered at once. `torch.utils.data.DataLoader` needs no `collate_fn`. Fields that were not stored or not requested
    are None. `extras` holds the fields that the agent and the user added.

    The next observation is the observation in the environment's next row. At the end of an episode it is the episode's
    final observation, at the end of an epoch the epoch's next observation.

    Raises ValueError if the files differ in a requested field.
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
    """Dataset of windows of `length` consecutive transitions of one environment. No window crosses a reset.

    Windows begin at the first stored transition of every episode and at every `stride`-th transition after it. A
    remainder shorter than `length` is dropped, unless `pad` is set. It is then padded: all fields of the rows after
    the last transition are zero, and `valid` is False. With `stride=length`, every transition is in one window. An
    element is a `Transition` with tensors of shape (L, ...). A window
    may cross the borders of epochs and files. Otherwise the class behaves like `Transitions`.
    """

    def __init__(
        self,
        contents: Sequence[Content],
        length: int,
        stride: int = 1,
        fields: Collection[str] | None = None,
        episodes: tuple[np.ndarray, ...] | None = None,
        pad: bool = False,
    ) -> None:
        if length < 1 or stride < 1:
            raise ValueError(f"sequences({length=}, {stride=}): both must be positive")
        super().__init__(contents, length, fields, episodes)
        self._stride, self._pad = stride, pad
        if pad:
            self._spare = length

    @functools.cached_property
    def _found(self) -> tuple[np.ndarray, np.ndarray]:
        return find_windows(self._rows, self._envs, self._length, self._stride, self._pad)

    @functools.cached_property
    def _first(self) -> np.ndarray:
        return self._found[0]

    @functools.cached_property
    def _count(self) -> np.ndarray | None:
        return self._found[1] if self._pad else None


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
    known = {"observation": transition.observation, "action": transition.action, **transition.extras}
    # in TorchRL, rewards and end flags have a trailing dimension of size 1
    following = {
        k: v.unsqueeze(-1) if isinstance(v, Tensor) and k != "observation" else v for k, v in following.items()
    }
    nested = {**known, "next": {name: value for name, value in following.items() if value is not None}}
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
    def _first(self) -> np.ndarray:
        row = np.flatnonzero(self._rows.whole_G)
        file = np.searchsorted(self._rows.base, row, "right") - 1
        environment = (row - self._rows.base[file]) % self._envs[file]
        return row[np.argsort(environment, kind="stable")]
