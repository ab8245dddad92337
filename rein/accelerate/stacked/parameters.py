"""Parameters and optimizers of several networks of equal shapes, as tensors with a leading axis.

Shapes: S learners, P parameters of a network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rein.accelerate.fast_learner import FastLearner
from rein.agents.base.optimizers import Adam
from rein.errors import NonFiniteError
from rein.ops.values import polyak_


class StackedModules:
    """Parameters of S modules of equal shapes, as rows of one tensor.

    The parameters of the modules become views of the rows, so that changes of either are changes of both.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = list(modules)
        self.shapes = {name: parameter.shape for name, parameter in modules[0].named_parameters()}
        self.flat = _joined([[p.detach() for p in module.parameters()] for module in modules])  # (S, P)
        self.parameters = self.unflatten(self.flat)  # (S, ...) by name
        for row, module in enumerate(modules):
            for name, parameter in module.named_parameters():
                parameter.data = self.parameters[name][row]

    @property
    def connected(self) -> bool:
        """Whether the parameters of the modules are still views. They are not if a user has replaced their tensors."""
        rows = zip(self.modules, self.flat.unbind(), strict=True)
        return all(next(module.parameters()).data_ptr() == row.data_ptr() for module, row in rows)

    def unflatten(self, flat_SP: Tensor) -> dict[str, Tensor]:
        """Return views (S, ...) of each parameter by name."""
        parts = flat_SP.split([shape.numel() for shape in self.shapes.values()], 1)
        named = zip(self.shapes.items(), parts, strict=True)
        return {name: part.unflatten(1, shape) if shape else part.squeeze(1) for (name, shape), part in named}

    def flatten(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return values (S, ...) of all parameters as one tensor (S, P)."""
        return torch.cat([values[name].reshape(len(self.flat), -1) for name in self.shapes], 1)

    def follow(self, networks: StackedModules, tau: float) -> None:
        """Move the parameters, which are those of target networks, toward others by `tau`."""
        polyak_([self.flat], [networks.flat], tau)


class StackedLearner:
    """Adam for S learners with separate learning rates and gradient clipping."""

    def __init__(self, networks: StackedModules, learners: Sequence[FastLearner]) -> None:
        """Create the optimizer. The moments of the learners' optimizers become views of its moments."""
        self.networks, self.learners = networks, list(learners)
        optimizers: list[Any] = [learner.optimizer for learner in learners]
        group, device = optimizers[0].param_groups[0], networks.flat.device
        self._betas, self._epsilon = group["betas"], group["eps"]
        self._settings = _settings(optimizers[0])
        self._mean = _joined([adam._means for adam in optimizers])
        self._square = _joined([adam._squares for adam in optimizers])
        self._count = torch.stack([adam._count for adam in optimizers])  # (S, number of parameter tensors)
        for row, adam in enumerate(optimizers):
            means, squares = (networks.unflatten(moments[row : row + 1]) for moments in (self._mean, self._square))
            adam._means = [mean[0] for mean in means.values()]
            adam._squares = [square[0] for square in squares.values()]
            adam._count = self._count[row]
            adam._steps = list(adam._count.unbind())
        self._rate_S1 = torch.zeros(len(learners), 1, dtype=torch.float32, device=device)
        self._limit_S1 = torch.full_like(self._rate_S1, math.inf)
        self._wrong_S = torch.zeros(len(learners), dtype=torch.float32, device=device)  # NaN after such a norm

    @property
    def together(self) -> bool:
        """Whether `step` does the same as the learners: not with guards, hooks and other settings of optimizers."""
        return all(
            each.joins
            and each.guard is None
            and each.on_gradients is None
            and _settings(each.optimizer) == self._settings
            for each in self.learners
        )

    def read_options(self) -> None:
        """Read the learning rates and the largest gradient norms of the learners."""
        rates = [learner.optimizer.param_groups[0]["lr"] for learner in self.learners]
        limits = [math.inf if each.max_grad_norm is None else each.max_grad_norm for each in self.learners]
        numbers = torch.tensor([rates, limits], dtype=torch.float32, device="cpu").to(self._rate_S1.device)
        self._rate_S1.copy_(numbers[0].unsqueeze(1))
        self._limit_S1.copy_(numbers[1].unsqueeze(1))

    def step(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Clip the gradients (S, ...) of each learner and update its parameters. Returns the norms before, (S,).

        On the CPU, raises NonFiniteError before any change if a norm is not finite. On other devices, the error is
        raised by `Learner.finite_reads`.
        """
        gradient_SP = self.networks.flatten(gradients)
        norm_S1 = torch.linalg.vector_norm(gradient_SP, dim=1, keepdim=True)
        if not norm_S1.is_cpu:
            self._wrong_S.add_(norm_S1.squeeze(1).mul(0.0))
        elif not math.isfinite(float(norm_S1.sum())):
            self._check(gradients, norm_S1.squeeze(1))
        gradient_SP.mul_((self._limit_S1 / (norm_S1 + 1e-6)).clamp(max=1.0))
        beta1, beta2 = self._betas
        self._count += 1.0
        count_S1 = self._count[:, :1]
        self._mean.lerp_(gradient_SP, 1.0 - beta1)
        self._square.mul_(beta2).addcmul_(gradient_SP, gradient_SP, value=1.0 - beta2)
        rate_S1 = self._rate_S1 / _correction(beta1, count_S1)
        root_SP = self._square.sqrt().mul_(_correction(beta2, count_S1).rsqrt()).add_(self._epsilon)
        self.networks.flat.sub_(self._mean.div(root_SP).mul_(rate_S1))
        return norm_S1.squeeze(1)

    def _check(self, gradients: Mapping[str, Tensor], norm_S: Tensor) -> None:
        """Raise NonFiniteError for the first learner that checks its norm and whose norm is not finite."""
        for row, learner in enumerate(self.learners):
            for name, parameter in learner.networks.named_parameters():
                parameter.grad = gradients[name][row]
            try:
                learner.check({}, norm_S[row])
            except NonFiniteError as error:
                rate = learner.optimizer.param_groups[0]["lr"]
                raise NonFiniteError(f"a learner with a learning rate of {rate:g}: {error}") from None
            finally:
                learner.optimizer.zero_grad()

    def mark(self) -> None:
        """Make `Learner.finite_reads` raise if a norm was not finite, on other devices than the CPU."""
        if not self._wrong_S.is_cpu:
            self.learners[0].check({}, self._wrong_S.sum())


def _correction(beta: float, count: Tensor) -> Tensor:
    """Return 1 - beta**count. In float32, the difference has an error of 1e-5 for a beta near 1 and small counts."""
    return -torch.expm1(count * (math.log(beta) if beta else -math.inf))


def can_stack(learners: Sequence[FastLearner]) -> bool:
    """Return whether `StackedLearner` does the same as these learners."""
    if not all(learner.joins and type(learner.optimizer) is Adam for learner in learners):
        return False
    forms = [
        ([p.shape for p in learner.networks.parameters()], _settings(learner.optimizer), str(learner.networks))
        for learner in learners
    ]
    return all(form == forms[0] for form in forms) and forms[0][1]["weight_decay"] == 0.0


def _settings(optimizer: Any) -> dict[str, Any]:
    """Return the settings of an optimizer except the learning rate."""
    return {name: value for name, value in optimizer.param_groups[0].items() if name not in ("params", "lr")}


def _joined(rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the numbers of each row of tensors, (S, P)."""
    return torch.stack([torch.cat([x.flatten() for x in row]) for row in rows])
