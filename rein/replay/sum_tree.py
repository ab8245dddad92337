"""Sum tree with wide nodes, for sampling in proportion to priorities with few operations.

A binary tree of a million numbers has twenty levels, with at least three operations each. Here `WIDTH` numbers form a
block. The top level has at most `TOP` numbers, whose running sums are computed for each draw. A million numbers need
only two levels above them.

Shapes: B rows, W numbers in a block, K numbers in the top level.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

# Number n is in block n >> SHIFT. numba compiles this value into its cached code until compiled_tree.py changes.
SHIFT = 4
WIDTH = 1 << SHIFT  # W; with a million rows, 8 is slower in torch, 32 in numba, and 2 in both
TOP = 4096


def total(x: Tensor) -> Tensor:
    """Return the sum over the last dimension, added in order, so that torch and numba agree to the bit."""
    return x.cumsum(-1)[..., -1]


def padded(count: int) -> int:
    """Return the length of a level for `count` numbers: whole blocks, except for the top level."""
    return count if count <= TOP else -(-count // WIDTH) * WIDTH


def levels_of(leaf: Tensor) -> list[Tensor]:
    """Return the levels of a tree, lowest first. The lowest is `leaf`, of a `padded` length; padding is 0."""
    levels = [leaf]
    while len(levels[-1]) > TOP:
        block = total(levels[-1].view(-1, WIDTH))
        above = block.new_zeros(padded(len(block)))
        above[: len(block)] = block
        levels.append(above)
    return levels


def refresh_(levels: Sequence[Tensor], block_B: Tensor) -> None:
    """Compute the numbers above these blocks of the lowest level again, in place. Blocks may be repeated.

    Each number is computed from its whole block, not by adding a difference, so rounding errors do not accumulate.
    """
    for level, above in itertools.pairwise(levels):
        above.index_copy_(0, block_B, total(level.view(-1, WIDTH).index_select(0, block_B)))
        block_B = block_B >> SHIFT


def draw(levels: Sequence[Tensor], uniform_B: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Sample rows (B,) int64 of the lowest level of a sum tree in proportion to its numbers; also return the total ().

    `uniform_B` has one (B,) float64 tensor in [0, 1) per level, top level first. In each block, the first number is
    selected whose running sum exceeds that fraction of the block's sum. A number that is 0 is never selected, because a
    fraction of a sum below 1 stays below the sum after rounding.

    Numbers must not be negative and the total must not be 0, otherwise rows are out of range.
    """
    running_K = levels[-1].cumsum(0)
    whole = running_K[-1]
    row_B = torch.searchsorted(running_K, uniform_B[0] * whole, right=True)
    for level, part_B in zip(reversed(levels[:-1]), uniform_B[1:], strict=True):
        running_BW = level.view(-1, WIDTH).index_select(0, row_B).cumsum(-1)
        mass_B1 = (part_B * running_BW[:, -1]).unsqueeze(-1)
        row_B = torch.searchsorted(running_BW, mass_B1, right=True).view(-1).add_(row_B, alpha=WIDTH)
    return row_B, whole
