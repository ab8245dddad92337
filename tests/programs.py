"""Python programs in processes that are forked from a server with torch and rein loaded, which saves their imports.

A forked program does not end like an interpreter, and its torch was imported earlier. Tests of imports, of the exit of
the interpreter and of its exit status after a signal start a real process with `subprocess`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "gymnasium",
        "h5py",
        "rein.agents.ppo",
        "rein.agents.dqn",
        "rein.cli",
        "rein.store.hdf5",
        "rein.training.training_loop",
    ]
)


class Program:
    """Program that runs like `python ARGUMENTS`, where arguments begin with `-c`, `-m` or the path of a script."""

    def __init__(self, *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        self.arguments = [*map(str, arguments)]
        self._folder = tempfile.TemporaryDirectory()
        self._outputs = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        environment = dict(os.environ if env is None else env)
        self._process = _CONTEXT.Process(
            target=_run, args=(self.arguments, str(cwd or Path.cwd()), environment, self._outputs)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid or 0

    def poll(self) -> int | None:
        """Return the exit status, or None while the program runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Wait until the program ends. Returns its exit status and output."""
        self._process.join()
        status, (out, err) = self._process.exitcode, (output.read_text(errors="replace") for output in self._outputs)
        self._folder.cleanup()
        return subprocess.CompletedProcess(self.arguments, status or 0, out, err)


def run(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. Fails with its output if it does not end with status 0, unless `check` is False."""
    done = Program(*arguments, cwd=cwd, env=env).wait()
    assert not check or done.returncode == 0, f"{done.args}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def stop_server() -> None:
    """End the server and wait for it, so that the time of its programs counts as time of this process."""
    forkserver._forkserver._stop()


def _run(arguments: list[str], cwd: str, environment: dict[str, str], outputs: list[Path]) -> None:
    for output, descriptor in zip(outputs, (1, 2), strict=True):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if coverage := sys.modules.get("coverage"):  # mutate.py measures which tests execute a line
        coverage.Coverage.current().switch_context(environment.get("PYTEST_CURRENT_TEST", ""))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]  # the default of the system
    if arguments[0] == "-W":
        warnings.simplefilter(arguments[1])
        arguments = arguments[2:]
    try:
        _execute(arguments)
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()


def _execute(arguments: list[str]) -> None:
    first, *rest = arguments
    if first == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    code = rest.pop(0) if first == "-c" else Path(first).read_text(encoding="utf-8")
    sys.path.insert(0, "" if first == "-c" else str(Path(first).resolve().parent))
    sys.argv = [first, *rest]
    module: Any = types.ModuleType("__main__")
    if first != "-c":
        module.__file__ = first
    sys.modules["__main__"] = module
    exec(compile(code, "<string>" if first == "-c" else first, "exec"), module.__dict__)
