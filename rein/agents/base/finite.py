"""Checks that losses, gradients and parameters are finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rein.errors import NonFiniteError
from rein.ops.statistics import global_norm

HINT = (
    "Add rein.handlers.guards.guard_data(loop) to find the data that caused it; a smaller learning rate or "
    "max_grad_norm helps if the data is finite; check_finite=False turns the check off"
)


class FiniteUpdate:
    """Raises NonFiniteError if a loss or the norm of all gradients of a module is NaN or infinite.

    On the host this happens before the optimizer's step. On another device a flag is accumulated without waiting for
    the device, and `read` looks at it.
    """

    def __init__(self, networks: nn.Module) -> None:
        self._networks = networks
        self._flag: Tensor | None = None  # on a device: NaN after a non-finite loss or norm

    def __call__(self, metrics: Mapping[str, Tensor], norm: Tensor) -> None:
        """Check one update, before gradients are clipped."""
        if not norm.is_cpu:
            flag = torch.zeros_like(norm) if self._flag is None else self._flag
            for value in (norm, *_losses(metrics).values()):
                flag += value.mul(0.0)  # 0 * infinity is NaN
            self._flag = flag
            return
        total = float(norm)
        for name, value in metrics.items():
            if "loss" in name and not value.ndim:
                total += float(value)
        if not math.isfinite(total):
            self._search(_losses(metrics), norm)

    def _search(self, losses: Mapping[str, Tensor], norm: Tensor) -> None:
        """Raise for what is not finite; the sum of finite numbers may overflow."""
        found = [f"{name} is {float(loss)}" for name, loss in losses.items() if not math.isfinite(float(loss))]
        found += [f"the gradient norm is {float(norm)}"] if not math.isfinite(float(norm)) else []
        named = self._networks.named_parameters()
        wrong = (name for name, one in named if one.grad is not None and not bool(torch.isfinite(one.grad).all()))
        first = next(wrong, None)
        found += [f"the first gradient that is not finite is that of {first}"] if first is not None else []
        if not found:
            return
        kind = type(self._networks).__name__
        raise NonFiniteError(f"{', '.join(found)}: this update of {kind} was not applied. {HINT}")

    def read(self) -> None:
        """Raise if the flag was set since the last call. Waits for the device."""
        flag, self._flag = self._flag, None
        if flag is not None and math.isnan(float(flag)):
            raise NonFiniteError(
                f"a loss or gradient norm of {type(self._networks).__name__} was not finite in this epoch. {HINT}"
            )


def _losses(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in metrics.items() if "loss" in name and not value.ndim}


@torch.no_grad()
def check_parameters(part: Any) -> None:
    """Raise NonFiniteError if a parameter of a module, or of an agent's networks or table, is NaN or infinite.

    Takes one reduction if all parameters are finite.
    """
    networks = part if isinstance(part, nn.Module) else getattr(part, "networks", None)
    if isinstance(networks, nn.Module):
        values, named = [*networks.parameters()], networks.named_parameters()
    elif isinstance(table := getattr(part, "table", None), Tensor):
        values, named = [table], iter([("table", table)])
    else:
        return
    if math.isfinite(float(global_norm(values))):
        return
    for name, value in named:
        if not bool(torch.isfinite(value).all()):
            raise NonFiniteError(f"parameter {name} of {type(part).__name__} is not finite. {HINT}")
