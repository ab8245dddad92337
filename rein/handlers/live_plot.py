"""Draw curves of metrics in a notebook while a run continues."""

from __future__ import annotations

import base64
import io
import math
import time
from collections.abc import Sequence
from typing import Any

from rein.errors import optional_import
from rein.handlers.output import in_notebook, short_number
from rein.loop import Loop
from rein.loop.state import CLOCKS, State

COLUMNS = 3  # plots in a row
_DEFAULTS = ("episode_return", "evaluation_return")


def live_plot(
    loop: Loop,
    metrics: str | Sequence[str] = _DEFAULTS,
    *,
    clock: str = "env_steps",
    seconds: float = 2.0,
    event: str = "epoch_ended",
    **filters: Any,
) -> Any:
    """Draw a curve per metric in the output of a notebook cell, and draw again during the run.

    Example::

        figure = rein.handlers.live_plot(loop, ["episode_return", "policy_loss"])
        loop.run(epochs=100)
        figure.savefig("curves.png")

    A metric gets a plot when it first has a value. NaN is left out. Outside of a notebook, the figure is not shown.

    Args:
        loop: Loop to observe.
        metrics: Names of the metrics.
        clock: Clock of the x axis.
        seconds: Minimum time between two drawings, in seconds.
        event: Name of the event at which the metrics are read.
        **filters: Filters of the event, such as `every=10`.

    Returns:
        The `matplotlib.figure.Figure`.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If the clock is unknown, or if there are no metrics.
    """
    names = [metrics] if isinstance(metrics, str) else list(metrics)
    if clock not in CLOCKS:
        raise ValueError(f"live_plot(clock={clock!r}): unknown clock; the clocks are {', '.join(CLOCKS)}")
    if not names:
        raise ValueError("live_plot(metrics=[]): give at least one metric, such as 'episode_return'")
    with optional_import("live_plot needs matplotlib: pip install matplotlib"):
        from matplotlib.figure import Figure
    for name in names if tuple(names) != _DEFAULTS else ():
        loop.metrics.read_by(f"live_plot(metrics={metrics!r})", name)
    plot = _Plot(Figure(layout="constrained"), names, clock, seconds)
    loop.event(event)(**filters)(plot.request)
    loop.started.observe(plot.begin)
    for final in (loop.completed, loop.halted, loop.failed):
        final.observe(plot.end)
    return plot.figure


class _Plot:
    """Points of all curves, and the display that shows them."""

    def __init__(self, figure: Any, names: Sequence[str], clock: str, seconds: float) -> None:
        self.figure = figure
        self._clock, self._seconds, self._due = clock, seconds, 0.0
        self._points: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
        self._lines: dict[str, Any] = {}
        self._handle: Any = None

    def begin(self, loop: Loop, state: State) -> None:
        """Show the figure. Observer of `started`."""
        if in_notebook():
            from IPython.display import display  # pyright: ignore[reportMissingImports]  # only in notebooks

            self._handle = display(self._bundle(), raw=True, display_id=True)

    def request(self, state: State) -> None:
        """Read the metrics at the next edge, after all handlers. Handler of the event."""
        state.request(self.add)

    def add(self, state: State) -> None:
        """Add a point to each curve, and draw if enough time has passed. Runs at an edge."""
        x = getattr(state.clocks, self._clock)
        metrics = state.metrics if state.epoch_open else state.history[-1].metrics
        for name, (x_K, y_K) in self._points.items():
            if name in metrics and math.isfinite(value := metrics[name]):
                x_K.append(x)
                y_K.append(value)
        if time.perf_counter() >= self._due:
            self._draw()
            self._due = time.perf_counter() + self._seconds

    def end(self, loop: Loop, state: State) -> None:
        """Draw all points. Observer of the final events."""
        self._draw()

    def _draw(self) -> None:
        shown = [name for name, (x_K, _) in self._points.items() if x_K]
        if list(self._lines) != shown:
            self._arrange(shown)
        for name, line in self._lines.items():
            line.set_data(*self._points[name])
            line.axes.relim()
            line.axes.autoscale_view()
            line.axes.set_title(f"{name}   {short_number(self._points[name][1][-1])}", loc="left")
        if self._handle is not None:
            self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        """Return the figure as a PNG image. Notebooks show figures only if pyplot was imported."""
        file = io.BytesIO()
        self.figure.savefig(file, format="png", dpi=80)
        return {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": repr(self.figure)}

    def _arrange(self, names: Sequence[str]) -> None:
        """Create a plot per metric."""
        self.figure.clear()
        columns = min(COLUMNS, len(names))
        rows = -(-len(names) // columns)
        self.figure.set_size_inches(4 * columns + 1, 2.8 * rows)
        self._lines = {}
        for number, name in enumerate(names, 1):
            axes = self.figure.add_subplot(rows, columns, number)
            axes.set_xlabel(self._clock.replace("_", " "))
            axes.grid(alpha=0.3)
            (self._lines[name],) = axes.plot([], [], linewidth=1.2)
