"""An agent of rein's own, built again from its file.

A file may be anybody's and chooses no code: it names one of the classes of `rein.agents`, and the configuration that
this was built with.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import math
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

import rein.agents
from rein.agents.base.exploration import GaussianNoise, OrnsteinUhlenbeck, Plateau
from rein.agents.base.options import options_of
from rein.agents.base.segments import Segments
from rein.errors import CheckpointError
from rein.networks.recurrent import GRU, LSTM, MinimalGRU
from rein.ops.trees import leaves
from rein.protocols import Policy
from rein.schedules import as_schedule
from rein.store.checkpoint import Checkpoint, describe_part, differences
from rein.store.parts import part_at, put
from rein.store.spaces import Space, space_from_json

_ROWS = ("replay", "rollout")  # what the agent has seen, and not what it is
_CORES = {core.__name__: core for core in (GRU, LSTM, MinimalGRU)}
_CALLERS = ("device", "guard", "threads", "micro_batch", "compile", "optimizer")  # what no file decides
_SIZES = ("hidden", "core", "critics", "cosines")  # what makes networks larger
_OBJECTS = ("core", "stem", "noise", "segments")  # of which a name alone says nothing


@torch.inference_mode(False)
def load_agent(path: str | Path, *, name: str = "agent", **options: Any) -> Any:
    """The agent that `rein.save` wrote, or that of a run's checkpoint, built as it was and loaded.

        agent = rein.load_agent("runs/mine/checkpoints/best")   # whatever `rein.load` takes
        agent = rein.load_agent("agent.h5", device="cuda")

    `options` are those of its constructor, in place of what the file says. `device`, "cpu" where it is not given,
    `guard` and what changes speed alone are not taken from the file. Neither are functions that are not rein's, which
    must be given: `optimizer=`, a `core` of your own, a `stem`.

    Raises CheckpointError where the file is missing or damaged; where its agent is not one of rein's own, or has spaces
    or options that a file cannot say: such a one is built first, and loaded by `rein.load`.
    """
    return rebuilt(part_at(path, name), options)


def load_policy(path: str | Path, *, deterministic: bool = True, name: str = "agent", **options: Any) -> Policy:
    """Return the policy of a saved agent, for evaluation or deployment; see `load_agent`.

    The policy takes the greedy action, or samples with `deterministic=False`.
    """
    return load_agent(path, name=name, **options).policy(deterministic)


def rebuilt(found: Checkpoint, options: Mapping[str, Any]) -> Any:
    """The agent of a checkpoint that `part_at` read, with these options in place of its own; see `load_agent`."""
    build, config = found.about.get("build"), found.about.get("config")
    if not (isinstance(build, Mapping) and isinstance(config, Mapping)):
        raise _refused(
            found.path, "does not say what its agent was built for, as files of older versions and odd spaces"
        )
    kind = own_agents().get(str(build.get("class")))
    if kind is None:
        raise _refused(found.path, f"is of a {build.get('class')!r:.200}, which is not one of rein's own agents")
    try:
        agent = _built(kind, found, options)
    except (
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        AttributeError,
        RuntimeError,
        AssertionError,
        MemoryError,
    ) as error:
        raise _refused(found.path, f"its agent cannot be built again: {error}") from error
    given = dict.fromkeys(options)  # which replace what the file says
    mine = {**describe_part(agent)["config"], **given, "seed": config.get("seed")}
    if differ := differences({**config, **given}, mine):
        names = dict.fromkeys(line.split(" ")[0].partition(".")[0] for line in differ)
        raise _refused(found.path, f"a file cannot say what {', '.join(names)} was; give it to load_agent")
    put(agent, found, strict=False)
    return agent


def _refused(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path}: {why}. Build the agent as it was, and use rein.load(agent, path)")


def _built(kind: type[Any], found: Checkpoint, options: Mapping[str, Any]) -> Any:
    build, config = found.about["build"], found.about["config"]
    observation_space, action_space = (
        space_from_json(build.get(f"{side}_space")) for side in ("observation", "action")
    )
    wanted = options_of(kind).keys() - {*_CALLERS, *options}
    said = {key: value for key, value in config.items() if key in wanted}
    _check_sizes(said, observation_space, action_space, found.state)
    return kind(observation_space, action_space, **{key: _option(key, said[key]) for key in said}, **options)


@functools.cache
def own_agents() -> dict[str, type[Any]]:
    """Every agent that is defined in a module of `rein.agents`, by its full name."""
    found: dict[str, type[Any]] = {}
    for module in pkgutil.iter_modules(rein.agents.__path__, "rein.agents."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if inspect.isclass(value) and value.__module__ == module.name and hasattr(value, "optimize_model"):
                found[f"{module.name}.{name}"] = value
    return found


def _check_sizes(said: Mapping[str, Any], observation: Space, action: Space, state: Mapping[str, Any]) -> None:
    """ValueError where building the agent would take far more memory than its file, which may be anybody's."""
    numbers = sum(x.numel() for path, x in leaves(state) if isinstance(x, Tensor) and not path.startswith(_ROWS))
    sizes = {"observation_space": spaces.flatdim(observation), "action_space": spaces.flatdim(action)}
    if isinstance(observation, spaces.MultiDiscrete) and "table" in state:  # a row for each combination
        sizes["observation_space"] = math.prod(observation.nvec.tolist())
    sizes |= {key: _size(said[key]) for key in _SIZES if key in said}
    if large := [key for key, size in sizes.items() if size > numbers]:
        raise ValueError(f"{', '.join(large)}: larger than the {numbers:,} numbers that the file holds")


def _size(value: Any) -> int:
    """How many weights an option makes, at least; 0 for what is no number of features."""
    if isinstance(value, list):
        each = [_size(one) for one in value]
        return sum([*each, *(a * b for a, b in itertools.pairwise(each))])
    if isinstance(value, Mapping):
        return _size(value.get("features")) * max(_size(value.get("layers", 1)), 1) if "function" in value else 0
    return value if type(value) is int else 0


def _option(key: str, said: Any) -> Any:
    """An option, as it was before it was written down as JSON. ValueError for what is a function of somebody else's."""
    if said in ("inf", "-inf"):
        return float(said)
    if isinstance(said, list):
        return tuple(_option(key, one) for one in said)
    if isinstance(said, Mapping) and key != "stem":
        return _object(key, said)
    if isinstance(said, str | Mapping) and key in _OBJECTS:
        name = said if isinstance(said, str) else said.get("function")
        raise ValueError(f"a file cannot say what {key}={name!s:.80} was; give {key}= to load_agent")
    return said


def _object(key: str, said: Mapping[str, Any]) -> Any:
    keys, noise = {*said}, said.get("noise")
    if keys == {"clock", "segments"}:
        return as_schedule(said)
    if {"threshold", "window"} <= keys:
        return Plateau(**said)
    if noise == "gaussian":
        return GaussianNoise(_option("std", said["std"]))
    if noise == "ornstein_uhlenbeck":
        return OrnsteinUhlenbeck(said["theta"], _option("sigma", said["sigma"]), said["mu"])
    if said.get("function") in _CORES and "features" in keys and keys <= {"function", "features", "layers"}:
        return functools.partial(_CORES[said["function"]], **{name: said[name] for name in keys - {"function"}})
    if key == "segments":
        return Segments(**{name: _option(name, value) for name, value in said.items()})
    raise ValueError(f"a file cannot say what {key}={said.get('function', dict(said))!r:.80} was; give {key}=")
