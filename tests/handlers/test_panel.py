"""The panel of `progress` on a real pseudo-terminal, and its rows."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import rein
from rein.handlers.progress import _curve, _Display, _evaluation, _Lines, _target

fcntl, pty, termios = (pytest.importorskip(name) for name in ("fcntl", "pty", "termios"))  # not on Windows

PROGRAM = """
import os, sys
import rein

loop = rein.Loop(lambda state: state.clocks.advance(env_steps=10), epochs=6, iterations=2)
loop.metric("episode_return", lambda state: float(state.epoch))
loop.metric("policy_loss", lambda state: 0.25)
rein.record_solved(loop, "episode_return", at_least=10)
rein.handlers.interrupts(loop)
rein.progress(loop, description="task")
sys.modules["rein.handlers.progress"]._Bar.every = 0.0  # draw in each iteration

@loop.epoch_started(once=5)
def wait(state):
    os.write(int(sys.argv[1]), b"r")
    os.read(int(sys.argv[2]), 1)

loop.run()
print("after the run")
"""


class Terminal:
    """Program on a pseudo-terminal. `screen()` returns the lines that a terminal of its width would show."""

    def __init__(self, columns: int) -> None:
        self.columns, self.text = columns, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._leader, follower = pty.openpty()
        self.resize(columns)
        ready, child_ready = os.pipe()
        child_go, self._go = os.pipe()
        command = [sys.executable, "-c", PROGRAM, str(child_ready), str(child_go)]
        environment = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self.process = subprocess.Popen(
            command,
            stdin=follower,
            stdout=follower,
            stderr=follower,
            pass_fds=(child_ready, child_go),
            env={**environment, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for descriptor in (follower, child_ready, child_go):
            os.close(descriptor)
        assert os.read(ready, 1) == b"r"
        os.close(ready)
        self.read_until(r"80 env_steps[\s\S]*╯" if columns >= 60 else "80 env_steps")  # the drawing before the wait

    def resize(self, columns: int) -> None:
        self.columns = columns
        fcntl.ioctl(self._leader, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))

    def read_until(self, pattern: str) -> None:
        """Read until the pattern occurs in the text, or to the end of the program."""
        with contextlib.suppress(OSError):  # the program has ended
            while not re.search(pattern, self.text) and (data := os.read(self._leader, 65536)):
                self.text += self._decoder.decode(data)

    def finish(self) -> int:
        """Let the program continue, and return its exit status."""
        os.write(self._go, b"g")
        self.read_until("(?!)")  # never occurs
        os.close(self._leader)
        os.close(self._go)
        return self.process.wait()

    def screen(self) -> list[str]:
        lines, row, column = [""], 0, 0
        for code, count, text in re.findall(r"\x1b\[\??(?:(\d*)[;\d]*)([A-Za-z])|([\s\S])", self.text):
            if count == "A":
                row -= int(code or 1)
            elif count == "K":
                lines[row] = ""
            elif text == "\r":
                column = 0
            elif text == "\n":
                row += 1
            elif text:
                lines[row] = lines[row].ljust(column)[:column] + text + lines[row][column + 1 :]
                column += 1
                assert column <= self.columns, f"wider than the terminal: {lines[row]}"
            lines += [""] * (row + 1 - len(lines))
        return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.default_cases("140-50")
@pytest.mark.parametrize(("columns", "later"), [(80, 140), (140, 50), (50, 80)])
def test_panel_fits_the_terminal_and_ends_as_one_line(columns: int, later: int) -> None:
    terminal = Terminal(columns)
    before = terminal.screen()
    terminal.resize(later)
    assert terminal.finish() == 0
    terminal.columns = max(columns, later)
    if columns < 60:
        assert len(before) == 1
    else:
        assert {len(line) for line in before} == {min(columns, 100)}
        assert [line.split()[1] for line in before[1:-1]] == ["task", "target", "returns", "loss"]
        assert "episode_return ≥ 10   now 3" in before[2] and "▁" in before[3] and "policy 0.25" in before[4]
    bar, last = terminal.screen()
    assert bar.startswith("task ━") and bar.endswith(": not solved") and len(bar) <= later
    assert last == "after the run"


@pytest.mark.slow
def test_signal_leaves_its_message_and_the_terminal_in_order() -> None:
    terminal = Terminal(100)
    panel = terminal.screen()
    terminal.process.send_signal(signal.SIGINT)
    terminal.read_until("ends it immediately")
    assert terminal.finish() == 0
    after = terminal.screen()
    assert after[: len(panel)] == panel
    message, bar, last = after[len(panel) :]
    assert message.startswith("rein: SIGINT") and "interrupted by SIGINT, not solved" in bar and last == "after the run"
    assert terminal.text.rfind("\x1b[?25h") > terminal.text.rfind("\x1b[?25l"), "the cursor is visible"


@pytest.fixture
def state() -> Iterator[rein.State]:
    values = [3.0, float("nan"), 1.0, 2.0]
    loop = rein.Loop(lambda state: None, epochs=4, iterations=1)
    loop.metric("episode_return", lambda state: values[state.epoch - 1])
    yield loop.run()


def test_curve_has_a_block_per_epoch_with_a_return(state: rein.State) -> None:
    assert _curve(state) == "█▁▅   1 to 3"
    state.history.clear()
    assert _curve(state) == ""


def test_rows_have_the_last_value_of_a_metric_that_some_epochs_lack() -> None:
    terminal, values = io.StringIO(), [0.25, float("nan"), float("nan")]
    loop = rein.Loop(lambda state: None, epochs=4, iterations=1)
    loop.metric("policy_loss", lambda state: values[state.epoch - 1] if state.epoch < 4 else None)
    loop.metric("value_loss", lambda state: None)
    rows = _Display("", "iterations", None, terminal)
    loop.started.observe(rows.begin)
    loop.run()
    rows._sample(loop.state, _Lines(terminal, ""))
    assert rows._rows(loop.state)["loss"] == "policy 0.25"


def test_target_and_evaluation_are_read_from_the_memory(state: rein.State) -> None:
    assert _target(state) == _evaluation(state) == ""
    memory: dict[str, Any] = state.memory
    memory["unsolved/episode_return 5.0"] = {"metric": "episode_return", "at_least": 5.0, "value": 2.0}
    assert _target(state) == "episode_return ≥ 5   now 2"
    memory["solved"] = memory.pop("unsolved/episode_return 5.0")
    assert _target(state) == "episode_return ≥ 5   reached"
    memory["evaluations"] = {"return": 475.5, "return_std": 2.0, "episodes": 8}
    assert _evaluation(state) == "475.5 ± 2   8 episodes"
