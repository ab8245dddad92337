"""The command line: `rein COMMAND`. An error is printed as one line; `--debug` prints its traceback."""

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

  rein train RECIPE [options]     train a recipe, or a loop returned by your function: my_module:make_loop
  rein train RECIPE --help        list the options of a recipe
  rein train --config FILE        train with the recipe and the options in a TOML file, such as the config.toml of a run
  rein train RECIPE --seeds 0-9   train several seeds in parallel processes, and summarize them
  rein sweep RECIPE --param ...   search for good options of a recipe with Optuna
  rein resume PATH [options]      continue a run with the options in its run.json; for a custom recipe, name the
                                  function again: rein resume PATH my_module:make_loop
  rein evaluate RUN [--best]      evaluate the agent of a run on new episodes
  rein list                       list the recipes
  rein runs [FOLDER]              list the runs in a folder with their status, return and options
  rein show PATH                  summarize a run or one of its files
  rein plot RUN [RUN ...]         plot learning curves, fields of an episode, or paths and values on the Gridworld
  rein replay RUN --episode N     replay stored episodes and compare them; --video records one
  rein view PATH                  open a run, or one of its files, in H5Web
  rein verify PATH                check a run, or one of its files, for damage
  rein compact RUN NEW            copy a run to a folder with fewer, larger trajectory files
  rein export RUN --to onnx       export the policy of a run to ONNX, torch.export (pt2) or safetensors
  rein export RUN --to minari ID  export the episodes of a run as a Minari dataset
  rein doctor                     show versions and optional packages, and test training and its files
  rein --version                  show the version

Add --debug to any command to see the traceback of an error.
"""


_COMMANDS = {  # command -> (module, function); modules are imported when needed
    "train": ("train", "train"),
    "resume": ("train", "resume"),
    "sweep": ("sweep", "main"),
    "evaluate": ("evaluate", "main"),
    "runs": ("runs", "main"),
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
    """Run the command in `arguments` (default: `sys.argv[1:]`). Exits with a non-zero status on an error."""
    ours = arguments is None  # called as a program, not as a function
    if ours and isinstance(sys.stdout, io.TextIOWrapper):  # notice a closed pipe at the next line, not at exit
        sys.stdout.reconfigure(line_buffering=True)
    words = list(sys.argv[1:] if arguments is None else arguments)
    while words and words[0] == "--debug":  # also accepted before the command
        words.append(words.pop(0))
    with plain_messages():
        _guarded(words, debug="--debug" in words, ours=ours)


def _guarded(words: list[str], debug: bool, ours: bool) -> None:
    """Run a command. Print an error as one line, or as a traceback with `debug`."""
    try:
        _run(words, ours)
    except KeyboardInterrupt:
        _restore_terminal()
        raise SystemExit(_print_error("interrupted", 130)) from None
    except BrokenPipeError:  # the reader has closed the pipe, for example `head`
        raise SystemExit(_unread(ours)) from None
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich exits with this context
            raise SystemExit(_unread(ours)) from None
        _restore_terminal()
        raise
    except Exception as error:
        if debug and not ours:
            raise
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
        text = "".join(traceback.format_exception(error)) if debug else f"{_text_of(error)}{notes}"
        raise SystemExit(_print_error(text, 1)) from None


def _restore_terminal() -> None:
    """Undo the changes of a progress bar, because a second signal may have ended it before it could do so."""
    sys.stdout, sys.stderr = (getattr(file, "rich_proxied_file", file) for file in (sys.stdout, sys.stderr))
    if sys.stdout.isatty():
        sys.stdout.write("\033[?25h")
        sys.stdout.flush()


def _text_of(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    readable = isinstance(error, ReinError | ValueError | TypeError | ImportError)
    return str(error) if readable else repr(error)


def _print_error(text: str, status: int) -> int:
    say(f"rein: {text}", error=True)
    return status


def _unread(ours: bool) -> int:
    """Return the exit status for a closed pipe. If `ours`, further output of the process is discarded."""
    if ours:
        with open(os.devnull, "wb") as nowhere, contextlib.suppress(OSError):  # standard output may not be a file
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return 141


def _import(name: str, ours: bool) -> Any:
    """Import the module of a command, without garbage collection: torch creates many objects that stay."""
    collects = gc.isenabled()
    gc.disable()
    try:
        module = importlib.import_module(f"rein.cli.{name}")
    finally:
        if collects:
            gc.enable()
    if ours:  # objects created by imports are never garbage
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
            raise ValueError(f"rein list takes no arguments, got {' '.join(rest)}")
        show_recipes()
    else:
        raise ValueError(f"unknown command {command!r}; {_closest(command)}")


def _closest(command: str) -> str:
    names = [*_COMMANDS, "list"]
    ours = COMMANDS.get(command) or next(iter(difflib.get_close_matches(command, names, 1)), None)
    return f"did you mean rein {ours}?" if ours else f"the commands are {', '.join(names)}"
