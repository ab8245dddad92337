from __future__ import annotations

import io
import math
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import rein
from rein.handlers.progress import BAR_SECONDS, LINE_SECONDS, progress
from rein.loop import Loop
from rein.loop.state import CLOCKS, State

module = sys.modules["rein.handlers.progress"]
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Terminal(io.StringIO):
    """File that rich treats as a terminal."""

    def isatty(self) -> bool:
        return True


class Number:
    """Number on a device that counts how often it is fetched."""

    def __init__(self, value: float) -> None:
        self.value, self.fetched = value, 0

    def __float__(self) -> float:
        self.fetched += 1
        return float(self.value)

    def __int__(self) -> int:
        self.fetched += 1
        return int(self.value)


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "JUPYTER_COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Clock of the display, controlled by the test."""
    watch = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: watch.now))
    return watch


@pytest.fixture
def slow_step(watch: SimpleNamespace) -> Callable[[State], None]:
    """Step that takes one second on the display's clock and advances 10 env_steps."""

    def step(state: State) -> None:
        watch.now += 1.0
        state.clocks.advance(env_steps=10)

    return step


def drawn(terminal: Terminal) -> list[str]:
    """Return the bar as drawn each time, without colors and cursor movements."""
    frames = re.split(r"\r(?:\x1b\[2K)?", terminal.getvalue())
    return [text for frame in frames if (text := re.sub(r"\x1b\[[?\d;]*\w", "", frame).strip())]


def test_piped_output_is_lines_and_a_last_line(slow_step: Callable[[State], None]) -> None:
    file = io.StringIO()
    loop = Loop(slow_step, iterations=23)
    progress(loop, description="taxi", file=file)
    loop.run()
    lines = file.getvalue().splitlines()
    assert [line.split("  ")[2] for line in lines] == [
        "50 env_steps",
        "100 env_steps",
        "150 env_steps",
        "200 env_steps",
        "230 env_steps",
    ]
    assert lines[0] == "taxi   22%  50 env_steps  10/s  0:18 left"
    assert re.fullmatch(r"taxi  100%  230 env_steps  10/s  completed after \d+:\d\d", lines[-1])
    assert LINE_SECONDS == 5


def test_short_piped_run_writes_only_the_last_line() -> None:
    file = io.StringIO()
    loop = Loop(lambda state: None, iterations=100)
    progress(loop, unit="iterations", file=file)
    loop.run()
    assert len(file.getvalue().splitlines()) == 1


@pytest.mark.parametrize(
    ("file", "seconds"), [(io.StringIO(), LINE_SECONDS), (Terminal(), BAR_SECONDS)], ids=["piped", "terminal"]
)
def test_metrics_and_clocks_are_read_only_when_drawing(
    file: io.StringIO, seconds: float, watch: SimpleNamespace
) -> None:
    env_steps, episode_return = Number(0), Number(-10.25)

    def step(state: State) -> None:
        watch.now += seconds / 10
        env_steps.value += 8
        state.clocks.env_steps = env_steps  # type: ignore[assignment]  # counts reads

    loop = Loop(step, iterations=1000)
    loop.metrics.compute("episode_return", lambda: episode_return)
    progress(loop, file=file)
    loop.run()
    for number in (env_steps, episode_return):
        assert 90 <= number.fetched <= 102  # every tenth iteration, the first and the last


@pytest.mark.parametrize("env_steps", [0, 50_000])
def test_loop_without_environments_shows_iterations(watch: SimpleNamespace, env_steps: int) -> None:
    def step(state: State) -> None:
        watch.now += 1.0

    file, loop = io.StringIO(), Loop(step, iterations=12)
    loop.started.wire(lambda state: state.clocks.advance(env_steps=env_steps))  # of an agent that has trained before
    progress(loop, file=file)
    loop.run()
    assert file.getvalue().splitlines()[0] == " 42%  5 iterations  1.00/s  0:07 left"


def test_time_left_is_an_upper_bound_if_the_run_may_be_solved_earlier(slow_step: Callable[[State], None]) -> None:
    file, loop = io.StringIO(), Loop(slow_step, epochs=10, iterations=1)
    loop.metric("score", lambda state: float(state.epoch))
    rein.record_solved(loop, "score", at_least=8)
    rein.record_solved(loop, "score", at_least=100, stop=False)
    progress(loop, file=file)
    loop.run()
    assert file.getvalue().splitlines()[0].endswith("10/s  < 0:05 left")


def test_latest_return_is_shown(slow_step: Callable[[State], None]) -> None:
    """Until an episode ends in the new epoch, this is the return of the previous epoch."""
    file = io.StringIO()
    loop = Loop(slow_step, epochs=2, iterations=10)
    loop.metric("episode_return", lambda state: 7.5 if state.epoch == 1 else math.nan)
    progress(loop, file=file)
    loop.run()
    assert len(file.getvalue().splitlines()) == 5
    assert all("return 7.5" in line for line in file.getvalue().splitlines())


def test_total_determines_fraction_and_time_left(slow_step: Callable[[State], None]) -> None:
    file = io.StringIO()
    loop = Loop(slow_step, epochs=None, iterations=4)
    loop.iteration_completed(once=30)(lambda state: state.halt_loop("that will do"))
    progress(loop, total=200, file=file)
    loop.run()
    lines = file.getvalue().splitlines()
    assert lines[0] == " 25%  50 env_steps  10/s  0:15 left"
    assert re.fullmatch(r"100%  300 env_steps  10/s  halted after \d+:\d\d: that will do", lines[-1])


@pytest.mark.parametrize(
    ("iterations", "left"),
    [(23, "0:18"), (86_404, "23:59:59"), (86_405, "1 d 00:00:00"), (604_805, "7 d 00:00:00"), (90_066, "1 d 01:01:01")],
)
def test_time_left_of_long_runs_is_in_days(slow_step: Callable[[State], None], iterations: int, left: str) -> None:
    file = io.StringIO()
    loop = Loop(slow_step, iterations=iterations)
    progress(loop, file=file)
    loop.iteration_completed(once=6)(lambda state: state.halt_loop())
    loop.run()
    assert file.getvalue().splitlines()[0].endswith(f"  {left} left")


def test_endless_run_shows_no_fraction_or_time_left(slow_step: Callable[[State], None]) -> None:
    file = io.StringIO()
    loop = Loop(slow_step, epochs=None, iterations=4)
    loop.iteration_completed(once=7)(lambda state: state.halt_loop())
    progress(loop, file=file)
    loop.run()
    assert file.getvalue().splitlines()[0] == "50 env_steps  10/s"


def test_time_left_of_a_resumed_run_uses_its_current_speed(slow_step: Callable[[State], None]) -> None:
    first, file = Loop(slow_step, epochs=90, iterations=1), io.StringIO()
    first.run()
    second = Loop(slow_step, epochs=100, iterations=1)
    second.load_state_dict(first.state_dict())
    progress(second, file=file)
    second.run()
    assert file.getvalue().splitlines()[0] == " 95%  950 env_steps  10/s  0:05 left"


def test_terminal_shows_one_bar_drawn_over_itself(slow_step: Callable[[State], None]) -> None:
    terminal = Terminal()
    loop = Loop(slow_step, iterations=10)
    loop.metric("episode_return", lambda state: -10.25)
    progress(loop, description="taxi [16]", file=terminal)
    loop.run()
    frames = drawn(terminal)
    assert frames[0].startswith("taxi [16] ━")
    assert any(re.search(r"━ +50%  50 env_steps  10/s  return -10.25  0:05 left", frame) for frame in frames)
    assert re.search(r"100%  100 env_steps  10/s  return -10.25  completed after 0:\d\d", frames[-1])
    assert terminal.getvalue().count("\n") == 1  # later output begins below the bar


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ("40", r"halted after 0:\d\d: solved"),
        ("60", r"100 env_steps  halted after 0:\d\d: solved"),
        ("70", r"100 env_steps  return -13.656  halted after 0:\d\d: solved"),
        ("75", r"  5%  100 env_steps  return -13.656  halted after 0:\d\d: solved"),
        ("80", r"  5%  100 env_steps  10/s  return -13.656  halted after 0:\d\d: solved"),
    ],
)
def test_narrow_terminal_keeps_description_and_ending(
    columns: str, expected: str, slow_step: Callable[[State], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    terminal = Terminal()
    loop = Loop(slow_step, iterations=20)
    loop.metric("episode_return", lambda state: -13.656)
    loop.iteration_completed(once=10)(lambda state: state.halt_loop("solved"))
    progress(loop, description="gridworld", total=2_000, file=terminal)
    loop.run()
    assert re.fullmatch(rf"gridworld [━╺╸]+ {expected}", drawn(terminal)[-1])


def test_broken_pipe_is_ignored_silently(caplog: pytest.LogCaptureFixture) -> None:
    class Unread(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    loop = Loop(lambda state: None, iterations=10)
    progress(loop, file=Unread())
    assert loop.run().status == "completed"
    assert caplog.text == ""


def test_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    loop = Loop(lambda state: None, iterations=3)
    progress(loop, file=terminal)
    loop.run()
    assert "\x1b" not in terminal.getvalue()
    assert len(terminal.getvalue().splitlines()) == 1


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("act", "error", "ending"),
    [
        (lambda state: None, None, r"completed after 0:\d\d"),
        (lambda state: state.halt_loop("enough"), None, r"halted after 0:\d\d: enough"),
        (lambda state: _raise(RuntimeError("boom")), RuntimeError, r"failed after 0:\d\d"),
        (lambda state: _raise(KeyboardInterrupt()), KeyboardInterrupt, r"failed after 0:\d\d"),
    ],
    ids=["completed", "halted", "failed", "ctrl-c"],
)
def test_terminal_is_restored_after_any_ending(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[State], None], error: type[BaseException] | None, ending: str
) -> None:
    terminal, errors = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", errors)
    loop = Loop(lambda state: None, iterations=10)
    loop.iteration_completed(once=5)(act)
    loop.started(lambda state: print("a line above the bar"))
    loop.iteration_completed(once=2)(lambda state: print("another line above the bar"))
    progress(loop)
    if error is None:
        loop.run()
    else:
        with pytest.raises(error):
            loop.run()
    assert sys.stdout is terminal
    assert sys.stderr is errors
    written = terminal.getvalue()
    assert written.count(HIDE_CURSOR) == 1
    assert written.endswith(SHOW_CURSOR)
    assert re.search(rf"  {ending}$", drawn(terminal)[-1])
    assert "another line above the bar\n" in written


@pytest.mark.parametrize(
    "where", ["console.Console._check_buffer", "console.Console._exit_buffer", "console.Console.clear_live"]
)
def test_second_signal_while_the_display_ends_restores_the_terminal(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    loop = Loop(lambda state: None, iterations=10)
    progress(loop)

    @loop.completed
    def receive_signal(state: State) -> None:
        monkeypatch.setattr(f"rich.{where}", lambda interrupted: _raise(KeyboardInterrupt()))

    with pytest.raises(KeyboardInterrupt):
        loop.run()
    written = terminal.getvalue()
    assert written.rfind(SHOW_CURSOR) > written.rfind(HIDE_CURSOR) >= 0
    assert sys.stdout is terminal


def test_display_accepts_a_clock_that_does_not_advance(watch: SimpleNamespace) -> None:
    file, terminal = io.StringIO(), Terminal()
    loop = Loop(lambda state: state.clocks.advance(env_steps=10, updates=1), iterations=3, epochs=2)
    progress(loop, file=file)
    progress(loop, file=terminal)
    loop.run()
    assert "60 env_steps" in file.getvalue() and "/s" not in file.getvalue()


def test_terminal_is_restored_if_started_fails() -> None:
    terminal = Terminal()
    loop = Loop(lambda state: None, iterations=10)
    loop.started(lambda state: _raise(RuntimeError("boom")))
    progress(loop, file=terminal)
    with pytest.raises(RuntimeError):
        loop.run()
    assert terminal.getvalue().endswith(SHOW_CURSOR)
    assert "failed" in drawn(terminal)[-1]


def test_each_run_has_a_bar() -> None:
    terminal = Terminal()
    loop = Loop(lambda state: None, iterations=10)
    progress(loop, unit="iterations", file=terminal)
    for epochs in (1, 2, 3):
        loop.run(epochs=epochs)
    written = terminal.getvalue()
    assert written.count(HIDE_CURSOR) == 3 and written.endswith(SHOW_CURSOR)
    assert [f"{n} iterations" in written for n in (10, 20, 30)] == [True] * 3


def test_rate_excludes_time_between_runs(watch: SimpleNamespace, slow_step: Callable[[State], None]) -> None:
    file = io.StringIO()
    loop = Loop(slow_step, iterations=3)
    progress(loop, file=file)
    for epochs in (1, 2):
        loop.run(epochs=epochs)
        watch.now += 1000
    assert [line.split("  ")[2] for line in file.getvalue().splitlines()] == ["10/s"] * 2


def test_redirected_stdout_is_not_printed_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, printed = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", printed)
    loop = Loop(lambda state: None, iterations=10)
    loop.iteration_completed(once=2)(lambda state: print("a line"))
    progress(loop, file=terminal)
    loop.run()
    assert printed.getvalue() == "a line\n"
    assert "a line" not in terminal.getvalue()


def comparable(loop: Loop) -> dict[str, Any]:
    """Return the state of a loop without times."""
    saved = loop.state_dict()
    for record in saved["history"]:
        record["seconds"] = 0.0
    return {**saved, "times": None, "epoch_began": None, "clocks": {**saved["clocks"], "seconds": 0.0}}


@pytest.mark.parametrize("file", [io.StringIO(), Terminal()], ids=["piped", "terminal"])
def test_progress_does_not_affect_the_run(file: io.StringIO, slow_step: Callable[[State], None]) -> None:
    watched, alone = (Loop(slow_step, epochs=3, iterations=7) for _ in range(2))
    progress(watched, file=file)
    watched.run()
    alone.run()
    assert file.getvalue()
    assert comparable(watched) == comparable(alone)


def test_write_error_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("no space left on device")

    loop = Loop(lambda state: None, iterations=10)
    progress(loop, file=Full())
    assert loop.run().status == "completed"
    assert "is disconnected" in caplog.text


def test_unknown_clock_and_zero_total_raise() -> None:
    loop = Loop(lambda state: None)
    with pytest.raises(ValueError, match="unknown clock") as error:
        progress(loop, unit="steps")
    assert all(clock in str(error.value) for clock in CLOCKS)
    with pytest.raises(ValueError, match="expected a number of env_steps above 0"):
        progress(loop, total=0)
    assert not any(event.calls for event in loop.events.values())


def test_rich_is_imported_only_when_a_run_starts() -> None:
    program = "import sys, rein.handlers.progress; sys.exit('rich.progress' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """Stand-in for the kernel of a notebook: the states of each display."""
    displays: list[list[dict[str, str]]] = []

    class Handle:
        def __init__(self, states: list[dict[str, str]]) -> None:
            self.states = states

        def update(self, bundle: dict[str, str], raw: bool) -> None:
            self.states.append(bundle)

    def display(bundle: dict[str, str], raw: bool, display_id: bool) -> Handle:
        displays.append([bundle])
        return Handle(displays[-1])

    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    return displays


def test_notebook_shows_one_html_bar_per_run(
    notebook: list[list[dict[str, str]]], slow_step: Callable[[State], None], capsys: pytest.CaptureFixture[str]
) -> None:
    loop = Loop(slow_step, iterations=10)
    loop.metric("episode_return", lambda state: -10.25)
    progress(loop, description="a < b")
    loop.run()
    loop.run(epochs=2)
    first, _ = notebook
    line = "a &lt; b   50%  50 env_steps  10/s  return -10.25  0:05 left</span>"
    assert any(state["text/html"].endswith(line) for state in first)
    assert first[-1]["text/html"].startswith('<progress value="1.0000"></progress> ')
    ending = r"a < b  100%  100 env_steps  10/s  return -10.25  completed after \d+:\d\d"
    assert re.fullmatch(ending, first[-1]["text/plain"])
    assert capsys.readouterr().out == ""


def test_notebook_shows_text_without_a_bar_for_an_endless_run(
    notebook: list[list[dict[str, str]]], slow_step: Callable[[State], None]
) -> None:
    loop = Loop(slow_step, epochs=None, iterations=4)
    loop.iteration_completed(once=7)(lambda state: state.halt_loop())
    progress(loop)
    loop.run()
    assert notebook[0][-1]["text/html"].startswith("<span")


def test_file_receives_lines_in_a_notebook_too(
    notebook: list[list[dict[str, str]]], slow_step: Callable[[State], None]
) -> None:
    file = io.StringIO()
    loop = Loop(slow_step, iterations=10)
    progress(loop, file=file)
    loop.run()
    assert notebook == []
    assert "100%" in file.getvalue()


def test_train_shows_the_bar_in_a_notebook(notebook: list[list[dict[str, str]]]) -> None:
    environment = rein.envs.Gridworld(4, seed=0)
    rein.train(rein.QLearning(environment, seed=0), environment, epochs=1, iterations=10)
    assert len(notebook) == 1
