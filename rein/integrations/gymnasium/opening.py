"""Opening vector environments: making them by id, and finding out how they reset."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, VectorizeMode
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TransformObservation

from rein.integrations.gymnasium.making import make
from rein.integrations.gymnasium.workers import starting
from rein.rollout.contract import checked_num_envs


def opened(
    source: Any, num_envs: int | None, autoreset_mode: AutoresetMode | str | None, make_kwargs: Mapping[str, Any]
) -> tuple[Any, AutoresetMode]:
    """The vector environment that `source` is, or that `make_vec(source)` gives, and its autoreset mode.

    Raises ValueError where its mode is not known or not the one that was asked for, TypeError for a number that is no
    integer.
    """
    mode = None if autoreset_mode is None else AutoresetMode(autoreset_mode)
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
    mode = _mode_of(environment, mode)
    bare = environment.unwrapped
    if mode is AutoresetMode.SAME_STEP and isinstance(bare, SyncVectorEnv):
        _keep_final_observations(bare)
    if mode is AutoresetMode.NEXT_STEP and isinstance(bare, AsyncVectorEnv) and not bare.shared_memory:
        # its workers do not forget in `reset` that they have to reset, and do it again (Gymnasium 1.4)
        raise ValueError(f"{environment}: shared_memory=False does not go with {mode}; share it, or reset otherwise")
    return environment, mode


def _make_vec(mode: AutoresetMode | None, source: str | EnvSpec, **kwargs: Any) -> Any:
    """`gymnasium.make_vec`, an autoreset mode being asked for where it takes it."""
    if mode is not None:
        spec = gymnasium.spec(source) if isinstance(source, str) else source
        usual = VectorizeMode.SYNC if spec.vector_entry_point is None else VectorizeMode.VECTOR_ENTRY_POINT
        if VectorizeMode(kwargs.get("vectorization_mode") or usual) is VectorizeMode.VECTOR_ENTRY_POINT:
            kwargs["autoreset_mode"] = mode
        else:
            kwargs["vector_kwargs"] = {**kwargs.get("vector_kwargs", {}), "autoreset_mode": mode}
    asynchronous = kwargs.get("vectorization_mode") in (VectorizeMode.ASYNC, VectorizeMode.ASYNC.value)
    with starting() if asynchronous else contextlib.nullcontext():
        return gymnasium.make_vec(source, **kwargs)


def _mode_of(environment: Any, asked: AutoresetMode | None) -> AutoresetMode:
    said = None
    if environment.metadata is not VectorEnv.metadata:  # which everybody shares who has none, and ale-py writes to
        said = environment.metadata.get("autoreset_mode")
    if said is None:
        said = getattr(environment.unwrapped, "autoreset_mode", None)
    if said is None and asked is None:
        modes = ", ".join(f"AutoresetMode.{mode.name}" for mode in AutoresetMode)
        raise ValueError(
            f"{environment} does not say how it resets, as metadata['autoreset_mode']; give autoreset_mode=, one of"
            f" {modes}"
        )
    mode = AutoresetMode(asked if said is None else said)
    if asked not in (None, mode):
        raise ValueError(f"autoreset_mode={asked}: {environment} says that it is {mode}")
    return mode


def _keep_final_observations(environment: SyncVectorEnv) -> None:
    """Have an environment that writes into one array at every step leave the final observation as it was.

    In SAME_STEP mode Gymnasium resets it before anybody could make a copy (Gymnasium#1132).
    """
    environment.envs = [TransformObservation(single, copy.deepcopy, None) for single in environment.envs]
