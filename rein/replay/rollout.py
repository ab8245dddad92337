"""Rollout buffer of on-policy agents, and the growing buffer of rows that it uses.

Shapes: T vector steps, N environments, B = T * N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rein.networks.normalizers import RewardNormalizer
from rein.ops.trees import leaves, map_tree
from rein.types import Transition, Tree

_BLOCK = 1024  # rows whose views are created together


class _Form(NamedTuple):
    """Shape and dtype of a row of a field."""

    shape: torch.Size
    dtype: torch.dtype


class RowBuffer:
    """T rows of N environments, on the device of the data. The memory is reused for the next epoch."""

    def __init__(
        self,
        capacity: int | None = None,
        *,
        everything: bool = True,
        derive: Callable[[Any], Mapping[str, Tree]] | None = None,
    ) -> None:
        """Allocate memory for `capacity` rows (256 by default, at most 1,024), doubled whenever it is full.

        Args:
            capacity: rows to allocate at first.
            everything: whether to record all fields that a store needs, or only those for episode statistics.
            derive: function of the `State` of the run that returns custom fields, each (N, ...).
        """
        self.everything = everything
        self.derive = derive
        self.length = 0
        self.options: dict[tuple[int, int], str] = {}  # (row, environment) of ended episodes: reset options as JSON
        self._capacity = min(capacity or 256, _BLOCK)
        self.generation = 0  # grows whenever the memory is replaced
        self._storage: dict[str, Tree] = {}
        self._forms: dict[str, Any] = {}
        self._block = 0  # number of the block of rows of `_views`
        self._views: list[tuple[Tensor, ...]] = []  # for each row of the block, views of its fields

    def append(self, row: Mapping[str, Tree]) -> None:
        """Copy one row: for each field a tensor (N, ...) or a nested dictionary of them.

        Raises ValueError if fields, dtypes or shapes differ from earlier rows.
        """
        if self.length == self._capacity:
            self._grow()
        if row.keys() != self._storage.keys():
            self._begin(row)
        values: list[Tensor] = []
        for name, form in self._forms.items():
            value = row[name]
            if type(value) is Tensor and (value.shape, value.dtype) == form and not value.requires_grad:
                values.append(value)
            else:
                _gather(name, form, value, values)
        block, index = divmod(self.length, _BLOCK)
        if block != self._block or not self._views:
            self._begin_block(block)
        # one call for all fields takes a third of the time
        torch._foreach_copy_(self._views[index], values)
        self.length += 1

    @property
    def memory(self) -> dict[str, Tree]:
        """The memory of all fields, also of rows that are not recorded yet. A program writes to it."""
        return self._storage

    def write_ahead(self, fields: Mapping[str, Tree]) -> None:
        """Copy the rows (T, N, ...) after the current ones. They are recorded by `count_written`."""
        rows = len(fields["reward"])
        while self.length + rows > self._capacity:
            self._grow()
        after = slice(self.length, self.length + rows)
        values = [leaf for name in self._storage for _, leaf in leaves(fields[name])]
        torch._foreach_copy_([leaf[after] for _, leaf in leaves(self._storage)], values)

    def count_written(self) -> None:
        """Record the next row, which was written to `memory`."""
        self.length += 1

    def _begin(self, row: Mapping[str, Tree]) -> None:
        """Start an epoch with other fields than the last one. Raises ValueError in the middle of an epoch."""
        if self.length:
            differ = sorted(row.keys() ^ self._storage.keys())
            raise ValueError(f"row {self.length} of this epoch has other fields than earlier rows: {differ}")
        old = self._storage
        self._keep({name: old[name] if name in old else map_tree(self._allocate, row[name]) for name in row})

    def _keep(self, storage: dict[str, Tree]) -> None:
        self._storage = storage
        self.generation += 1
        self._views = []
        self._forms = map_tree(lambda rows: _Form(rows.shape[1:], rows.dtype), storage)

    def _begin_block(self, block: int) -> None:
        rows = slice(block * _BLOCK, (block + 1) * _BLOCK)
        self._block = block
        self._views = list(zip(*(stored[rows].unbind() for _, stored in leaves(self._storage)), strict=True))

    def _allocate(self, value: Tensor) -> Tensor:
        if not isinstance(value, Tensor) or value.ndim == 0:
            raise ValueError(f"a field of a row must be a tensor (N, ...), not {value!r}")
        return torch.zeros((self._capacity, *value.shape), dtype=value.dtype, device=value.device)

    def _grow(self) -> None:
        self._capacity *= 2

        def grown(stored: Tensor) -> Tensor:
            larger = torch.zeros((self._capacity, *stored.shape[1:]), dtype=stored.dtype, device=stored.device)
            larger[: self.length] = stored
            return larger

        self._keep({name: map_tree(grown, stored) for name, stored in self._storage.items()})

    def add_copy(self, name: str, of: str) -> None:
        """Add a field in the middle of an epoch, with the values of field `of` in the rows so far."""
        if name not in self._storage:
            self._keep({**self._storage, name: map_tree(Tensor.clone, self._storage[of])})

    def __contains__(self, name: object) -> bool:
        """Whether the rows have a field."""
        return name in self._storage

    def __getitem__(self, name: str) -> Tree:
        """Return a view (T, N, ...) of one field."""
        return map_tree(lambda stored: stored[: self.length], self._storage[name])

    def fields(self) -> dict[str, Tree]:
        """Return views of all fields by name."""
        return {name: self[name] for name in self._storage}

    def clear(self) -> None:
        """Remove the rows, and keep the memory. The next row may have other fields."""
        self.length = 0
        self.options = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the rows so far."""
        options = [[*place, text] for place, text in self.options.items()]
        state = {"length": self.length, "fields": self.fields() if self.length else {}}
        return {**state, "options": options} if options else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        length = int(state["length"])
        for path, rows in leaves(state["fields"]):
            if len(rows) != length:
                raise ValueError(f"the field {path} has {len(rows)} rows, but the state has {length}")
        self._capacity = max(self._capacity, length)

        def stored(rows: Tensor) -> Tensor:
            copy = torch.zeros((self._capacity, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
            copy[:length] = rows
            return copy

        self._keep({name: map_tree(stored, rows) for name, rows in state["fields"].items()})
        self.length = length
        self.options = {(row, environment): text for row, environment, text in state.get("options", ())}
        self.everything = self.everything or "observation" in self  # all rows of an epoch have the same fields


def _gather(name: str, form: Any, value: Any, values: list[Tensor]) -> None:
    """Append the tensors of one field of a row to `values`, in the order of `leaves`."""
    if isinstance(form, dict):
        for key, part in form.items():
            _gather(f"{name}.{key}", part, value[key], values)
        return
    if not isinstance(value, Tensor) or value.shape != form.shape or value.dtype is not form.dtype:
        received = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} is {received}, but was {form.dtype} {tuple(form.shape)} in earlier rows")
    values.append(value.detach() if value.requires_grad else value)


class Rollout:
    """Rollout buffer: the transitions and extras of `steps` vector steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.dense = False  # whether it computes on the CPU as on other devices, without reading values
        self._rows = RowBuffer(steps)

    def __len__(self) -> int:
        """Number of recorded vector steps."""
        return self._rows.length

    @property
    def full(self) -> bool:
        """Whether `steps` vector steps are recorded."""
        return self._rows.length >= self.steps

    def append(self, transition: Transition, **more: Tensor) -> None:
        """Append one step of every environment, with further fields `more`, each (N, ...)."""
        fields = transition._asdict()
        extras = fields.pop("extras")
        self._rows.append({**fields, **extras, **more})

    def observe_reset(self, mask: Tensor) -> None:
        """Mark a reset outside a step of the environments in `mask` (N,): their last steps become truncated."""
        if self._rows.length:
            last = self._rows.length - 1
            self["truncated"][last] |= mask & ~self["terminated"][last]

    def __contains__(self, name: object) -> bool:
        """Whether the steps have a field."""
        return name in self._rows

    def __getitem__(self, name: str) -> Tree:
        """Return one field, (T, N, ...)."""
        return self._rows[name]

    def flat(self, name: str) -> Tree:
        """Return one field, (B, ...). Step t of environment n is row `t * N + n`."""
        return map_tree(lambda rows: rows.flatten(0, 1), self._rows[name])

    def valid(self) -> Tensor | None:
        """Return which rows are valid, (T, N). On the CPU, returns None if all rows are valid, to save operations."""
        valid_TN: Tensor = self["valid"]
        return None if self._reads(valid_TN) and bool(valid_TN.all()) else valid_TN

    @property
    def generation(self) -> int:
        """Number that grows whenever the memory of the steps is replaced."""
        return self._rows.generation

    @property
    def memory(self) -> dict[str, Tree]:
        """See `RowBuffer.memory`."""
        return self._rows.memory

    def count_written(self) -> None:
        """See `RowBuffer.count_written`."""
        self._rows.count_written()

    def _reads(self, x: Tensor) -> bool:
        return x.device.type == "cpu" and not self.dense

    def rewards(self, normalizer: RewardNormalizer | None, gamma: float) -> Tensor:
        """Return the rewards (T, N), scaled by the normalizer after updating it with their discounted returns."""
        if normalizer is None:
            return self["reward"]
        normalizer.gamma = gamma
        return normalizer.scale(self["reward"], self["terminated"] | self["truncated"], self["valid"])

    @torch.no_grad()
    def next_values(self, value: Tensor, value_of: Callable[..., Tensor], *fields: str) -> Tensor:
        """Return the values (T, N) of the true next observations.

        They are the values of the next rows. In the last row, and where an episode was truncated, they are computed
        from `next_observation`. On the CPU, only these rows are computed. On other devices, all rows are computed,
        because selecting rows would wait for the device.

        Args:
            value: the values (T, N) or (B,) of the observations of the rollout.
            value_of: function from next observations (R, ...) of R rows, and from `fields` of these rows, to values
                (R,), such as a critic.
            fields: names of further fields that `value_of` is called with.
        """
        names, value_TN = ("next_observation", *fields), value.detach().view(self["reward"].shape)
        cut_TN = self["truncated"] & ~self["terminated"] & self["valid"]
        cut_TN[-1] = True
        next_value_TN = torch.cat((value_TN[1:], value_TN[-1:]))
        flat_B, cut_B = next_value_TN.view(-1), cut_TN.view(-1)
        if self._reads(value_TN):
            (row_R,) = cut_B.nonzero(as_tuple=True)
            flat_B[row_R] = value_of(*(map_tree(lambda rows: rows[row_R], self.flat(name)) for name in names))
            return next_value_TN
        return torch.where(cut_B, value_of(*map(self.flat, names)), flat_B).view_as(next_value_TN)

    def clear(self) -> None:
        """Remove all steps."""
        self._rows.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded steps."""
        return self._rows.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._rows.load_state_dict(state)
