"""`rein train`: a recipe's loop, its store and its display; every parameter of the recipe is a flag."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import torch
import tyro

from rein.cli.listing import find, recipe_names
from rein.handlers.progress import progress
from rein.handlers.stop_at import stop_at
from rein.loop import Loop
from rein.stores.hdf5 import HDF5Store
from rein.types import State


def common(
    run: Path | None = None,
    epochs: int | None = None,
    iterations: int | None = None,
    env_steps: int | None = None,
    threads: int = 1,
    quiet: bool = False,
    debug: bool = False,
) -> None:
    """What every recipe takes.

    Args:
        run: the run's folder; a fresh name under runs/ by default.
        epochs: epochs at most.
        iterations: steps of every environment in an epoch.
        env_steps: end the run when the environments have taken so many steps in all.
        threads: threads that torch computes with; for small networks one is fastest.
        quiet: no progress display.
        debug: give the traceback of an error.
    """


def train(words: Sequence[str]) -> None:
    """Train what `words` name, under the options that they give."""
    if not words or words[0].startswith("-"):
        if "--help" in words or "-h" in words:
            print("usage: rein train RECIPE [options]; rein train RECIPE --help shows them")
            return
        raise ValueError(f"rein train RECIPE: name a recipe ({', '.join(recipe_names())}) or my_module:make_loop")
    name = words[0]
    sys.path.insert(0, os.getcwd())  # my_module may lie where the user stands, as it may for `python -m`
    recipe = find(name)
    options = parse(recipe, f"rein train {name}", list(words[1:]))
    own = inspect.signature(recipe).parameters
    if options["threads"] < 1:
        raise ValueError(f"--threads {options['threads']}: give 1 or more")
    if options["run"] is not None and "store" not in own:
        raise ValueError(f"--run {options['run']}: {name} has no parameter `store`, so it stores nothing")
    torch.set_num_threads(options["threads"])
    store = _open_store(name, options["run"]) if "store" in own else None
    try:
        given = {key: value for key, value in options.items() if key in own}
        loop = recipe(**given, **({"store": store} if store else {}))
        if not isinstance(loop, Loop):
            raise TypeError(f"{name} returned {type(loop).__name__}, not a rein.Loop")
        if options["env_steps"] is not None:
            stop_at(loop, env_steps=options["env_steps"])
        if not options["quiet"]:
            progress(loop, description=name, total=options["env_steps"])
        limits = {k: options[k] for k in ("epochs", "iterations") if k not in own and options[k] is not None}
        if options["env_steps"] is not None and "--epochs" not in words:
            limits["epochs"] = None  # the recipe's own number is for whoever gives no other end
        final = loop.run(**limits)
    finally:
        if store is not None:
            store.close()
            _remove_if_empty(store.path)
    print(summary(final, store))


def parse(recipe: Callable[..., Any], program: str, words: list[str]) -> dict[str, Any]:
    """The values of all options: the recipe's own parameters and the common ones that it does not have itself."""
    own = dict(inspect.signature(recipe).parameters)
    own.pop("store", None)
    shared = {k: p for k, p in inspect.signature(common).parameters.items() if k not in own}
    parameters = {k: p.replace(kind=p.KEYWORD_ONLY) for k, p in (own | shared).items()}
    hints = {**get_type_hints(common), **get_type_hints(recipe)}

    def options(**values: Any) -> dict[str, Any]:
        return values

    options.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    options.__annotations__ = {key: hints.get(key, type(p.default)) for key, p in parameters.items()}
    options.__doc__ = _document(recipe, shared)
    return tyro.cli(options, prog=program, args=words)


def _document(recipe: Callable[..., Any], shared: Mapping[str, Any]) -> str:
    """The recipe's docstring with the help of the common options added, as the parser of flags reads it."""
    mine, theirs = inspect.getdoc(recipe) or "Run it.", (inspect.getdoc(common) or "").splitlines()
    lines = [line for line in theirs if line.strip().partition(":")[0] in shared]
    return "\n".join([mine if "Args:" in mine else f"{mine}\n\nArgs:", *lines])


def _open_store(name: str, run: Path | None) -> HDF5Store:
    if run is not None:
        return HDF5Store(run)
    return HDF5Store(Path("runs") / name.replace(":", "-"), exist="new")


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
    if store is not None:
        files = sorted((store.path / "trajectories").glob("*.h5"))
        size = sum(file.stat().st_size for file in files) / 1e6
        count = f"{len(files)} HDF5 file{'s' * (len(files) != 1)}"
        lines.append(f"trajectories: {count}, {size:.1f} MB, in {store.path}/trajectories")
        lines.append(f"look at them: rein show {store.path}; or open one in VS Code with the H5Web extension,")
        lines.append("              at myhdf5.hdfgroup.org, or with silx view: each opens with a plot")
    return "\n".join(lines)
