"""Learner: optimizer steps from batches, with gradient accumulation and mixed precision.

Shapes: M rows of a minibatch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rein.agents.base.optimizers import (
    FiniteUpdate,
    Guard,
    Optimizer,
    OptimizerFactory,
    apply_gradients,
    check_learning_rate,
    check_optimizer,
)
from rein.networks.encoder import Inputs, inputs_of
from rein.ops.parallel import processes
from rein.ops.statistics import explained_variance
from rein.ops.trees import Read, load_plain_state, map_tree, plain_state
from rein.schedules import Schedule

if TYPE_CHECKING:
    from rein.agents.base.data_parallel import LearnerGroup

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]  # (networks, batch, coefficients, report=) -> (loss, metrics)

CACHE_ROWS = 4096  # rows whose activations fit the cache, in networks of 64 features


_NONE: Any = None  # value of a column that a loss does not use
_TREES = (dict, Inputs)


class Batch(NamedTuple):
    """Batch of rows (M, ...), or of whole sequences (T, N, ...) if `carry` is set.

    Columns that the loss does not use are None. Comments give the shapes for rows; sequences have (T, N) instead of M.
    """

    features: Any = _NONE  # (M, F) preprocessed observations, before the encoder; a tree for custom networks, or Inputs
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

    def shuffled(self, order_MB: Tensor) -> Iterator[Batch]:
        """Yield minibatches of rows or sequences in this order, see `rein.ops.statistics.minibatches`."""
        shuffled = self.rows(order_MB.flatten())  # one gather per pass, so that minibatches are slices
        count, size = order_MB.shape
        for start in range(0, count * size, size):
            yield shuffled.rows(slice(start, start + size))


def _select(column: Tensor, index_M: Tensor) -> Tensor:
    return column.index_select(0, index_M)


class Learner:
    """Computes the gradient of a loss and steps an optimizer.

    A batch is split into micro-batches of `micro_batch` rows. Their gradients are added, weighted by their share of the
    valid rows, so `micro_batch` changes the rounding only. `precision` is the floating-point type of matrix products.
    `backward` is called for each micro-batch, so hooks of parameters and modules fire.

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
        precision: str = "float32",
    ) -> None:
        """Create a learner. By default, `micro_batch` is 4,096 rows on the CPU and all rows on other devices."""
        self.networks = networks
        self.loss = loss
        self.optimizer = _optimizer_of(networks, optimizer)
        self.max_grad_norm = max_grad_norm
        self.guard = guard
        # function of (parameters, gradients), called before gradients are clipped; gradients must not be changed
        self.on_gradients: Callable[[Sequence[Tensor], Sequence[Tensor | None]], None] | None = None
        # function of (loss, batch) that returns the loss to minimize, called with each micro-batch
        self.on_loss: Callable[[Tensor, Batch], Tensor] | None = None
        self._finite: FiniteUpdate | None = FiniteUpdate(networks)  # not used with a guard
        self.parameters = [*networks.parameters()]
        self.device = self.parameters[0].device
        self._rows = micro_batch or (CACHE_ROWS if self.device.type == "cpu" else None)
        self._bfloat16 = precision == "bfloat16"
        self.processes = processes()
        self.decisions: dict[str, Any] | None = None  # compared at each step, as JSON: they decide which learners step

    @functools.cached_property
    def group(self) -> LearnerGroup:
        """The learners of all processes that learn together."""
        from rein.agents.base.data_parallel import LearnerGroup  # most runs have one process

        return LearnerGroup(self)

    def step(self, batch: Batch, coefficients: Any, *, report: bool = True) -> dict[str, Tensor]:
        """Make one optimizer step. Returns the metrics of the loss and, if `report` is set, `grad_norm`."""
        gradients, metrics = self.gradients(self._parts(batch), coefficients, batch.valid, report)
        if self.processes > 1 or processes() > 1:
            gradients, metrics = self.group.average(gradients, metrics, batch)
        return self.apply(gradients, metrics, report)

    def apply(self, gradients: Sequence[Tensor | None], metrics: dict[str, Tensor], report: bool) -> dict[str, Tensor]:
        """Clip gradients of the parameters and step the optimizer. Returns the metrics with `grad_norm` if reported."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        if self.on_gradients is not None:
            self.on_gradients(self.parameters, gradients)
        if all(gradient is None for gradient in gradients):  # all parameters are frozen
            zero = torch.zeros((), dtype=torch.float32, device=self.device)
            return {**metrics, "grad_norm": zero} if report else metrics
        settings = {"max_grad_norm": self.max_grad_norm, "guard": self.guard, "measure": report}
        norm = apply_gradients(self.optimizer, metrics, **settings, finite=self._finite)
        return metrics if norm is None else {**metrics, "grad_norm": norm}

    def _parts(self, batch: Batch) -> list[Batch]:
        """Split a batch into micro-batches."""
        steps = batch.shape.numel() // batch.size  # 1 for rows
        size = batch.size if self._rows is None else max(1, self._rows // steps)
        return [batch.rows(slice(start, start + size)) for start in range(0, batch.size, size)]

    def gradients(
        self, parts: Sequence[Batch], coefficients: Any, valid: Tensor | None, report: bool
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """Return the gradients of the loss (None if frozen) and the metrics of a batch, given as micro-batches."""
        if len(parts) == 1:
            return self.part_gradients(parts[0], coefficients, report)
        rows = sum(part.shape.numel() for part in parts) if valid is None else valid.sum().clamp(min=1)

        def compute(part: Batch) -> tuple[list[Tensor | None], dict[str, Tensor]]:
            share = (part.shape.numel() if part.valid is None else part.valid.sum()) / rows
            return self.part_gradients(part, coefficients, report, share)

        gradients: list[Tensor | None] = []
        metrics: dict[str, Tensor] = {}
        for part_gradients, part_metrics in self.map(compute, parts):
            pairs = zip(gradients, part_gradients, strict=True)
            gradients = [_sum(a, b) for a, b in pairs] if gradients else part_gradients
            metrics = {name: _join(metrics.get(name), value) for name, value in part_metrics.items()}
        return gradients, metrics

    def map(self, compute: Callable[[Batch], Any], parts: Sequence[Batch]) -> Iterable[Any]:
        """Call a function with each micro-batch, and return the results in order."""
        return map(compute, parts)

    def part_gradients(
        self, batch: Batch, coefficients: Any, report: bool, share: float | Tensor | None = None
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """Return the gradients and the metrics of a micro-batch, multiplied by `share`, its fraction of valid rows."""
        learned = [parameter for parameter in self.parameters if parameter.requires_grad]  # may change during a run
        loss, metrics = self.weighted_loss(self.loss, batch, coefficients, report, share)
        for parameter in self.parameters:
            parameter.grad = None
        if learned:  # `backward` calls post-accumulate hooks, `torch.autograd.grad` does not
            loss.backward(inputs=learned)
        return [parameter.grad for parameter in self.parameters], metrics

    def weighted_loss(
        self, function: Loss, batch: Batch, coefficients: Any, report: bool, share: float | Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a micro-batch and its metrics, multiplied by `share`. Frozen networks skip autograd."""
        half = torch.autocast(self.device.type, torch.bfloat16, enabled=self._bfloat16)
        with torch.set_grad_enabled(any(parameter.requires_grad for parameter in self.parameters)), half:
            loss, metrics = function(self.networks, batch, coefficients, report=report)
            if self.on_loss is not None:
                loss = self.on_loss(loss, batch)
            if share is not None:
                loss = loss * share
                metrics = {name: value if value.ndim else value * share for name, value in metrics.items()}
        return loss, metrics

    def compare_processes(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError if the options of an agent differ between the processes."""
        if self.processes > 1 or processes() > 1:
            self.group.compare(options)

    def check(self, losses: Mapping[str, Tensor], norm: Tensor) -> None:
        """Raise NonFiniteError if a loss or a gradient norm is not finite; on a GPU, `finite_reads` raise it."""
        if self._finite is not None:
            self._finite(losses, norm)

    def check_finite(self, enabled: bool) -> None:
        """Turn on (default) or off the check that losses and gradient norms are finite."""
        self._finite = (self._finite or FiniteUpdate(self.networks)) if enabled else None
        if self._finite is not None:
            self._finite.clear()

    def defer_finite(self) -> bool:
        """Accumulate a flag on all devices, for `finite_reads`. Returns whether updates are checked."""
        if self._finite is not None:
            self._finite.deferred = True
        return self._finite is not None

    def finite_reads(self) -> Iterator[Read]:
        """Yield the check that raises NonFiniteError if an update on a GPU since the last check was not finite."""
        if self._finite is not None:
            yield from self._finite.reads()

    def check_learning_rate(self, option: str, rates: Mapping[str, Schedule]) -> None:
        """Raise ValueError if the optimizer was built with another learning rate, which `option` would replace."""
        check_learning_rate(self.optimizer, option, rates)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer."""
        return plain_state(self.optimizer)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        load_plain_state(self.optimizer, state)
        vars(self).pop("group", None)  # compare the processes again


def mean_metrics(seen: list[dict[str, Tensor]], batch: Batch) -> dict[str, Tensor]:
    """Return the mean metrics of updates, and the explained variance of the values of the batch."""
    means = torch.stack([torch.stack([*metrics.values()]) for metrics in seen]).mean(0)
    explained = explained_variance(batch.value, batch.target, batch.valid)
    return {**dict(zip(seen[0], means.unbind(), strict=True)), "explained_variance": explained}


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


def _join(a: Tensor | None, b: Tensor) -> Tensor:
    """Add scalars; concatenate values per row."""
    return b if a is None else torch.cat((a, b)) if b.ndim else a + b


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a.add_(b)
