"""Normalization of features by the statistics of a batch.

Shapes: K networks, B rows, F features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Renormalized(NamedTuple):
    """Result of `batch_renorm`."""

    output: Tensor  # (K, B, F)
    mean: Tensor  # (K, 1, F) of the batch, without gradient
    variance: Tensor  # (K, 1, F) of the batch, without gradient


def batch_renorm(
    x_KBF: Tensor,
    mean_K1F: Tensor,
    variance_K1F: Tensor,
    *,
    r_max: float | Tensor,
    d_max: float | Tensor,
    epsilon: float = 1e-3,
) -> Renormalized:
    """Normalize by the mean m and deviation s of the batch, corrected toward the running mean M and deviation S.

    The output is::

        (x - m) / s * r + d      r = clamp(s / S, 1 / r_max, r_max)      d = clamp((m - M) / S, -d_max, d_max)

    r and d carry no gradient. Without clamping, the output is (x - M) / S. With r_max = 1 and d_max = 0, it is that of
    batch normalization. Deviations are sqrt(variance + epsilon).

    Source: Ioffe 2017 ("Batch renormalization"), algorithm 1.
    """
    variance, mean = torch.var_mean(x_KBF, 1, correction=0, keepdim=True)
    deviation = (variance + epsilon).sqrt()
    with torch.no_grad():
        running = (variance_K1F + epsilon).sqrt()
        low, high, most = (
            torch.as_tensor(bound, dtype=x_KBF.dtype, device=x_KBF.device) for bound in (1.0 / r_max, r_max, d_max)
        )
        r = (deviation / running).clamp(low, high)
        d = ((mean - mean_K1F) / running).clamp(-most, most)
    return Renormalized(torch.addcmul(d, x_KBF - mean, r / deviation), mean.detach(), variance.detach())
