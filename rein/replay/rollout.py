"""Rollouts: rows of N environments in time, and the rollout of an on-policy agent.

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

_BLOCK = 1024  # rows that are ready to be written into at once


class _Form(NamedTuple):
    """What every row of a field is."""

    shape: torch.Size
    dtype: torch.dtype


class RowBuffer:
    """Rows of N environments, T in time. Storage lives where the data does and is used again for the next epoch."""

    def __init__(
        self,
        capacity: int | None = None,
        *,
        everything: bool = True,
        derive: Callable[[Any], Mapping[str, Tree]] | None = None,
    ) -> None:
        """`capacity` rows are allocated at first (256 if not given, 1,024 at most), twice as many when they are full.

        `everything` asks for all that a store wants of a step, without it for what episode statistics need;
        `derive(state)` adds fields of one's own, each (N, ...).
        """
        self.everything = everything
        self.derive = derive
        self.length = 0
        self._capacity = min(capacity or 256, _BLOCK)
        self._storage: dict[str, Tree] = {}
        self._forms: dict[str, Any] = {}
        self._block = 0  # the number of the block of rows that `_views` are of
        self._views: list[tuple[Tensor, ...]] = []  # of each row of it, where its fields are written

    def append(self, row: Mapping[str, Tree]) -> None:
        """Copy in one row: for each field a tensor (N, ...) or a nested dictionary of them.

        Raises ValueError when the fields are not those of the rows before.
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
            self._look_at(block)
        # one call takes a third of the time of one for each field
        torch._foreach_copy_(self._views[index], values)
        self.length += 1

    def _begin(self, row: Mapping[str, Tree]) -> None:
        """Other fields than before: fine for a first row, an error later."""
        if self.length:
            differ = sorted(row.keys() ^ self._storage.keys())
            raise ValueError(f"row {self.length} of this epoch differs from those before it in its fields: {differ}")
        old = self._storage
        self._keep({name: old[name] if name in old else map_tree(self._allocate, row[name]) for name in row})

    def _keep(self, storage: dict[str, Tree]) -> None:
        self._storage, self._views = storage, []
        self._forms = map_tree(lambda kept: _Form(kept.shape[1:], kept.dtype), storage)

    def _look_at(self, block: int) -> None:
        rows = slice(block * _BLOCK, (block + 1) * _BLOCK)
        self._block = block
        self._views = list(zip(*(kept[rows].unbind() for _, kept in leaves(self._storage)), strict=True))

    def _allocate(self, value: Tensor) -> Tensor:
        if not isinstance(value, Tensor) or value.ndim == 0:
            raise ValueError(f"a field of a row is a tensor (N, ...), not {value!r}")
        return torch.zeros((self._capacity, *value.shape), dtype=value.dtype, device=value.device)

    def _grow(self) -> None:
        self._capacity *= 2

        def grown(kept: Tensor) -> Tensor:
            larger = torch.zeros((self._capacity, *kept.shape[1:]), dtype=kept.dtype, device=kept.device)
            larger[: self.length] = kept
            return larger

        self._keep({name: map_tree(grown, kept) for name, kept in self._storage.items()})

    def add_copy(self, name: str, of: str) -> None:
        """Begin a field in mid-epoch that equalled another one in every row so far."""
        if name not in self._storage:
            self._keep({**self._storage, name: map_tree(Tensor.clone, self._storage[of])})

    def __contains__(self, name: object) -> bool:
        """Whether rows have that field."""
        return name in self._storage

    def __getitem__(self, name: str) -> Tree:
        """The rows of one field so far, (T, N, ...), as views into the storage."""
        return map_tree(lambda kept: kept[: self.length], self._storage[name])

    def fields(self) -> dict[str, Tree]:
        """All fields by name, as views into the storage."""
        return {name: self[name] for name in self._storage}

    def clear(self) -> None:
        """Forget the rows; the storage is kept. The fields may be others afterwards."""
        self.length = 0

    def state_dict(self) -> dict[str, Any]:
        """The rows so far; see `rein.protocols.Stateful`."""
        return {"length": self.length, "fields": self.fields() if self.length else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        length = int(state["length"])
        for path, rows in leaves(state["fields"]):
            if len(rows) != length:
                raise ValueError(f"the field {path} has {len(rows)} rows, and the state {length}")
        self._capacity = max(self._capacity, length)

        def stored(rows: Tensor) -> Tensor:
            kept = torch.zeros((self._capacity, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
            kept[:length] = rows
            return kept

        self._keep({name: map_tree(stored, rows) for name, rows in state["fields"].items()})
        self.length = length
        self.everything = self.everything or "observation" in self  # all rows of an epoch have the same fields


def _gather(name: str, form: Any, value: Any, values: list[Tensor]) -> None:
    """Add the tensors of one field of a row to `values`, in the order of `leaves`."""
    if isinstance(form, dict):
        for key, part in form.items():
            _gather(f"{name}.{key}", part, value[key], values)
        return
    if not isinstance(value, Tensor) or value.shape != form.shape or value.dtype is not form.dtype:
        what = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} was {form.dtype} {tuple(form.shape)} in the rows before, and is {what} now")
    values.append(value.detach() if value.requires_grad else value)


class Rollout:
    """The transitions of `steps` vector steps, with what the agent said of each (its extras)."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._rows = RowBuffer(steps)

    def __len__(self) -> int:
        """Vector steps held."""
        return self._rows.length

    @property
    def full(self) -> bool:
        """Whether it is time to learn."""
        return self._rows.length >= self.steps

    def append(self, transition: Transition, **more: Tensor) -> None:
        """Take in one step of every environment, and what else is to be kept of it, each (N, ...)."""
        fields = transition._asdict()
        extras = fields.pop("extras")
        self._rows.append({**fields, **extras, **more})

    def observe_reset(self, mask: Tensor) -> None:
        """The environments in `mask` (N,) were reset outside a step: what they were doing is cut there."""
        if self._rows.length:
            last = self._rows.length - 1
            self["truncated"][last] |= mask & ~self["terminated"][last]

    def __contains__(self, name: object) -> bool:
        """Whether the steps have that field."""
        return name in self._rows

    def __getitem__(self, name: str) -> Tree:
        """One field, (T, N, ...)."""
        return self._rows[name]

    def flat(self, name: str) -> Tree:
        """One field, (B, ...): row t of environment n is t * N + n."""
        return map_tree(lambda rows: rows.flatten(0, 1), self._rows[name])

    def valid(self) -> Tensor | None:
        """(T, N), or None where all rows are, which spares many small operations: known at once on the host alone."""
        valid_TN: Tensor = self["valid"]
        return None if valid_TN.device.type == "cpu" and bool(valid_TN.all()) else valid_TN

    def rewards(self, normalizer: RewardNormalizer | None, gamma: float) -> Tensor:
        """The rewards (T, N), scaled by the normalizer, which takes in their returns, discounted by `gamma`, first."""
        if normalizer is None:
            return self["reward"]
        normalizer.gamma = gamma
        return normalizer.scale(self["reward"], self["terminated"] | self["truncated"], self["valid"])

    @torch.no_grad()
    def next_values(self, value: Tensor, value_of: Callable[..., Tensor], *fields: str) -> Tensor:
        """Return the values (T, N) of the true next observations.

        They are the values of the next rows. In the last row, and where an episode was truncated, they are computed
        from `next_observation`. On the CPU, only these rows are computed; on other devices, where selecting rows would
        wait for the device, all are.

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
        if value_TN.device.type == "cpu":
            (row_R,) = cut_B.nonzero(as_tuple=True)
            flat_B[row_R] = value_of(*(map_tree(lambda rows: rows[row_R], self.flat(name)) for name in names))
            return next_value_TN
        return torch.where(cut_B, value_of(*map(self.flat, names)), flat_B).view_as(next_value_TN)

    def clear(self) -> None:
        """Forget everything."""
        self._rows.clear()

    def state_dict(self) -> dict[str, Any]:
        """The steps held."""
        return self._rows.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._rows.load_state_dict(state)
