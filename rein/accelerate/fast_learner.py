"""Learner with closed-form gradients, threads, compilation and fast products."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from rein.accelerate.closed_form import gradient_of
from rein.accelerate.compiled import Program, captured, has_graphs
from rein.accelerate.products import fast_products, largest_matrix, with_usual_products
from rein.agents.base.learner import Batch, Learner
from rein.ops.trees import map_tree

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"


class FastLearner(Learner):
    """Learner that computes the same gradients faster.

    Losses in `rein.accelerate.closed_form` need no autograd. `threads` threads process the micro-batches in parallel;
    results do not depend on their number. `compile` compiles the loss.

    If a hook is registered on a parameter, a module or the loss, gradients are computed as by a `Learner`, so that it
    fires.
    """

    def __init__(self, *arguments: Any, threads: int = 1, compile: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if compile and threads > 1 and has_graphs(self.device):
            raise ValueError(f"threads={threads}, compile=True: CUDA graphs require a single thread; use threads=1")
        self._compiled = compile
        self._closed_form = None if self._bfloat16 else gradient_of(self.loss, self.networks)
        self._loss = self.loss
        self._captured = self._computed
        if compile:
            self._loss = torch.compile(self.loss, dynamic=False)
            self._closed_form = self._closed_form and torch.compile(self._closed_form, dynamic=False)
            self._captured = captured(self._computed, self.device)
        self._hooks = [getattr(module, kind) for module in self.networks.modules() for kind in _HOOKS]
        self._largest = largest_matrix(self.networks)
        self._pool = _pool(threads) if threads > 1 else None
        if self.device.type == "cpu":
            keep_freed_memory()

    def is_hooked(self) -> bool:
        """Return whether a parameter, a module or the loss has a hook.

        torch keeps one dictionary per kind and module.
        """
        if self.on_loss is not None:
            return True
        hooks = (p._backward_hooks or p._post_accumulate_grad_hooks for p in self.parameters)  # type: ignore[attr-defined]
        return any(self._hooks) or any(hooks)

    @property
    def joins(self) -> bool:
        """Whether its steps can be computed together with those of other learners: only plain closed-form gradients."""
        plain = self._closed_form is not None and not self._compiled and self.processes == 1
        return plain and not self.is_hooked() and all(p.requires_grad for p in self.parameters)

    def gradients(
        self, parts: Sequence[Batch], coefficients: Any, valid: Tensor | None, report: bool
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """See `Learner`."""
        if self._compiled:  # tensors, so that a schedule does not trigger recompilation
            coefficients = map_tree(self._tensor, coefficients)
            report = report or not Program.is_running  # compile only one variant of the loss, except in larger programs
        with fast_products(parts[0].size * self._largest):
            return super().gradients(parts, coefficients, valid, report)

    def apply(self, gradients: Sequence[Tensor | None], metrics: dict[str, Tensor], report: bool) -> dict[str, Tensor]:
        """See `Learner`. Guards and optimizers see the setting of matrix products that the user has made."""
        return with_usual_products(super().apply, gradients, metrics, report)

    def _tensor(self, number: Any) -> Any:
        """Return a nonzero float as a tensor. 0 and other objects stay constants of the compiled program."""
        if isinstance(number, float) and number:
            return torch.tensor(number, dtype=torch.float32, device=self.device)
        return number

    def map(self, compute: Callable[[Batch], Any], parts: Sequence[Batch]) -> Iterable[Any]:
        """See `Learner`. `backward` in two threads would mix their gradients."""
        return map(compute, parts) if self._pool is None or self.is_hooked() else self._pool.map(compute, parts)

    def part_gradients(
        self, batch: Batch, coefficients: Any, report: bool, share: float | Tensor | None = None
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """See `Learner`."""
        if self.is_hooked():  # compiled functions may skip hooks
            return super().part_gradients(batch, coefficients, report, share)
        learned = [parameter.requires_grad for parameter in self.parameters]  # may change during a run
        gradients, metrics = self._captured(batch, coefficients, report, share, learned)
        computed = iter(gradients)
        return [next(computed) if is_learned else None for is_learned in learned], metrics

    def _computed(
        self, batch: Batch, coefficients: Any, report: bool, share: float | Tensor | None, learned: Sequence[bool]
    ) -> tuple[Sequence[Tensor | None], dict[str, Tensor]]:
        """Return the gradients of the learned parameters, and the metrics."""
        if self._closed_form is not None and all(learned):
            result = self._closed_form(self.networks, batch, coefficients, share, report=report)
            if result is not None:
                return result
        loss, metrics = self.weighted_loss(self._loss, batch, coefficients, report, share)
        parameters = [parameter for parameter in self.parameters if parameter.requires_grad]
        return torch.autograd.grad(loss, parameters, allow_unused=True) if parameters else (), metrics


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for later allocations instead of returning it to the system.

    Otherwise the memory of activations may be returned and faulted in again for every batch. In threads this always
    happened and took a fourth of the time. In some single-threaded runs it took half of the time. Does nothing without
    glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 256 << 20)


def _pool(threads: int) -> ThreadPoolExecutor:
    """Return a thread pool whose threads use torch's current number of threads, which torch does not ensure."""
    return ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),))
