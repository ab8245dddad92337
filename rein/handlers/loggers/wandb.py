"""Log metrics to Weights & Biases."""

from __future__ import annotations

import html
import importlib
import io
import math
from collections.abc import Mapping
from typing import Any

from rein.errors import optional_import
from rein.files import absolute
from rein.handlers.loggers.attach import Axis
from rein.handlers.loggers.media import Histogram, Image, Video
from rein.handlers.output import Names, grouped

_EXIT_CODES = {"failed": 1, "interrupted": 130}  # any other status exits with 0


class WandbLogger:
    """Log metrics, and clocks as `clocks/<name>`, to a run created by `wandb.init(**options)`.

    Example::

        WandbLogger(project="cartpole", dir="runs/cartpole")

    Metrics are grouped by their names, as in `TensorBoardLogger`: `train/episode_return`, `loss/policy`, ...

    The default `clock` of the x axis is `env_steps`, or `iterations` if no environment has been stepped at the first
    row. NaN is not logged. The run is created when the loop starts, and the configuration is added to its config. It
    ends with exit code 1 if the loop failed, and with 130 if it was interrupted. After `close`, `write` continues the
    same run. To continue it in another process, pass its `id` and `resume="allow"`.

    Raises ImportError if wandb is not installed, and ValueError if the clock is unknown.
    """

    def __init__(self, *, clock: str | None = None, **options: Any) -> None:
        self._axis = Axis("WandbLogger", clock)
        with optional_import("WandbLogger needs wandb: pip install wandb"):
            self._wandb: Any = importlib.import_module("wandb")
        self._options = options | {name: str(absolute(options[name])) for name in ("dir",) if options.get(name)}
        self._run: Any = None
        self._names = Names(grouped)
        self._config: dict[str, Any] = {}
        self._exit_code = 0

    def describe(self, settings: Mapping[str, Any]) -> None:
        """Store the configuration for the config of the run."""
        self._config = dict(settings)

    def finish(self, status: str | None) -> None:
        """Store the status of the run for the next `close`."""
        self._exit_code = _EXIT_CODES.get(status or "", 0)

    def begin(self) -> None:
        """Create the run, or continue it."""
        if self._run is None:
            self._run = self._wandb.init(**self._options)
            self._options |= {"id": self._run.id, "resume": "allow"}
            self._run.config.update(self._config, allow_val_change=True)  # a continued run may have longer limits

    def write(self, clocks: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Log one value per metric and clock."""
        self.begin()
        numbers = {self._names[name]: value for name, value in metrics.items() if not math.isnan(value)}
        times = {f"clocks/{name}": value for name, value in clocks.items()}
        self._run.log({**times, **numbers}, step=self._axis.step(clocks))

    def write_text(self, clocks: Mapping[str, float], name: str, text: str) -> None:
        """Log a text as HTML."""
        page = self._wandb.Html(f"<pre>{html.escape(text)}</pre>", data_is_not_path=True)
        self._log(clocks, name, page)

    def write_histogram(self, clocks: Mapping[str, float], name: str, histogram: Histogram) -> None:
        """Log a histogram, unless it is empty."""
        if len(histogram.values):
            self._log(clocks, name, self._wandb.Histogram(histogram.values))

    def write_image(self, clocks: Mapping[str, float], name: str, image: Image) -> None:
        """Log an image."""
        self._log(clocks, name, self._wandb.Image(image.pixels))

    def write_video(self, clocks: Mapping[str, float], name: str, video: Video) -> None:
        """Log a video as an animated GIF."""
        self._log(clocks, name, self._wandb.Video(io.BytesIO(video.gif()), format="gif"))

    def _log(self, clocks: Mapping[str, float], name: str, value: Any) -> None:
        self.begin()
        self._run.log({name: value}, step=self._axis.step(clocks))

    def close(self) -> None:
        """Send pending data and finish the run."""
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)
            self._run, self._exit_code = None, 0
