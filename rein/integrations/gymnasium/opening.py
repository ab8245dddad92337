"""Opening vector environments: making them by id, and finding out how they reset."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, VectorizeMode, load_env_creator
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import TransformObservation

from rein.integrations.gymnasium.making import make, name_of
from rein.integrations.gymnasium.workers import closed_on_error, starting
from rein.rollout.contract import checked_num_envs


def opened(
    source: Any, num_envs: int | None, autoreset_mode: AutoresetMode | str | None, make_kwargs: Mapping[str, Any]
) -> tuple[Any, AutoresetMode]:
    """The vector environment that `source` is, or that `make_vec(source)` gives, and its autoreset mode.

    A mode is asked for by a member of AutoresetMode, its name in any case, or its value. Raises ValueError for what is
    none, and where the mode is not known or not the one that was asked for, TypeError for a number that is no integer.
    Raises ValueError for environments with different observation spaces.
    """
    mode = None if autoreset_mode is None else _asked_for(autoreset_mode)
    if num_envs is not None:
        num_envs = checked_num_envs(num_envs)
    if isinstance(source, str | EnvSpec):
        by_id = functools.partial(_make_vec, mode)
        environment = make(source, {"num_envs": 1 if num_envs is None else num_envs, **make_kwargs}, by_id)
    elif not hasattr(source, "single_observation_space"):
        raise TypeError(f"{source!r} is no gymnasium.vector.VectorEnv; GymnasiumEnvironment takes single environments")
    elif make_kwargs:
        raise TypeError(f"{source} is made already: it takes no {', '.join(make_kwargs)}")
    elif num_envs not in (None, source.num_envs):
        raise ValueError(f"num_envs={num_envs}: {source} has {source.num_envs}")
    else:
        environment = source
    made_here = isinstance(source, str | EnvSpec)
    with closed_on_error(environment) if made_here else contextlib.nullcontext():
        return environment, _usable_mode(environment, mode)


def _usable_mode(environment: Any, asked: AutoresetMode | None) -> AutoresetMode:
    """Return the autoreset mode, and prepare the environment for it. Raises ValueError if it does not work."""
    mode = _mode_of(environment, asked)
    bare = environment.unwrapped
    if isinstance(bare, SyncVectorEnv | AsyncVectorEnv):
        equal = batch_space(bare.single_observation_space, bare.num_envs)
        if bare.observation_space != equal:
            raise ValueError(
                f"{environment}: its environments have different observation spaces, together"
                f" {bare.observation_space}; all environments must have equal spaces, together {equal}"
            )
    if mode is AutoresetMode.SAME_STEP and isinstance(bare, SyncVectorEnv):
        _keep_final_observations(bare)
    if mode is AutoresetMode.NEXT_STEP and isinstance(bare, AsyncVectorEnv) and not bare.shared_memory:
        # its workers do not forget in `reset` that they have to reset, and do it again (Gymnasium 1.4)
        raise ValueError(f"{environment}: shared_memory=False does not go with {mode}; share it, or reset otherwise")
    return mode


def _asked_for(value: AutoresetMode | str) -> AutoresetMode:
    text = value.lower() if isinstance(value, str) else value
    for mode in AutoresetMode:
        if value is mode or text in (mode.name.lower(), mode.value.lower()):
            return mode
    raise ValueError(f"autoreset_mode={value!r}: give one of {_modes()}")


def _modes() -> str:
    return ", ".join(mode.name for mode in AutoresetMode)


def _make_vec(mode: AutoresetMode | None, source: str | EnvSpec, **kwargs: Any) -> Any:
    """`gymnasium.make_vec`, an autoreset mode being asked for where it takes it.

    Raises ValueError where it takes none and says that it has another one.
    """
    taken = True
    if mode is not None:
        spec = gymnasium.spec(source) if isinstance(source, str) else source
        usual = VectorizeMode.SYNC if spec.vector_entry_point is None else VectorizeMode.VECTOR_ENTRY_POINT
        if VectorizeMode(kwargs.get("vectorization_mode") or usual) is not VectorizeMode.VECTOR_ENTRY_POINT:
            kwargs["vector_kwargs"] = {**kwargs.get("vector_kwargs", {}), "autoreset_mode": mode}
        elif taken := _takes_a_mode(spec):
            kwargs["autoreset_mode"] = mode
    asynchronous = kwargs.get("vectorization_mode") in (VectorizeMode.ASYNC, VectorizeMode.ASYNC.value)
    with starting() if asynchronous else contextlib.nullcontext():
        environment = gymnasium.make_vec(source, **kwargs)
    said = None if taken else _said_by(environment)
    if mode is not None and said not in (None, mode):
        environment.close()
        raise ValueError(
            f"autoreset_mode={mode.name}: {name_of(source)}'s own vector environment takes no autoreset_mode, and is"
            f' {said.name}; give vectorization_mode="sync" as well'
        )
    return environment


def _takes_a_mode(spec: EnvSpec) -> bool:
    """Whether the vector entry point has the argument; CartPole's has not. One that does not tell is asked."""
    entry: Any = spec.vector_entry_point
    if entry is None:  # what Gymnasium refuses by itself
        return True
    try:
        parameters = inspect.signature(load_env_creator(entry) if isinstance(entry, str) else entry).parameters
    except (TypeError, ValueError):  # of a compiled one
        return True
    return "autoreset_mode" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _mode_of(environment: Any, asked: AutoresetMode | None) -> AutoresetMode:
    said = _said_by(environment)
    mode = asked if said is None else said
    if mode is None:
        raise ValueError(
            f"{environment} does not say how it resets, as metadata['autoreset_mode']; give autoreset_mode=, one of"
            f" {_modes()}"
        )
    if asked not in (None, mode):
        raise ValueError(f"autoreset_mode={asked}: {environment} says that it is {mode}")
    return mode


def _said_by(environment: Any) -> AutoresetMode | None:
    said = None
    if environment.metadata is not VectorEnv.metadata:  # which everybody shares who has none, and ale-py writes to
        said = environment.metadata.get("autoreset_mode")
    if said is None:
        said = getattr(environment.unwrapped, "autoreset_mode", None)
    return None if said is None else AutoresetMode(said)


def _keep_final_observations(environment: SyncVectorEnv) -> None:
    """Have an environment that writes into one array at every step leave the final observation as it was.

    In SAME_STEP mode Gymnasium resets it before anybody could make a copy (Gymnasium#1132).
    """
    environment.envs = [TransformObservation(single, copy.deepcopy, None) for single in environment.envs]
