"""Tests of supervised learning: steps, errors, metrics, validation and exact resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss, mse_loss
from torch.utils.data import DataLoader, TensorDataset

import rein
from rein.agents.base.optimizers import Adam
from rein.errors import NonFiniteError
from rein.handlers.checkpoint import checkpoint
from rein.handlers.guards import UpdateGuard
from rein.ops.classification import accuracy, precision, true_positives
from rein.testing.stateful import copy_state, first_difference
from rein.training.supervised import Prediction, evaluator, train_step, trainer, validate

ONE = torch.ones(1, 1)
XOR = TensorDataset(torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1]]), torch.tensor([0, 1, 1, 0]))


@pytest.fixture(autouse=True)
def restore_global_generator() -> Any:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        yield


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def scale(value: float = 1.0) -> nn.Linear:
    """Return the model x -> value * x."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def stepped(model: nn.Module, loss: Any, batch: Any, optimizer: Any = None, **options: Any) -> Prediction:
    """Return the result of one step on `batch`."""
    loop = rein.Loop(train_step(model, loss, optimizer or sgd(model), **options))
    return loop.run([batch]).step_state


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, Adam])
def test_step_follows_gradient_and_returns_prediction_and_target(optimizer: Any) -> None:
    model, target = scale(3.0), torch.tensor([[1.0]])
    result = stepped(model, mse_loss, [ONE, target], optimizer(model.parameters(), lr=0.1))
    assert (result.prediction.item(), result.target.item(), result.metrics["loss"].item()) == (3.0, 1.0, 4.0)
    assert model.weight.item() < 3.0
    assert not result.prediction.requires_grad
    assert not result.metrics["loss"].requires_grad


def test_gradient_descent_step_equals_manual_computation() -> None:
    for options, gradient in (({}, 2 * (3.0 - 1.0)), ({"max_grad_norm": 0.5}, 0.5)):
        model = scale(3.0)
        result = stepped(model, mse_loss, (ONE, torch.tensor([[1.0]])), **options)
        assert model.weight.item() == pytest.approx(3.0 - 0.1 * gradient)
    assert result.metrics["grad_norm"].item() == pytest.approx(4.0)


class TwoHeads(nn.Module):
    """Returns its scaled input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body = scale()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), self.body(x)


def test_losses_of_several_outputs_are_weighted_and_reported() -> None:
    model, twos = TwoHeads(), (ONE + 1.0, ONE + 1.0)
    assert stepped(model, [(mse_loss, 0.5), (l1_loss, 0.5)], (ONE, twos)).metrics["loss"] == 1.0
    model = TwoHeads()
    metrics = trainer(model, [(mse_loss, 0.5), (l1_loss, 2.0)], sgd(model)).run([(ONE, (ONE + 2.0, ONE))]).metrics
    assert dict(metrics) == {"loss": 2.0, "loss_0": 4.0, "loss_1": 0.0}


def test_inputs_and_targets_may_be_trees() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = scale()

        def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"sum": self.body(inputs["a"] + inputs["b"])}

    result = stepped(Sum(), lambda p, t: mse_loss(p["sum"], t["sum"]), ({"a": ONE, "b": ONE}, {"sum": ONE}))
    assert result.prediction["sum"] == 2.0
    assert result.metrics["loss"] == 1.0


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (torch.ones(2, 1), "not Tensor"),
        ({"input": ONE, "target": ONE}, "not dict"),
        ((ONE,), "not tuple of 1"),
        ((ONE, ONE, ONE), "not tuple of 3"),
        ((ONE, 1.0), "not a pair with Tensor, float in it"),
        (({}, None), "not a pair with nothing in it"),
    ],
)
def test_batch_other_than_a_pair_of_tensors_raises(batch: Any, text: str) -> None:
    model = scale()
    with pytest.raises(
        TypeError, match=rf"a batch must be a pair \(inputs, targets\) of tensors or trees of them, {text}"
    ):
        trainer(model, mse_loss, sgd(model)).run([batch])
    with pytest.raises(TypeError, match=text):
        evaluator(model, {"loss": mse_loss})([batch])


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"model": mse_loss}, TypeError, "give a torch.nn.Module"),
        ({"loss": "mse"}, TypeError, "loss='mse'.*give a function such as torch.nn.functional.mse_loss"),
        ({"loss": []}, TypeError, "a list of"),
        ({"loss": [mse_loss, l1_loss]}, TypeError, "a list of"),
        ({"optimizer": torch.optim.SGD}, TypeError, "give an optimizer object"),
        ({"optimizer": "sgd"}, TypeError, "give an optimizer object"),
        ({"optimizer": sgd(scale())}, ValueError, "the optimizer has no parameter of the model"),
        ({"optimizer": []}, ValueError, "optimizer"),
        ({"precision": "half"}, ValueError, "precision"),
        ({"accumulate": 0}, ValueError, "accumulate"),
    ],
)
def test_invalid_arguments_raise(change: dict[str, Any], kind: Any, text: str) -> None:
    model = scale()
    parts: dict[str, Any] = {"model": model, "loss": mse_loss, "optimizer": sgd(model), **change}
    with pytest.raises(kind, match=text):
        trainer(**parts)


def test_non_scalar_loss_and_missing_loss_raise() -> None:
    with pytest.raises(ValueError, match=r"the loss is a tensor of shape \(1, 1\), not a scalar"):
        stepped(scale(), lambda p, t: p - t, (ONE, ONE))
    with pytest.raises(ValueError, match="1 losses do not fit 2 outputs of the model and 1 targets"):
        stepped(TwoHeads(), [(mse_loss, 1.0)], (ONE, ONE))


@pytest.mark.parametrize("kind", [float, Tensor.numpy])
def test_loss_other_than_a_tensor_raises(kind: Any) -> None:
    expected_error = pytest.raises(ValueError, match=r"the loss is .*4\..*, not a scalar tensor; .* without \.item\(\)")
    for loss in (lambda p, t: kind(mse_loss(p, t).detach()), [(lambda p, t: kind(mse_loss(p, t).detach()), 1.0)]):
        with expected_error:
            stepped(scale(), loss, (ONE, ONE + 2.0))


class InTuple(nn.Sequential):
    """Sequential that returns its output in a tuple of one entry."""

    def forward(self, x: Tensor) -> tuple[Tensor]:  # type: ignore[override]  # on purpose: a tuple
        return (super().forward(x),)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("output", [nn.Sequential, InTuple])
@pytest.mark.parametrize("target", [lambda one: one, lambda one: (one,)])
def test_list_of_one_loss_applies_to_whole_output(rows: int, output: Any, target: Any) -> None:
    def mean_of_rows(p: Tensor, t: Tensor) -> Tensor:
        assert p.shape == t.shape == (rows, 1)
        return mse_loss(p, t)

    inputs, expected = torch.ones(rows, 1), torch.arange(1.0, rows + 1.0).unsqueeze(1)
    metrics = stepped(output(scale()), [(mean_of_rows, 2.0)], (inputs, target(expected))).metrics
    assert metrics["loss_0"] == mse_loss(inputs, expected)
    assert metrics["loss"] == 2.0 * metrics["loss_0"]


def test_frozen_parameters_do_not_change() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    before = copy_state(model.state_dict())
    trainer(model, mse_loss, torch.optim.Adam(model.parameters())).run([(torch.rand(4, 2), torch.rand(4, 1))])
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"1.weight", "1.bias"}


def test_evaluation_restores_training_modes() -> None:
    """A module that was in evaluation mode stays in it, also if the evaluation fails."""
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Dropout(0.5), nn.Linear(1, 1))
    model[0].eval()
    evaluate = evaluator(model, {"training": lambda p, t: torch.tensor(float(model.training))})
    assert evaluate([(ONE, ONE)]) == {"training": 0.0}
    with pytest.raises(ValueError, match="the data is empty"):
        evaluate([])
    assert [module.training for module in model.modules()] == [True, False, True, True]


def test_loss_is_epoch_mean_and_updates_are_counted() -> None:
    model = scale()
    loop = trainer(model, mse_loss, sgd(model, lr=0.0), epochs=2)
    final = loop.run([(ONE, ONE), (ONE, ONE + 2.0)])
    assert [record.metrics["loss"] for record in final.history] == [2.0, 2.0]
    assert final.clocks.updates == 4


def test_update_rejected_by_guard_has_no_effect() -> None:
    model = scale(3.0)
    loop = trainer(model, mse_loss, sgd(model), guard=UpdateGuard("skip"))
    loop.run([(ONE * float("nan"), ONE)])
    assert model.weight.item() == 3.0
    strict = trainer(model, mse_loss, sgd(model), guard=UpdateGuard("stop"), epochs=None)
    with pytest.raises(NonFiniteError):
        strict.run([(ONE * float("nan"), ONE)])
    strict.epoch_ended(lambda state: state.halt_loop())
    strict.run([(ONE, ONE), (ONE, ONE)])  # the first batch of the open epoch is the one that failed
    assert torch.isfinite(model.weight).all()


def test_loop_metrics_read_prediction_and_target() -> None:
    model = scale()
    loop = trainer(model, mse_loss, sgd(model, lr=0.0))
    loop.metric("accuracy", lambda state: accuracy(state.step_state.prediction, state.step_state.target))
    loop.metric("hits", lambda state: true_positives(state.step_state.prediction, state.step_state.target), "sum")
    batches = [(torch.tensor([[0.9], [0.1]]), torch.tensor([[1.0], [1.0]])), (ONE, ONE)]
    metrics = loop.run(batches).metrics
    assert (metrics["accuracy"], metrics["hits"]) == (0.75, 2.0)


@pytest.mark.parametrize("cuts", [[7], [3, 4], [1, 6], [1] * 7])
def test_evaluation_does_not_depend_on_batches(cuts: list[int]) -> None:
    predicted = torch.tensor([0.8, 0.6, 0.4, 0.2, 0.8, 0.2, 0.2]).unsqueeze(1)
    target = torch.tensor([[1.0], [0], [1], [1], [0], [1], [0]])
    data = list(zip(predicted.split(cuts), target.split(cuts), strict=True))
    found = evaluator(scale(), {"precision": precision, "error": l1_loss})(data)
    assert found["precision"] == pytest.approx(1 / 3)
    assert found["error"] == pytest.approx((predicted - target).abs().mean().item())


def test_metric_name_and_iterator_raise() -> None:
    model = scale()
    with pytest.raises(TypeError, match="give a function"):
        evaluator(model, {"accuracy": "accuracy"})  # type: ignore[dict-item]  # the mistake
    with pytest.raises(ValueError, match="can be read only once"):
        validate(trainer(model, mse_loss, sgd(model)), model, iter([(ONE, ONE)]), {"loss": mse_loss})


def test_validation_equals_later_evaluation() -> None:
    model = nn.Linear(2, 1)
    data = [(torch.rand(5, 2), torch.rand(5, 1))]
    loop, seen = trainer(model, mse_loss, sgd(model), epochs=4), []
    validate(loop, model, data, {"loss": mse_loss}, every=2)
    loop.epoch_ended(every=2)(lambda state: seen.append(state.metrics["validation_loss"]))
    loop.run(data)
    assert len(seen) == 2
    assert evaluator(model, {"loss": mse_loss})(data) == {"loss": seen[-1]}


def test_validation_does_not_change_training() -> None:
    def weights(validated: bool) -> Tensor:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        data = DataLoader(XOR, batch_size=2, shuffle=True)
        loop = trainer(model, nn.functional.cross_entropy, sgd(model), epochs=3)
        if validated:
            validate(loop, model, data, {"accuracy": accuracy}, event="iteration_completed")
        loop.run(data)
        return model[0].weight

    assert torch.equal(weights(True), weights(False))


def test_trainer_learns_xor_and_stops_early() -> None:
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    loop = trainer(model, nn.functional.cross_entropy, torch.optim.Adam(model.parameters(), lr=0.05), epochs=200)
    validate(loop, model, DataLoader(XOR, batch_size=3), {"accuracy": accuracy})
    rein.early_stop(loop, "validation_accuracy", mode="max", patience=20)
    final = loop.run(DataLoader(XOR, batch_size=2, shuffle=True))
    assert (final.metrics["validation_accuracy"], final.status) == (1.0, "halted")


@pytest.mark.parametrize("ask", [rein.Loop.stop, rein.Loop.interrupt])
def test_validation_ends_at_next_batch_after_stop_or_interrupt(ask: Any) -> None:
    batches = [(torch.rand(5, 2), torch.rand(5, 1)) for _ in range(4)]

    def make(asks: bool) -> tuple[rein.Loop, list[int]]:
        torch.manual_seed(0)
        model, taken = nn.Linear(2, 1), []

        class Data(list):
            def __iter__(self) -> Any:
                for place, batch in enumerate(batches):
                    taken.append(place)
                    if asks and place == 1:
                        ask(loop, "enough")
                    yield batch

        loop = trainer(model, mse_loss, sgd(model), epochs=2)
        validate(loop, model, Data(), {"loss": mse_loss})
        return loop, taken

    whole, _ = make(False)
    whole.run(batches)
    loop, taken = make(True)
    assert loop.run(batches).reason == "enough"
    assert taken == [0, 1]
    assert ask is rein.Loop.interrupt or math.isnan(loop.state.metrics["validation_loss"])
    resumed, taken = make(False)
    resumed.load_state_dict(loop.state_dict())
    resumed.run(batches)
    if ask is rein.Loop.interrupt:
        assert taken == [0, 1, 2, 3] * 2
        assert [dict(r.metrics) for r in resumed.state.history] == [dict(r.metrics) for r in whole.state.history]


def classifier() -> tuple[rein.Loop, Any]:
    """Return a loop with all kinds of state: batch norm, dropout, Adam, a learning-rate schedule, shuffled data."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loop = trainer(model, nn.functional.cross_entropy, optimizer, epochs=3)
    scheduler = loop.own("scheduler", torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    loop.epoch_ended(lambda state: scheduler.step())
    return loop, DataLoader(TensorDataset(XOR[:][0].repeat(2, 1), XOR[:][1].repeat(2)), 2, shuffle=True)


def runs_of(build: Any, folder: Path, stop_at: int) -> tuple[rein.Loop, rein.Loop]:
    """Return an uninterrupted run, and one that was interrupted after some iterations and resumed."""
    whole, data = build()
    whole.run(data)
    first, data = build()
    first.iteration_completed(once=stop_at)(lambda state: first.interrupt())
    checkpoint(first, rein.Checkpoints(folder))
    first.run(data)
    second, data = build()
    rein.resume(second, folder)
    second.run(data)
    return whole, second


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the run may stop between the two steps
@pytest.mark.parametrize("stop_at", [1, 3, 4, 6, 8, 11])
def test_resumed_run_equals_uninterrupted_run(stop_at: int, tmp_path: Path) -> None:
    whole, second = runs_of(classifier, tmp_path, stop_at)
    assert second.state.total_iterations == 12
    for part in ("model", "optimizer", "scheduler", "torch_generators"):
        one, other = (copy_state(loop.parts[part].state_dict()) for loop in (whole, second))
        assert first_difference(one, other) is None, part
    assert whole.state.metrics["loss"] == second.state.metrics["loss"]


@pytest.mark.parametrize("stop_at", [2, 4, 7])
def test_dataloader_with_own_generator_resumes_exactly(stop_at: int, tmp_path: Path) -> None:
    def shuffled() -> tuple[rein.Loop, Any]:
        torch.manual_seed(1)
        model, order = nn.Linear(2, 2), torch.Generator().manual_seed(3)
        loop = trainer(model, nn.functional.cross_entropy, sgd(model), epochs=3, generators=[order])
        return loop, DataLoader(XOR, 1, shuffle=True, generator=order)

    whole, second = runs_of(shuffled, tmp_path, stop_at)
    assert torch.equal(second.parts["model"].weight, whole.parts["model"].weight)
    assert second.state.metrics["loss"] == whole.state.metrics["loss"]


@pytest.mark.parametrize("make_store", [rein.HDF5Store, Path])
def test_run_with_store_or_path_writes_metrics(tmp_path: Path, make_store: Any) -> None:
    model = scale()
    loop = trainer(model, mse_loss, sgd(model), make_store(tmp_path / "run"), epochs=2)
    validate(loop, model, [(ONE, ONE)], {"loss": mse_loss})
    loop.run([(ONE, ONE)])
    lines = (tmp_path / "run/metrics.csv").read_text(encoding="utf-8").splitlines()
    assert "validation_loss" in lines[0]
    assert len(lines) == 3
    assert (tmp_path / "run/run.json").is_file()


def test_resumed_run_does_not_warn_of_missing_trajectories(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def build(exist: Any) -> rein.Loop:
        model = scale()
        loop = trainer(model, mse_loss, sgd(model), rein.HDF5Store(tmp_path / "run", exist=exist), epochs=2)
        rein.checkpoint(loop)
        return loop

    build("error").run([(ONE, ONE)], epochs=1)
    second = build("resume")
    rein.resume(second, tmp_path / "run")
    second.run([(ONE, ONE)])
    assert caplog.messages == []


@pytest.mark.parametrize("returned", [None, "good", torch.ones(2)])
def test_metric_that_returns_no_number_raises(returned: Any) -> None:
    evaluate = evaluator(nn.Linear(1, 1), {"mine": lambda prediction, target: returned})
    with pytest.raises(TypeError, match=r"metric 'mine' returned .*; return one number"):
        evaluate([(ONE, ONE)])


def test_guard_that_returns_none_raises() -> None:
    model = nn.Linear(1, 1)
    loop = trainer(model, mse_loss, sgd(model), guard=lambda metrics, gradients: None)  # type: ignore[arg-type, return-value]  # wrong on purpose
    with pytest.raises(TypeError, match="guard returned None"):
        loop.run([(ONE, ONE)])


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))


def rows_of(count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(5))
    return x, x.prod(1, keepdim=True)


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def in_parts(batch: tuple[Tensor, Tensor], size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(x.split(size) for x in batch), strict=True))


@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
def test_accumulated_batches_equal_one_large_batch(max_grad_norm: float | None) -> None:
    models = layers(), layers()
    for model, data, accumulate in zip(models, ([rows_of(12)], in_parts(rows_of(12), 4)), (1, 3), strict=True):
        loop = trainer(model, mse_loss, sgd(model), accumulate=accumulate, max_grad_norm=max_grad_norm)
        state = loop.run(data, epochs=3)
        assert state.clocks.updates == 3
    assert torch.allclose(*(weights(model) for model in models), atol=1e-6)


def test_incomplete_group_of_batches_continues_in_next_epoch() -> None:
    model = layers()
    loop = trainer(model, mse_loss, sgd(model), accumulate=2)
    assert loop.run(in_parts(rows_of(12), 4), epochs=1).clocks.updates == 1
    assert loop.run(in_parts(rows_of(12), 4), epochs=2).clocks.updates == 3


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_resume_within_group_of_batches_is_exact(tmp_path: Path, precision: Any) -> None:
    def build() -> tuple[rein.Loop, Any]:
        model = layers()
        loop = trainer(model, mse_loss, Adam(model.parameters()), epochs=3, accumulate=2, precision=precision)
        return loop, in_parts(rows_of(20), 4)

    whole, second = runs_of(build, tmp_path, 8)
    assert torch.equal(weights(whole.parts["model"]), weights(second.parts["model"]))


def test_bfloat16_computes_predictions_in_bfloat16_and_keeps_float32_parameters() -> None:
    models = layers(), layers()
    losses = []
    for model, dtype in zip(models, ("float32", "bfloat16"), strict=True):
        loop = trainer(model, mse_loss, sgd(model), precision=dtype)  # type: ignore[arg-type]  # a literal
        state = loop.run([rows_of(64)], epochs=20)
        losses.append(state.metrics["loss"])
    assert state.step_state.prediction.dtype is torch.bfloat16
    assert weights(models[1]).dtype is torch.float32
    assert not torch.equal(*(weights(model) for model in models))
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_float16_skips_updates_whose_scaled_gradients_overflow() -> None:
    model = scale(1.0)
    loop = trainer(model, mse_loss, sgd(model, 1e-4), precision="float16")
    step = loop.parts["step"]
    started = weights(model)
    scales = [step.state_dict()["scaler"]["scale"]]
    loop.iteration_completed(lambda state: scales.append(step.state_dict()["scaler"]["scale"]))
    loop.run([(ONE, ONE * -1000.0)], epochs=1)
    assert scales[1] == scales[0] / 2  # 65536 * 2002 is larger than the largest float16
    assert torch.equal(weights(model), started)
    loop.run([(ONE, ONE * -1000.0)], epochs=15)
    assert weights(model) < started


def test_loss_that_is_not_finite_raises_in_float16() -> None:
    model = scale()
    with pytest.raises(NonFiniteError, match="loss"):
        trainer(model, mse_loss, sgd(model), precision="float16").run([(ONE, ONE * math.nan)])


def test_several_optimizers_step_together() -> None:
    one, several = layers(), layers()
    trainer(one, mse_loss, sgd(one), max_grad_norm=0.1).run([rows_of(8)], epochs=3)
    parts = [sgd(several[0]), sgd(several[2])]
    loop = trainer(several, mse_loss, parts, max_grad_norm=0.1)
    loop.run([rows_of(8)], epochs=3)
    assert torch.equal(weights(one), weights(several))
    assert (loop.parts["optimizer"], loop.parts["optimizer_1"]) == tuple(parts)


def test_loss_is_mean_over_rows_of_batches_of_different_sizes() -> None:
    model, (x, y) = layers(), rows_of(10)
    optimizer = sgd(model, lr=0.0)
    state = trainer(model, mse_loss, optimizer).run([(x[:7], y[:7]), (x[7:], y[7:])])
    assert state.metrics["loss"] == pytest.approx(float(mse_loss(model(x), y).detach()))


def test_torchmetrics_objects_equal_functions_of_all_rows() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    model = nn.Linear(2, 2)
    data = list(DataLoader(XOR, batch_size=3))
    metrics = {"ours": accuracy, "theirs": torchmetrics.Accuracy("multiclass", num_classes=2, average="micro")}
    evaluate = evaluator(model, metrics)
    for _ in range(2):
        found = evaluate(data)
        assert found["theirs"] == found["ours"]
    only = evaluator(model, {"theirs": metrics["theirs"]})
    assert only(data)["theirs"] == found["ours"]
    with pytest.raises(ValueError, match="empty"):
        only([])


def test_step_that_loop_does_not_own_is_an_error_at_first_checkpoint(tmp_path: Path) -> None:
    model = layers()
    optimizer = sgd(model)
    loop = rein.Loop(train_step(model, mse_loss, optimizer, accumulate=2))
    loop.own("model", model)
    loop.own("optimizer", optimizer)
    checkpoint(loop, rein.HDF5Store(tmp_path))
    with pytest.raises(rein.errors.CheckpointError, match="TrainStep"):
        loop.run(in_parts(rows_of(8), 4))


def test_guard_may_refuse_updates_in_float16() -> None:
    model = scale(1.0)
    loop = trainer(model, mse_loss, sgd(model), precision="float16", guard=lambda metrics, gradients: False)
    assert loop.run([(ONE, ONE * 2.0)], epochs=3).status == "completed"
    assert model.weight.item() == 1.0


def test_updates_that_float16_skips_report_no_norm() -> None:
    model = scale(1.0)
    loop = trainer(model, mse_loss, sgd(model, 1e-4), precision="float16", max_grad_norm=1.0)
    assert math.isfinite(loop.run([(ONE, ONE * -1000.0)] * 16).metrics["grad_norm"])
