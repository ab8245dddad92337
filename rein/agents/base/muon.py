"""Muon, an optimizer of weight matrices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rein.agents.base.optimizers import Adam, set_learning_rate
from rein.ops.trees import load_plain_state, plain_state


class Muon:
    """Muon (Jordan et al. 2024) for weight matrices, and Adam for all other parameters.

    The update of a matrix is its momentum with all singular values set to about 1, scaled to the size of a usual update
    of Adam (Liu et al. 2025), so that learning rates of Adam apply. A parameter of shape (K, I, H) holds the matrices
    of K networks, which are updated separately by `torch.optim.Muon`. Biases, other vectors, matrices with a single row
    or column, and convolutions are updated by Adam.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        """Create an optimizer. `momentum` and `weight_decay` apply to matrices, `betas` and `eps` to Adam."""
        parameters = list(parameters)
        adam: dict[str, Any] = {"betas": betas, "eps": eps}
        muon: dict[str, Any] = {"momentum": momentum, "weight_decay": weight_decay}
        self.param_groups: list[dict[str, Any]] = [{"params": parameters, "lr": lr, **muon, **adam}]
        weights = [p for p in parameters if p.ndim in (2, 3) and min(p.shape[-2:]) > 1]
        self._matrices = [(p, _matrices(p.detach())) for p in weights]  # share memory with the parameters
        matrices = [matrix for _, each in self._matrices for matrix in each]
        self._muon: Any = torch.optim.Muon(matrices, lr, adjust_lr_fn="match_rms_adamw", **muon) if matrices else None
        self._adam = Adam([p for p in parameters if not any(p is weight for weight in weights)], lr, **adam)

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for optimizer in filter(None, (self._muon, self._adam)):
            set_learning_rate(optimizer, self.param_groups[0]["lr"])
        for parameter, matrices in self._matrices:
            gradient = parameter.grad
            gradients = [None] * len(matrices) if gradient is None else _matrices(gradient)
            for matrix, part in zip(matrices, gradients, strict=True):
                matrix.grad = part
        if self._muon is not None:
            self._muon.step()
            self._muon.zero_grad()
        self._adam.step()

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the momentum of matrices and the state of Adam."""
        return {"muon": None if self._muon is None else plain_state(self._muon), "adam": self._adam.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned. Raises ValueError if the number of parameters differs."""
        if self._muon is not None:
            load_plain_state(self._muon, state["muon"])
        self._adam.load_state_dict(state["adam"])


def _matrices(parameter: Tensor) -> tuple[Tensor, ...]:
    return parameter.unbind(0) if parameter.ndim == 3 else (parameter,)
