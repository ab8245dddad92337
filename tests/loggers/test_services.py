"""What TensorBoard, Weights & Biases and MLflow are told; stand-ins of theirs listen."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import rein
from rein.loggers.attach import attach
from rein.loggers.mlflow import MlflowLogger
from rein.loggers.tensorboard import TensorBoardLogger
from rein.loggers.wandb import WandbLogger

POINTS = [(4, 1.5), (8, 5.5), (12, 9.5)]  # iterations, and the mean of an epoch's


def make() -> rein.Loop:
    loop = rein.Loop(lambda state: {"loss": float(state.total_iterations)}, iterations=4, epochs=3)
    loop.metric("loss, total", "loss")
    loop.metric("never", lambda state: math.nan)
    return loop


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_tensorboard_gets_a_scalar_a_metric_and_hides_what_is_newer_than_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            told.append(("open", folder, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            told.append((name, step, value))

        def close(self) -> None:
            told.append("close")

    stand_in(monkeypatch, "torch.utils.tensorboard", SummaryWriter=SummaryWriter)
    loop = make()
    attach(loop, TensorBoardLogger("there", clock="iterations"))
    loop.run()
    assert told == [("open", "there", 4), *(("loss, total", *point) for point in POINTS), "close"]
    loop.run(epochs=4)
    assert told[5:] == [("open", "there", 16), ("loss, total", 16, 13.5), "close"]


def test_wandb_goes_on_with_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def init(**options: Any) -> Any:
        told.append(options)
        return SimpleNamespace(
            id="abc", log=lambda values, step: told.append((step, values)), finish=lambda: told.append("finish")
        )

    stand_in(monkeypatch, "wandb", init=init)
    loop = make()
    attach(loop, WandbLogger(project="mine", clock="iterations"))
    loop.run()
    assert told[0] == {"project": "mine"} and told[-1] == "finish"
    assert [(step, values["loss, total"]) for step, values in told[1:-1]] == POINTS
    assert all("never" not in values and values["clocks/iterations"] == step for step, values in told[1:-1])
    loop.run(epochs=4)
    assert told[5] == {"project": "mine", "id": "abc", "resume": "allow"}


class MlflowClient:
    """Keeps what it is told, as the server does."""

    def __init__(self, uri: str | None) -> None:
        self.experiments: dict[str, Any] = {}
        self.told: list[Any] = []

    def get_experiment_by_name(self, name: str) -> Any:
        return self.experiments.get(name)

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = SimpleNamespace(experiment_id="7")
        return "7"

    def create_run(self, experiment_id: str) -> Any:
        self.told.append(("run of", experiment_id))
        return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    def update_run(self, run_id: str, status: str) -> None:
        self.told.append((run_id, status))

    def log_batch(self, run_id: str, metrics: list[Any]) -> None:
        self.told += [(run_id, *metric) for metric in metrics]

    def set_terminated(self, run_id: str, status: str) -> None:
        self.told.append((run_id, status))


def test_mlflow_makes_experiment_and_run_and_goes_on_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "mlflow", MlflowClient=MlflowClient)
    stand_in(monkeypatch, "mlflow.entities", Metric=lambda name, value, time, step: (name, step, value))
    loop, mlflow = make(), MlflowLogger("mine", clock="iterations")
    client: Any = mlflow._client
    attach(loop, mlflow)
    loop.run()
    points = [("abc", "loss_ total", *point) for point in POINTS]
    assert client.told == [("run of", "7"), *points, ("abc", "FINISHED")]
    assert mlflow.run_id == "abc"
    loop.run(epochs=4)
    assert client.told[5:] == [("abc", "RUNNING"), ("abc", "loss_ total", 16, 13.5), ("abc", "FINISHED")]


@pytest.mark.parametrize(
    ("package", "missing", "kind", "arguments"),
    [
        ("tensorboard", "torch.utils.tensorboard", TensorBoardLogger, ("folder",)),
        ("wandb", "wandb", WandbLogger, ()),
        ("mlflow", "mlflow", MlflowLogger, ("experiment",)),
    ],
)
def test_without_its_package_the_error_names_it_and_an_unknown_clock_is_refused(
    monkeypatch: pytest.MonkeyPatch, package: str, missing: str, kind: Any, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"{kind.__name__} needs .*pip install {package} \("):
        kind(*arguments)
    with pytest.raises(ValueError, match=r"clock='steps'\): the clocks are env_steps"):
        kind(*arguments, clock="steps")
