"""Adapters for Gymnasium: single environments and vector environments."""

from __future__ import annotations

from typing import Any, Literal

from gymnasium.vector import VectorEnv

from rein.envs.gymnasium.adapter import GymnasiumEnvironment, Source
from rein.envs.gymnasium.vector import GymnasiumVectorEnvironment

__all__ = ["GymnasiumEnvironment", "GymnasiumVectorEnvironment", "make"]

_OF_WORKERS = ("timeout", "on_failure", "max_restarts")


def make(
    env: Source | VectorEnv[Any, Any, Any],
    num_envs: int | None = None,
    seed: int | None = None,
    *,
    workers: int | None = None,
    mode: Literal["processes", "threads", "sync"] | None = None,
    **options: Any,
) -> GymnasiumEnvironment | GymnasiumVectorEnvironment:
    """Build environments that are stepped together.

    Args:
        env: Gymnasium id, function that returns a `gymnasium.Env`, or `gymnasium.vector.VectorEnv`. If the function
            has a parameter `index` without a default, it gets the index of the environment, from 0 to N - 1.
        num_envs: number of environments, 1 by default. A `VectorEnv` has a fixed number.
        seed: random seed of all episodes. `training_loop(seed=)` seeds environments without a seed.
        workers: number of workers that step the environments at the same time, for environments that take long.
            Without workers they are stepped one by one.
        mode: kind of the workers: "processes", the default; "threads" for environments that cannot be pickled or that
            wait; or "sync" for no workers, to find errors.
        **options: options of `GymnasiumEnvironment` or `GymnasiumVectorEnvironment`.
            Other options are passed to `gymnasium.make`.

    Raises:
        ValueError: if Gymnasium does not know the id, if the environments have different spaces, or if there is a mode
            without workers.
        TypeError: if `env` is an environment instead of a function that makes one, or if a space cannot be converted
            to tensors.

    Example::

        env = rein.make("CartPole-v1", num_envs=8, seed=0)
        env = rein.make(lambda: FrameStackObservation(gymnasium.make("ALE/Pong-v5"), 4), num_envs=8, workers=2)
    """
    if isinstance(env, VectorEnv):
        return GymnasiumVectorEnvironment(env, num_envs, seed, **options)
    num_envs = 1 if num_envs is None else num_envs
    if mode not in (None, "processes", "threads", "sync"):
        raise ValueError(f"mode={mode!r}: give 'processes', 'threads' or 'sync'")
    if workers is None and mode not in (None, "sync"):
        raise ValueError(f"mode={mode!r}: give workers= as well, the number of workers")
    if mode == "sync":
        options = {name: value for name, value in options.items() if name not in _OF_WORKERS}
    elif workers is not None:
        options |= {"workers": workers, "mode": mode}
    return GymnasiumEnvironment(env, num_envs, seed, **options)
