"""Rebuild the environment and the loop of a run from its `run.json`.

A file never chooses which code runs. Only environments, wrappers and recipes of rein, and environments that Gymnasium
registers, are built from it. Other code runs only if the user names it on the command line.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

import rein.envs
from rein.cli.arguments import check_options
from rein.cli.catalog import is_recipe
from rein.cli.experiment import Experiment, environment_maker
from rein.cli.plans import Recipe, call_recipe, make_plan
from rein.envs.gymnasium.adapter import rebuild
from rein.errors import CheckpointError, StoreError
from rein.files import read_json, short
from rein.loop import Loop
from rein.store.checkpoint_file import Checkpoint
from rein.store.loading import put
from rein.store.reader import Run
from rein.training.saved_agents import rebuilt

_USED = ("num_envs", "episode_seeds", "reseed", "reset", "apply_action", "close")  # attributes of an environment
_ADAPTERS = (
    "rein.envs.gymnasium.adapter.GymnasiumEnvironment",
    "rein.envs.gymnasium.workers.GymnasiumWorkers",  # in files of earlier versions
    "rein.envs.gymnasium.vector.GymnasiumVectorEnvironment",
)
NOT_REBUILT = tuple(f"rein.envs.{name}" for name in ("base", "gymnasium", "host", "jax", "pettingzoo", "tensors"))
_FILMING = "rein.envs.wrappers.record_video.RecordVideo"
_DEEPEST = 20  # maximum number of nested wrappers
_NOTHING = Experiment()


class _NotOurs(Exception):
    """Raised with the reason if an environment cannot be built from `run.json` alone."""


@attrs.frozen
class Described:
    """Run as described by its `run.json`, without its stored files."""

    path: Path
    info: Mapping[str, Any]
    fields: Mapping[str, Any] = attrs.field(factory=dict)

    @classmethod
    def of(cls, path: Path) -> Described:
        """Read the description of the run in a folder. Raises StoreError if its `run.json` cannot be read."""
        try:
            return cls(path, read_json(path / "run.json"))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise StoreError(f"{path}: not the folder of a run: its run.json cannot be read: {why}") from error


def environment_of(
    run: Run | Described,
    typed: Experiment = _NOTHING,
    *,
    command: str = "replay",
    render_mode: str | None = None,
    **replaced: Any,
) -> Any:
    """Build the environments of a run, by default as many as were stored.

    Args:
        run: the run.
        typed: environment that the user has typed: a Gymnasium id, or `module:function`, which returns the environments
            or a loop that has them.
        command: command of the user.
        render_mode: how Gymnasium environments render: "rgb_array" for videos, or "human" for a window.
        replaced: `num_envs` and `device`, which replace those of the run.

    Raises:
        ValueError: If `run.json` does not describe the environments and the user has not typed one.
    """
    replaced = {"num_envs": num_envs_of(run), **replaced}
    if typed.env is not None:
        made = made_by(run, typed.env, render_mode, **replaced)
        return made.parts["environment"] if isinstance(made, Loop) else made
    try:
        return _built(_part(run, "environment"), replaced, render_mode)
    except _NotOurs as reason:
        why = str(reason)
    stored = _experiment(run)
    if stored is not None and stored.env is not None:  # the agent is not needed
        Experiment(env=stored.env).completed(typed, *_usage(run, command))
    loop = recipe_loop(run, typed, command, **replaced)
    if loop is None:
        raise ValueError(f"{run.path}: {why}; name a function that returns it: --env my_module:make")
    return loop.parts["environment"]


def recipe_loop(
    run: Run | Described, typed: Experiment = _NOTHING, command: str = "replay", **replaced: Any
) -> Loop | None:
    """Build the loop of the run's recipe, without a store. Returns None if the recipe is not one of rein's.

    Options in `replaced` replace those of the file. Raises ValueError if the run trained an environment or an agent
    that is not part of rein, and the user has not `typed` its name.
    """
    stored = _experiment(run)
    options = _part(run, "recipe")["config"].get("options")
    if stored is None or not isinstance(options, Mapping) or (stored.recipe and not is_recipe(stored.recipe)):
        return None
    experiment = stored.completed(typed, *_usage(run, command))
    if "data" in inspect.signature(experiment.function).parameters:  # would read or record another run
        return None
    learners = max(1, learners) if isinstance(learners := options.get("learners", 1), int) else 1
    options = {**options, "num_envs": max(1, num_envs_of(run) // learners), **replaced}
    if "worlds" in options:  # their number is that of the recipe
        del options["num_envs"]
    return call_recipe(make_plan(experiment, [], Recipe(experiment, options)))


def _experiment(run: Run | Described) -> Experiment | None:
    """Return what the run trained, by its names; None if it was not started from the command line."""
    try:
        return Experiment.of(_part(run, "recipe")["config"])
    except (KeyError, TypeError):
        return None


def _usage(run: Run | Described, command: str) -> tuple[Path, str]:
    return run.path / "run.json", f"rein {command} {shlex.quote(str(short(run.path)))}"


def agent_of(
    saved: Checkpoint,
    run: Described | None,
    made: Any,
    device: str,
    command: str,
    otherwise: str,
    typed: Experiment = _NOTHING,
) -> Any:
    """Return the agent of a checkpoint, rebuilt from its file or taken from the loop of the user or the recipe.

    `command` is the command of the user, and `otherwise` Python code that an error message suggests.
    """
    try:
        return rebuilt(saved, {"device": device})
    except CheckpointError as error:
        why = error
    loop = made if isinstance(made, Loop) else None if run is None else recipe_loop(run, typed, command, device=device)
    if loop is None:
        option = f"give a function that returns the loop of the run: rein {command} RUN --env my_module:make_loop"
        raise CheckpointError(f"{why} and {otherwise}; or {option}")
    put(loop.parts["agent"], saved)
    return loop.parts["agent"]


def num_envs_of(run: Run | Described) -> int:
    """Return the number of stored environments, from the shapes of the fields."""
    return next((shape[1] for _, shape in run.fields.values()), 1)


def part_type(run: Run | Described, name: str) -> str:
    """Return the full class name of a part, or an empty string if `run.json` has none."""
    return _part(run, name)["type"]


def made_by(run: Run | Described, env: str, render_mode: str | None = None, **options: Any) -> Any:
    """Return the environments that the user has typed, or the loop that a function of the user returns.

    Environments have the options of the run, and `options` where they accept them. Raises ValueError if a function does
    not exist, and TypeError if it returns something else.
    """
    maker = environment_maker(env)
    source = maker.args[0] if isinstance(maker, functools.partial) else None
    if callable(source):
        made: Any = source()
        is_gymnasium = hasattr(made, "step") and not hasattr(made, "apply_action") and not isinstance(made, Loop)
        if not is_gymnasium:
            _check_made(env, made)
            return made
        made.close()
    accepted = inspect.signature(maker).parameters
    stored = _part(run, "recipe")["config"].get("options")
    stored = {name: value for name, value in stored.items() if name in accepted} if isinstance(stored, Mapping) else {}
    check_options(stored)
    built = {name: value for name, value in {**stored, **options}.items() if name in accepted}
    renders = isinstance(source, str) or (source is not None and "render_mode" in inspect.signature(source).parameters)
    if render_mode is not None and renders:
        built["render_mode"] = render_mode
    environment = maker(**built)
    _check_made(env, environment)
    return environment


def _check_made(env: str, made: Any) -> None:
    """Raise TypeError unless the user's function has returned environments, or a loop that has them."""
    environment = made.parts.get("environment") if isinstance(made, Loop) else made
    if missing := [name for name in _USED if not hasattr(environment, name)]:
        what = type(made).__name__ if environment is made else f"a loop whose environment is {environment!r:.200}"
        raise TypeError(f"--env {env}: returned {what}, which is not an environment (it lacks {', '.join(missing)})")


def _part(run: Run | Described, name: str) -> dict[str, Any]:
    """Return type and configuration of a part of the run, empty if `run.json` has none."""
    parts = run.info.get("parts")
    return _described(parts.get(name) if isinstance(parts, Mapping) else None)


def _described(part: Any) -> dict[str, Any]:
    kind, config = (part.get("type"), part.get("config")) if isinstance(part, Mapping) else (None, None)
    return {"type": kind if isinstance(kind, str) else "", "config": config if isinstance(config, Mapping) else {}}


def _built(part: Mapping[str, Any], replaced: Mapping[str, Any], render_mode: str | None, depth: int = 0) -> Any:
    kind = part["type"]
    config = dict(part["config"])
    if depth > _DEEPEST:
        raise _NotOurs("its environment has too many wrappers")
    own = _own_environment(kind)
    if kind not in _ADAPTERS and own is None:
        raise _NotOurs(_why_not(kind, config))
    try:
        if kind != _FILMING:  # the folder in it is not used
            check_options({name: value for name, value in config.items() if name != "inner"})
        if kind in _ADAPTERS:
            return rebuild(config, replaced["num_envs"], render_mode=render_mode)
        if "inner" not in config:
            options = config | {name: value for name, value in replaced.items() if name in (*config, "num_envs")}
            if "worlds" in config:
                agents = own(**{**config, "worlds": 1}).num_envs
                options["worlds"] = -(-options.pop("num_envs") // agents)
            return own(**options)
        inner = _built(_described(config.pop("inner")), replaced, render_mode, depth + 1)
        return inner if kind == _FILMING else own(inner, **config)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise _NotOurs(f"its environment cannot be rebuilt: {error}") from error


def _own_environment(kind: str) -> Any:
    """Return rein's environment or wrapper of a full name, which may be in another module than in earlier versions."""
    is_built = kind.startswith("rein.envs.") and not kind.startswith(NOT_REBUILT)
    own = own_environments()
    by_name = {value.__name__: value for value in own.values()}
    return own.get(kind) or by_name.get(kind.rpartition(".")[2]) if is_built else None


def _why_not(kind: str, config: Mapping[str, Any]) -> str:
    """Return why an environment cannot be built from a file."""
    if not kind.startswith(NOT_REBUILT):
        return f"its environment {kind} is not part of rein" if kind else "run.json names no environment"
    made_of = str(config.get("id", config.get("env", config.get("game", "other code"))))
    return f"its environment, a {kind.rpartition('.')[2]} of {made_of:.200}, cannot be built from run.json alone"


@functools.cache
def own_environments() -> dict[str, Any]:
    """Return rein's environments and wrappers by their full names, without base classes and adapters."""
    environments = {}
    for module in pkgutil.walk_packages(rein.envs.__path__, "rein.envs."):
        if module.name.startswith(NOT_REBUILT):
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            if inspect.isclass(value) and value.__module__ == module.name and hasattr(value, "reset_to"):
                environments[f"{module.name}.{name}"] = value
    return environments
