"""Rebuild rein's agents from their files.

Files are not trusted and never choose code: a file names a class of `rein.agents` and the configuration of the agent.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import math
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gymnasium import spaces
from torch import Tensor

import rein.agents
from rein.agents.base.action_noise import AdaptiveExploration, GaussianNoise, OrnsteinUhlenbeck
from rein.agents.base.agent import Agent, environment_name
from rein.agents.base.network_agent import FACTORIES
from rein.agents.base.segments import PrioritizedSegments
from rein.errors import CheckpointError
from rein.files import absolute
from rein.integrations.weights_file import load_weights, read_weights
from rein.networks.recurrent import GRU, LSTM, MinimalGRU
from rein.ops.trees import leaves
from rein.options import options_of
from rein.schedules import as_schedule
from rein.spaces.space_json import Space, space_from_json
from rein.store.checkpoint_file import Checkpoint, describe_part, differences
from rein.store.loading import part_at, put

if TYPE_CHECKING:
    from rein.agents.base.policies import AgentPolicy

_ROWS = ("replay", "demonstrations", "rollout")  # entries of the state that are data, not parameters
_CORES = {core.__name__: core for core in (GRU, LSTM, MinimalGRU)}
_CALLERS = ("device", "guard", "threads", "micro_batch", "compile", "optimizer")  # options not taken from a file
_SIZES = ("hidden", "core", "critics", "cosines", "action_quantiles")  # options that make an agent larger
_OBJECTS = ("encoder", *FACTORIES, "core", "noise", "segments")  # options that a name alone does not describe


@torch.inference_mode(False)
def load_agent(path: str | Path, *, name: str = "agent", **options: Any) -> Any:
    """Build and load the agent that `rein.save` wrote, or the agent of a run's checkpoint.

    Args:
        path: file of the agent, checkpoint, or folder of a run.
        name: name of the agent among the parts of the run.
        options: options of the constructor that replace those of the file. `device` ("cpu" by default), `guard` and
            options that only change speed are not taken from the file. Custom functions must be given: `optimizer=`, a
            custom `core`, an `encoder`, custom networks.

    Raises:
        CheckpointError: if the file is missing or damaged, if its agent is not one of rein's, or if the file does not
            describe all spaces and options. Build such an agent first, and load it with `rein.load`.

    Example:
        >>> agent = rein.load_agent("runs/mine/checkpoints/best")  # any path that `rein.load` accepts
        >>> agent = rein.load_agent("agent.h5", device="cuda")
    """
    return rebuilt(part_at(path, name), options)


def load_policy(path: str | Path, *, deterministic: bool = True, name: str = "agent", **options: Any) -> AgentPolicy:
    """Return the policy of a saved agent, for evaluation or deployment; see `load_agent`.

    The policy takes the greedy action, or samples with `deterministic=False`. `path` may also be a `.safetensors` file
    of `rein.export`.
    """
    if Path(path).suffix == ".safetensors":
        with torch.inference_mode(False):
            agent = rebuilt(read_weights(absolute(path)), options, load_weights)
    else:
        agent = load_agent(path, name=name, **options)
    return agent.policy(deterministic)


def _put(agent: Any, checkpoint: Checkpoint) -> None:
    put(agent, checkpoint, strict=False)


def rebuilt(checkpoint: Checkpoint, options: Mapping[str, Any], load: Callable[[Any, Checkpoint], None] = _put) -> Any:
    """Build an agent from its description, and `load` its state. `options` replace those of the file."""
    build, config = checkpoint.about.get("build"), checkpoint.about.get("config")
    if not (isinstance(build, Mapping) and isinstance(config, Mapping)):
        raise _refused(
            checkpoint.path, "the file has an old format or an unusual space, and does not describe its agent"
        )
    kind = own_agents().get(str(build.get("class")))
    if kind is None:
        raise _refused(checkpoint.path, f"the class {build.get('class')!r:.200} is not an agent of rein")
    try:
        agent = _built(kind, checkpoint, options)
    except Exception as error:  # the file is not trusted, so anything can be wrong with its configuration
        raise _refused(checkpoint.path, f"the agent cannot be rebuilt: {error}") from error
    replaced = dict.fromkeys(options)  # they replace options of the file
    built = {**describe_part(agent)["config"], **replaced, "seed": config.get("seed")}
    if differ := differences({**config, **replaced}, built):
        names = dict.fromkeys(line.split(" ")[0].partition(".")[0] for line in differ)
        raise _refused(checkpoint.path, f"the file cannot describe {', '.join(names)}; pass it to load_agent")
    agent._environment_name = environment_name(checkpoint.about.get("environment"))
    load(agent, checkpoint)
    return agent


def _refused(path: Path, reason: str) -> CheckpointError:
    advice = "Build the agent as before, and use rein.load(agent, path)"
    if path.suffix == ".safetensors":
        advice = "safetensors.torch.load_file(path) reads its weights"
    return CheckpointError(f"{path}: {reason}. {advice}")


def _built(kind: type[Any], checkpoint: Checkpoint, options: Mapping[str, Any]) -> Any:
    build, config = checkpoint.about["build"], checkpoint.about["config"]
    observation_space, action_space = (
        space_from_json(build.get(f"{side}_space")) for side in ("observation", "action")
    )
    wanted = options_of(kind).keys() - {*_CALLERS, *options}
    saved = {key: value for key, value in config.items() if key in wanted}
    factories = options_of(kind).keys() & {*FACTORIES}
    unused = ("hidden",) if factories and factories <= options.keys() else ()  # custom networks define all layers
    sizes = {key: value for key, value in saved.items() if key not in unused}
    _check_sizes(sizes, observation_space, action_space, checkpoint.state)
    return kind(observation_space, action_space, **{key: _option(key, saved[key]) for key in saved}, **options)


@functools.cache
def own_agents() -> dict[str, type[Any]]:
    """Return all agents that the modules of `rein.agents` define, by their full names."""
    agents: dict[str, type[Any]] = {}
    for module in pkgutil.iter_modules(rein.agents.__path__, "rein.agents."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if inspect.isclass(value) and value.__module__ == module.name and issubclass(value, Agent):
                agents[f"{module.name}.{name}"] = value
    return agents


def _check_sizes(saved: Mapping[str, Any], observation: Space, action: Space, state: Mapping[str, Any]) -> None:
    """Raise ValueError if the agent would take far more memory than its file holds."""
    numbers = sum(x.numel() for path, x in leaves(state) if isinstance(x, Tensor) and not path.startswith(_ROWS))
    sizes = {"observation_space": spaces.flatdim(observation), "action_space": spaces.flatdim(action)}
    if isinstance(observation, spaces.MultiDiscrete) and "table" in state:  # a row for each combination
        sizes["observation_space"] = math.prod(observation.nvec.tolist())
    sizes |= {key: _size(saved[key]) for key in _SIZES if key in saved}
    if large := [key for key, size in sizes.items() if size > numbers]:
        raise ValueError(f"{', '.join(large)}: larger than the {numbers:,} numbers in the file")


def _size(value: Any) -> int:
    """Return a lower bound on the number of weights that an option makes; 0 if it is not a number of features."""
    if isinstance(value, list):
        each = [_size(one) for one in value]
        return sum([*each, *(a * b for a, b in itertools.pairwise(each))])
    if isinstance(value, Mapping):
        return _size(value.get("features")) * max(_size(value.get("layers", 1)), 1) if "function" in value else 0
    return value if type(value) is int else 0


def _option(key: str, saved: Any) -> Any:
    """Return an option from its JSON. Raises ValueError if it was a custom function."""
    if saved in ("inf", "-inf"):
        return float(saved)
    if isinstance(saved, list):
        return tuple(_option(key, one) for one in saved)
    if isinstance(saved, Mapping) and key not in ("encoder", *FACTORIES):
        return _object(key, saved)
    if isinstance(saved, str | Mapping) and key in _OBJECTS:
        name = saved if isinstance(saved, str) else saved.get("function")
        raise ValueError(f"the file cannot describe {key}={name!s:.80}; pass {key}= to load_agent")
    return saved


def _object(key: str, saved: Mapping[str, Any]) -> Any:
    keys, noise = {*saved}, saved.get("noise")
    if keys == {"clock", "segments"}:
        return as_schedule(saved)
    if {"threshold", "window"} <= keys:
        return AdaptiveExploration(**saved)
    if noise == "gaussian":
        return GaussianNoise(_option("std", saved["std"]))
    if noise == "ornstein_uhlenbeck":
        return OrnsteinUhlenbeck(saved["theta"], _option("sigma", saved["sigma"]), saved["mu"])
    if saved.get("function") in _CORES and "features" in keys and keys <= {"function", "features", "layers"}:
        return functools.partial(_CORES[saved["function"]], **{name: saved[name] for name in keys - {"function"}})
    if key == "segments":
        return PrioritizedSegments(**{name: _option(name, value) for name, value in saved.items()})
    raise ValueError(f"the file cannot describe {key}={saved.get('function', dict(saved))!r:.80}; pass {key}=")
