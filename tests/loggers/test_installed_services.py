"""Runs that are logged with the installed packages of TensorBoard, Weights & Biases and MLflow, and read back."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rein
from rein.handlers.loggers import Histogram, Image, MlflowLogger, TensorBoardLogger, Video, WandbLogger, attach

FRAMES = np.random.default_rng(0).integers(0, 255, (3, 6, 8, 3), dtype=np.uint8)


pytestmark = pytest.mark.filterwarnings("ignore")  # the packages warn about their dependencies


class Part:
    config: Mapping[str, Any] = {"gamma": 0.9, "name": "mine"}


def run(logger: Any) -> None:
    """Log two epochs of metrics, and a value of each kind per epoch."""
    loop = rein.Loop(lambda state: {"loss": float(state.total_iterations)}, iterations=2, epochs=2)
    loop.own("part", Part())
    loop.metric("policy_loss", "loss")
    loop.metric("episode_return", "loss", reduce="max")
    attach(loop, logger)

    @loop.epoch_ended
    def log(state: rein.State) -> None:
        state.log("notes/epoch", f"epoch <{state.epoch}>")
        state.log("weights", Histogram(np.arange(10.0)))
        state.log("frames/first", Image(FRAMES[0]))
        state.log("film", Video(FRAMES, fps=10))

    loop.run()


def test_tensorboard_reads_metrics_options_and_media(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(TensorBoardLogger(tmp_path))
    events = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0, "images": 0})
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("loss/policy")] == [(2, 0.5), (4, 2.5)]
    assert [point.value for point in events.Scalars("train/episode_return")] == [1.0, 3.0]
    assert [point.step for point in events.Histograms("weights")] == [2, 4]
    for name, kind in (("frames/first", b"\x89PNG"), ("film", b"GIF8")):
        assert [image.encoded_image_string[:4] for image in events.Images(name)] == [kind] * 2
        assert (events.Images(name)[0].width, events.Images(name)[0].height) == (8, 6)
    assert {"run/text_summary", "notes/epoch/text_summary"} <= {*events.Tags()["tensors"]}
    plugin_data: Any = importlib.import_module("tensorboard.plugins.hparams.plugin_data_pb2")
    hyper = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    started = plugin_data.HParamsPluginData.FromString(hyper).session_start_info
    assert started.hparams["part.gamma"].number_value == 0.9 and started.hparams["part.name"].string_value == "mine"
    assert "versions.rein" not in started.hparams
    assert len([*tmp_path.iterdir()]) == 1, "no second folder"
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_wandb_writes_an_offline_run_with_metrics_and_media(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wandb = pytest.importorskip("wandb")
    run(WandbLogger(project="mine", mode="offline", dir=tmp_path, settings={"silent": True, "console": "off"}))
    assert not [record for record in caplog.records if record.name == "rein"]
    wandb.teardown()  # waits for the process that writes the file
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    content = file.read_bytes()
    for text in (b"train/episode_return", b"loss/policy", b"clocks/iterations", b"part.gamma", b"histogram"):
        assert text in content
    endings = sorted(path.suffix for path in (folder / "files/media").rglob("*") if path.is_file())
    assert endings == [".gif"] * 2 + [".html"] * 2 + [".png"] * 2


def test_mlflow_stores_metrics_tags_and_artifacts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri, own = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "own.txt"
    own.write_text("mine")
    mlflow.MlflowClient(uri).create_experiment("mine", artifact_location=(tmp_path / "artifacts").as_uri())
    logger = MlflowLogger("mine", tracking_uri=uri, run_name="first", tags={"purpose": "test"}, artifacts=[own])
    run(logger)
    assert [record.getMessage() for record in caplog.records if record.name == "rein"] == [
        "MlflowLogger has no method write_histogram, so 'weights' and similar values are skipped"
    ]
    client = mlflow.MlflowClient(uri)
    stored = client.get_run(logger.run_id)
    assert (stored.info.run_name, stored.info.status, stored.data.tags["purpose"]) == ("first", "FINISHED", "test")
    assert stored.data.params["part.gamma"] == "0.9"
    history = client.get_metric_history(logger.run_id, "loss/policy")
    assert [(point.step, point.value) for point in history] == [(2, 0.5), (4, 2.5)]
    files = {path.relative_to(tmp_path / "artifacts").as_posix() for path in (tmp_path / "artifacts").rglob("*.*")}
    kinds = ("notes/epoch/{}.txt", "frames/first/{}.png", "film/{}.gif")
    expected = {f"{logger.run_id}/artifacts/{kind.format(step)}" for kind in kinds for step in (2, 4)}
    assert files == {*expected, f"{logger.run_id}/artifacts/own.txt"}
