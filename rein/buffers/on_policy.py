"""What an on-policy agent keeps of its last steps, and the values from which their returns are made.

Shapes: T vector steps, N environments, B = T * N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rein.buffers.rollout import Rows
from rein.networks.normalizers import RewardNormalizer
from rein.ops.trees import map_tree
from rein.types import Transition, Tree


class Rollout:
    """The transitions of `steps` vector steps, with what the agent said of each (its extras)."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._rows = Rows(steps)

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

    def next_value(self, value_TN: Tensor, value_of: Callable[[Callable[[str], Tree]], Tensor]) -> Tensor:
        """The value (T, N) of what truly came next, given those of the observations.

        It is that of the next row, but for the last row and those whose episode was cut: there `value_of` is asked,
        with a function that gives a field by its name, in the rows in question. On the host these rows alone;
        elsewhere, where to know them would be to wait, all.
        """
        cut_TN = self["truncated"] & ~self["terminated"] & self["valid"]
        cut_TN[-1] = True
        next_value_TN = torch.cat((value_TN[1:], value_TN[-1:]))
        flat_B, cut_B = next_value_TN.view(-1), cut_TN.view(-1)
        if value_TN.device.type == "cpu":
            (row_R,) = cut_B.nonzero(as_tuple=True)
            flat_B[row_R] = value_of(lambda name: map_tree(lambda rows: rows[row_R], self.flat(name)))
            return next_value_TN
        return torch.where(cut_B, value_of(self.flat), flat_B).view_as(next_value_TN)

    def clear(self) -> None:
        """Forget everything."""
        self._rows.clear()

    def state_dict(self) -> dict[str, Any]:
        """The steps held."""
        return self._rows.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._rows.load_state_dict(state)
