"""Observations of any structure as one vector of numbers.

Shapes: N rows, F features, K one-hot vectors in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

Tree = Any  # a Tensor, or a (nested) dictionary of tensors


class Flatten:
    """Makes every observation of a space a float32 vector (F,): what `gymnasium.spaces.flatten` makes of it, N at once.

    Numbers are laid out one after the other, each Discrete and each place of a MultiDiscrete as a one-hot vector, and
    the parts of a Dict or Tuple in its order. The numbers of each tensor for whose space `scales` returns True are
    divided by 255.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        device: torch.device | str = "cpu",
        *,
        scales: Callable[[spaces.Space[Any]], bool] = lambda _: False,
    ) -> None:
        """Raises TypeError for a space that is no tensor."""
        self.features = int(spaces.flatdim(space))
        self._parts = [_part(path, part, torch.device(device), scales(part)) for path, part in tensors_of(space)]
        self._plain = self._parts[0].places is None and not self._parts[0].scaled

    def __call__(self, observation: Tree) -> Tensor:
        """(N, F) float32; the observation itself where it is that already. ValueError for what is of another shape."""
        if isinstance(observation, Tensor) and observation.ndim == 2 and self._plain:
            flat_NF = observation.to(torch.float32)
        else:
            flat_NF = torch.cat([part.flat(observation) for part in self._parts], 1)
        if flat_NF.shape[1] != self.features:
            raise ValueError(
                f"observations of N environments are expected, {self.features} numbers each, not {flat_NF.shape[1]}; "
                "for one environment, its observation with a first dimension of 1"
            )
        return flat_NF


class _Part(NamedTuple):
    """One tensor of an observation, and how it becomes numbers in a row."""

    path: tuple[str, ...]  # the keys that lead to it
    places: Tensor | None  # (K,) where its one-hot vectors have the 1 of the value 0; None for plain numbers
    width: int  # numbers in the row, where it is one-hot
    scaled: bool  # whether its numbers are divided by 255

    def flat(self, observation: Tree) -> Tensor:
        """(N, width) float32."""
        for key in self.path:
            if key not in observation:
                raise ValueError(f"the observation has no key {key!r}; it has {', '.join(map(str, observation))}")
            observation = observation[key]
        rows = len(observation) if observation.ndim else 1
        if self.places is None:
            numbers_NF = observation.reshape(rows, -1).to(torch.float32)
            return numbers_NF / 255.0 if self.scaled else numbers_NF
        row_NF = torch.zeros(rows, self.width, dtype=torch.float32, device=observation.device)
        return row_NF.scatter_(1, observation.reshape(rows, -1) + self.places, 1.0)


def children(space: spaces.Space[Any]) -> dict[str, spaces.Space[Any]] | None:
    """Return the spaces inside a Dict or Tuple by the keys of its tensors; None for a space that is one tensor.

    Raises ValueError for an empty Dict or Tuple.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple) and not len(space.spaces):
        raise ValueError(f"{space} is an empty space: an agent needs at least one Box, Discrete or other tensor in it")
    if isinstance(space, spaces.Dict):
        return dict(space.spaces)
    if isinstance(space, spaces.Tuple):
        return {str(index): inner for index, inner in enumerate(space.spaces)}
    return None


def tensors_of(
    space: spaces.Space[Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], spaces.Space[Any]]]:
    """The spaces of the single tensors of an observation, in the order in which they are laid out, with their keys."""
    inner = children(space)
    if inner is None:
        yield path, space
        return
    for key, child in inner.items():
        yield from tensors_of(child, (*path, key))


def _part(path: tuple[str, ...], space: spaces.Space[Any], device: torch.device, scaled: bool) -> _Part:
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        discrete = isinstance(space, spaces.Discrete)
        size_K = np.atleast_1d(space.n if discrete else space.nvec).reshape(-1)
        start_K = np.atleast_1d(space.start).reshape(-1)
        first_K = np.cumsum(size_K) - size_K
        return _Part(
            path, torch.as_tensor(first_K - start_K, dtype=torch.int64, device=device), int(size_K.sum()), scaled
        )
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return _Part(path, None, 0, scaled)
    raise TypeError(f"an observation in {space} is no tensor; use Box, Discrete, Multi..., Dict or Tuple")
