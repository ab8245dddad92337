"""Adam in one operation, and what any optimizer's state looks like without pickle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class Adam:
    """Adam (Kingma & Ba 2015), the default of rein's agents.

    The same numbers as `torch.optim.Adam(fused=True)`, whose first construction imports torch's compiler and takes
    longer than many a run here. It has what agents use of an optimizer: `param_groups`, `step`, `zero_grad`, a state.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        """`weight_decay` is an L2 penalty on the gradient, as in `torch.optim.Adam`."""
        parameters = list(parameters)
        self.param_groups = [{"params": parameters, "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}]
        self._parameters = parameters
        self._means = [torch.zeros_like(p) for p in parameters]
        self._squares = [torch.zeros_like(p) for p in parameters]
        # one number for each, side by side, so that one operation counts them all
        device = parameters[0].device if parameters else "cpu"
        self._count = torch.zeros(len(parameters), dtype=torch.float32, device=device)
        self._steps = list(self._count.unbind())

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        group = self.param_groups[0]
        kept = self._parameters, self._means, self._squares, self._steps
        gradients = [laid_out_as(p, p.grad) for p in self._parameters if p.grad is not None]
        if not gradients:
            return
        if len(gradients) == len(self._parameters):
            parameters, means, squares, steps = kept
            self._count += 1.0
        else:
            rows = [row for row in zip(*kept, strict=True) if row[0].grad is not None]
            parameters, means, squares, steps = (list(column) for column in zip(*rows, strict=True))
            torch._foreach_add_(steps, 1.0)
        torch._fused_adam_(
            parameters,
            gradients,
            means,
            squares,
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The moments and the number of steps."""
        return {"means": list(self._means), "squares": list(self._squares), "steps": list(self._steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError for the state of other parameters."""
        for name, mine in (("means", self._means), ("squares", self._squares), ("steps", self._steps)):
            theirs = state[name]
            if [t.shape for t in theirs] != [m.shape for m in mine]:
                raise ValueError(f"{name} of the optimizer are those of other parameters")
            for mine_i, theirs_i in zip(mine, theirs, strict=True):
                mine_i.copy_(theirs_i)


def laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient, its numbers in memory in the order of the parameter's.

    Fused optimizers of torch 2.13 go through both side by side, whatever their strides say: a gradient whose channels
    are neighbours, as convolutions give it where their images' are, would reach the wrong weights. `backward` sees to
    that; `torch.autograd.grad` does not.
    """
    if (gradient.is_contiguous() and parameter.is_contiguous()) or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
