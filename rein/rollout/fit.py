"""Whether an agent, an environment and a store go together."""

from __future__ import annotations

import os
from typing import Any

from rein.protocols import Agent, Environment, Store


def check_fit(agent: Agent, environment: Environment, store: Store | None) -> None:
    """Raises TypeError where one lacks something of its protocol, ValueError where their spaces do not go together."""
    if lacking(agent, Agent) and isinstance(environment, Agent):
        raise TypeError("training_loop: agent and environment are the other way round; give the agent first")
    check_part("training_loop", agent, Agent)
    check_part("training_loop", environment, Environment)
    if store is not None:
        check_part("training_loop", store, Store)
    pairs = (
        ("observations", agent.observation_space, environment.single_observation_space),
        ("actions", agent.action_space, environment.single_action_space),
    )
    for what, mine, theirs in pairs:
        if agent.observation_space == environment.single_action_space != agent.action_space:
            raise ValueError(
                "training_loop: the agent's spaces are the other way round; give the observation space first"
            )
        if mine != theirs:
            raise ValueError(
                f"training_loop: the agent was built for {what} in {mine}, but the environment's are in {theirs}; "
                "build it from environment.single_observation_space and environment.single_action_space"
            )
    check_held(environment, store)


def lacking(part: Any, protocol: type) -> list[str]:
    """Return the names of the protocol that `part` does not have."""
    return [name for name in vars(protocol) if not name.startswith("_") and not hasattr(part, name)]


def check_part(caller: str, part: Any, protocol: type) -> None:
    """Raise TypeError if `part` lacks a method or an attribute of the protocol, and say how to get one that has all."""
    if isinstance(part, type):
        raise TypeError(f"{caller}: {part.__name__} is a class; give an object of it, {part.__name__}(...)")
    absent = lacking(part, protocol)
    if not absent:
        return
    kind = type(part).__name__
    hint = f"it lacks {', '.join(absent)}"
    if protocol is Environment and hasattr(part, "step"):
        vector = hasattr(part, "single_observation_space")
        wrapper = (
            "GymnasiumVectorEnvironment(environment)" if vector else "GymnasiumEnvironment(id_or_factory, num_envs)"
        )
        hint = f"wrap Gymnasium's with rein.integrations.gymnasium.{wrapper}"
    elif protocol is Environment and isinstance(part, str):
        hint = f"give rein.integrations.gymnasium.GymnasiumEnvironment({part!r}, num_envs)"
    elif protocol is Store and isinstance(part, str | os.PathLike):
        hint = f'give rein.HDF5Store({os.fspath(part)!r}, exist="new")'
    raise TypeError(f"{caller}: {kind} is no {protocol.__name__}; {hint}")


def check_held(environment: Environment, store: Store | None) -> None:
    """Raises ValueError where the store cannot hold what the environment gives.

    One that has `check_spaces` is asked: it would say so after a whole epoch.
    """
    if check := getattr(store, "check_spaces", None):
        check({"observation": environment.single_observation_space, "action": environment.single_action_space})
