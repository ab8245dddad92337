"""Evaluate a policy while it is being trained."""

from __future__ import annotations

import logging
from typing import Any, Literal

from rein.loop import Loop
from rein.loop.info import run_info
from rein.protocols import Environment, Policy, Stateful, Store
from rein.rollout import Recorder
from rein.rollout import evaluate as play
from rein.types import State

logger = logging.getLogger("rein")


def evaluate(
    loop: Loop,
    policy: Policy,
    environment: Environment,
    *,
    episodes: int,
    max_episode_steps: int | None = 10_000,
    name: str = "evaluation",
    event: str = "epoch_ended",
    on_failure: Literal["raise", "drop"] = "raise",
    store: Store | None = None,
    **filters: Any,
) -> None:
    """Run whole episodes when `event` fires; their means are the metrics `<name>_return` and `<name>_length`.

        evaluate(loop, agent.policy(), Gridworld(num_envs=16, seed=1), episodes=100, every=10)

    Training goes on as if nothing had been evaluated: the policy has its own generator, and `environment` must be one
    that is used for nothing else. The loop owns it as `<name>_environment`, and a policy that has a state as
    `<name>_policy`, so a resumed run evaluates as the run without a break. What the policy or the environment
    raises ends the run; with `on_failure="drop"` it is logged, that evaluation has no metrics, and training goes on.
    See `rein.rollout.evaluate`.

    A `store`, which is used for nothing else, takes the episodes down: an epoch for each round in which every
    environment plays one. To keep only these, build the training's store with `every=0`.

    Then the event `evaluated` fires, and `state.memory["evaluations"]` says what the latest one found: its `number`,
    counted over the whole run and all evaluations, `name`, mean `return` and `length`, and `episodes`.

    Raises ValueError where the environment is part of the loop already, for a name that is taken, and for fewer than
    one episode.
    """
    if on_failure not in ("raise", "drop"):
        raise ValueError(f'evaluate(on_failure={on_failure!r}): give "raise" or "drop"')
    if episodes < 1:
        raise ValueError(f"evaluate(episodes={episodes}): give 1 or more")
    for taken, part in loop.parts.items():
        if part is environment:
            raise ValueError(
                f"evaluate(environment=...): this is the loop's own {taken!r}; build another to evaluate in"
            )
        if store is not None and _writes_to(part, store):
            raise ValueError(f"evaluate(store=...): the loop's own {taken!r} writes there; give one of another folder")
    attach = loop.event(event)(**filters)
    loop.own(f"{name}_environment", environment)
    if isinstance(policy, Stateful):
        loop.own(f"{name}_policy", policy)
    recorder = None if store is None else _record(loop, environment, store, name)
    evaluated = loop.events.get("evaluated") or loop.define("evaluated")

    @attach
    def evaluate_policy(state: State) -> None:
        try:
            result = play(policy, environment, episodes, max_episode_steps=max_episode_steps, recorder=recorder)
        except Exception as error:  # raised or logged, as the user chose
            if on_failure == "raise" or (recorder is not None and recorder.failure is error):
                raise
            logger.exception("%s failed in epoch %d and is dropped", name, state.epoch)
            return
        state.metrics[f"{name}_return"] = result.mean_return
        state.metrics[f"{name}_length"] = result.mean_length
        found = {"return": result.mean_return, "length": result.mean_length, "episodes": episodes}
        number = state.memory.get("evaluations", {"number": 0})["number"] + 1
        state.memory["evaluations"] = {"number": number, "name": name, **found}
        evaluated.fire(state)


def _writes_to(part: Any, store: Any) -> bool:
    folder = getattr(store, "path", None)
    return part is store or (folder is not None and getattr(part, "path", None) == folder)


def _record(loop: Loop, environment: Environment, store: Any, name: str) -> Recorder:
    """What takes the episodes down in `store`, which the loop owns from now on."""
    loop.own(f"{name}_store", store)
    recorder = loop.own(f"{name}_recorder", Recorder(store, environment.num_envs))
    if hasattr(store, "write_run"):  # it has the folder of a run, of these environments

        @loop.started
        def write_run(state: State) -> None:
            info = run_info(loop)
            mine = {kind: info["parts"][f"{name}_{kind}"] for kind in ("environment", "store")}
            store.write_run({**info, "parts": {**info["parts"], **mine}})

    @loop.on("completed", "halted", "failed")
    def flush_store(state: State) -> None:
        store.flush()

    return recorder
