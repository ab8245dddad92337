"""Calls that the loggers make to TensorBoard, Weights & Biases and MLflow, recorded by replacements."""

from __future__ import annotations

import contextlib
import math
import posixpath
import re
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import rein
from rein.files import absolute
from rein.handlers.loggers.attach import Axis, attach
from rein.handlers.loggers.mlflow import MlflowLogger
from rein.handlers.loggers.tensorboard import TensorBoardLogger
from rein.handlers.loggers.wandb import WandbLogger
from rein.handlers.output import grouped

POINTS = [(4, 1.5), (8, 5.5), (12, 9.5)]  # iterations, and the mean over an epoch


def make() -> rein.Loop:
    loop = rein.Loop(lambda state: {"loss": float(state.total_iterations)}, iterations=4, epochs=3)
    loop.metric("loss, total", "loss")
    loop.metric("never", lambda state: math.nan)
    return loop


def replace_module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_tensorboard_writes_scalars_and_hides_later_points(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            calls.append(("open", folder, purge_step))

        def add_text(self, name: str, text: str, step: int) -> None:
            assert "\n    epochs: 3\n" in text
            calls.append((name, step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, step, value))

        def close(self) -> None:
            calls.append("close")

    replace_module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=SummaryWriter)
    loop = make()
    attach(loop, TensorBoardLogger("there", clock="iterations"))
    there = str(absolute("there"))
    loop.run()
    assert calls == [
        ("open", there, 4),
        ("run", 4),
        *(("train/loss, total", *point) for point in POINTS),
        "close",
    ]
    loop.run(epochs=4)
    assert calls[6:] == [("open", there, 16), ("train/loss, total", 16, 13.5), "close"]


@pytest.mark.parametrize(
    ("clocks", "steps"),
    [
        ((), [4, 8, 12, 16]),  # iterations
        (("updates",), [4, 8, 12, 16]),
        (("updates", "env_steps"), [40, 80, 120, 160]),
        (("late env_steps",), [4, 8, 12, 16]),
    ],
)
def test_default_clock_is_env_steps_or_iterations(
    monkeypatch: pytest.MonkeyPatch, fake_mlflow: None, clocks: tuple[str, ...], steps: list[int]
) -> None:
    drawn: list[int] = []
    writer = SimpleNamespace(
        add_text=lambda *arguments: None, add_scalar=lambda name, value, step: drawn.append(step), close=lambda: None
    )
    replace_module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=lambda folder, purge_step: writer)
    calls, loop, mlflow = record_wandb(monkeypatch), make(), MlflowLogger("mine")
    client: Any = mlflow._client
    for logger in (TensorBoardLogger("there"), WandbLogger(), mlflow):
        attach(loop, logger)

    @loop.iteration_completed
    def advance(state: rein.State) -> None:
        for clock, amount in (("updates", 2), ("env_steps", 10)):
            if clock in clocks or (f"late {clock}" in clocks and state.epoch > 1):
                state.clocks.advance(**{clock: amount})

    loop.run()
    loop.run(epochs=4)  # all loggers are opened again
    assert drawn == steps
    assert [entry[0] for entry in calls if isinstance(entry, tuple) and isinstance(entry[1], dict)] == steps
    assert [entry[2] for entry in client.calls if len(entry) == 4] == steps


def test_axis_is_selected_when_a_clock_has_advanced() -> None:
    axis = Axis("logger", None)
    assert axis.step({"env_steps": 0, "updates": 0, "iterations": 0}) == 0
    assert axis.step({"env_steps": 7, "updates": 2, "iterations": 1}) == 7
    assert Axis("logger", "seconds").step({"env_steps": 7, "seconds": 2.5}) == 2


def record_wandb(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace W&B. Returns a list of the calls."""
    calls: list[Any] = []

    def update(settings: Any, allow_val_change: bool) -> None:
        calls.append((settings["epochs"], allow_val_change))

    def init(**options: Any) -> Any:
        calls.append(options)
        return SimpleNamespace(
            id="abc",
            config=SimpleNamespace(update=update),
            log=lambda values, step: calls.append((step, values)),
            finish=lambda exit_code: calls.append(exit_code),
        )

    replace_module(monkeypatch, "wandb", init=init)
    return calls


def test_wandb_continues_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, loop = record_wandb(monkeypatch), make()
    attach(loop, WandbLogger(project="mine", clock="iterations"))
    loop.run()
    assert calls[:2] == [{"project": "mine"}, (3, True)] and calls[-1] == 0
    assert [(step, values["train/loss, total"]) for step, values in calls[2:-1]] == POINTS
    assert all("train/never" not in values and values["clocks/iterations"] == step for step, values in calls[2:-1])
    loop.run(epochs=4)
    assert calls[6] == {"project": "mine", "id": "abc", "resume": "allow"}


class MlflowClient:
    """Replacement of the MLflow client that records calls."""

    def __init__(self, uri: str | None) -> None:
        self.experiments: dict[str, Any] = {}
        self.calls: list[Any] = []
        self.parameters: dict[str, str] = {}

    def get_experiment_by_name(self, name: str) -> Any:
        return self.experiments.get(name)

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = SimpleNamespace(experiment_id="7")
        return "7"

    def create_run(self, experiment_id: str, tags: Mapping[str, str], run_name: str | None) -> Any:
        self.calls.append(("run of", experiment_id))
        return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    def update_run(self, run_id: str, status: str) -> None:
        self.calls.append((run_id, status))

    def log_batch(self, run_id: str, metrics: list[Any] | None = None, params: list[Any] | None = None) -> None:
        assert len(params or ()) <= 100
        self.calls += [(run_id, *metric) for metric in metrics or ()]
        self.parameters.update(params or ())

    def set_terminated(self, run_id: str, status: str) -> None:
        self.calls.append((run_id, status))


@pytest.fixture
def fake_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    entities = {"Metric": lambda name, value, time, step: (name, step, value), "Param": lambda *pair: pair}
    replace_module(monkeypatch, "mlflow", MlflowClient=MlflowClient)
    replace_module(monkeypatch, "mlflow.entities", **entities)


def end_in(loop: rein.Loop, epoch: int, ask: Any) -> None:
    """Call `ask(loop)` at the start of an epoch."""

    @loop.epoch_started(once=epoch)
    def end(state: rein.State) -> None:
        ask(loop)


def boom(loop: rein.Loop) -> None:
    raise RuntimeError("boom")


@pytest.mark.parametrize(
    ("ask", "status", "exit_code"),
    [(boom, "FAILED", 1), (rein.Loop.interrupt, "KILLED", 130), (rein.Loop.stop, "FINISHED", 0)],
)
def test_mlflow_and_wandb_receive_the_status(
    monkeypatch: pytest.MonkeyPatch, fake_mlflow: None, ask: Any, status: str, exit_code: int
) -> None:
    calls, loop, mlflow = record_wandb(monkeypatch), make(), MlflowLogger("mine", clock="iterations")
    client: Any = mlflow._client
    attach(loop, mlflow)
    attach(loop, WandbLogger(clock="iterations"))
    end_in(loop, 3, ask)
    with contextlib.suppress(RuntimeError):
        loop.run()
    assert client.calls[-1] == ("abc", status) and calls[-1] == exit_code


@pytest.mark.parametrize("runs", [1, 2])
def test_run_that_fails_before_its_first_row_is_logged_as_failed(
    monkeypatch: pytest.MonkeyPatch, fake_mlflow: None, runs: int
) -> None:
    calls, loop, mlflow = record_wandb(monkeypatch), make(), MlflowLogger("mine", clock="iterations")
    client: Any = mlflow._client
    attach(loop, mlflow)
    attach(loop, WandbLogger(clock="iterations"))
    if runs == 2:
        loop.run(epochs=1)
        del client.calls[:], calls[:]
    loop.epoch_started(lambda state: boom(loop))
    with pytest.raises(RuntimeError, match="boom"):
        loop.run(epochs=2)
    assert client.calls == [("run of", "7") if runs == 1 else ("abc", "RUNNING"), ("abc", "FAILED")]
    assert calls[0] == ({} if runs == 1 else {"id": "abc", "resume": "allow"}) and calls[-1] == 1


def test_mlflow_logs_the_configuration_of_new_runs(fake_mlflow: None) -> None:
    class Part:
        config = {f"layer {number}": "x" * 1000 for number in range(150)} | {"b(eta)": 0.5}

    for run_id, count in ((None, 150), ("abc", 0)):
        loop, mlflow = make(), MlflowLogger("mine", clock="iterations", run_id=run_id)
        client: Any = mlflow._client
        loop.own("part", Part())
        attach(loop, mlflow)
        loop.run()
        layers = [value for name, value in client.parameters.items() if name.startswith("part.layer ")]
        assert len(layers) == count and {len(value) for value in layers} <= {250}
        assert client.parameters.get("part.b_eta_") == (None if run_id else "0.5")


def test_mlflow_creates_and_continues_a_run(fake_mlflow: None) -> None:
    loop, mlflow = make(), MlflowLogger("mine", clock="iterations")
    client: Any = mlflow._client
    attach(loop, mlflow)
    loop.run()
    points = [("abc", "train/loss_ total", *point) for point in POINTS]
    assert client.calls == [("run of", "7"), *points, ("abc", "FINISHED")]
    assert mlflow.run_id == "abc"
    loop.run(epochs=4)
    assert client.calls[5:] == [("abc", "RUNNING"), ("abc", "train/loss_ total", 16, 13.5), ("abc", "FINISHED")]


@pytest.mark.parametrize(
    ("package", "missing", "kind", "arguments"),
    [
        ("tensorboard", "torch.utils.tensorboard", TensorBoardLogger, ("folder",)),
        ("wandb", "wandb", WandbLogger, ()),
        ("mlflow", "mlflow", MlflowLogger, ("experiment",)),
    ],
)
def test_missing_package_and_unknown_clock_raise(
    monkeypatch: pytest.MonkeyPatch, package: str, missing: str, kind: Any, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"{kind.__name__} needs .*pip install {package} \("):
        kind(*arguments)
    with pytest.raises(ValueError, match=r"clock='steps'\): unknown clock; the clocks are env_steps"):
        kind(*arguments, clock="steps")


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("episode_return_100", "train/episode_return_100"),
        ("policy_loss", "loss/policy"),
        ("loss", "loss/loss"),
        ("evaluation_return_std", "evaluation/return_std"),
        ("critics_grad_norm", "norm/critics_grad"),
        ("updates_per_second", "time/updates_per_second"),
        ("mine/loss", "mine/loss"),
        ("mine//loss/", "mine/loss"),
        ("loss/", "loss/loss"),
        ("_loss", "train/_loss"),
        ("evaluation_", "train/evaluation_"),
        ("", "train/_"),
    ],
)
def test_services_group_metrics_by_name(metric: str, name: str) -> None:
    assert grouped(metric) == name


ODD = ["reward//speed", "reward/speed", "a/", "/a", "a", "../b", "./b", "x" * 300, "x" * 301, "_loss", "a@b", "a#b"]
ODD += ["policy_loss", "loss/policy", "loss", "loss_loss", ".", "..", "a\nb", "a b", "ü"]


def test_services_get_a_different_valid_name_for_each_metric(
    monkeypatch: pytest.MonkeyPatch, fake_mlflow: None
) -> None:
    scalars: list[str] = []
    writer = SimpleNamespace(
        add_text=lambda *arguments: None, add_scalar=lambda tag, value, step: scalars.append(tag), close=lambda: None
    )
    replace_module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=lambda folder, purge_step: writer)
    calls, mlflow = record_wandb(monkeypatch), MlflowLogger("mine")
    client: Any = mlflow._client
    loop = rein.Loop(lambda state: None, iterations=1, epochs=2)
    for logger in (TensorBoardLogger("there"), WandbLogger(), mlflow):
        attach(loop, logger)

    @loop.epoch_ended
    def measure(state: rein.State) -> None:
        for name in ODD if state.epoch == 1 else ODD[::-1]:
            state.metrics[name] = 1.0

    loop.run()
    points = [entry[1] for entry in client.calls if len(entry) == 4]
    logged = [[*values] for _, values in (entry for entry in calls if isinstance(entry, tuple)) if values is not True]
    logged = [[name for name in names if not name.startswith("clocks/")] for names in logged]
    for first, second in ((scalars[: len(ODD)], scalars[len(ODD) :]), (points[: len(ODD)], points[len(ODD) :]), logged):
        assert len({*first}) == len(ODD)
        assert first == second[::-1]
    for name in points:  # the rules of MLflow
        assert re.fullmatch(r"[/\w.\- :]{1,250}", name) and posixpath.normpath(name) == name and name[0] not in "./"


def test_artifacts_of_different_names_have_different_folders(fake_mlflow: None) -> None:
    mlflow, loop = MlflowLogger("mine"), make()
    client: Any = mlflow._client
    paths: list[str] = []
    client.log_text = lambda run_id, text, path: paths.append(path)
    attach(loop, mlflow)

    @loop.completed
    def log(state: rein.State) -> None:
        for name in ("a@b", "a#b", "a@b"):
            state.log(name, "text")

    loop.run()
    assert paths[0] == paths[2] != paths[1]
