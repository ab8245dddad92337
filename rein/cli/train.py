"""`rein train` and `rein resume`."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rein.cli.config import FILE, config_of, read_config
from rein.cli.options import LIMITS, parse, source
from rein.cli.output import say
from rein.cli.recipes import Recipe, call, find, of_run, recipe_names
from rein.errors import CheckpointError
from rein.foreign_names import written
from rein.handlers.checkpoint import checkpoint
from rein.handlers.describe import describe
from rein.handlers.interrupts import Interrupts, interrupts
from rein.handlers.progress import progress
from rein.handlers.solved import UNSOLVED
from rein.handlers.stop_at import stop_at
from rein.loop import Loop
from rein.loop.state import State
from rein.store.format.sealed import write_whole
from rein.store.hdf5 import HDF5Store
from rein.store.loading import resume as go_on

_LIMITS = [written(limit, True) for limit in LIMITS]
_NOT_RECORDED = ("run", "resume", "quiet", "debug", "config", "like")
_MOST_THREADS = max(64, os.cpu_count() or 1)
_SECONDS = 30.0  # default time between checkpoints, and so the most that a killed run loses


def train(words: Sequence[str]) -> None:
    """Run the recipe that `words` name, with the options in `words` and in the file or run that they name."""
    words = list(words)
    name = words.pop(0) if words and not words[0].startswith("-") else None
    file, run_folder = take(words, "--config"), take(words, "--like")
    if file is not None and run_folder is not None:
        raise ValueError(f"rein train --config {file} --like {run_folder}: give one of the two")
    before = None
    if file is not None:
        before = read_config(Path(file).expanduser(), name)
    elif run_folder is not None:
        before = of_run(Path(run_folder).expanduser(), name, "train")
    elif name is None:
        if "--help" in words or "-h" in words:
            say(
                "usage: rein train RECIPE [options]. List options with rein train RECIPE --help, recipes with rein list"
            )
            return
        raise ValueError(f"rein train RECIPE: name a recipe ({', '.join(recipe_names())}) or my_module:make_loop")
    run(before.name if before else str(name), words, before)


def take(words: list[str], flag: str) -> str | None:
    """Remove a flag and its value from `words` and return the value; None without the flag. The last one counts."""
    value = None
    while found := [index for index, word in enumerate(words) if word.partition("=")[0] == flag]:
        _, equals, value = words.pop(found[0]).partition("=")
        if not equals and (found[0] == len(words) or words[found[0]].startswith("--")):
            raise ValueError(f"{flag} needs a value")
        value = value if equals else words.pop(found[0])
    return value


def resume(words: Sequence[str]) -> None:
    """Resume the run in the folder that `words` name, with the recipe and the options in its `run.json`.

    A recipe that is not one of rein's must be named after the folder, because `run.json` never chooses code.
    """
    usage = (
        "rein resume PATH [my_module:make_loop] [options]: give the folder of a run, and its function if the recipe is "
        "not part of rein. Accepts the options of rein train, which replace the options of the run"
    )
    asks = "--help" in words or "-h" in words
    if asks and (words[0].startswith("-") or not Path(words[0]).exists()):  # with a run, --help lists its options
        say(f"usage: {usage}")
        return
    if not words or words[0].startswith("-"):
        raise ValueError(usage)
    named = words[1] if len(words) > 1 and not words[1].startswith("-") else None
    recipe = of_run(Path(words[0]).expanduser(), named)
    options = words[1:] if named is None else words[2:]
    run(recipe.name, [*options, "--run", words[0], "--resume"], recipe, "resume")


def run(name: str, words: list[str], before: Recipe | None = None, command: str = "train") -> None:
    """Run the recipe `name` with the options in `words`. The other options are those of `before`, read from a file.

    If `words` contain a limit (epochs or env steps), the limits of `before` do not apply.
    """
    recipe = find(name)
    own = inspect.signature(recipe).parameters
    flags = given = _flags(words)
    if before is not None:
        before = _without_replaced(before, flags, own)
        given = [*_flags(before.given), *flags]
    stored = {"before": before.options, "file": before.source} if before is not None else {}
    also = [source] if command == "train" else []
    options = parse(recipe, f"rein {command} {name}", words, **stored, also=also)
    _check(name, options, own)
    torch.set_num_threads(options["threads"])
    store = _open_store(name, options) if "store" in own else None
    made = Recipe(name, {k: v for k, v in options.items() if k not in _NOT_RECORDED}, given)
    with _terminable() as settle:
        try:
            loop = call(recipe, options, **({"store": store} if store else {}))
            if not isinstance(loop, Loop):
                raise TypeError(f"{name} returned {type(loop).__name__}, not a rein.Loop")
            if store is not None:
                _say_if_renamed(name, options, store)
                _write_config(loop, store, made)
            loop.own("recipe", made)
            if store is not None and all(part is not store for part in loop.parts.values()):
                loop.own("store", store)
                describe(loop, store)
            # env_steps of the recipe end the run only if no other limit is given
            env_steps = options["env_steps"] if "--env-steps" in given or "--epochs" not in given else None
            caught = _attach(loop, name, options, store, env_steps)
            if options["resume"] and store is not None:
                _resume(loop, store, flags)
            limits = {k: options[k] for k in ("epochs", "iterations") if k not in own and options[k] is not None}
            if env_steps is not None and "--epochs" not in given:
                limits["epochs"] = None
            final = loop.run(**limits)
            settle()
        finally:
            if store is not None:
                store.close()
                _remove_if_empty(store.path)
        try:
            say(summary(final, store))
            if caught.signal is not None:
                hint = f"continue with: rein resume {shlex.quote(str(_shown(store)))}" if store else ""
                say(hint or "nothing was stored, so the run cannot be resumed")
        except OSError:  # after SIGHUP the terminal is closed
            if caught.signal is None:
                raise
        if caught.signal is not None:
            raise SystemExit(128 + caught.signal)


def _say_if_renamed(name: str, options: Mapping[str, Any], store: HDF5Store) -> None:
    """Print the folder of a new run if the usual folder exists. Called only if the options are valid."""
    usual = _usual_folder(name)
    if options["run"] is None and store.path.name != usual.name:
        say(f"{usual} exists; this run goes to {_shown(store)}", error=True)


def _write_config(loop: Loop, store: HDF5Store, recipe: Recipe) -> None:
    @loop.started.wire
    def write_config(state: State) -> None:
        write_whole(store.path / FILE, config_of(recipe))


def _flags(words: Sequence[str]) -> list[str]:
    """Return the options in `words`, each written as `--env-steps`."""
    return [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]


def _without_replaced(before: Recipe, flags: Sequence[str], own: Mapping[str, Any]) -> Recipe:
    """Return the recipe of an earlier run without the limits replaced by `flags`.

    Parameters of the recipe keep their values, because a schedule may depend on them.
    """
    old = [limit for limit in _LIMITS if limit not in flags] if set(_LIMITS) & set(flags) else []
    names = [flag.removeprefix("--").replace("-", "_") for flag in old]
    options = {key: value for key, value in before.options.items() if key in own or key not in names}
    return Recipe(before.name, options, [flag for flag in _flags(before.given) if flag not in old])


def _check(name: str, options: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if not 1 <= options["threads"] <= _MOST_THREADS:  # OpenMP aborts the process if it cannot start its threads
        raise ValueError(f"--threads {options['threads']}: must be 1 to {_MOST_THREADS}")
    for key in ("epochs", "iterations", "env_steps"):
        if isinstance(options[key], int) and options[key] < 1:
            raise ValueError(f"{written(key, True)} {options[key]}: must be 1 or more")
    every = options["checkpoint_every"]
    if every is not None and every < 0:
        raise ValueError(f"--checkpoint-every {every}: must be a number of epochs, or 0 to save only at the end")
    if options["run"] is not None and "store" not in own:
        raise ValueError(f"--run {options['run']}: {name} has no parameter `store`, so nothing can be stored")
    if options["resume"] and options["run"] is None:
        raise ValueError("--resume: give the run with --run PATH, or use rein resume PATH")


def _attach(
    loop: Loop, name: str, options: Mapping[str, Any], store: HDF5Store | None, env_steps: int | None
) -> Interrupts:
    """Attach the handlers of the command line: limits, progress, checkpoints and signals."""
    if env_steps is not None:
        stop_at(loop, env_steps=env_steps)
    if not options["quiet"]:
        progress(loop, description=name, total=env_steps)
    saver, every = None, options["checkpoint_every"]
    if store is not None:
        saver = (
            checkpoint(loop, store, every=_SECONDS, unit="seconds")
            if every is None
            else checkpoint(loop, store, every=every)
        )
    return interrupts(loop, saver, force_after=0.7)


def _resume(loop: Loop, store: HDF5Store, flags: Sequence[str]) -> None:
    if not any(store.checkpoints.folder.glob("*.h5")):
        say(f"{_shown(store)} has no checkpoint; starting from the beginning")
        return
    try:
        found = go_on(loop, store.path)
    except CheckpointError as error:
        named = [flag for flag in flags if f".{flag.removeprefix('--').replace('-', '_')} was" in str(error)]
        if not named:
            raise
        raise CheckpointError(
            f"rein resume: these options cannot change in a resumed run; leave out {', '.join(named)}, or start a new "
            f"run with rein train: {error}"
        ) from error
    file = _shown(store) / found.path.relative_to(store.path)
    say(f"resuming from {file}, after {found.about['clocks']['env_steps']:,} env steps")


@contextlib.contextmanager
def _terminable() -> Iterator[Callable[[], None]]:
    """Exit on SIGTERM and SIGHUP, also outside a run, so that open files are closed.

    Yields a function to call after the run. Signals are then ignored until the store is closed and the summary printed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    def settle() -> None:
        for number in previous:
            signal.signal(number, signal.SIG_IGN)

    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU")  # Windows has only the first two
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    previous = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if number != signal.SIGINT and previous[number] != signal.SIG_IGN:
            signal.signal(number, leave)
    try:
        yield settle
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _open_store(name: str, options: Mapping[str, Any]) -> HDF5Store:
    run = options["run"] and options["run"].expanduser()
    if run is None:
        return HDF5Store(_free(_usual_folder(name)), exist="new")
    if not options["resume"] and run.exists() and (not run.is_dir() or any(run.iterdir())):
        ways = f"`rein resume {shlex.quote(str(run))}` or --resume"
        raise ValueError(f"{run} exists; continue it with {ways}, or start a new run with another --run")
    return HDF5Store(run, exist="resume" if options["resume"] else "error")


def _usual_folder(name: str) -> Path:
    return Path("runs") / name.replace(":", "-")


def _free(path: Path) -> Path:
    """Return the path, or the first of `path-2`, `path-3`, ... that does not exist."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([path], numbered) if not candidate.exists())


def _shown(store: HDF5Store) -> Path:
    """Return the run folder as given by the user, with the name that the store chose."""
    given = Path(store.config["path"])
    return given.with_name(store.path.name) if given.name else store.path


def _remove_if_empty(folder: Path) -> None:
    """Remove the folder of a run that failed before storing anything."""
    for path in (folder / "trajectories", folder):
        with contextlib.suppress(OSError):  # not empty
            path.rmdir()


def summary(state: State, store: HDF5Store | None) -> str:
    """Return the lines to print after a run: result, location of the trajectories and further commands."""
    clocks = state.clocks
    ending = f"{state.status} ({state.reason})" if state.reason else f"{state.status}"
    lines = [f"{ending}: {clocks.env_steps:,} env steps, {clocks.episodes:,} episodes, {clocks.seconds:.1f} s"]
    solved = state.memory.get("solved")
    if solved:
        lines.append(
            f"solved: {solved['metric']} {solved['value']:.2f} (threshold {solved['at_least']:g}) after "
            f"{solved['env_steps']:,} env steps in {solved['seconds']:.1f} s"
        )
    for key, record in state.memory.items():
        if key.startswith(UNSOLVED) and not solved:
            value = record["value"]
            last = "has no value" if value is None or math.isnan(value) else f"{value:.2f}"
            lines.append(f"not solved: {record['metric']} {last} at the end (threshold {record['at_least']:g})")
    if store is not None:
        files = sorted((store.path / "trajectories").glob("*.h5"))
        size = sum(file.lstat().st_size for file in files) / 1e6
        count = f"{len(files)} HDF5 file{'s' * (len(files) != 1)}"
        lines.append(f"trajectories: {count}, {size:.1f} MB, in {_shown(store)}/trajectories")
        lines.append(f"summary: rein show {shlex.quote(str(_shown(store)))}")
        lines.append(
            "plots: open a file in VS Code with the H5Web extension, at myhdf5.hdfgroup.org, or with silx view"
        )
    return "\n".join(lines)
