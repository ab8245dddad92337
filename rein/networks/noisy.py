"""Linear layers with learned noise.

Shapes: B rows, I inputs, H outputs, E numbers of noise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NoisyLinear(nn.Module):
    """Linear layer whose weights have factorized Gaussian noise of a learned size, (B, I) -> (B, H)::

        W = mean_W + std_W * f(e_H) f(e_I)^T      b = mean_b + std_b * f(e_H)      f(e) = sign(e) sqrt |e|

    Standard normal e = (e_I, e_H) with E = I + H numbers is an argument, so the layer has no hidden state. Means are
    drawn from `generator`, uniformly in +-1 / sqrt(I). Sizes of the noise begin at `std` / sqrt(I).

    Source: Fortunato et al. 2018 ("Noisy networks for exploration"), section 3 (b).
    """

    def __init__(self, inputs: int, outputs: int, std: float, generator: torch.Generator) -> None:
        super().__init__()
        self.sizes = [inputs, outputs]
        bound = inputs**-0.5

        def uniform(*shape: int) -> nn.Parameter:
            mean = torch.empty(shape, dtype=torch.float32, device=generator.device)
            return nn.Parameter(mean.uniform_(-bound, bound, generator=generator))

        self.weight, self.bias = uniform(outputs, inputs), uniform(outputs)
        self.weight_std = nn.Parameter(torch.full_like(self.weight, std * bound))
        self.bias_std = nn.Parameter(torch.full_like(self.bias, std * bound))

    @property
    def noise_size(self) -> int:
        """Number E of normal numbers of a forward pass with noise."""
        return sum(self.sizes)

    def forward(self, x_BI: Tensor, noise_E: Tensor | None = None) -> Tensor:
        """Return the outputs (B, H), by default without noise."""
        if noise_E is None:
            return F.linear(x_BI, self.weight, self.bias)
        noise_I, noise_H = (noise_E.sign() * noise_E.abs().sqrt()).split(self.sizes)
        weight = torch.addcmul(self.weight, self.weight_std, torch.outer(noise_H, noise_I))
        return F.linear(x_BI, weight, torch.addcmul(self.bias, self.bias_std, noise_H))
