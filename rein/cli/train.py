"""`rein train` and `rein resume`."""

from __future__ import annotations

import contextlib
import math
import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rein.cli.arguments import named, several, show_shared_options, source
from rein.cli.jobs import train_seeds
from rein.cli.plans import (
    CONFIG,
    Plan,
    call_recipe,
    flags_of,
    free_folder,
    make_plan,
    read_run,
    read_source,
    take_names,
    usual_folder,
)
from rein.cli.terminal import say
from rein.episodes.episode_statistics import LEARNER_RETURN
from rein.errors import CheckpointError
from rein.handlers.checkpoint import checkpoint
from rein.handlers.interrupts import Interrupts, interrupts
from rein.handlers.loggers import MlflowLogger, TensorBoardLogger, WandbLogger, attach
from rein.handlers.output import UNSOLVED, status_of
from rein.handlers.progress import progress
from rein.handlers.run_files import describe
from rein.handlers.stop_at import stop_at
from rein.loop import Loop
from rein.loop.state import State
from rein.store.format.sealed import write_whole
from rein.store.hdf5 import HDF5Store
from rein.store.loading import resume as load_checkpoint

_SECONDS = 30.0  # default time between checkpoints, and so the most that a killed run loses


def train_command(words: Sequence[str]) -> None:
    """Train what `words` name, with the options in `words` and in the file or run that they name."""
    words = list(words)
    experiment, before, origin = read_source(words, "train")
    if "--seeds" in flags_of(words):
        train_seeds(experiment, words, before, origin)
    else:
        _run(make_plan(experiment, words, before, also=(named, source, several)), flags_of(words))


def resume_command(words: Sequence[str]) -> None:
    """Resume the run in the folder that `words` name, with the options in its `run.json`.

    A recipe, environment or agent that is not part of rein must be named again: `run.json` never chooses code.
    """
    if not words or words[0].startswith("-"):
        raise ValueError(
            "rein resume PATH [my_module:make_loop] [options]: give the folder of a run, and its function if the "
            "recipe is not part of rein. Accepts the options of rein train, which replace the options of the run"
        )
    run, *options = words
    if {"-h", "--help"} & {*options} and not Path(run).exists():  # with a run, --help lists its options
        show_shared_options("resume")
    recipe = read_run(Path(run).expanduser(), take_names(options))
    options += ["--run", run, "--resume"]
    _run(make_plan(recipe.experiment, options, recipe, "resume", also=(named,)), flags_of(options))


def _run(plan: Plan, flags: Sequence[str]) -> None:
    """Run a recipe. `flags` are the options in the words of the user."""
    own = plan.parameters
    options = plan.options
    if options.get("jobs") is not None:
        raise ValueError("--jobs: give the seeds of the runs with --seeds, such as --seeds 0-9")
    torch.set_num_threads(options["threads"])
    store = _open_store(plan.name, options) if "store" in own else None
    with _exit_on_signals() as ignore_signals:
        try:
            loop = _build_loop(plan, store)
            caught = _attach_handlers(loop, plan, store)
            if options["resume"] and store is not None:
                _resume(loop, store, flags)
            limits = {k: options[k] for k in ("epochs", "iterations") if k not in own and options[k] is not None}
            if plan.env_steps is not None and "--epochs" not in plan.flags:
                limits["epochs"] = None
            final = loop.run(**limits)
            ignore_signals()
        finally:
            if store is not None:
                store.close()
                _remove_if_empty(store.path)
        try:
            say(_summary(final, store, plan.each))
            if caught.signal is not None:
                hint = f"continue with: rein resume {shlex.quote(str(_shown(store)))}" if store else ""
                say(hint or "nothing was stored, so the run cannot be resumed")
        except OSError:  # after SIGHUP the terminal is closed
            if caught.signal is None:
                raise
        if caught.signal is not None:
            raise SystemExit(128 + caught.signal)


def _build_loop(plan: Plan, store: HDF5Store | None) -> Loop:
    """Build the loop of a recipe, which owns the recipe and the store."""
    recipe = plan.recipe
    loop = call_recipe(plan, **({"store": store} if store else {}))
    if not isinstance(loop, Loop):
        raise TypeError(f"{plan.name} returned {type(loop).__name__}, not a rein.Loop")
    loop.own("recipe", recipe)
    if store is None:
        return loop
    usual = usual_folder(plan.name)
    if plan.options["run"] is None and store.path.name != usual.name:
        say(f"{usual} exists; this run goes to {_shown(store)}", error=True)
    loop.started.wire(lambda state: write_whole(store.path / CONFIG, recipe.toml))
    if all(part is not store for part in loop.parts.values()):
        loop.own("store", store)
        describe(loop, store)
    return loop


def _attach_handlers(loop: Loop, plan: Plan, store: HDF5Store | None) -> Interrupts:
    """Attach the handlers of the command line: limits, progress, checkpoints and signals."""
    env_steps = plan.env_steps
    every = plan.options["checkpoint_every"]
    if env_steps is not None:
        stop_at(loop, env_steps=env_steps)
    if not plan.options["quiet"]:
        progress(loop, description=plan.name, total=env_steps)
    for name in plan.options["log"]:
        _attach_logger(loop, name, plan.name, store)
    saver = None
    if store is not None:
        period = {"every": _SECONDS, "unit": "seconds"} if every is None else {"every": every}
        saver = checkpoint(loop, store, **period)
    return interrupts(loop, saver, force_after=0.7)


def _attach_logger(loop: Loop, name: str, title: str, store: HDF5Store | None) -> None:
    """Log metrics to the tool of this name. Raises ImportError if it is not installed."""
    if store is None:
        raise ValueError(f"--log {name}: {title} has no parameter `store`, so the run has no folder for it")
    run = store.path
    if name == "tensorboard":
        attach(loop, TensorBoardLogger(run / "tensorboard"))
    elif name == "wandb":
        earlier = sorted((run / "wandb").glob("*run-*-*"))  # continued by a resumed run
        same = {"id": earlier[-1].name.rpartition("-")[2], "resume": "allow"} if earlier else {}
        attach(loop, WandbLogger(project="rein", name=run.name, group=title, dir=run, **same))
    elif name == "mlflow":
        attach(loop, MlflowLogger(title, run_name=run.name))


def _resume(loop: Loop, store: HDF5Store, flags: Sequence[str]) -> None:
    if not any(store.checkpoints.folder.glob("*.h5")):
        say(f"{_shown(store)} has no checkpoint; starting from the beginning")
        return
    try:
        loaded = load_checkpoint(loop, store.path)
    except CheckpointError as error:
        named = [flag for flag in flags if f".{flag.removeprefix('--').replace('-', '_')} was" in str(error)]
        if not named:
            raise
        raise CheckpointError(
            f"rein resume: these options cannot change in a resumed run; leave out {', '.join(named)}, or start a new "
            f"run with rein train: {error}"
        ) from error
    file = _shown(store) / loaded.path.relative_to(store.path)
    say(f"resuming from {file}, after {loaded.about['clocks']['env_steps']:,} env steps")


@contextlib.contextmanager
def _exit_on_signals() -> Iterator[Callable[[], None]]:
    """Exit on SIGTERM and SIGHUP, also outside a run, so that open files are closed.

    Yields a function to call after the run. Signals are then ignored until the store is closed and the summary printed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    def ignore_signals() -> None:
        for number in previous:
            signal.signal(number, signal.SIG_IGN)

    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU")  # Windows has only the first two
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    previous = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if number != signal.SIGINT and previous[number] != signal.SIG_IGN:
            signal.signal(number, leave)
    try:
        yield ignore_signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _open_store(name: str, options: Mapping[str, Any]) -> HDF5Store:
    run = options["run"] and options["run"].expanduser()
    if run is None:
        return HDF5Store(free_folder(usual_folder(name)), exist="new")
    if not options["resume"] and run.exists() and (not run.is_dir() or any(run.iterdir())):
        ways = f"`rein resume {shlex.quote(str(run))}` or --resume"
        raise ValueError(f"{run} exists; continue it with {ways}, or start a new run with another --run")
    return HDF5Store(run, exist="resume" if options["resume"] else "error")


def _shown(store: HDF5Store) -> Path:
    """Return the run folder as given by the user, with the name that the store chose."""
    path = Path(store.config["path"])
    return path.with_name(store.path.name) if path.name else store.path


def _remove_if_empty(folder: Path) -> None:
    """Remove the folder of a run that failed before storing anything."""
    for path in (folder / "trajectories", folder):
        with contextlib.suppress(OSError):  # not empty
            path.rmdir()


def _summary(state: State, store: HDF5Store | None, each: Mapping[str, Sequence[Any]]) -> str:
    """Return the lines to print after a run: result, location of the trajectories and further commands.

    `each` has the values of all learners of a population for the options in which they differ.
    """
    clocks = state.clocks
    ending = f"{status_of(state)} ({state.reason})" if state.reason else status_of(state)
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
    lines += _best_learner(state, each)
    if store is not None:
        files = sorted((store.path / "trajectories").glob("*.h5"))
        size = sum(file.lstat().st_size for file in files) / 1e6
        count = f"{len(files)} HDF5 file{'s' * (len(files) != 1)}"
        lines.append(f"trajectories: {count}, {size:.1f} MB, in {_shown(store)}/trajectories")
        lines.append(f"summary: rein show {shlex.quote(str(_shown(store)))}")
        lines += [f"returns: rein plot {shlex.quote(str(_shown(store)))} --x {name}" for name in each]
        lines.append(
            "plots: open a file in VS Code with the H5Web extension, at myhdf5.hdfgroup.org, or with silx view"
        )
    return "\n".join(lines)


def _best_learner(state: State, each: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return a line about the learner with the highest return; none without a population or an ended episode."""
    returns = {name: value for name, value in state.metrics.items() if name.startswith(LEARNER_RETURN)}
    measured = {name: value for name, value in returns.items() if not math.isnan(value)}
    if not measured:
        return []
    name = max(measured, key=lambda name: measured[name])
    best = int(name.removeprefix(LEARNER_RETURN))
    chosen = {option: values[best] for option, values in each.items()}
    texts = [f", {option} {x:.4g}" if isinstance(x, float) else f", {option} {x}" for option, x in chosen.items()]
    return [f"best of {len(returns)} learners: learner {best}{''.join(texts)}, mean return {measured[name]:.2f}"]
