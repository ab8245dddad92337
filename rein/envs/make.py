"""Environments from Gymnasium ids, factories and vector environments."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import VectorEnv

from rein.envs.gymnasium.adapter import GymnasiumEnvironment, Source
from rein.envs.gymnasium.vector import GymnasiumVectorEnvironment


def make(
    env: Source | VectorEnv[Any, Any, Any],
    num_envs: int | None = None,
    seed: int | None = None,
    *,
    processes: bool = False,
    **options: Any,
) -> GymnasiumEnvironment | GymnasiumVectorEnvironment:
    """Build environments that are stepped together.

    Args:
        env: Gymnasium id, function that returns a `gymnasium.Env`, or `gymnasium.vector.VectorEnv`.
        num_envs: number of environments, 1 by default. A `VectorEnv` has a fixed number.
        seed: random seed of all episodes. `training_loop(seed=)` seeds environments without a seed.
        processes: step each environment in a separate process, for environments that take milliseconds per step.
        **options: options of `GymnasiumEnvironment` or `GymnasiumVectorEnvironment`. Other options are passed to
            `gymnasium.make`.

    Raises:
        ValueError: if Gymnasium does not know the id, or if the environments have different spaces.
        TypeError: if `env` is an environment instead of a function that makes one, or if a space cannot be converted
            to tensors.

    Example::

        env = rein.make("CartPole-v1", num_envs=8, seed=0)
        env = rein.make(lambda: FrameStackObservation(gymnasium.make("ALE/Pong-v5"), 4), num_envs=8, processes=True)
    """
    if isinstance(env, VectorEnv):
        return GymnasiumVectorEnvironment(env, num_envs, seed, **options)
    num_envs = 1 if num_envs is None else num_envs
    if processes:
        return GymnasiumVectorEnvironment.in_processes(env, num_envs, seed, **options)
    return GymnasiumEnvironment(env, num_envs, seed, **options)
