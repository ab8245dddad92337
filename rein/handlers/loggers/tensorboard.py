"""Log metrics to TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rein.errors import optional_import
from rein.files import absolute
from rein.handlers.loggers.attach import Axis
from rein.handlers.loggers.media import Histogram, Image, Video
from rein.handlers.output import Names, grouped

_NO_OPTIONS = ("versions.", "command.", "git.")  # settings that do not belong to the hyperparameters


class TensorBoardLogger:
    """Write each metric as a scalar to TensorBoard event files in `folder`.

    Metrics are grouped by their names: `train/episode_return`, `loss/policy`, `evaluation/return`, `norm/actor`,
    `time/env_steps_per_second`. A name with "/" is not changed. The default `clock` of the x axis is `env_steps`, or
    `iterations` if no environment has been stepped at the first row. NaN is not written. The configuration of the run
    is the text `run`, and its options are hyperparameters. A run that continues in the same folder hides later points
    of the earlier run. Videos are animated images.

    Raises ImportError if TensorBoard is not installed, and ValueError if the clock is unknown.
    """

    def __init__(self, folder: str | Path, *, clock: str | None = None) -> None:
        self._axis = Axis("TensorBoardLogger", clock)
        with optional_import("TensorBoardLogger needs TensorBoard: pip install tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        self._open = SummaryWriter
        self._folder = str(absolute(folder))
        self._writer: Any = None
        self._names = Names(grouped)
        self._settings: Mapping[str, Any] = {}  # not written yet

    def describe(self, settings: Mapping[str, Any]) -> None:
        """Store the configuration for the first event file."""
        self._settings = settings

    def write(self, clocks: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Write one point per metric."""
        step, writer = self._at(clocks)
        points = {self._names[name]: value for name, value in metrics.items()}
        if self._settings:
            self._write_options(writer, points)
        for tag, value in points.items():
            if not math.isnan(value):
                writer.add_scalar(tag, value, step)

    def write_text(self, clocks: Mapping[str, float], name: str, text: str) -> None:
        """Write a text."""
        step, writer = self._at(clocks)
        writer.add_text(name, text, step)

    def write_histogram(self, clocks: Mapping[str, float], name: str, histogram: Histogram) -> None:
        """Write a histogram, unless it is empty."""
        step, writer = self._at(clocks)
        if len(histogram.values):
            writer.add_histogram(name, histogram.values, step)

    def write_image(self, clocks: Mapping[str, float], name: str, image: Image) -> None:
        """Write an image."""
        self._write_encoded(clocks, name, image.pixels, image.png())

    def write_video(self, clocks: Mapping[str, float], name: str, video: Video) -> None:
        """Write a video as an animated GIF, which TensorBoard plays among the images."""
        self._write_encoded(clocks, name, video.frames[0], video.gif())

    def close(self) -> None:
        """Write all pending points. Another `write` opens a new event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _at(self, clocks: Mapping[str, float]) -> tuple[int, Any]:
        """Return the x coordinate and the writer, which is opened if necessary."""
        step = self._axis.step(clocks)
        if self._writer is None:
            self._writer = self._open(self._folder, purge_step=step)
            if self._settings:
                lines = [f"    {name}: {value}" for name, value in self._settings.items()]  # a code block in Markdown
                self._writer.add_text("run", "\n".join(lines), step)
        return step, self._writer

    def _write_options(self, writer: Any, tags: Iterable[str]) -> None:
        """Write the options of the run as hyperparameters, with the returns as results, or all metrics without any."""
        named = {name: value for name, value in self._settings.items() if "." in name}
        options = {name: value for name, value in named.items() if not name.startswith(_NO_OPTIONS)}
        scalars = {name: value for name, value in options.items() if isinstance(value, bool | int | float | str)}
        self._settings = {}
        if not scalars:
            return
        from torch.utils.tensorboard.summary import hparams

        returns = [tag for tag in tags if "return" in tag]
        results = dict.fromkeys([*returns, "evaluation/return"] if returns else tags, 0.0)
        for summary in hparams(scalars, results):
            writer._get_file_writer().add_summary(summary)  # `add_hparams` would write to a second folder

    def _write_encoded(self, clocks: Mapping[str, float], name: str, pixels: Any, encoded: bytes) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        step, writer = self._at(clocks)
        height, width = pixels.shape[:2]
        channels = pixels.shape[2] if pixels.ndim == 3 else 1
        image = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=encoded)
        writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)
