"""Curves in Weights & Biases."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

from rein.files import absolute
from rein.handlers.loggers.attach import Axis

_EXIT_CODES = {"failed": 1, "interrupted": 130}  # all others have finished


class WandbLogger:
    """Logs all metrics, and all clocks as `clocks/<name>`, over one clock to a run that `wandb.init(**options)` begins.

        WandbLogger(project="cartpole", dir="runs/cartpole")

    The default clock is `env_steps`, or `iterations` if no environment has been stepped at the first row. A metric that
    is NaN, for example while no episode has ended, has no point. The run is created when the loop starts, with the
    configuration added to the config in `options`. It ends with exit code 1 if the loop failed, and with 130 if it was
    interrupted. After `close` the same run is continued; to continue it in another process, give its `id` and
    `resume="allow"`. Raises ImportError without wandb, ValueError for an unknown clock.
    """

    def __init__(self, *, clock: str | None = None, **options: Any) -> None:
        self._axis = Axis("WandbLogger", clock)
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise ImportError(f"WandbLogger needs wandb: pip install wandb ({error})") from error
        self._init = wandb.init
        self._options = options | {name: str(absolute(options[name])) for name in ("dir",) if options.get(name)}
        self._run: Any = None
        self._config: dict[str, Any] = {}
        self._exit_code = 0

    def describe(self, settings: Mapping[str, Any]) -> None:
        """Keep the run's configuration for its config."""
        self._config = dict(settings)

    def finish(self, status: str | None) -> None:
        """How the run ended, for the next `close`."""
        self._exit_code = _EXIT_CODES.get(status or "", 0)

    def begin(self) -> None:
        """Create the run, or continue it."""
        if self._run is None:
            self._run = self._init(**self._options)
            self._options |= {"id": self._run.id, "resume": "allow"}
            self._run.config.update(self._config, allow_val_change=True)  # a run that goes on may have longer limits

    def write(self, clocks: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """A point for each metric and clock."""
        self.begin()
        known = {name: value for name, value in metrics.items() if not math.isnan(value)}
        times = {f"clocks/{name}": value for name, value in clocks.items()}
        self._run.log({**times, **known}, step=self._axis.step(clocks))

    def close(self) -> None:
        """Send what is left and finish the run."""
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)
            self._run, self._exit_code = None, 0
