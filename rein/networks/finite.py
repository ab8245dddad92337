"""Check that parameters are finite."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rein.errors import NonFiniteError
from rein.ops.statistics import global_norm


@torch.no_grad()
def check_parameters(part: Any, advice: str) -> None:
    """Raise NonFiniteError if a parameter of a module, or a parameter or the table of an agent, is not finite.

    Other objects have no parameters. `advice` is the end of the message.
    """
    groups = getattr(part, "agents", None)
    inner = [*groups.values()] if isinstance(groups, dict) else []
    for agent in (*inner, *(part.agent(learner) for learner in range(getattr(part, "num_learners", 0)))):
        check_parameters(agent, advice)
    public = {name: value for name, value in getattr(part, "__dict__", {}).items() if not name.startswith("_")}
    modules = {"networks": part} if isinstance(part, nn.Module) else public
    found: dict[str, Tensor] = {
        name if attribute == "networks" else f"{attribute}.{name}": parameter
        for attribute, module in modules.items()
        if isinstance(module, nn.Module)
        for name, parameter in module.named_parameters()
    }
    if isinstance(table := public.get("table"), Tensor):
        found["table"] = table
    values = {name: value for name, value in found.items() if value.is_floating_point()}
    if not values or math.isfinite(float(global_norm([*values.values()]))):
        return
    for name, value in values.items():  # the norm can overflow although all values are finite
        if not bool(torch.isfinite(value).all()):
            raise NonFiniteError(f"parameter {name} of {type(part).__name__} is not finite. {advice}")
