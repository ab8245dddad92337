"""Environments in workers, by default one worker for each environment."""

from __future__ import annotations

from typing import Any

from rein.envs import GymnasiumEnvironment


def in_workers(source: Any, num_envs: int = 1, seed: int | None = None, **options: Any) -> GymnasiumEnvironment:
    """Return environments of an id or a factory that workers step."""
    return GymnasiumEnvironment(source, num_envs, seed, **{"workers": num_envs, **options})
