"""Stepping only the environments whose episodes are still wanted."""

from __future__ import annotations

from torch import Tensor

from rein.protocols import Environment
from rein.types import TimeStep, Tree


def step_active(environment: Environment, action: Tree, active: Tensor | None) -> TimeStep:
    """Step the environments for which `active` (N,) is True, all of them if it is None.

    Environments that step all rows at once, whose `steps_separately` is missing or False, step the others as well:
    leaving some out would take longer.
    """
    if active is None or not getattr(environment, "steps_separately", False) or bool(active.all()):
        return environment.apply_action(action)
    return environment.apply_action_where(action, active)  # type: ignore[attr-defined]  # see `PartlySteppable`
