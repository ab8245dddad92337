"""Numbers and the sums of their blocks, level upon level: drawing one in proportion to it costs a few small operations.

A binary tree of a million numbers is twenty levels deep, of three operations each or more. Here a block is `WIDTH`
numbers, and the levels end with the first of at most `TOP`, whose running sums are computed anew for each draw: two
levels stand above a million numbers.

Shapes: B rows, W numbers in a block, K numbers in the top level.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# number n is in block n >> SHIFT, which is faster than a division; numba caches compiled code with this value until
# compiled_tree.py changes
SHIFT = 4
WIDTH = 1 << SHIFT  # W; with a million rows 8 is slower by torch, and 32 by numba; 2 by both
TOP = 4096

Reduce = Callable[[Tensor], Tensor]  # what makes one number of each block: (B, W) -> (B,)


def total(x: Tensor) -> Tensor:
    """The sum over the last dimension, one number after the other: so a block has one sum, whoever computes it."""
    return x.cumsum(-1)[..., -1]


def least_positive(x: Tensor) -> Tensor:
    """The smallest number above 0 over the last dimension; infinity where there is none."""
    return torch.where(x > 0.0, x, float("inf")).amin(-1)


def padded(count: int) -> int:
    """How many numbers a level needs to hold `count`: whole blocks, unless it is the top."""
    return count if count <= TOP else -(-count // WIDTH) * WIDTH


def levels_of(leaf: Tensor, reduce: Reduce) -> list[Tensor]:
    """The levels of a tree from the lowest one up, which is `leaf` itself, of a `padded` length; padding is 0."""
    levels = [leaf]
    while len(levels[-1]) > TOP:
        block = reduce(levels[-1].view(-1, WIDTH))
        above = block.new_zeros(padded(len(block)))
        above[: len(block)] = block
        levels.append(above)
    return levels


def refresh_(levels: Sequence[Tensor], block_B: Tensor, reduce: Reduce) -> None:
    """Make true again what stands above these blocks of the lowest level, in place; a block may be named twice.

    Every number above is computed from its whole block, never by a difference: nothing drifts.
    """
    for level, above in itertools.pairwise(levels):
        above.index_copy_(0, block_B, reduce(level.view(-1, WIDTH).index_select(0, block_B)))
        block_B = block_B >> SHIFT


def draw(levels: Sequence[Tensor], uniform_B: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows (B,) int64 of the lowest level of a tree of sums, each in proportion to its number, and the whole, ().

    Numbers are not negative. For each level, from the top down, there is one `uniform_B` (B,) float64 in [0, 1): the
    first number is taken whose running sum within its block exceeds that part of the block's whole. A number that is 0
    adds nothing and is never the first, and a part below 1 of a sum is below the sum after rounding too.

    The whole must not be 0: the rows would lie beyond the last one.
    """
    running_K = levels[-1].cumsum(0)
    whole = running_K[-1]
    row_B = torch.searchsorted(running_K, uniform_B[0] * whole, right=True)
    for level, part_B in zip(reversed(levels[:-1]), uniform_B[1:], strict=True):
        running_BW = level.view(-1, WIDTH).index_select(0, row_B).cumsum(-1)
        mass_B1 = (part_B * running_BW[:, -1]).unsqueeze(-1)
        row_B = torch.searchsorted(running_BW, mass_B1, right=True).view(-1).add_(row_B, alpha=WIDTH)
    return row_B, whole
