"""Learner: optimizer steps from batches, with gradient accumulation, threads, compilation and mixed precision.

Shapes: M rows of a minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rein.agents.base.data_parallel import average, check_equal, check_same
from rein.agents.base.optimizers import (
    FiniteUpdate,
    Guard,
    Optimizer,
    OptimizerFactory,
    apply_gradients,
    check_learning_rate,
    check_optimizer,
    describe_optimizer,
)
from rein.networks.reserved import Inputs, inputs_of
from rein.ops import backend
from rein.ops.backend import compiled, fast_products, has_graphs, keep_freed_memory, largest_matrix
from rein.ops.parallel import processes
from rein.ops.statistics import explained_variance
from rein.ops.trees import leaves, load_plain_state, map_tree, plain_state
from rein.schedules import Schedule

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]  # (networks, batch, coefficients, report=) -> (loss, metrics)
Gradient = Callable[..., tuple[list[Any], dict[str, Tensor]] | None]  # (networks, batch, coefficients, share, report=)

CHECK_EVERY = 100  # steps from one comparison of the processes to the next
CACHE_ROWS = 4096  # rows whose activations fit the cache, in networks of 64 features


_NONE: Any = None  # value of a column that a loss does not use
_TREES = (dict, Inputs)


class Batch(NamedTuple):
    """Batch of rows (M, ...), or of whole sequences (T, N, ...) if `carry` is set.

    Columns that the loss does not use are None. Comments give the shapes for rows; sequences have (T, N) instead of M.
    """

    features: Any = _NONE  # (M, F), a tree for custom networks, or Inputs if observations have reserved entries
    action: Tensor = _NONE  # (M, A) scaled to [-1, 1], or (M,) int64 counted from 0
    sample: Any = _NONE  # (M, ...) sample of the policy, or a dictionary, before it was converted to an action
    log_prob: Tensor = _NONE  # (M,) log probability of the sample
    value: Tensor = _NONE  # (M,) value of the observation, recorded while acting
    advantage: Tensor = _NONE  # (M,)
    target: Tensor = _NONE  # (M,) target of the value, or (M, S) samples of the target
    weight: Tensor | None = None  # (M,) weight of each row in the loss; None for equal weights
    noise: Tensor = _NONE  # (M, A) standard normal noise of samples
    level: Tensor = _NONE  # (M, Q) quantile levels
    valid: Tensor | None = None  # (M,) bool; None if all rows are valid
    reset: Tensor | None = None  # (T, N) bool, sequences only: whether the carry is zeroed before a step
    carry: Tensor | None = None  # (N, C) sequences only: the carry before the first step

    @property
    def shape(self) -> torch.Size:
        """(M,), or (T, N) for sequences."""
        first = self.log_prob if self.features is None else inputs_of(self.features).features
        while isinstance(first, dict):  # observations of a custom network
            first = next(iter(first.values()))
        return first.shape[: 1 if self.carry is None else 2]

    @property
    def size(self) -> int:
        """Number of rows or sequences."""
        return self.shape[-1]

    def rows(self, index: Any) -> Batch:
        """Return the rows or sequences at `index`, a slice or an int64 tensor."""
        *columns, carry = self
        if carry is not None:
            return Batch._make([*map_tree(lambda column: column[:, index], columns), carry[index]])
        take: Any = Tensor.__getitem__ if isinstance(index, slice) else _select  # three times as fast as indexing
        selected = [column if column is None or isinstance(column, _TREES) else take(column, index) for column in self]
        batch = Batch._make(selected)
        for name in ("features", "sample"):
            if isinstance(tree := getattr(self, name), _TREES):
                batch = batch._replace(**{name: map_tree(lambda column: take(column, index), tree)})
        return batch


def _select(column: Tensor, index_M: Tensor) -> Tensor:
    return column.index_select(0, index_M)


class Learner:
    """Computes the gradient of a loss and steps an optimizer.

    A batch is split into micro-batches of `micro_batch` rows, which `threads` threads process in parallel. Their
    gradients are added in order, weighted by their share of the valid rows. Results do not depend on the number of
    threads; `micro_batch` changes the rounding only. `precision` is the floating-point type of matrix products.

    If a hook is registered on a parameter or a module, threads and `compile` are not used. `backward` is then called
    for each micro-batch, so that all hooks fire.

    Parameters with `requires_grad=False` and their optimizer state do not change. If all parameters are frozen, the
    optimizer does not step, `guard` is not called, and only the metrics of the loss are returned.

    In a group of several processes (`rein.agents.base.data_parallel`), the gradient is the mean over the rows of all
    processes. Clipping, `guard` and metrics are then identical in all processes.
    """

    def __init__(
        self,
        networks: nn.Module,
        loss: Loss,
        optimizer: OptimizerFactory,
        *,
        max_grad_norm: float | None,
        guard: Guard | None = None,
        micro_batch: int | None = None,
        threads: int = 1,
        compile: bool = False,
        precision: str = "float32",
        closed_form: Gradient | None = None,
    ) -> None:
        """Create a learner. By default, `micro_batch` is 4,096 rows on the CPU and all rows on other devices.

        `closed_form` computes the gradient of the loss without autograd. Autograd is used if `closed_form` returns
        None, with bfloat16, with `REIN_PLAIN=1`, and if parameters are frozen or hooks are registered.
        """
        if precision not in ("float32", "bfloat16"):
            raise ValueError(f"precision={precision!r}: use float32 or bfloat16")
        for name, count in (("micro_batch", micro_batch), ("threads", threads)):
            if count is not None and count < 1:
                raise ValueError(f"{name}={count}: give 1 or more")
        self.networks, self.optimizer = networks, _optimizer_of(networks, optimizer)
        self.max_grad_norm, self.guard = max_grad_norm, guard
        # function of (parameters, gradients), called before gradients are clipped; gradients must not be changed
        self.on_gradients: Callable[[Sequence[Tensor], Sequence[Tensor | None]], None] | None = None
        self._finite: FiniteUpdate | None = FiniteUpdate(networks)  # not used with a guard
        self._parameters = [*networks.parameters()]
        self._largest = largest_matrix(networks)
        self._device = self._parameters[0].device
        self._rows = micro_batch or (CACHE_ROWS if self._device.type == "cpu" else None)
        self._compiled, self._bfloat16 = compile, precision == "bfloat16"
        self._eager_loss, self._loss = loss, compiled(loss, self._device) if compile else loss
        kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
        self._hooks = [getattr(module, kind) for module in networks.modules() for kind in kinds]
        self._closed_form = None if self._bfloat16 or backend.PLAIN else closed_form
        if compile and self._closed_form is not None:
            self._closed_form = compiled(self._closed_form, self._device)
        if compile and threads > 1 and has_graphs(self._device):
            raise ValueError(f"threads={threads}, compile=True: CUDA graphs require a single thread; use threads=1")
        self._copies = compile and has_graphs(self._device)  # copy gradients before the next part overwrites them
        self._pool = _pool(threads) if threads > 1 else None
        if self._device.type == "cpu":
            keep_freed_memory()
        self._processes, self._until_check = processes(), 0  # steps until the next comparison of the processes
        self.decisions: dict[str, Any] | None = None  # compared at each step, as JSON: they decide which learners step

    def _hooked(self) -> bool:
        """Return whether a parameter or a module has a hook. torch keeps one dictionary per kind and module."""
        hooks = (p._backward_hooks or p._post_accumulate_grad_hooks for p in self._parameters)  # type: ignore[attr-defined]
        return any(self._hooks) or any(hooks)

    @property
    def joins(self) -> bool:
        """Whether its steps can be computed together with those of other learners: only plain closed-form gradients."""
        plain = self._closed_form is not None and not self._compiled and self._processes == 1
        return plain and not self._hooked() and all(p.requires_grad for p in self._parameters)

    def step(self, batch: Batch, coefficients: Any, *, report: bool = True) -> dict[str, Tensor]:
        """Make one optimizer step. Returns the metrics of the loss and, if `report` is set, `grad_norm`."""
        measure, report = report, report or self._compiled  # compile only one variant of the loss
        if self._compiled:  # tensors, so that a schedule does not trigger recompilation
            coefficients = map_tree(self._tensor, coefficients)
        parts = self._parts(batch)
        with fast_products(parts[0].size * self._largest):
            if len(parts) == 1:
                gradients, metrics = self._gradients(batch, coefficients, report)
            else:
                gradients, metrics = self._accumulate(parts, coefficients, batch.valid, report)
        if self._processes > 1 or processes() > 1:
            gradients, metrics = self._average_over_processes(gradients, metrics, batch)
        return self._apply(gradients, metrics, measure)

    def _apply(
        self, gradients: Sequence[Tensor | None], metrics: dict[str, Tensor], measure: bool
    ) -> dict[str, Tensor]:
        """Clip gradients of the parameters and step the optimizer. Returns the metrics with `grad_norm` if measured."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        if self.on_gradients is not None:
            self.on_gradients(self._parameters, gradients)
        if all(gradient is None for gradient in gradients):  # all parameters are frozen
            return (
                {**metrics, "grad_norm": torch.zeros((), dtype=torch.float32, device=self._device)}
                if measure
                else metrics
            )
        settings = {"max_grad_norm": self.max_grad_norm, "guard": self.guard, "measure": measure}
        norm = apply_gradients(self.optimizer, metrics, **settings, finite=self._finite)
        return metrics if norm is None else {**metrics, "grad_norm": norm}

    def _tensor(self, number: Any) -> Any:
        """Return a nonzero float as a tensor. 0 and other objects stay constants of the compiled program."""
        return (
            torch.tensor(number, dtype=torch.float32, device=self._device)
            if isinstance(number, float) and number
            else number
        )

    def _parts(self, batch: Batch) -> list[Batch]:
        """Split a batch into micro-batches."""
        steps = batch.shape.numel() // batch.size  # 1 for rows
        size = batch.size if self._rows is None else max(1, self._rows // steps)
        return [batch.rows(slice(start, start + size)) for start in range(0, batch.size, size)]

    def _accumulate(
        self, parts: list[Batch], coefficients: Any, valid: Tensor | None, report: bool
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        rows = sum(part.shape.numel() for part in parts) if valid is None else valid.sum().clamp(min=1)

        def compute(part: Batch) -> tuple[list[Tensor | None], dict[str, Tensor]]:
            share = (part.shape.numel() if part.valid is None else part.valid.sum()) / rows
            return self._gradients(part, coefficients, report, share)

        gradients: list[Tensor | None] = []
        metrics: dict[str, Tensor] = {}
        pool = None if self._hooked() else self._pool  # `backward` in two threads would mix their gradients
        for part_gradients, part_metrics in pool.map(compute, parts) if pool else map(compute, parts):
            pairs = zip(gradients, part_gradients, strict=True)
            gradients = [_sum(a, b) for a, b in pairs] if gradients else part_gradients
            metrics = {name: _join(metrics.get(name), value) for name, value in part_metrics.items()}
        return gradients, metrics

    def _gradients(
        self, batch: Batch, coefficients: Any, report: bool, share: float | Tensor | None = None
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """Return the gradients of the loss (None if frozen) and the metrics, both times `share`."""
        learned = [parameter for parameter in self._parameters if parameter.requires_grad]  # may change during a run
        hooked = self._hooked()
        if self._closed_form is not None and not hooked and len(learned) == len(self._parameters):
            found = self._closed_form(self.networks, batch, coefficients, share, report=report)
            if found is not None:
                return found
        half = torch.autocast(self._device.type, torch.bfloat16, enabled=self._bfloat16)
        with torch.set_grad_enabled(bool(learned)), half:
            function = self._eager_loss if hooked else self._loss  # compiled functions may skip hooks
            loss, metrics = function(self.networks, batch, coefficients, report=report)
            if share is not None:
                loss = loss * share
                metrics = {name: value if value.ndim else value * share for name, value in metrics.items()}
        if hooked and learned:
            return _by_backward(loss, learned, self._parameters), metrics
        gradients = torch.autograd.grad(loss, learned, allow_unused=True) if learned else ()
        found = iter(map_tree(Tensor.clone, gradients) if self._copies else gradients)
        return [next(found) if parameter.requires_grad else None for parameter in self._parameters], metrics

    def _average_over_processes(
        self, gradients: list[Tensor | None], metrics: dict[str, Tensor], batch: Batch
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """Average over processes. Raises ValueError if decisions differ, or, every 100 steps, networks or options."""
        self._check_group()
        if self.decisions is not None:
            check_equal(self.decisions, self._device)
        if not self._until_check:
            state = (leaf for _, leaf in leaves(self.state_dict()) if isinstance(leaf, Tensor))
            check_same([*self._parameters, *state], self._shared_options())
            self._until_check = CHECK_EVERY
        self._until_check -= 1
        rows = batch.shape.numel() if batch.valid is None else batch.valid.sum()
        return average(gradients, metrics, rows)

    def _check_group(self) -> None:
        if processes() != self._processes:
            raise RuntimeError(
                f"the agent was built in a group of {self._processes} processes and learns in a group of "
                f"{processes()}: build and train it within the same `with process_group():`"
            )

    def _shared_options(self) -> dict[str, Any]:
        """Return the settings of the optimizer that must be equal in all processes, as JSON."""
        return {
            "optimizer": describe_optimizer(self.optimizer),
            "learning_rate": [float(group["lr"]) for group in self.optimizer.param_groups if "lr" in group],
            "max_grad_norm": self.max_grad_norm,
            "frozen parameters": [i for i, p in enumerate(self._parameters) if not p.requires_grad],
        }

    def compare_processes(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError if the options of an agent differ between the processes."""
        if self._processes > 1 or processes() > 1:
            self._check_group()
            check_equal(options, self._device)

    def check(self, losses: Mapping[str, Tensor], norm: Tensor) -> None:
        """Raise NonFiniteError if a loss or a gradient norm is not finite; on a GPU, `read_finite` raises it."""
        if self._finite is not None:
            self._finite(losses, norm)

    def check_finite(self, enabled: bool) -> None:
        """Turn on (default) or off the check that losses and gradient norms are finite."""
        self._finite = FiniteUpdate(self.networks) if enabled else None

    def read_finite(self) -> None:
        """Raise NonFiniteError if an update on a GPU since the last call was not finite. Waits for the device."""
        if self._finite is not None:
            self._finite.read()

    def check_learning_rate(self, option: str, rates: Mapping[str, Schedule]) -> None:
        """Raise ValueError if the optimizer was built with another learning rate, which `option` would replace."""
        check_learning_rate(self.optimizer, option, rates)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer."""
        return plain_state(self.optimizer)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        load_plain_state(self.optimizer, state)
        self._until_check = 0


def mean_metrics(seen: list[dict[str, Tensor]], batch: Batch) -> dict[str, Tensor]:
    """Return the mean metrics of updates, and the explained variance of the values of the batch."""
    means = torch.stack([torch.stack([*metrics.values()]) for metrics in seen]).mean(0)
    explained = explained_variance(batch.value, batch.target, batch.valid)
    return {**dict(zip(seen[0], means.unbind(), strict=True)), "explained_variance": explained}


def _by_backward(loss: Tensor, learned: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradient of each parameter. `backward` calls post-accumulate hooks, `torch.autograd.grad` does not."""
    for parameter in parameters:
        parameter.grad = None
    loss.backward(inputs=learned)
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients


def _optimizer_of(networks: nn.Module, factory: OptimizerFactory) -> Optimizer:
    if not callable(factory):
        received = repr(factory) if isinstance(factory, str) else f"an object of type {type(factory).__name__}"
        raise TypeError(
            f"optimizer: expected a function of parameters, got {received}; give a class such as "
            "torch.optim.RMSprop, or functools.partial(torch.optim.RMSprop, alpha=0.99)"
        )
    try:
        optimizer = factory(networks.parameters())
    except ValueError as error:
        shapes = ", ".join(map(str, dict.fromkeys(tuple(parameter.shape) for parameter in networks.parameters())))
        error.add_note(
            f"optimizer: the parameters of {type(networks).__name__} have the shapes {shapes}; networks of equal size, "
            "such as actor and critic, are stacked along a leading axis. For Muon, use rein.Muon"
        )
        raise
    check_optimizer(optimizer)
    return optimizer


def _pool(threads: int) -> ThreadPoolExecutor:
    """Return a thread pool whose threads use torch's current number of threads, which torch does not ensure."""
    return ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),))


def _join(a: Tensor | None, b: Tensor) -> Tensor:
    """Add scalars; concatenate values per row."""
    return b if a is None else torch.cat((a, b)) if b.ndim else a + b


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a.add_(b)
