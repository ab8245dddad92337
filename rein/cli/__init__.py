"""The command line: `rein COMMAND`. An error is printed as one line; `--debug` prints its traceback."""

from __future__ import annotations

import contextlib
import difflib
import gc
import importlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from rein import __version__
from rein.cli.terminal import plain_messages, restore_terminal, say
from rein.errors import ReinError
from rein.foreign_names import COMMANDS

USAGE = """\
usage: rein COMMAND ...

  rein train --env ID --agent NAME
                                 train an agent in an environment, such as
                                 --env CartPole-v1 --agent ppo
  rein train RECIPE [options]    train a recipe, or a loop that your function
                                 returns: my_module:make_loop
  rein train RECIPE --help       list the options of a recipe
  rein train --config FILE       train with the recipe and options of a TOML
                                 file, such as the config.toml of a run
  rein train RECIPE --seeds 0-9  train several seeds in parallel processes
  rein sweep RECIPE --param ...  search for good options with Optuna
  rein resume RUN [options]      continue a run with its options; name the
                                 function of a custom recipe again:
                                 rein resume RUN my_module:make_loop
  rein evaluate RUN [--best]     evaluate the agent of a run on new episodes
  rein list                      list the recipes
  rein runs [FOLDER]             list the runs in a folder
  rein show PATH                 summarize a run, or one of its files
  rein plot RUN [RUN ...]        plot learning curves, fields of episodes, or
                                 paths and values on the Gridworld
  rein replay RUN --episode N    replay stored episodes; --video records one
  rein view PATH                 open a run, or one of its files, in H5Web
  rein verify PATH               check a run, or one of its files, for damage
  rein compact RUN NEW           copy a run, with fewer and larger files
  rein export RUN --to onnx      export the policy to ONNX, torch.export (pt2)
                                 or safetensors
  rein export RUN --to minari ID export the episodes as a Minari dataset
  rein doctor                    show versions, and test the installation
  rein --version                 show the version
  rein --completion SHELL        print a completion script: bash, zsh or fish

rein COMMAND --help lists all options of a command. Add --debug to any command
to see the traceback of an error.
"""

END_WITH_PARENT = "--end-with-parent"  # first word of a process that ends when the process that started it ends

_COMMANDS = {  # command -> (module, function); modules are imported when needed
    "train": ("train", "train_command"),
    "resume": ("train", "resume_command"),
    "sweep": ("sweep", "sweep_command"),
    "evaluate": ("play", "evaluate_command"),
    "list": ("catalog", "list_recipes"),
    "runs": ("run_folder", "list_runs_in"),
    "show": ("run_folder", "show"),
    "plot": ("plots", "plot"),
    "replay": ("play", "replay_episodes"),
    "view": ("run_folder", "view_command"),
    "verify": ("run_folder", "verify_files"),
    "compact": ("run_folder", "compact_run"),
    "export": ("export_run", "export"),
    "doctor": ("doctor", "doctor"),
}
_WITHOUT_ARGUMENTS = ("list", "runs", "doctor")  # the other commands show their help if none is given


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command in `arguments` (default: `sys.argv[1:]`). Exits with a non-zero status on an error."""
    is_program = arguments is None
    if is_program and isinstance(sys.stdout, io.TextIOWrapper):  # notice a closed pipe at the next line, not at exit
        sys.stdout.reconfigure(line_buffering=True)
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == [END_WITH_PARENT]:
        del words[0]
        threading.Thread(target=_end_with_parent, daemon=True).start()
    debug = "--debug" in words
    with plain_messages():
        try:
            _run(words, is_program)
        except KeyboardInterrupt:
            restore_terminal()
            raise SystemExit(_print_error("interrupted", 130)) from None
        except BrokenPipeError:  # the reader has closed the pipe, for example `head`
            raise SystemExit(_discard_output(is_program)) from None
        except SystemExit as ended:
            if isinstance(ended.__context__, BrokenPipeError):  # rich exits with this context
                raise SystemExit(_discard_output(is_program)) from None
            restore_terminal()
            raise
        except Exception as error:
            if debug and not is_program:
                raise
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
            text = "".join(traceback.format_exception(error)) if debug else f"{_text_of(error)}{notes}"
            raise SystemExit(_print_error(text, 1)) from None


def _end_with_parent() -> None:
    """End this process as SIGTERM does, which saves its run, when the pipe from the parent process closes."""
    os.read(0, 1)
    if sys.platform == "win32":  # where os.kill does not call the handler
        signal.raise_signal(signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def _text_of(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    readable = isinstance(error, ReinError | ValueError | TypeError | ImportError)
    return str(error) if readable else repr(error)


def _print_error(text: str, status: int) -> int:
    say(f"rein: {text}", error=True)
    return status


def _discard_output(is_program: bool) -> int:
    """Return the exit status for a closed pipe. Further output of a program is discarded."""
    if is_program:
        with open(os.devnull, "wb") as nowhere, contextlib.suppress(OSError):  # standard output may not be a file
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return 141


def _import(name: str, is_program: bool) -> Any:
    """Import the module of a command, without garbage collection: torch creates many objects that stay."""
    collects = gc.isenabled()
    gc.disable()
    try:
        module = importlib.import_module(f"rein.cli.{name}")
    finally:
        if collects:
            gc.enable()
    if is_program:  # objects created by imports are never garbage
        gc.freeze()
    return module


def _run(words: list[str], is_program: bool) -> None:
    start = next((place for place, word in enumerate(words) if word != "--debug"), 0)  # --debug may come first
    command, *rest = [*words[start:], *words[:start]] or ["--help"]
    if command in ("-h", "--help", "help"):
        say(USAGE, end="")
    elif command == "--version":
        say(f"rein {__version__}")
    elif command == "--completion":
        from rein.cli.completion import completion_script

        say(completion_script(rest, list(_COMMANDS), main), end="")
    elif command not in _COMMANDS:
        raise ValueError(f"unknown command {command!r}; {_closest(command)}")
    elif not rest and command not in _WITHOUT_ARGUMENTS:
        with contextlib.suppress(SystemExit):
            _run([command, "--help"], is_program)
        raise SystemExit(2)  # a script with an empty variable must not succeed
    elif command in ("train", "resume", "sweep") and rest[:1] in (["-h"], ["--help"]):
        from rein.cli.arguments import show_shared_options

        show_shared_options(command)
    else:
        module, function_name = _COMMANDS[command]
        function = getattr(_import(module, is_program), function_name)
        if module != "train":  # a recipe may have an option of this name
            rest = [word for word in rest if word != "--debug"]
        if function_name.endswith("_command"):  # parses its words itself
            function(rest)
        else:
            from rein.cli.arguments import parse_arguments

            function(**parse_arguments(function, f"rein {command}", rest))


def _closest(command: str) -> str:
    near = COMMANDS.get(command) or next(iter(difflib.get_close_matches(command, _COMMANDS, 1)), None)
    return f"did you mean rein {near}?" if near else f"the commands are {', '.join(_COMMANDS)}"
