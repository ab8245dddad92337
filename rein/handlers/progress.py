"""Progress of a run: a panel on a terminal, a bar in a notebook, plain lines elsewhere."""

from __future__ import annotations

import atexit
import collections
import html
import math
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, TextIO

from rein.handlers.output import (
    UNSOLVED,
    duration,
    ending,
    grouped,
    in_notebook,
    rate,
    short_number,
    write_line,
)
from rein.loop import Loop
from rein.loop.state import CLOCKS, INTERRUPT, State

BAR_SECONDS = 0.5  # between two drawings of the bar or the panel, each of which takes about 4 ms
LINE_SECONDS = 5.0  # between two plain lines
WINDOW = 100  # number of drawings over which the rate is computed
CURVE = 40  # number of epochs in the curve of returns
LEAST_COLUMNS, LEAST_ROWS = 60, 12  # smallest terminal with a panel
MOST_COLUMNS = 100  # of the panel
UNITS = ("env_steps", "iterations")  # by default, the first of these clocks that advances is shown
RATES = ("env_steps", "updates", "episodes")  # clocks whose rates the panel shows
BLOCKS = "▁▂▃▄▅▆▇█"
SHOW_CURSOR = "\x1b[?25h"
GOES_FIRST = ("rate", "share", "return", "count")  # parts dropped first in a narrow terminal


def progress(
    loop: Loop,
    *,
    description: str = "",
    unit: str | None = None,
    total: float | None = None,
    file: TextIO | None = None,
) -> None:
    """Show the progress of a run on `file`, with its rate, the latest `episode_return` and the time left.

    A terminal shows a bar, and around it a panel with the target of `rein.record_solved`, the returns of the last
    epochs as a curve, the last evaluation, losses and rates. The last line shows whether the target was reached. Other
    files get a line every few seconds and one at the end. In a notebook, the default is an HTML bar in the cell's
    output; a saved notebook keeps its last state. Clocks and metrics are read only when drawing.

    Args:
        loop: Loop to observe.
        description: Text in front of the progress.
        unit: Name of the clock that measures the progress. Default: `env_steps`, or without `total` and environments
            `iterations`.
        total: Value of the clock at the end. Default: the epochs of the run or the limits of `stop_at`, see
            `State.remaining`.
        file: Open text file. Default: standard output.

    Raises:
        ValueError: If the clock is unknown, or if `total` is not above 0.
    """
    if unit not in (None, *CLOCKS):
        raise ValueError(f"progress(unit={unit!r}): unknown clock; the clocks are {', '.join(CLOCKS)}")
    unit = "env_steps" if unit is None and total is not None else unit
    if total is not None and not total > 0:
        raise ValueError(
            f"progress(total={total!r}): expected a number of {unit} above 0, or None for the epochs of the run"
        )
    display = _Display(description, unit, total, file)
    loop.started.observe(display.begin)
    loop.iteration_completed.observe(display.tick)
    for event in (loop.completed, loop.halted, loop.failed):
        event.observe(display.end)


def is_interactive() -> bool:
    """Return whether standard output is a terminal or the output of a notebook."""
    return in_notebook() or (sys.stdout is not None and sys.stdout.isatty())


class _Sample(NamedTuple):
    """Values read for one drawing."""

    seconds: float
    counts: Mapping[str, float]  # values of the clocks that are shown
    done: float  # fraction of the run, 0 to 1; NaN if the run has no end


class _Display:
    """Decides when to draw, reads the values, and passes them to a bar or to lines."""

    def __init__(self, description: str, unit: str | None, total: float | None, file: TextIO | None) -> None:
        self._description = description
        self._total = total
        self._file = file
        self._units = UNITS if unit is None else (unit,)
        self._screen: _Lines | None = None
        self._due = math.inf
        self._samples: collections.deque[_Sample] = collections.deque(maxlen=WINDOW)
        self._episode_return = math.nan

    def begin(self, loop: Loop, state: State) -> None:
        """Start the display. Observer of `started`."""
        self._close()
        file = sys.stdout if self._file is None else self._file
        if self._file is None and in_notebook():
            kind: type[_Lines] = _Html
        else:
            kind = _Bar if _draws_bars(file) else _Lines
        self._screen = kind(file, self._description)
        self._samples.clear()
        self._episode_return = math.nan
        self._sample(state, self._screen)
        self._screen.begin(self._samples[-1].done, "  ".join(self._parts().values()))

    def tick(self, loop: Loop, state: State) -> None:
        """Draw if enough time has passed. Called in every iteration, so it must be fast."""
        if time.perf_counter() >= self._due and (screen := self._screen) is not None:
            self._sample(state, screen)
            parts = {**self._parts(), "left": self._left(state)}
            rows = self._rows(state) if screen.has_rows else {}
            screen.draw(self._samples[-1].done, "  ".join(filter(None, parts.values())), rows, _signalled(state))

    def end(self, loop: Loop, state: State) -> None:
        """Draw a last time and release the terminal. Observer of the final events."""
        if self._screen is None:  # a handler of `started` failed
            return
        try:
            self._sample(state, self._screen)
            self._screen.end(self._samples[-1].done, {**self._parts(), "ending": ending(state)}, _signalled(state))
        finally:
            self._close()

    def _close(self) -> None:
        screen, self._screen, self._due = self._screen, None, math.inf
        if screen is not None:
            screen.close()

    def _sample(self, state: State, screen: _Lines) -> None:
        """Read the clocks, and the latest return: early in an epoch it is NaN, because no episode has ended yet."""
        now = time.perf_counter()
        counts = {name: getattr(state.clocks, name) for name in dict.fromkeys((*self._units, *RATES))}
        done = 1.0 - state.remaining if self._total is None else min(1.0, counts[self._units[0]] / self._total)
        if self._samples and not math.isnan(value := state.metrics.get("episode_return", math.nan)):
            self._episode_return = value
        self._samples.append(_Sample(now, counts, done))
        self._due = now + screen.every

    @property
    def _unit(self) -> str:
        """The clock to show: the first of the units that has advanced."""
        first, last = self._samples[0].counts, self._samples[-1].counts
        return max(self._units, key=lambda name: last[name] > first[name])

    def _rate(self, name: str) -> float:
        """Return the steps of a clock per second since the first drawing in the window; NaN if it has not advanced."""
        first, last = self._samples[0], self._samples[-1]
        return rate(last.counts[name] - first.counts[name] or math.nan, last.seconds - first.seconds)

    def _parts(self) -> dict[str, str]:
        """Return ` 42%`, `12,800 env_steps`, `51,200/s` and `return -10.25` by name, without unknown parts."""
        sample, unit = self._samples[-1], self._unit
        parts = {} if math.isnan(sample.done) else {"share": f"{sample.done:4.0%}"}
        parts["count"] = f"{sample.counts[unit]:,.0f} {unit}"
        if not math.isnan(speed := self._rate(unit)):
            parts["rate"] = f"{speed:,.{0 if speed >= 10 else 2}f}/s"
        if not math.isnan(self._episode_return):
            parts["return"] = f"return {self._episode_return:,.5g}"
        return parts

    def _left(self, state: State) -> str:
        first, last = self._samples[0], self._samples[-1]
        if not last.done > first.done:
            return ""
        seconds = (last.seconds - first.seconds) * (1.0 - last.done) / (last.done - first.done)
        # `record_solved` ends the run earlier if its target is reached
        ends_early = any(record["stop"] for key, record in state.memory.items() if key.startswith(UNSOLVED))
        return f"{'< ' * ends_early}{duration(seconds)} left"

    def _rows(self, state: State) -> dict[str, str]:
        """Return the rows of the panel: the target, and the returns, losses and rates of the last epochs."""
        rows = {"target": _target(state), "returns": _curve(state), "evaluation": _evaluation(state)}
        if state.history:
            losses = [name for name in state.history[-1].metrics if grouped(name).startswith("loss/")]
            rows["loss"] = _joined({grouped(name).partition("/")[2]: _last_value(state, name) for name in losses})
        rates = {f"{name}/s": float(f"{self._rate(name):.3g}") for name in RATES if name != self._unit}
        rows["speed"] = _joined(rates, number_first=True)
        return {label: text for label, text in rows.items() if text}


def _joined(values: Mapping[str, float], *, number_first: bool = False) -> str:
    """Return names and numbers on one line, without NaN."""
    pairs = [(name, short_number(value)) for name, value in values.items() if not math.isnan(value)]
    return "   ".join(" ".join(reversed(pair) if number_first else pair) for pair in pairs)


def _signalled(state: State) -> bool:
    """Return whether a signal has ended the run, so that `interrupts` has written to the terminal."""
    return INTERRUPT in state.halts and str(state.reason).startswith("interrupted by")


def _last_value(state: State, name: str) -> float:
    """Return the last value of a metric, which is NaN in epochs without an update; NaN if there is none."""
    values = (record.metrics.get(name, math.nan) for record in reversed(state.history))
    return next((value for value in values if not math.isnan(value)), math.nan)


def _target(state: State) -> str:
    """Return the target of `record_solved`, and the last value of its metric."""
    records = [state.memory["solved"]] if "solved" in state.memory else []
    records += [record for key, record in state.memory.items() if key.startswith(UNSOLVED)]
    if not records:
        return ""
    rule = records[0]
    value = _last_value(state, rule["metric"])
    reached = "reached" if "solved" in state.memory else f"now {short_number(value)}" * (not math.isnan(value))
    return f"{rule['metric']} ≥ {short_number(rule['at_least'])}   {reached}".rstrip()


def _curve(state: State) -> str:
    """Return the mean returns of the last epochs as blocks, with the smallest and the largest."""
    last = list(state.history)[-CURVE:]
    values = [value for record in last if not math.isnan(value := record.metrics.get("episode_return", math.nan))]
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return ""
    low, high = min(values), max(values)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    blocks = "".join(BLOCKS[round((value - low) * scale)] for value in values)
    return f"{blocks}   {short_number(low)} to {short_number(high)}"


def _evaluation(state: State) -> str:
    """Return the mean and the spread of the last evaluation."""
    if (last := state.memory.get("evaluations")) is None:
        return ""
    spread = f" ± {short_number(last['return_std'])}" if last["return_std"] else ""
    return f"{short_number(last['return'])}{spread}   {last['episodes']} episodes"


class _Lines:
    """Writes a line for each drawing. Base class of displays that draw over themselves."""

    every = LINE_SECONDS
    has_rows = False

    def __init__(self, file: TextIO, description: str) -> None:
        self._file = file
        self._description = description

    def begin(self, done: float, text: str) -> None:
        """Write nothing, because nothing has happened yet."""

    def draw(self, done: float, text: str, rows: Mapping[str, str], signalled: bool) -> None:
        """Write a line."""
        error = write_line(self._line(text), self._file)
        if error is not None and not isinstance(error, BrokenPipeError):  # for example when piped to `head`
            raise error

    def end(self, done: float, parts: dict[str, str], signalled: bool) -> None:
        """Show all parts, which include the ending of the run."""
        self.draw(done, "  ".join(parts.values()), {}, signalled)

    def close(self) -> None:
        """Do nothing: the last line stays visible."""

    def _line(self, text: str) -> str:
        return "  ".join(filter(None, [self._description, text]))


class _Html(_Lines):
    """An HTML bar in the output of a notebook cell, replaced at each drawing. It needs no widgets."""

    every = BAR_SECONDS

    def begin(self, done: float, text: str) -> None:
        """Add the bar to the output of the cell."""
        from IPython.display import display  # pyright: ignore[reportMissingImports]  # only in notebooks

        self._handle: Any = display(self._bundle(done, text), raw=True, display_id=True)

    def draw(self, done: float, text: str, rows: Mapping[str, str], signalled: bool) -> None:
        """Replace the bar. A saved notebook keeps the last one."""
        self._handle.update(self._bundle(done, text), raw=True)

    def _bundle(self, done: float, text: str) -> dict[str, str]:
        """Return the bar as HTML, and as text for notebooks that are converted to text."""
        line = self._line(text)
        bar = "" if math.isnan(done) else f'<progress value="{done:.4f}"></progress> '
        style = "white-space: pre-wrap; font-variant-numeric: tabular-nums"
        return {"text/plain": line, "text/html": f'{bar}<span style="{style}">{html.escape(line)}</span>'}


class _Bar(_Lines):
    """Bar that is drawn over itself, within a panel if there are rows. Other output is printed above it."""

    every = BAR_SECONDS
    has_rows = True

    def __init__(self, file: TextIO, description: str) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        super().__init__(file, description)
        label, text = (
            TextColumn(field, markup=False, table_column=Column(no_wrap=True))
            for field in ("{task.description}", "{task.fields[text]}")
        )
        self._console = Console(file=file, force_terminal=True)
        columns = [*[label] * bool(description), BarColumn(20), text]  # the bar shrinks first in a narrow terminal
        self._progress = Progress(*columns, console=self._console)
        self._task = self._progress.add_task(description, total=None, text="")
        self._live = Live(
            console=self._console,
            auto_refresh=False,  # the loop draws, not a thread
            redirect_stdout=sys.stdout.isatty(),  # a redirected stdout is left alone
            redirect_stderr=sys.stderr.isatty(),
        )
        self._signalled = False

    def begin(self, done: float, text: str) -> None:
        """Take over the terminal."""
        self._live.start()
        atexit.register(self.close)  # restores the cursor on any exit
        self.draw(done, text, {}, False)

    def draw(self, done: float, text: str, rows: Mapping[str, str], signalled: bool) -> None:
        """Draw the bar, and the rows if the terminal is large enough."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        if signalled and not self._signalled:  # draw below the message, and leave the old panel as it is
            self._signalled = True
            self._live._live_render._shape = None
        if not math.isnan(done):
            self._progress.update(self._task, total=1.0, completed=done)
        self._progress.update(self._task, text=text)
        width, height = self._console.size
        drawing: Any = self._progress.get_renderable()
        if rows and width >= LEAST_COLUMNS and height >= LEAST_ROWS and not self._console.options.ascii_only:
            grid = Table.grid(padding=(0, 2))
            grid.add_column(no_wrap=True, style="dim")
            grid.add_column(no_wrap=True, overflow="ellipsis")
            for label, row in rows.items():
                grid.add_row(label, Text(row))
            drawing = Panel(Group(drawing, grid), border_style="dim", width=min(width, MOST_COLUMNS))
        self._live.update(drawing, refresh=True)

    def end(self, done: float, parts: dict[str, str], signalled: bool) -> None:
        """Draw the bar with the ending of the run, and as many other parts as fit. The panel disappears."""
        from rich.cells import cell_len

        label = cell_len(self._description) + 1 if self._description else 0  # including a space
        room = self._console.width - label - 2  # at least one column of bar, and a space
        for name in GOES_FIRST:
            if cell_len("  ".join(parts.values())) > room:
                parts.pop(name, None)
        super().end(done, parts, signalled)

    def close(self) -> None:
        """Release the terminal and leave the bar visible. May be called twice."""
        try:
            self._live.stop()
        finally:  # a second signal can interrupt rich at any line, and its console then writes nothing more
            self._live._disable_redirect_io()
            self._console.file.write(SHOW_CURSOR)
            self._console.file.flush()
        atexit.unregister(self.close)


def _draws_bars(file: TextIO) -> bool:
    from rich.console import Console

    return file.isatty() and not Console(file=file, force_terminal=True).is_dumb_terminal
