"""The command line: `rein COMMAND`. Errors are one readable line; `--debug` gives the rest."""

from __future__ import annotations

import contextlib
import difflib
import gc
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from rein.cli.output import plain_messages, say
from rein.errors import ReinError
from rein.foreign_names import COMMANDS

USAGE = """\
usage: rein COMMAND ...

  rein train RECIPE [options]     run a recipe, or a function that returns a loop: my_module:make_loop
  rein train RECIPE --help        its options
  rein resume PATH [options]      continue a run with the options in its run.json; a recipe of your own is named
                                  again: rein resume PATH my_module:make_loop
  rein evaluate RUN [--best]      its agent plays new episodes: what are their returns?
  rein list                       the recipes there are
  rein show PATH                  what is in a run's folder or in one of its files
  rein plot RUN [RUN ...]         learning curves, fields of an episode, paths and values on the Gridworld
  rein replay RUN --episode N     play stored episodes again: are they the same? --video films one
  rein view PATH                  open a run, or one of its files, in H5Web; or say how to
  rein verify PATH                whether a run, or one of its files, is whole
  rein compact RUN NEW            copy a run to a folder with fewer, larger trajectory files
  rein export RUN --to minari ID  its episodes as a dataset of Minari
  rein doctor                     versions, optional packages, and whether training and its files work here
  rein --version

--debug gives the traceback of an error.
"""


_COMMANDS = {  # where each is, imported when it is asked for
    "train": ("train", "train"),
    "resume": ("train", "resume"),
    "evaluate": ("evaluate", "main"),
    "show": ("run_folder", "show_command"),
    "plot": ("plot", "main"),
    "replay": ("replay", "main"),
    "view": ("run_folder", "view_command"),
    "verify": ("run_folder", "verify_command"),
    "compact": ("run_folder", "compact_command"),
    "export": ("export", "main"),
    "doctor": ("doctor", "main"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that `arguments` (those of the process by default) ask for; exits non-zero on an error."""
    ours = arguments is None  # the process
    if ours and isinstance(sys.stdout, io.TextIOWrapper):  # a pipe without a reader is noticed here, not at the exit
        sys.stdout.reconfigure(line_buffering=True)
    words = list(sys.argv[1:] if arguments is None else arguments)
    while words and words[0] == "--debug":  # it may come before the command, too
        words.append(words.pop(0))
    with plain_messages():
        _guarded(words, debug="--debug" in words, ours=ours)


def _guarded(words: list[str], debug: bool, ours: bool) -> None:
    """Run a command. An error is printed in one line, or with `debug` as its traceback."""
    try:
        _run(words, ours)
    except KeyboardInterrupt:
        if sys.stdout.isatty():  # a second Ctrl-C may break off the bar that would show the cursor again
            sys.stdout.write("\033[?25h")
            sys.stdout.flush()
        raise SystemExit(_say("interrupted", 130)) from None
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        raise SystemExit(_unread(ours)) from None
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # as rich tells it
            raise SystemExit(_unread(ours)) from None
        raise
    except Exception as error:
        if debug and not ours:
            raise
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
        text = "".join(traceback.format_exception(error)) if debug else f"{_text_of(error)}{notes}"
        raise SystemExit(_say(text, 1)) from None


def _text_of(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    written_to_be_read = isinstance(error, ReinError | ValueError | TypeError | ImportError)
    return str(error) if written_to_be_read else repr(error)


def _say(text: str, status: int) -> int:
    say(f"rein: {text}", error=True)
    return status


def _unread(ours: bool) -> int:
    """The status of a program whose output nobody reads any more; if the process is `ours`, the rest goes nowhere."""
    if ours:
        with open(os.devnull, "wb") as nowhere, contextlib.suppress(OSError):  # standard output is no file
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return 141


def _import(name: str, ours: bool) -> Any:
    """The module of a command. Importing torch creates many objects that stay, so no garbage is collected meanwhile."""
    collects = gc.isenabled()
    gc.disable()
    try:
        module = importlib.import_module(f"rein.cli.{name}")
    finally:
        if collects:
            gc.enable()
    if ours:  # nothing of what importing has left will become garbage
        gc.freeze()
    return module


def _run(words: list[str], ours: bool) -> None:
    command, rest = (words[0], words[1:]) if words else ("--help", [])
    if command in _COMMANDS:
        name, function = _COMMANDS[command]
        module = _import(name, ours)
        if name == "train":
            getattr(module, function)(rest)
            return
        getattr(module, function)([word for word in rest if word != "--debug"])
    elif command in ("-h", "--help", "help"):
        say(USAGE, end="")
    elif command == "--version":
        from rein import __version__

        say(f"rein {__version__}")
    elif command == "list":
        from rein.cli.recipes import show_recipes

        if rest not in ([], ["--help"], ["-h"], ["--debug"]):
            raise ValueError(f"rein list takes nothing more, not {' '.join(rest)}")
        show_recipes()
    else:
        raise ValueError(f"there is no command {command!r}; {_closest(command)}")


def _closest(command: str) -> str:
    names = [*_COMMANDS, "list"]
    ours = COMMANDS.get(command) or next(iter(difflib.get_close_matches(command, names, 1)), None)
    return f"did you mean rein {ours}?" if ours else f"the commands are {', '.join(names)}"
