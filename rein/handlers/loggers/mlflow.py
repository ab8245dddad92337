"""Log metrics to MLflow."""

from __future__ import annotations

import importlib
import math
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rein.errors import optional_import
from rein.files import absolute
from rein.handlers.loggers.attach import Axis
from rein.handlers.loggers.media import Image, Video
from rein.handlers.output import Names, grouped

_STATUS = {"failed": "FAILED", "interrupted": "KILLED"}  # any other status is FINISHED
_PARAMETERS = 100  # MLflow's maximum per request
_LENGTH = 250  # maximum length of names and of a parameter's value in every MLflow store
_ODD = re.compile(r"[^\w\-. :/]")  # characters that MLflow does not allow in names


class MlflowLogger:
    """Log each metric to a new MLflow run of `experiment`, which is created if it does not exist.

    Example::

        MlflowLogger("cartpole", tracking_uri="sqlite:///mlflow.db", run_name="seed 0", tags={"purpose": "baseline"})

    Metrics are grouped by their names, as in `TensorBoardLogger`: `train/episode_return`, `loss/policy`, ... Characters
    that MLflow does not allow are replaced by "_". Texts, images and videos are artifacts of the run.

    The MLflow run is created when the loop starts, with the configuration as its parameters. NaN is not logged. The run
    is RUNNING while the loop runs, then FAILED if the loop failed, KILLED if it was interrupted, and otherwise
    FINISHED.

    Args:
        experiment: Name of the experiment.
        tracking_uri: MLflow server or store.
        run_name: Name of a new run. Default: a name that MLflow chooses.
        tags: Tags of a new run.
        artifacts: Files and folders that are uploaded when the loop ends, such as `["runs/cartpole/metrics.csv"]`.
        run_id: Existing run to continue; its parameters are not changed. The attribute `run_id` is the id of the
            current run.
        clock: Clock of the x axis. Default: `env_steps`, or `iterations` if no environment has been stepped at the
            first row.

    Raises:
        ImportError: If MLflow is not installed.
        ValueError: If the clock is unknown.
    """

    def __init__(
        self,
        experiment: str,
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
        artifacts: Sequence[str | Path] = (),
        run_id: str | None = None,
        clock: str | None = None,
    ) -> None:
        self._axis = Axis("MlflowLogger", clock)
        with optional_import("MlflowLogger needs MLflow: pip install mlflow"):
            mlflow: Any = importlib.import_module("mlflow")
            entities: Any = importlib.import_module("mlflow.entities")
        self.run_id = run_id
        self._client, self._entities = mlflow.MlflowClient(tracking_uri), entities
        self._experiment, self._name, self._tags = experiment, run_name, dict(tags or {})
        self._artifacts = [absolute(path) for path in artifacts]
        self._metrics = Names(lambda metric: _path(grouped(metric)), _LENGTH)
        self._artifact = Names(_path, _LENGTH)
        self._running = False
        self._parameters: dict[str, str] = {}
        self._status: str | None = None

    def describe(self, settings: Mapping[str, Any]) -> None:
        """Store the configuration for the parameters of a new run."""
        names = Names(_path, _LENGTH)
        self._parameters = {names[name]: str(value)[:_LENGTH] for name, value in settings.items()}

    def finish(self, status: str | None) -> None:
        """Store the status of the run for the next `close`."""
        self._status = status

    def write(self, clocks: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Log one value per metric."""
        self.begin()
        now, step = int(time.time() * 1000), self._axis.step(clocks)
        numbers = [(self._metrics[name], value) for name, value in metrics.items() if not math.isnan(value)]
        points = [self._entities.Metric(name, value, now, step) for name, value in numbers]
        self._client.log_batch(self.run_id, metrics=points)

    def write_text(self, clocks: Mapping[str, float], name: str, text: str) -> None:
        """Store a text as the artifact `<name>/<step>.txt`."""
        self.begin()
        self._client.log_text(self.run_id, text, f"{self._artifact[name]}/{self._axis.step(clocks)}.txt")

    def write_image(self, clocks: Mapping[str, float], name: str, image: Image) -> None:
        """Store an image as the artifact `<name>/<step>.png`."""
        self._store(clocks, name, "png", image.png())

    def write_video(self, clocks: Mapping[str, float], name: str, video: Video) -> None:
        """Store a video as the artifact `<name>/<step>.gif`."""
        self._store(clocks, name, "gif", video.gif())

    def _store(self, clocks: Mapping[str, float], name: str, ending: str, content: bytes) -> None:
        self.begin()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{self._axis.step(clocks)}.{ending}"
            file.write_bytes(content)
            self._client.log_artifact(self.run_id, str(file), self._artifact[name])

    def close(self) -> None:
        """Upload the artifacts and mark the run as ended. Another `write` continues it."""
        status, self._status = self._status, None
        if self._running:
            self._running = False
            try:
                for path in self._artifacts:
                    self._client.log_artifact(self.run_id, str(path))
            finally:
                self._client.set_terminated(self.run_id, _STATUS.get(status or "", "FINISHED"))

    def begin(self) -> None:
        """Create the run, or mark it as running again."""
        if self._running:
            return
        if self.run_id is None:
            experiment = self._client.get_experiment_by_name(self._experiment)
            experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
            self.run_id = self._client.create_run(experiment_id, tags=self._tags, run_name=self._name).info.run_id
            params = [self._entities.Param(name, value) for name, value in self._parameters.items()]
            for first in range(0, len(params), _PARAMETERS):
                self._client.log_batch(self.run_id, params=params[first : first + _PARAMETERS])
        else:
            self._client.update_run(self.run_id, status="RUNNING")
        self._running = True


def _path(name: str) -> str:
    """Return the name as a relative path, as MLflow needs it: without empty parts, `.`, `..` and odd characters."""
    return "/".join(part for part in _ODD.sub("_", name[:_LENGTH]).split("/") if part.strip(".")) or "_"
