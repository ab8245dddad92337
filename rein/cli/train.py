"""`rein train` and `rein resume`: a recipe's loop, its store and its display."""

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

from rein.cli.listing import find, recipe_names
from rein.cli.options import parse
from rein.cli.output import say
from rein.cli.recipe import Recipe, of_run
from rein.errors import CheckpointError
from rein.foreign_names import written
from rein.handlers.checkpoint import Saver, checkpoint
from rein.handlers.describe import describe
from rein.handlers.interrupts import interrupts
from rein.handlers.progress import progress
from rein.handlers.solved import UNSOLVED
from rein.handlers.stop_at import stop_at
from rein.loop import Loop
from rein.loop.state import State
from rein.store.hdf5 import HDF5Store
from rein.store.resume import resume as go_on

_LIMITS = ("--epochs", "--env-steps")  # options that end a run
_MOST_THREADS = max(64, os.cpu_count() or 1)
_SECONDS = 30.0  # between two checkpoints where nobody says: a run that is killed loses no more


def train(words: Sequence[str]) -> None:
    """Train what `words` name, under the options that they give."""
    if not words or words[0].startswith("-"):
        if "--help" in words or "-h" in words:
            say("usage: rein train RECIPE [options]; rein train RECIPE --help shows them, rein list the recipes")
            return
        raise ValueError(f"rein train RECIPE: name a recipe ({', '.join(recipe_names())}) or my_module:make_loop")
    run(words[0], list(words[1:]))


def resume(words: Sequence[str]) -> None:
    """Go on with the run in the folder that `words` name, with the recipe and the options in its `run.json`.

    A recipe that is not one of rein's own must be named after the folder: `run.json` may come from anybody and never
    chooses which code runs.
    """
    usage = (
        "rein resume PATH [my_module:make_loop] [options]: the folder of a run, and its recipe unless that is one of "
        "rein's own; options are those of rein train, and replace what it had"
    )
    asks = "--help" in words or "-h" in words
    if asks and (words[0].startswith("-") or not Path(words[0]).exists()):  # of a run, its recipe's options are shown
        say(f"usage: {usage}")
        return
    if not words or words[0].startswith("-"):
        raise ValueError(usage)
    named = words[1] if len(words) > 1 and not words[1].startswith("-") else None
    recipe = of_run(Path(words[0]).expanduser(), named)
    options = words[1:] if named is None else words[2:]
    run(recipe.name, [*options, "--run", words[0], "--resume"], recipe)


def run(name: str, words: list[str], before: Recipe | None = None) -> None:
    """Run the recipe `name`; what was given to it `before` stands where `words` do not say otherwise.

    A limit in `words`, of epochs or env steps, is the only one: those from `before` end the run no more.
    """
    recipe = find(name)
    own = inspect.signature(recipe).parameters
    given = _flags(words)
    if before is not None:
        before = _without_replaced(before, given, own)
        given = [*_flags(before.given), *given]
    options = parse(recipe, f"rein {'resume' if before else 'train'} {name}", words, before.options if before else {})
    _check(name, options, own)
    torch.set_num_threads(options["threads"])
    store = _open_store(name, options) if "store" in own else None
    made = Recipe(name, {k: v for k, v in options.items() if k not in ("run", "resume", "quiet", "debug")}, given)
    with _terminable() as settle:
        try:
            changed_options = {k: v for k, v in options.items() if k in own and v != own[k].default}
            loop = recipe(**changed_options, **({"store": store} if store else {}))
            if not isinstance(loop, Loop):
                raise TypeError(f"{name} returned {type(loop).__name__}, not a rein.Loop")
            _tell_of_name(name, options, store)
            loop.own("recipe", made)
            changed = _changed(words, before, own, options)
            final, received = _run(loop, name, options, own, given, store, changed)
            settle()
        finally:
            if store is not None:
                store.close()
                _remove_if_empty(store.path)
        try:
            say(summary(final, store))
            if received is not None:
                again = f"go on with: rein resume {shlex.quote(str(_shown(store)))}" if store else ""
                say(again or "nothing was stored, so it cannot be resumed")
        except OSError:  # SIGHUP tells that the terminal is gone
            if received is None:
                raise
        if received is not None:
            raise SystemExit(128 + received)


def _flags(words: Sequence[str]) -> list[str]:
    """The names of the options in `words`, each as `--env-steps`, however it was written."""
    return [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]


def _without_replaced(before: Recipe, given: Sequence[str], own: Mapping[str, Any]) -> Recipe:
    """What was given before without the limits that others which are `given` now replace.

    The recipe's own parameters keep their values, for a replay's capacity or a schedule may be made of them.
    """
    old = [limit for limit in _LIMITS if limit not in given] if set(_LIMITS) & set(given) else []
    names = [flag.removeprefix("--").replace("-", "_") for flag in old]
    options = {key: value for key, value in before.options.items() if key in own or key not in names}
    return Recipe(before.name, options, [flag for flag in _flags(before.given) if flag not in old])


def _check(name: str, options: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if not 1 <= options["threads"] <= _MOST_THREADS:  # OpenMP aborts the process if it cannot start so many
        raise ValueError(f"--threads {options['threads']}: give 1 to {_MOST_THREADS}")
    for key in ("epochs", "iterations", "env_steps"):
        if isinstance(options[key], int) and options[key] < 1:
            raise ValueError(f"{written(key, True)} {options[key]}: give 1 or more")
    every = options["checkpoint_every"]
    if every is not None and every < 0:
        raise ValueError(f"--checkpoint-every {every}: give a number of epochs, or 0 for at the end only")
    if options["run"] is not None and "store" not in own:
        raise ValueError(f"--run {options['run']}: {name} has no parameter `store`, so it stores nothing")
    if options["resume"] and options["run"] is None:
        raise ValueError("--resume: say which run with --run PATH; or use rein resume PATH")


def _run(
    loop: Loop,
    name: str,
    options: Mapping[str, Any],
    own: Mapping[str, Any],
    given: Sequence[str],
    store: Any,
    changed: Sequence[str],
) -> tuple[State, int | None]:
    """Attach what the command line adds, and run; the final state, and the signal that ended it."""
    if store is not None and all(part is not store for part in loop.parts.values()):
        loop.own("store", store)
        describe(loop, store)
    # here and below: the recipe's own number is for whoever gives no other end
    env_steps = options["env_steps"] if "--env-steps" in given or "--epochs" not in given else None
    if env_steps is not None:
        stop_at(loop, env_steps=env_steps)
    if not options["quiet"]:
        progress(loop, description=name, total=env_steps)
    saver = None if store is None else _save(loop, store, options["checkpoint_every"])
    caught = interrupts(loop, saver, force_after=0.7)
    if options["resume"] and store is not None:
        _resume(loop, store, changed)
    limits = {k: options[k] for k in ("epochs", "iterations") if k not in own and options[k] is not None}
    if env_steps is not None and "--epochs" not in given:
        limits["epochs"] = None
    return loop.run(**limits), caught.signal


def _save(loop: Loop, store: HDF5Store, every: int | None) -> Saver:
    if every is None:
        return checkpoint(loop, store, every=_SECONDS, unit="seconds")
    return checkpoint(loop, store, every=every)


def _changed(
    words: Sequence[str], before: Recipe | None, own: Mapping[str, Any], options: Mapping[str, Any]
) -> list[str]:
    """Return the flags in `words` that give a parameter of the recipe another value than the resumed run had."""
    if before is None:
        return []
    keys = {flag: flag.removeprefix("--").replace("-", "_") for flag in _flags(words)}
    return [
        flag
        for flag, key in keys.items()
        if key in own and key in before.options and _plain(options[key]) != before.options[key]
    ]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _resume(loop: Loop, store: HDF5Store, changed: Sequence[str]) -> None:
    if any(store.checkpoints.folder.glob("*.h5")):
        try:
            found = go_on(loop, store.path)
        except CheckpointError as error:
            named = [flag for flag in changed if f".{flag.removeprefix('--').replace('-', '_')} was" in str(error)]
            if not named:
                raise
            raise CheckpointError(
                f"rein resume: a run keeps its options; leave out {', '.join(named)}, or begin a new run with "
                f"rein train: {error}"
            ) from error
        file = _shown(store) / found.path.relative_to(store.path)
        say(f"going on from {file}, after {found.about['clocks']['env_steps']:,} env steps")
    else:
        say(f"{_shown(store)} has no checkpoint; it begins anew")


@contextlib.contextmanager
def _terminable() -> Iterator[Callable[[], None]]:
    """Have SIGTERM and SIGHUP end the program as an exit does, outside a run too: open files are closed.

    What it gives is called when a run is over: what is left, to close it and to say how it went, takes no time and is
    done whatever signal comes.
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
        again = f"`rein resume {shlex.quote(str(run))}` or --resume goes on with it"
        raise ValueError(f"{run} exists; {again}, another --run begins a new one")
    return HDF5Store(run, exist="resume" if options["resume"] else "error")


def _usual_folder(name: str) -> Path:
    return Path("runs") / name.replace(":", "-")


def _free(path: Path) -> Path:
    """Return the path, or the first of `path-2`, `path-3`, ... that does not exist."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([path], numbered) if not candidate.exists())


def _tell_of_name(name: str, options: Mapping[str, Any], store: HDF5Store | None) -> None:
    """Say that the run has another folder than usual, after the recipe has accepted all options."""
    if store is not None and options["run"] is None and store.path.name != (usual := _usual_folder(name)).name:
        say(f"{usual} exists; this run goes to {_shown(store)}", error=True)


def _shown(store: HDF5Store) -> Path:
    """Return the run folder as the user wrote it, with the name that the store chose."""
    given = Path(store.config["path"])
    return given.with_name(store.path.name) if given.name else store.path


def _remove_if_empty(folder: Path) -> None:
    """A run that failed before it began has left nothing, and need not take a name."""
    for path in (folder / "trajectories", folder):
        with contextlib.suppress(OSError):  # there is something in it
            path.rmdir()


def summary(state: State, store: HDF5Store | None) -> str:
    """What a person wants to know at the end: how it went, where the trajectories are, how to look at them."""
    clocks = state.clocks
    how = f"{state.status} ({state.reason})" if state.reason else f"{state.status}"
    lines = [f"{how}: {clocks.env_steps:,} env steps, {clocks.episodes:,} episodes, {clocks.seconds:.1f} s"]
    said = state.memory.get("solved")
    if said:
        lines.append(
            f"solved: {said['metric']} {said['value']:.2f} (at least {said['at_least']:g} was asked for) after "
            f"{said['env_steps']:,} env steps in {said['seconds']:.1f} s"
        )
    for key, record in state.memory.items():
        if key.startswith(UNSOLVED) and not said:
            value = record["value"]
            ended = "it has no value" if value is None or math.isnan(value) else f"it was {value:.2f} at the end"
            lines.append(f"not solved: {record['metric']} should reach {record['at_least']:g}, and {ended}")
    if store is not None:
        files = sorted((store.path / "trajectories").glob("*.h5"))
        size = sum(file.lstat().st_size for file in files) / 1e6
        count = f"{len(files)} HDF5 file{'s' * (len(files) != 1)}"
        lines.append(f"trajectories: {count}, {size:.1f} MB, in {_shown(store)}/trajectories")
        command = f"rein show {shlex.quote(str(_shown(store)))}"
        lines.append(f"look at them: {command}; or open one in VS Code with the H5Web extension,")
        lines.append("              at myhdf5.hdfgroup.org, or with silx view: each opens with a plot")
    return "\n".join(lines)
