"""Supervised learning: a loop over pairs of inputs and targets."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import attrs
import torch
from torch import Tensor, nn

from rein.agents.base.optimizers import FiniteUpdate, Guard, Optimizer, apply_gradients, check_optimizer
from rein.envs.base.contract import checked_count
from rein.handlers.torch_generators import torch_generators
from rein.loop import Loop
from rein.loop.engine import Interruptible, Unfinished
from rein.loop.filters import NOT_GIVEN
from rein.loop.state import State
from rein.ops.trees import checked_device, leaves, map_tree
from rein.protocols import Store
from rein.training.training_loop import check_learning, own_store
from rein.types import Tree

Score = Callable[[Any, Any], Tensor]  # (prediction, target) -> (), such as torch.nn.functional.mse_loss
Loss = Score | Sequence[tuple[Score, float]]
Precision = Literal["float32", "bfloat16", "float16"]

_DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Prediction(NamedTuple):
    """Step state of a supervised loop: results of the latest batch."""

    prediction: Tree  # (B, ...) output of the model before the update, detached
    target: Tree  # (B, ...)
    metrics: Mapping[str, Tensor]  # the loss and further metrics of the update


def trainer(
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizer | Sequence[Optimizer],
    store: Store | str | Path | None = None,
    *,
    epochs: int | None = NOT_GIVEN,
    iterations: int | None = None,
    precision: Precision = "float32",
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    guard: Guard | None = None,
    device: torch.device | str | None = None,
    generators: Sequence[torch.Generator] = (),
    check_finite: bool = True,
    debug: bool = False,
) -> Loop:
    """Build a loop that trains `model` on batches of data. Its metric `loss` is the mean over the rows of an epoch.

    The loop owns the model, the optimizer, torch's global generators (used by dropout and a shuffling DataLoader) and
    `generators`, so that a checkpoint resumes exactly. Resume is not exact for generators that are not passed, datasets
    that use random numbers in the main process, and transforms that use them in persistent workers; see
    `torch_generators`.

    Args:
        model: module to train.
        loss: loss function, or a list of (loss function, weight); see `train_step`.
        optimizer: optimizer of the model's parameters, or several optimizers that step together.
        store: store for `run.json`, the files of the metrics and checkpoints, or the path of a new `HDF5Store`.
        epochs: default number of epochs of `loop.run`.
        iterations: default number of iterations of an epoch.
        precision: see `train_step`.
        accumulate: see `train_step`.
        max_grad_norm: see `train_step`.
        guard: see `train_step`.
        device: device to which batches are moved. Default: the device of the model's first parameter.
        generators: generators that DataLoaders were given (`generator=`).
        check_finite: see `train_step`.
        debug: option of the loop.

    Raises:
        TypeError: if `generators` has other objects, or as in `train_step`.
        ValueError: as in `train_step`.

    Example:
        >>> loop = trainer(model, torch.nn.functional.mse_loss, torch.optim.Adam(model.parameters()), epochs=10)
        >>> validate(loop, model, validation_data, {"loss": torch.nn.functional.mse_loss})
        >>> loop.run(DataLoader(...))
    """
    options = {"max_grad_norm": max_grad_norm, "guard": guard, "check_finite": check_finite}
    step = train_step(model, loss, optimizer, precision=precision, accumulate=accumulate, **options)
    device = _device_of(model) if device is None else checked_device(device)
    loop = Loop(step, epochs=epochs, iterations=iterations, device=device, debug=debug)
    loop.own("model", model)
    for place, one in enumerate(step.optimizers):
        loop.own(f"optimizer_{place}" if place else "optimizer", one)
    loop.own("step", step)
    torch_generators(loop, device, generators=generators)
    check_learning(loop, model, None, check_finite)
    names = ["loss", *(f"loss_{place}" for place in range(0 if callable(loss) else len(loss)))]
    for name in names:
        loop.metric(name, name, weight=_rows)
    if max_grad_norm is not None or guard is not None:
        loop.metric("grad_norm", "grad_norm")
    if store is not None:
        own_store(loop, store)
    return loop


def train_step(
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    precision: Precision = "float32",
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    guard: Guard | None = None,
    check_finite: bool = True,
) -> TrainStep:
    """Return a step for `rein.Loop` that trains a model on `state.batch`, a pair of inputs and targets.

    Inputs and targets are tensors or trees of tensors. The prediction is `model(inputs)`. The training mode of the
    model is not changed. The loop must own the model, the optimizers and the step.

    Args:
        model: module to train.
        loss: function of (prediction, target) that returns a scalar, such as those of `torch.nn.functional`. If the
            model returns a tuple or list of outputs: a list with one (function, weight) per output. Their weighted sum
            is minimized, and each is reported as `loss_0`, `loss_1`. Any other output or target counts as one.
        optimizer: optimizer of the model's parameters, or several optimizers that step together.
        precision: number format of the forward pass, by `torch.autocast`. With "float16", the loss is scaled by a
            `torch.amp.GradScaler`, and updates with gradients that are not finite are skipped. Parameters stay float32.
        accumulate: number of batches for one update. Its gradient is the mean of their gradients. Checkpoints contain
            the gradients of an incomplete group, and the next epoch continues it.
        max_grad_norm: largest norm of all gradients together; None does not clip.
        guard: function of (metrics, gradients) that returns whether to apply an update.
        check_finite: whether to raise NonFiniteError before the update if the loss or gradient norm is not finite and
            there is no guard. On a GPU, `trainer` checks the parameters at the end of the epoch instead.

    Raises:
        TypeError: if an argument has the wrong type, or, at a step, if the batch is not a pair of tensors or trees.
        ValueError: for an unknown precision, if an optimizer has no parameter of the model, or, at a step, if the
            numbers of outputs and losses differ or a loss is not a scalar tensor.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"train_step(model={model!r}): give a torch.nn.Module")
    if precision not in _DTYPES:
        raise ValueError(f"train_step(precision={precision!r}): give {', '.join(map(repr, _DTYPES))}")
    checked_count(f"train_step(accumulate={accumulate!r})", accumulate)
    optimizers = cast(list[Optimizer], [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer])
    if not optimizers:
        raise ValueError("train_step(optimizer=[]): give an optimizer, or a list of them")
    model_parameters = {id(parameter) for parameter in model.parameters()}
    for one in optimizers:
        if isinstance(one, type) or not hasattr(one, "param_groups"):
            raise TypeError(f"train_step(optimizer={one!r}): give an optimizer object, such as those of torch.optim")
        check_optimizer(one)
        if not any(id(parameter) in model_parameters for group in one.param_groups for parameter in group["params"]):
            raise ValueError("train_step: the optimizer has no parameter of the model")
    options = {"max_grad_norm": max_grad_norm, "guard": guard}
    return TrainStep(model, _losses(loss), optimizers, precision, accumulate, options, check_finite)


@attrs.define(eq=False, slots=False)
class TrainStep:
    """Step of a supervised loop, see `train_step`. Its state is the loss scale and the accumulated gradients."""

    _model: nn.Module
    _losses: Callable[[Any, Any], tuple[Tensor, dict[str, Tensor]]]
    optimizers: list[Optimizer]
    _precision: Precision
    _accumulate: int
    _options: Mapping[str, Any]  # of `apply_gradients`
    _check_finite: bool

    def __attrs_post_init__(self) -> None:
        self.param_groups = [group for one in self.optimizers for group in one.param_groups]
        self._device_type = (_device_of(self._model) or torch.device("cpu")).type
        self._dtype = _DTYPES[self._precision]
        self._scaler = torch.amp.GradScaler(self._device_type) if self._precision == "float16" else None
        self._finite = FiniteUpdate(self._model) if self._check_finite and self._options["guard"] is None else None
        self._batches = 0  # of the incomplete group
        self.config = {"precision": self._precision, "accumulate": self._accumulate}

    def __call__(self, state: State) -> Prediction:
        """Compute the gradients of the batch, and update the parameters after the last batch of a group."""
        inputs, target = _pair(state.batch)
        with torch.autocast(self._device_type, self._dtype, enabled=self._dtype is not None):
            prediction = self._model(inputs)
            total, metrics = self._losses(prediction, target)
        if self._batches == 0:
            self.zero_grad()  # gradients of a failed update
        mean = total if self._accumulate == 1 else total / self._accumulate
        (mean if self._scaler is None else self._scaler.scale(mean)).backward()
        self._batches += 1
        if self._batches == self._accumulate:
            self._batches = 0
            norm = self._update(metrics)
            state.clocks.updates += 1
            metrics = metrics if norm is None else {**metrics, "grad_norm": norm}
        return Prediction(map_tree(Tensor.detach, prediction), target, metrics)

    def _update(self, metrics: Mapping[str, Tensor]) -> Tensor | None:
        """Apply the gradients, and return their norm if it is measured and the scaler has not skipped the update."""
        finite = self._finite
        if self._scaler is not None:
            if finite is not None:  # the scaler skips updates with gradients that are not finite
                finite(metrics, metrics["loss"].new_zeros(()))
                finite = None
            for one in self.optimizers:
                self._scaler.unscale_(cast(torch.optim.Optimizer, one))
        try:
            norm = apply_gradients(cast(Optimizer, self), metrics, **self._options, finite=finite, measure=False)
        finally:
            if self._scaler is not None:  # also if the guard has skipped the update
                self._scaler.update()
        skipped = self._scaler is not None and norm is not None and not math.isfinite(float(norm))
        return None if skipped else norm

    def step(self) -> None:
        """Step all optimizers."""
        for one in self.optimizers:
            if self._scaler is None:
                one.step()
            else:
                self._scaler.step(cast(torch.optim.Optimizer, one))

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for one in self.optimizers:
            one.zero_grad()

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale and the gradients of an incomplete group."""
        gradients = [parameter.grad for parameter in self._parameters()] if self._batches else []
        scaler = None if self._scaler is None else self._scaler.state_dict()
        return {"batches": self._batches, "gradients": gradients, "scaler": scaler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self._batches = state["batches"]
        for parameter, gradient in zip(self._parameters(), state["gradients"], strict=False):
            parameter.grad = None if gradient is None else gradient.to(parameter, copy=True)
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])


def evaluator(model: nn.Module, metrics: Mapping[str, Score]) -> Callable[[Iterable[Any]], dict[str, float]]:
    """Return a function that computes `metrics` of `model` on data.

    Each function is called once with all rows, so its result does not depend on the batches. Objects with `update`,
    `compute` and `reset`, such as those of torchmetrics, are updated with each batch. The model is in evaluation mode
    meanwhile, and torch's generators are restored, so an evaluation does not influence training.

    Args:
        model: module to evaluate.
        metrics: functions of (prediction, target) that return one number, by name, or objects of torchmetrics.

    Returns:
        A function from data, an iterable of pairs (inputs, targets), to the metrics by name.

    Raises:
        TypeError: if a metric is not a function, or, on data, for batches as in `train_step`.
        ValueError: on empty data.

    Example:
        >>> evaluate = evaluator(model, {"accuracy": accuracy})
        >>> evaluate(test_data)["accuracy"]
    """
    for name, metric in metrics.items():
        if not (callable(metric) or hasattr(metric, "compute")):
            raise TypeError(f"evaluator(metrics={{{name!r}: {metric!r}}}): give a function (prediction, target) -> ()")
    streaming: dict[str, Any] = {name: metric for name, metric in metrics.items() if hasattr(metric, "compute")}

    def evaluate(data: Iterable[Any]) -> dict[str, float]:
        with _evaluating(model) as device:
            for one in streaming.values():
                if hasattr(one, "to"):
                    one.to(device)
                one.reset()
            seen: list[tuple[Any, Any]] = []
            for inputs, target in (_pair(batch) for batch in data):
                pair = model(_on(device, inputs)), _on(device, target)
                for one in streaming.values():
                    one.update(*pair)
                if len(streaming) < len(metrics) or not seen:
                    seen.append(pair)
            if not seen:
                raise ValueError("evaluator: the data is empty")
            prediction, target = map_tree(lambda *batches: torch.cat(batches), *seen)
            results = {
                name: streaming[name].compute() if name in streaming else metric(prediction, target)
                for name, metric in metrics.items()
            }
            return {name: _value(name, value) for name, value in results.items()}

    return evaluate


def validate(
    loop: Loop,
    model: nn.Module,
    data: Iterable[Any],
    metrics: Mapping[str, Score],
    *,
    name: str = "validation",
    event: str = "epoch_ended",
    **filters: Any,
) -> None:
    """Evaluate `model` on `data` when `event` fires, and set the metrics `<name>_<metric>`; see `evaluator`.

    Attach it before handlers that read these metrics. `loop.stop` ends a validation at its next batch and sets the
    metrics to NaN. `loop.interrupt` ends it, too, and the next run repeats it first. Raises ValueError if `data` is an
    iterator, which can be read only once.
    """
    if isinstance(data, Iterator):
        raise ValueError("validate(data=...): an iterator can be read only once; give data that can be iterated again")
    evaluate = evaluator(model, metrics)
    loop.metrics.declare(*(f"{name}_{metric}" for metric in metrics))
    work = Interruptible()

    def until_left(state: State) -> Iterator[Any]:
        for batch in data:
            work.check(state)
            yield batch

    def validate_model(state: State) -> None:
        results = dict.fromkeys(metrics, math.nan)
        work.begin(state)
        try:
            if not state._left:
                results = evaluate(until_left(state))
        except Unfinished:
            work.leave(state)
        for metric, value in results.items():
            state.metrics[f"{name}_{metric}"] = value

    work.attach(loop, event, validate_model, **filters)


def _pair(batch: Any) -> tuple[Tree, Tree]:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        values = [leaf for tree in batch for _, leaf in leaves(tree)]
        if values and all(isinstance(leaf, Tensor) for leaf in values):
            return batch[0], batch[1]
        content = f"a pair with {', '.join(sorted({type(leaf).__name__ for leaf in values})) or 'nothing'} in it"
    else:
        content = f"{type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
    raise TypeError(f"a batch must be a pair (inputs, targets) of tensors or trees of them, not {content}")


def _losses(loss: Loss) -> Callable[[Any, Any], tuple[Tensor, dict[str, Tensor]]]:
    """Return a function of (prediction, target) that returns the total loss and the metrics."""
    if callable(loss):

        def single(prediction: Any, target: Any) -> tuple[Tensor, dict[str, Tensor]]:
            total = _number(loss(prediction, target))
            return total, {"loss": total.detach()}

        return single
    entries = [] if isinstance(loss, str) else list(loss)
    if not entries or any(not isinstance(e, tuple | list) or len(e) != 2 or not callable(e[0]) for e in entries):
        raise TypeError(
            f"train_step(loss={loss!r}): give a function such as torch.nn.functional.mse_loss, or, for several "
            "outputs, a list of (function, weight)"
        )

    def several(prediction: Any, target: Any) -> tuple[Tensor, dict[str, Tensor]]:
        outputs, targets = (x if isinstance(x, tuple | list) else (x,) for x in (prediction, target))
        if not len(outputs) == len(targets) == len(entries):
            numbers = f"{len(outputs)} outputs of the model and {len(targets)} targets"
            raise ValueError(f"{len(entries)} losses do not fit {numbers}; give one loss per output and target")
        each = [_number(one(p, t)) for (one, _), p, t in zip(entries, outputs, targets, strict=True)]
        total = torch.stack([weight * value for (_, weight), value in zip(entries, each, strict=True)]).sum()
        return total, {"loss": total.detach(), **{f"loss_{i}": value.detach() for i, value in enumerate(each)}}

    return several


def _value(name: str, value: Any) -> float:
    """Return the result of a metric as a float. Raises TypeError if it is not one number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        result = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
        raise TypeError(f"evaluator: metric {name!r} returned {result}; return one number, such as a mean") from None


def _number(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(f"the loss is {value!r:.80}, not a scalar tensor; compute it from tensors, without .item()")
    if value.ndim:
        raise ValueError(f"the loss is a tensor of shape {tuple(value.shape)}, not a scalar; use its mean or sum")
    return value


def _rows(state: State) -> int:
    """Number of rows of a batch: the length of its first target."""
    _, target = next(leaves(state.step_state.target))
    return len(target) if target.ndim else 1


def _device_of(model: nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in model.parameters()), None)


def _on(device: torch.device | None, tree: Tree) -> Tree:
    return tree if device is None else map_tree(lambda leaf: leaf.to(device), tree)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[torch.device | None]:
    """Evaluation mode without gradients, with torch's generators restored afterwards; yields the model's device."""
    device = _device_of(model)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []):
            yield device
    finally:
        for module, mode in modes.items():
            module.training = mode
