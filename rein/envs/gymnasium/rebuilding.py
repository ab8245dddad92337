"""Building the adapter again from a configuration that was read from a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode

from rein.envs.gymnasium.adapter import GymnasiumEnvironment

_ATARI = re.compile(r"ALE/\w+-v\d+")
_OWN = "gymnasium.envs."  # the module of an entry point that a file may choose


def rebuild(config: Mapping[str, Any], num_envs: int, *, filming: bool = False) -> GymnasiumEnvironment:
    """Build `num_envs` environments from the `config` of an adapter. With `filming` they can be rendered.

    A `GymnasiumVectorEnvironment` whose episodes rein resets, as `in_processes` does, becomes a `GymnasiumEnvironment`:
    it gives the same episodes, bit for bit, and can replay them. The configuration is not trusted, and an id of
    Gymnasium's may name a module to import. Only Gymnasium's own environments and Atari's are built. Raises ValueError
    for all others and for options that JSON could not hold.
    """
    mode = config.get("autoreset_mode", AutoresetMode.DISABLED.value)
    if mode != AutoresetMode.DISABLED.value:
        raise ValueError(f"its vector environment resets by itself (autoreset mode {mode!r})")
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
