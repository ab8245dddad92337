"""Progress of a run: a panel on a terminal, a bar in a notebook, plain lines elsewhere."""

from __future__ import annotations

import atexit
import collections
import html
import math
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TextIO

from rein.handlers.output import UNSOLVED, duration, ending, grouped, in_notebook, short_number, write_line
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

    A terminal shows a bar, and around it a panel with the target of `rein.solved`, the returns of the last epochs as a
    curve, the last evaluation, losses and rates. The last line shows whether the target was reached. Other files get
    a line every few seconds and one at the end. In a notebook, the default is an HTML bar in the cell's output; a saved
    notebook keeps its last state. Clocks and metrics are read only when drawing.

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
    counts: Mapping[str, float]  # values of the clock `unit`, or of those in `UNITS`
    done: float  # fraction of the run, 0 to 1; NaN if the run has no end


class _Display:
    """Decides when to draw, reads the values, and passes them to a bar or to lines."""

    def __init__(self, description: str, unit: str | None, total: float | None, file: TextIO | None) -> None:
        self._description, self._total, self._file = description, total, file
        self._units = UNITS if unit is None else (unit,)
        self._screen: _Bar | _Html | _Lines | None = None
        self._due = math.inf
        self._samples: collections.deque[_Sample] = collections.deque(maxlen=WINDOW)
        self._clocks: collections.deque[tuple[float, dict[str, int]]] = collections.deque(maxlen=WINDOW)
        self._episode_return = math.nan

    def begin(self, loop: Loop, state: State) -> None:
        """Start the display. Observer of `started`."""
        self._close()
        file = sys.stdout if self._file is None else self._file
        if self._file is None and in_notebook():
            self._screen = _Html(self._description)
        else:
            self._screen = _Bar(file, self._description) if _draws_bars(file) else _Lines(file, self._description)
        self._samples.clear()
        self._clocks.clear()
        self._episode_return = math.nan
        first = self._sample(state)
        self._screen.begin(first.done, self._text(first))

    def tick(self, loop: Loop, state: State) -> None:
        """Draw if enough time has passed. Called in every iteration, so it must be fast."""
        if time.perf_counter() >= self._due and self._screen is not None:
            sample = self._sample(state)
            self._read_return(state)
            rows = self._rows(state) if self._screen.has_rows else {}
            self._screen.draw(sample.done, f"{self._text(sample)}{self._left(sample, state)}", rows, _signalled(state))

    def end(self, loop: Loop, state: State) -> None:
        """Draw a last time and release the terminal. Observer of the final events."""
        if self._screen is None:  # a handler of `started` failed
            return
        try:
            sample = self._sample(state)
            self._read_return(state)
            self._screen.end(sample.done, self._parts(sample), ending(state), _signalled(state))
        finally:
            self._close()

    def _close(self) -> None:
        screen, self._screen, self._due = self._screen, None, math.inf
        if screen is not None:
            screen.close()

    def _sample(self, state: State) -> _Sample:
        now, counts = time.perf_counter(), {name: getattr(state.clocks, name) for name in self._units}
        done = 1.0 - state.remaining if self._total is None else min(1.0, counts[self._unit] / self._total)
        self._samples.append(_Sample(now, counts, done))
        self._due = now + (self._screen.every if self._screen is not None else 0.0)
        return self._samples[-1]

    @property
    def _unit(self) -> str:
        """The clock to show: the first of the units that has advanced."""
        if len(self._units) == 1:
            return self._units[0]
        first, last = self._samples[0].counts, self._samples[-1].counts
        return max(self._units, key=lambda name: last[name] > first[name])

    def _read_return(self, state: State) -> None:
        """Update the latest return. Early in an epoch it is NaN, because no episode has ended yet."""
        if "episode_return" in state.metrics:
            value = state.metrics["episode_return"]
            self._episode_return = self._episode_return if math.isnan(value) else value

    def _text(self, sample: _Sample) -> str:
        """Return ` 42%  12,800 env_steps  51,200/s  return -10.25`, without unknown parts."""
        return "  ".join(self._parts(sample).values())

    def _parts(self, sample: _Sample) -> dict[str, str]:
        parts = {} if math.isnan(sample.done) else {"share": f"{sample.done:4.0%}"}
        first, unit = self._samples[0], self._unit
        parts["count"] = f"{sample.counts[unit]:,.0f} {unit}"
        seconds, counted = sample.seconds - first.seconds, sample.counts[unit] - first.counts[unit]
        if counted > 0 and seconds > 0:
            parts["rate"] = f"{counted / seconds:,.{0 if counted >= 10 * seconds else 2}f}/s"
        if not math.isnan(self._episode_return):
            parts["return"] = f"return {self._episode_return:,.5g}"
        return parts

    def _left(self, sample: _Sample, state: State) -> str:
        first = self._samples[0]
        if not sample.done > first.done:
            return ""
        seconds = (sample.seconds - first.seconds) * (1.0 - sample.done) / (sample.done - first.done)
        return f"  {'< ' * _may_end_early(state)}{duration(seconds)} left"

    def _rows(self, state: State) -> dict[str, str]:
        """Return the rows of the panel: the target, and the returns, losses and rates of the last epochs."""
        rows = {"target": _target(state), "returns": _curve(state), "evaluation": _evaluation(state)}
        if state.history:
            losses = [name for name in state.history[-1].metrics if grouped(name).startswith("loss/")]
            values = {grouped(name).partition("/")[2]: _last_value(state, name) for name in losses}
            known = {short: value for short, value in values.items() if not math.isnan(value)}
            rows["loss"] = "   ".join(f"{short} {short_number(value)}" for short, value in known.items())
        rows["speed"] = "   ".join(self._rates(state))
        return {label: text for label, text in rows.items() if text}

    def _rates(self, state: State) -> Iterator[str]:
        """Yield the rates of other clocks than the one on the bar, since the first drawing in the window."""
        clocks = {name: getattr(state.clocks, name) for name in RATES if name != self._unit}
        self._clocks.append((time.perf_counter(), clocks))
        (began, first), (now, _) = self._clocks[0], self._clocks[-1]
        for name, count in clocks.items():
            if count > first[name] and now > began:
                yield f"{short_number(float(f'{(count - first[name]) / (now - began):.3g}'))} {name}/s"


def _signalled(state: State) -> bool:
    """Return whether a signal has ended the run, so that `interrupts` has written to the terminal."""
    return INTERRUPT in state.halts and str(state.reason).startswith("interrupted by")


def _may_end_early(state: State) -> bool:
    """Return whether `solved` will end the run when its target is reached."""
    return any(record["stop"] for key, record in state.memory.items() if key.startswith(UNSOLVED))


def _last_value(state: State, name: str) -> float:
    """Return the last value of a metric, which is NaN in epochs without an update; NaN if there is none."""
    values = (record.metrics.get(name, math.nan) for record in reversed(state.history))
    return next((value for value in values if not math.isnan(value)), math.nan)


def _target(state: State) -> str:
    """Return the target of `solved`, and the last value of its metric."""
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


class _Bar:
    """Bar that is drawn over itself, within a panel if there are rows. Other output is printed above it."""

    every, has_rows = BAR_SECONDS, True

    def __init__(self, file: TextIO, description: str) -> None:
        from rich.cells import cell_len
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        def text(field: str) -> TextColumn:
            return TextColumn(field, markup=False, table_column=Column(no_wrap=True))

        label = [text("{task.description}")] if description else []
        self._console = Console(file=file, force_terminal=True)
        bar = BarColumn(20)  # shrinks first in a narrow terminal
        self._progress = Progress(*label, bar, text("{task.fields[text]}"), console=self._console)
        self._task = self._progress.add_task(description, total=None, text="")
        self._live = Live(
            console=self._console,
            auto_refresh=False,  # the loop draws, not a thread
            redirect_stdout=sys.stdout.isatty(),  # a redirected stdout is left alone
            redirect_stderr=sys.stderr.isatty(),
        )
        self._length = cell_len
        self._taken = cell_len(description) + 1 if description else 0  # including a space
        self._signalled = False

    def begin(self, done: float, text: str) -> None:
        """Take over the terminal."""
        self._live.start()
        atexit.register(self.close)  # restores the cursor on any exit
        self.draw(done, text, {}, False)

    def draw(self, done: float, text: str, rows: Mapping[str, str], signalled: bool) -> None:
        """Draw the bar, and the rows if the terminal is large enough."""
        if signalled and not self._signalled:  # draw below the message, and leave the old panel as it is
            self._signalled, self._live._live_render._shape = True, None
        if not math.isnan(done):
            self._progress.update(self._task, total=1.0, completed=done)
        self._progress.update(self._task, text=text)
        width, height = self._console.size
        bar = self._progress.get_renderable()
        small = width < LEAST_COLUMNS or height < LEAST_ROWS or self._console.options.ascii_only
        self._live.update(bar if small or not rows else self._panel(bar, rows), refresh=True)

    def _panel(self, bar: Any, rows: Mapping[str, str]) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True, style="dim")
        grid.add_column(no_wrap=True, overflow="ellipsis")
        for label, text in rows.items():
            grid.add_row(label, Text(text))
        return Panel(Group(bar, grid), border_style="dim", width=min(self._console.width, MOST_COLUMNS))

    def end(self, done: float, parts: dict[str, str], ending: str, signalled: bool) -> None:
        """Draw the bar with the ending of the run, and as many other parts as fit. The panel disappears."""
        room = self._console.width - self._taken - 2  # at least one column of bar, and a space
        shown = {**parts, "ending": ending}
        for name in GOES_FIRST:
            if self._length("  ".join(shown.values())) <= room:
                break
            shown.pop(name, None)
        self.draw(done, "  ".join(shown.values()), {}, signalled)

    def close(self) -> None:
        """Release the terminal and leave the bar visible. May be called twice."""
        try:
            self._live.stop()
        finally:  # a second signal can interrupt rich at any line, and its console then writes nothing more
            self._live._disable_redirect_io()
            self._console.file.write(SHOW_CURSOR)
            self._console.file.flush()
        atexit.unregister(self.close)


class _Html:
    """An HTML bar in the output of a notebook cell, replaced at each drawing. It needs no widgets."""

    every, has_rows = BAR_SECONDS, False

    def __init__(self, description: str) -> None:
        self._label = [description] if description else []
        self._handle: Any = None

    def begin(self, done: float, text: str) -> None:
        """Add the bar to the output of the cell."""
        from IPython.display import display  # pyright: ignore[reportMissingImports]  # only in notebooks

        self._handle = display(self._bundle(done, text), raw=True, display_id=True)

    def draw(self, done: float, text: str, rows: Mapping[str, str], signalled: bool) -> None:
        """Replace the bar."""
        self._handle.update(self._bundle(done, text), raw=True)

    def end(self, done: float, parts: dict[str, str], ending: str, signalled: bool) -> None:
        """Replace the bar by its last state, which a saved notebook keeps."""
        self.draw(done, "  ".join([*parts.values(), ending]), {}, signalled)

    def close(self) -> None:
        """Do nothing: the bar stays visible."""

    def _bundle(self, done: float, text: str) -> dict[str, str]:
        """Return the bar as HTML, and as text for notebooks that are converted to text."""
        line = "  ".join([*self._label, text])
        bar = "" if math.isnan(done) else f'<progress value="{done:.4f}"></progress> '
        style = "white-space: pre-wrap; font-variant-numeric: tabular-nums"
        return {"text/plain": line, "text/html": f'{bar}<span style="{style}">{html.escape(line)}</span>'}


class _Lines:
    """Writes a line for each drawing."""

    every, has_rows = LINE_SECONDS, False

    def __init__(self, file: TextIO, description: str) -> None:
        self._file, self._label = file, [description] if description else []

    def begin(self, done: float, text: str) -> None:
        """Write nothing, because nothing has happened yet."""

    def draw(self, done: float, text: str, rows: Mapping[str, str], signalled: bool) -> None:
        """Write a line."""
        error = write_line("  ".join([*self._label, text]), self._file)
        if error is not None and not isinstance(error, BrokenPipeError):  # for example when piped to `head`
            raise error

    def end(self, done: float, parts: dict[str, str], ending: str, signalled: bool) -> None:
        """Write all parts and the ending of the run."""
        self.draw(done, "  ".join([*parts.values(), ending]), {}, signalled)

    def close(self) -> None:
        """Do nothing: the last line is already written."""


def _draws_bars(file: TextIO) -> bool:
    from rich.console import Console

    return file.isatty() and not Console(file=file, force_terminal=True).is_dumb_terminal
