"""Gradients of log-probabilities and entropies, written out: what a policy gradient is made of.

    d/d theta of  sum_n ( weight_n * log pi(a_n) + entropy_weight_n * H(pi_n) )

with respect to what a head puts out. They are what autograd finds, with far fewer operations.

Shapes: N rows, A actions or dimensions of an action.
"""

from __future__ import annotations

import torch
from torch import Tensor


def categorical_score(
    log_probs_NA: Tensor, sample_N: Tensor, weight_N: Tensor, entropy_weight_N: Tensor | None = None
) -> Tensor:
    """With respect to the logits, (N, A).

    d log pi(a) / d logit_j = [j = a] - p_j      d H / d logit_j = -p_j (log p_j + H)
    """
    p_NA = log_probs_NA.exp()
    score_NA = p_NA * weight_N.neg().unsqueeze(-1)
    if entropy_weight_N is not None:
        negative_entropy_N1 = (p_NA * log_probs_NA).sum(-1, keepdim=True)
        score_NA -= p_NA * (log_probs_NA - negative_entropy_N1) * entropy_weight_N.unsqueeze(-1)
    return score_NA.scatter_add_(-1, sample_N.unsqueeze(-1), weight_N.unsqueeze(-1))


def normal_score(
    mean_NA: Tensor, log_std: Tensor, sample_NA: Tensor, weight_N: Tensor, entropy_weight_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """With respect to the mean, (N, A), and to the logarithm of the standard deviation in each row, (N, A).

    z = (a - mean) / std      d log pi(a) / d mean = z / std      d log pi(a) / d log std = z^2 - 1      d H = 1
    """
    inverse_std = torch.exp(-log_std)
    z_NA = (sample_NA - mean_NA) * inverse_std
    weight_N1 = weight_N.unsqueeze(-1)
    of_log_std_NA = (z_NA.square() - 1.0) * weight_N1
    if entropy_weight_N is not None:
        of_log_std_NA += entropy_weight_N.unsqueeze(-1)
    return z_NA * inverse_std * weight_N1, of_log_std_NA
