"""Whether an agent, an environment and a store go together."""

from __future__ import annotations

from typing import Any

from rein.protocols import Agent, Environment, Store


def check_fit(agent: Agent, environment: Environment, store: Store | None) -> None:
    """Raises TypeError where one lacks something of its protocol, ValueError where their spaces do not go together."""
    parts: list[tuple[Any, type]] = [(agent, Agent), (environment, Environment)]
    for part, protocol in [*parts, (store, Store)] if store is not None else parts:
        names = [name for name in vars(protocol) if not name.startswith("_")]
        absent = ", ".join(name for name in names if not hasattr(part, name))
        if absent:
            hint = ""
            if protocol is Agent and isinstance(environment, Agent):
                hint = "; are agent and environment the other way round?"
            elif protocol is Environment and hasattr(part, "step"):
                hint = "; one of Gymnasium's goes into rein.integrations.gymnasium.GymnasiumEnvironment(id, num_envs)"
            what = f"{type(part).__name__} is no {protocol.__name__}"
            raise TypeError(f"training_loop: {what}; it lacks {absent}{hint}")
    pairs = (
        ("observations", agent.observation_space, environment.single_observation_space),
        ("actions", agent.action_space, environment.single_action_space),
    )
    for what, mine, theirs in pairs:
        if mine != theirs:
            raise ValueError(
                f"training_loop: the agent was built for {what} in {mine}, but the environment's are in {theirs}; "
                "build it from environment.single_observation_space and environment.single_action_space"
            )
    check_held(environment, store)


def check_held(environment: Environment, store: Store | None) -> None:
    """Raises ValueError where the store cannot hold what the environment gives.

    One that has `check_spaces` is asked: it would say so after a whole epoch.
    """
    if check := getattr(store, "check_spaces", None):
        check({"observation": environment.single_observation_space, "action": environment.single_action_space})
