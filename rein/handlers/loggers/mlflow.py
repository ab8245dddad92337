"""Log metrics to MLflow."""

from __future__ import annotations

import importlib
import math
import re
import time
from collections.abc import Mapping
from typing import Any

from rein.handlers.loggers.attach import Axis

_STATUS = {"failed": "FAILED", "interrupted": "KILLED"}  # any other status is FINISHED
_PARAMETERS = 100  # MLflow's maximum per request
_LENGTH = 250  # maximum length of a parameter's name and value in every MLflow store
_ODD = re.compile(r"[^\w\-. :/]")  # characters that MLflow does not allow in names


class MlflowLogger:
    """Log each metric to a new MLflow run of `experiment`, which is created if it does not exist.

    Example::

        MlflowLogger("cartpole", tracking_uri="sqlite:///mlflow.db")

    The MLflow run is created when the loop starts, with the configuration as its parameters. NaN is not logged. The run
    is RUNNING while the loop runs, then FAILED if the loop failed, KILLED if it was interrupted, and otherwise
    FINISHED.

    Args:
        experiment: Name of the experiment.
        tracking_uri: MLflow server or store.
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
        run_id: str | None = None,
        clock: str | None = None,
    ) -> None:
        self._axis = Axis("MlflowLogger", clock)
        try:
            mlflow: Any = importlib.import_module("mlflow")
            entities: Any = importlib.import_module("mlflow.entities")
        except ImportError as error:
            raise ImportError(f"MlflowLogger needs MLflow: pip install mlflow ({error})") from error
        self.run_id = run_id
        self._client, self._entities = mlflow.MlflowClient(tracking_uri), entities
        self._experiment = experiment
        self._running = False
        self._parameters: dict[str, str] = {}
        self._status: str | None = None

    def describe(self, settings: Mapping[str, Any]) -> None:
        """Store the configuration for the parameters of a new run."""
        self._parameters = {_ODD.sub("_", name)[:_LENGTH]: str(value)[:_LENGTH] for name, value in settings.items()}

    def finish(self, status: str | None) -> None:
        """Store the status of the run for the next `close`."""
        self._status = status

    def write(self, clocks: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Log one value per metric."""
        self.begin()
        now, step = int(time.time() * 1000), self._axis.step(clocks)
        known = {_ODD.sub("_", name): value for name, value in metrics.items() if not math.isnan(value)}
        points = [self._entities.Metric(name, value, now, step) for name, value in known.items()]
        self._client.log_batch(self.run_id, metrics=points)

    def close(self) -> None:
        """Mark the run as ended. Another `write` continues it."""
        status, self._status = self._status, None
        if self._running:
            self._client.set_terminated(self.run_id, _STATUS.get(status or "", "FINISHED"))
            self._running = False

    def begin(self) -> None:
        """Create the run, or mark it as running again."""
        if self._running:
            return
        if self.run_id is None:
            found = self._client.get_experiment_by_name(self._experiment)
            experiment_id = found.experiment_id if found else self._client.create_experiment(self._experiment)
            self.run_id = self._client.create_run(experiment_id).info.run_id
            params = [self._entities.Param(name, value) for name, value in self._parameters.items()]
            for first in range(0, len(params), _PARAMETERS):
                self._client.log_batch(self.run_id, params=params[first : first + _PARAMETERS])
        else:
            self._client.update_run(self.run_id, status="RUNNING")
        self._running = True
