"""Output of the command line cannot control a terminal."""

from __future__ import annotations

import ast
import logging
import warnings
from pathlib import Path

import pytest
from rich.table import Table

import rein.cli
from rein.cli import main, terminal

EVIL = "a\x1b]0;owned\x07\x9b2J\u202eb"
PLAIN = "a?]0;owned??2J?b"


@pytest.mark.parametrize("error", [False, True])
def test_text_is_printed_without_control_characters(capsys, error):
    terminal.say(f"{EVIL}\n\tnext", error=error)
    assert capsys.readouterr()[error] == f"{PLAIN}\n\tnext\n"


def test_table_is_printed_without_control_characters(capsys):
    table = Table("name")
    table.add_row(EVIL)
    terminal.say(table)
    assert "a?]0;owned" in (text := capsys.readouterr().out)
    assert all(line.isprintable() for line in text.splitlines())


@pytest.mark.filterwarnings("always")
def test_warnings_and_log_messages_are_printed_without_control_characters(capsys):
    with terminal.plain_messages():
        assert "\x1b" not in warnings.formatwarning(EVIL, UserWarning, EVIL, 1)
        assert logging.lastResort is not None
        record = logging.LogRecord("rein", logging.WARNING, "", 0, "%s", (EVIL,), None)
        assert logging.lastResort.format(record) == PLAIN
    assert "\x1b" in warnings.formatwarning(EVIL, UserWarning, "", 1)


def test_error_is_printed_without_control_characters(capsys):
    with pytest.raises(SystemExit):
        main(["show", EVIL])
    text = capsys.readouterr().err
    assert PLAIN in text and "\x1b" not in text


def test_only_terminal_module_prints():
    printing = set()
    for path in Path(rein.cli.__file__).parent.glob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        if {"print", "Console"} & {getattr(call.func, "id", "") for call in calls}:
            printing.add(path.name)
    assert printing == {"terminal.py"}, "use rein.cli.terminal.say"
