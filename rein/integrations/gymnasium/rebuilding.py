"""The adapter, built again from its configuration as a file tells it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import gymnasium

from rein.integrations.gymnasium.environment import GymnasiumEnvironment

_ATARI = re.compile(r"ALE/\w+-v\d+")
_OWN = "gymnasium.envs."  # the module of an entry point that a file may choose


def rebuild(config: Mapping[str, Any], num_envs: int, *, filming: bool = False) -> GymnasiumEnvironment:
    """`num_envs` environments of what `GymnasiumEnvironment.config` says; with `filming` they can be rendered.

    The configuration may be anybody's, so it chooses among Gymnasium's own environments and Atari's only: an id of
    Gymnasium's may name a module to import. Raises ValueError for any other, and for options that JSON could not hold.
    """
    name, options, info = config.get("id"), config.get("make_kwargs"), config.get("info")
    if not isinstance(name, str) or not _is_known(name):
        raise ValueError(f"{name!r} is not one of Gymnasium's own environments")
    options = options if isinstance(options, Mapping) else {}
    for key, value in options.items():
        if isinstance(value, str) and value.startswith("<"):  # what an object looks like
            raise ValueError(f"the option {key} of {name} was {value}, which a file cannot say")
    infos = info if isinstance(info, Mapping) else {}
    if filming:
        options = {**_camera(name, options), **options, "render_mode": "rgb_array"}
    return GymnasiumEnvironment(name, num_envs, info=infos, **options)


def _camera(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Of MuJoCo's, the camera that goes along with a robot, if there is one: it leaves the picture otherwise."""
    spec = gymnasium.registry.get(name)
    of_mujoco = spec is not None and str(spec.entry_point).startswith(f"{_OWN}mujoco.")
    return {"camera_name": "track"} if of_mujoco and options.get("camera_id") is None else {}


def _is_known(name: str) -> bool:
    if _ATARI.fullmatch(name):
        return True
    spec = gymnasium.registry.get(name)
    return spec is not None and isinstance(spec.entry_point, str) and spec.entry_point.startswith(_OWN)
