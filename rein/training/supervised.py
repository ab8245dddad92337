"""Learning from examples: the same loop, whose data are pairs of inputs and targets, and nobody acts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rein.agents.base.optimizers import FiniteUpdate, Guard, Optimizer, apply_gradients, check_optimizer
from rein.handlers.torch_generators import torch_generators
from rein.loop import Loop
from rein.loop.engine import Interruptible, Unfinished
from rein.loop.filters import NOT_GIVEN
from rein.loop.state import State
from rein.ops.trees import checked_device, leaves, map_tree
from rein.protocols import Store
from rein.training.training_loop import check_learning, describe_run
from rein.types import Tree

Score = Callable[[Any, Any], Tensor]  # (prediction, target) -> (), as torch.nn.functional.mse_loss
Loss = Score | Sequence[tuple[Score, float]]


class Prediction(NamedTuple):
    """The step_state of a supervised loop: what the latest batch gave."""

    prediction: Tree  # (B, ...) what the model put out, before the update; without gradients
    target: Tree  # (B, ...) what it was to be
    metrics: Mapping[str, Tensor]  # the loss, and what else the update reports


def trainer(
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizer,
    store: Store | None = None,
    *,
    epochs: int | None = NOT_GIVEN,
    iterations: int | None = None,
    max_grad_norm: float | None = None,
    guard: Guard | None = None,
    device: torch.device | str | None = None,
    generators: Sequence[torch.Generator] = (),
    check_finite: bool = True,
    debug: bool = False,
) -> Loop:
    """A loop that takes a step of `optimizer` for each batch of its data, and whose metric `loss` is the epoch's mean.

        loop = trainer(model, torch.nn.functional.mse_loss, torch.optim.Adam(model.parameters()), epochs=10)
        validate(loop, model, validation_data, {"loss": torch.nn.functional.mse_loss})
        loop.run(DataLoader(...))

    The loop owns the model, the optimizer, torch's global generators, from which dropout and a shuffling DataLoader
    draw, and `generators`, where DataLoaders have some of their own (`generator=`): a checkpoint resumes exactly. It
    does not for a generator that is not given, a dataset that draws in the main process, and transforms that draw in
    workers that persist; see `torch_generators`, which raises TypeError for generators that are none. Batches are
    moved to `device`, that of the model's first parameter if not told. `store` takes `run.json`, the metrics' files and
    checkpoints; `debug` is the loop's. The rest is that of `train_step`, which also says what it raises.
    """
    how = {"max_grad_norm": max_grad_norm, "guard": guard, "check_finite": check_finite}
    step = train_step(model, loss, optimizer, **how)
    device = _device_of(model) if device is None else checked_device(device)
    loop = Loop(step, epochs=epochs, iterations=iterations, device=device, debug=debug)
    loop.own("model", model)
    loop.own("optimizer", optimizer)
    torch_generators(loop, device, generators=generators)
    check_learning(loop, model, None, check_finite)
    loop.metric("loss", "loss")
    for place in range(0 if callable(loss) else len(loss)):
        loop.metric(f"loss_{place}", f"loss_{place}")
    if max_grad_norm is not None or guard is not None:
        loop.metric("grad_norm", "grad_norm")
    if store is not None:
        loop.own("store", store)
        describe_run(loop, store)
    return loop


def train_step(
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizer,
    *,
    max_grad_norm: float | None = None,
    guard: Guard | None = None,
    check_finite: bool = True,
) -> Callable[[State], Prediction]:
    """A step for `rein.Loop`: one update of `optimizer` on `state.batch`, a pair of inputs and targets.

    Both are tensors or trees of them; `model(inputs)` is the prediction. `loss(prediction, target)` gives one number,
    as the functions of `torch.nn.functional` do. For several outputs, a tuple or a list, it is a list of
    `(loss, weight)`, one for each; what is learned is their weighted sum, and each is reported as `loss_0`, `loss_1`.
    What is no tuple or list is one output, or one target.
    Gradients are clipped together to `max_grad_norm`, and an update that `guard(metrics, gradients)` refuses is left
    out. With `check_finite`, and without a guard, a loss or gradient norm that is not finite raises NonFiniteError
    before the optimizer's step; on a GPU it is found by `trainer` at the end of the epoch, in the parameters.
    Whether the model is in training mode is left as it is. The loop is to own the model and the optimizer.

    Raises TypeError for parts that are none, ValueError where the optimizer has no parameter of the model; at a step
    TypeError for a batch that is no pair of tensors or trees of them, ValueError for outputs that are not as many as
    the losses and for a loss that is not a tensor of one number.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"train_step(model={model!r}): give a torch.nn.Module")
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        raise TypeError(f"train_step(optimizer={optimizer!r}): give one of the model's parameters, as torch.optim has")
    check_optimizer(optimizer)
    mine = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError("train_step: none of the optimizer's parameters is the model's")
    losses = _losses(loss)
    finite = FiniteUpdate(model) if check_finite else None

    def step(state: State) -> Prediction:
        inputs, target = _pair(state.batch)
        prediction = model(inputs)
        total, metrics = losses(prediction, target)
        optimizer.zero_grad()  # what an update that failed has left behind
        total.backward()
        how = {"max_grad_norm": max_grad_norm, "guard": guard, "finite": finite}
        norm = apply_gradients(optimizer, metrics, **how, measure=False)
        state.clocks.updates += 1
        metrics = metrics if norm is None else {**metrics, "grad_norm": norm}
        return Prediction(map_tree(Tensor.detach, prediction), target, metrics)

    return step


def evaluator(model: nn.Module, metrics: Mapping[str, Score]) -> Callable[[Iterable[Any]], dict[str, float]]:
    """A function of data that gives each of `metrics`, of functions (prediction, target) -> one number, over all of it.

        evaluate = evaluator(model, {"accuracy": accuracy})
        evaluate(test_data)["accuracy"]

    Predictions are gathered, and every metric is taken once of all rows, so it does not matter how these are cut into
    batches. The model is in evaluation mode meanwhile, and no generator of torch's moves on: training goes on as if
    nothing had been evaluated. Raises TypeError for what is no function, and for batches as `train_step` does;
    ValueError for empty data.
    """
    for name, metric in metrics.items():
        if not callable(metric):
            raise TypeError(f"evaluator(metrics={{{name!r}: {metric!r}}}): give a function (prediction, target) -> ()")

    def evaluate(data: Iterable[Any]) -> dict[str, float]:
        with _evaluating(model) as device:
            pairs = (_pair(batch) for batch in data)
            seen = [(model(_on(device, inputs)), _on(device, target)) for inputs, target in pairs]
            if not seen:
                raise ValueError("evaluator: the data is empty")
            prediction, target = map_tree(lambda *batches: torch.cat(batches), *seen)
            return {name: _value(name, metric(prediction, target)) for name, metric in metrics.items()}

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
    """Evaluate `model` on `data` when `event` fires: the metrics `<name>_<metric>`; see `evaluator`.

    Attach it before the handlers that read them. `loop.stop` ends a validation at its next batch, and the metrics are
    NaN then. `loop.interrupt` ends it as well, and the next run does it again first. Raises ValueError for a bare
    iterator, which the first epoch would use up.
    """
    if isinstance(data, Iterator):
        raise ValueError("validate(data=...): a bare iterator is used up once; give data that can be iterated anew")
    evaluate = evaluator(model, metrics)

    work = Interruptible()

    def until_left(state: State) -> Iterator[Any]:
        for batch in data:
            work.check(state)
            yield batch

    def validate_model(state: State) -> None:
        found = dict.fromkeys(metrics, math.nan)
        work.begin(state)
        try:
            if not state._left:
                found = evaluate(until_left(state))
        except Unfinished:
            work.leave(state)
        for metric, value in found.items():
            state.metrics[f"{name}_{metric}"] = value

    work.attach(loop, event, validate_model, **filters)


def _pair(batch: Any) -> tuple[Tree, Tree]:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        found = [leaf for tree in batch for _, leaf in leaves(tree)]
        if found and all(isinstance(leaf, Tensor) for leaf in found):
            return batch[0], batch[1]
        what = f"a pair with {', '.join(sorted({type(leaf).__name__ for leaf in found})) or 'nothing'} in it"
    else:
        what = f"{type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
    raise TypeError(f"a batch is a pair (inputs, targets) of tensors or trees of them, not {what}")


def _losses(loss: Loss) -> Callable[[Any, Any], tuple[Tensor, dict[str, Tensor]]]:
    """(prediction, target) -> (what is learned, what is reported)."""
    if callable(loss):

        def single(prediction: Any, target: Any) -> tuple[Tensor, dict[str, Tensor]]:
            total = _number(loss(prediction, target))
            return total, {"loss": total.detach()}

        return single
    entries = [] if isinstance(loss, str) else list(loss)
    if not entries or any(not isinstance(e, tuple | list) or len(e) != 2 or not callable(e[0]) for e in entries):
        raise TypeError(
            f"train_step(loss={loss!r}): give a function, as torch.nn.functional.mse_loss, or for several outputs a "
            "list of (function, weight)"
        )

    def several(prediction: Any, target: Any) -> tuple[Tensor, dict[str, Tensor]]:
        outputs, targets = (x if isinstance(x, tuple | list) else (x,) for x in (prediction, target))
        if not len(outputs) == len(targets) == len(entries):
            found = f"{len(outputs)} outputs of the model for {len(targets)} targets"
            raise ValueError(f"{len(entries)} losses, and {found}")
        each = [_number(one(p, t)) for (one, _), p, t in zip(entries, outputs, targets, strict=True)]
        total = torch.stack([weight * value for (_, weight), value in zip(entries, each, strict=True)]).sum()
        return total, {"loss": total.detach(), **{f"loss_{i}": value.detach() for i, value in enumerate(each)}}

    return several


def _value(name: str, value: Any) -> float:
    """The result of a metric as a float. Raises TypeError if it is not one number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
        raise TypeError(f"evaluator: metric {name!r} returned {what}; return one number, for example a mean") from None


def _number(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(
            f"the loss is {value!r:.80}, not a tensor of one number: compute it of tensors, without .item()"
        )
    if value.ndim:
        raise ValueError(f"the loss is a tensor of shape {tuple(value.shape)}, not one number: give it a mean or a sum")
    return value


def _device_of(model: nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in model.parameters()), None)


def _on(device: torch.device | None, tree: Tree) -> Tree:
    return tree if device is None else map_tree(lambda leaf: leaf.to(device), tree)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[torch.device | None]:
    """In evaluation mode, without gradients or a trace in torch's generators; yields the model's device."""
    device = _device_of(model)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []):
            yield device
    finally:
        for module, mode in modes.items():
            module.training = mode
