"""Curves in TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rein.files import absolute
from rein.handlers.loggers.attach import Axis


class TensorBoardLogger:
    """Writes each metric as a scalar over `clock` to event files in `folder`.

    Without a `clock` it is `env_steps`, or `iterations` where no environment has been stepped at the first row.
    A metric that is NaN, as where no episode ended, has no point there. The run's configuration is the text `run`. A
    run that goes on in the same folder hides the points at and after the place where it goes on. Raises ImportError
    without TensorBoard, ValueError for no clock.
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
        """Keep the run's configuration for the first event file."""
        self._text = "\n".join(f"    {name}: {value}" for name, value in settings.items())  # code, as Markdown has it

    def write(self, clocks: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """A point for each metric."""
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
        """Write what is left; another `write` opens another event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
