"""Check the `device` argument of agents, environments, buffers and commands."""

from __future__ import annotations

from typing import Any

import torch


def checked_device(device: Any) -> torch.device:
    """Return `device` as a `torch.device`. Raises ValueError if torch has no such device on this machine."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        what = "is no name of a torch device" if isinstance(device, str) else "is no torch device"
        raise ValueError(f'device={device!r} {what}; use device="cpu" or device="cuda"') from error
    try:
        torch.empty(0, dtype=torch.float32, device=found)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(f'device="{found}": torch finds none here; use device="cpu"') from error
    return found
