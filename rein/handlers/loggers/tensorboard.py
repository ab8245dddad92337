"""Log metrics to TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rein.files import absolute
from rein.handlers.loggers.attach import Axis


class TensorBoardLogger:
    """Write each metric as a scalar to TensorBoard event files in `folder`.

    The default `clock` of the x axis is `env_steps`, or `iterations` if no environment has been stepped at the first
    row. NaN is not written. The configuration of the run is the text `run`. A run that continues in the same folder
    hides later points of the earlier run.

    Raises ImportError if TensorBoard is not installed, and ValueError if the clock is unknown.
    """

    def __init__(self, folder: str | Path, *, clock: str | None = None) -> None:
        self._axis = Axis("TensorBoardLogger", clock)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(f"TensorBoardLogger needs TensorBoard: pip install tensorboard ({error})") from error
        self._open = SummaryWriter
        self._folder = str(absolute(folder))
        self._writer: Any = None
        self._text: str | None = None

    def describe(self, settings: Mapping[str, Any]) -> None:
        """Store the configuration for the first event file."""
        self._text = "\n".join(f"    {name}: {value}" for name, value in settings.items())  # a code block in Markdown

    def write(self, clocks: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Write one point per metric."""
        step = self._axis.step(clocks)
        if self._writer is None:
            self._writer = self._open(self._folder, purge_step=step)
            if self._text is not None:
                self._writer.add_text("run", self._text, step)
                self._text = None
        for name, value in metrics.items():
            if not math.isnan(value):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write all pending points. Another `write` opens a new event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
