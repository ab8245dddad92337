"""Parameters of an agent, by name."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def named_parameters(agent: Any) -> dict[str, Tensor]:
    """Return the parameters of all networks of an agent by their path, such as `actor.head.weight`.

    The paths start at the attributes of the agent, or inside of `agent.networks`. For an agent without networks, the
    parameters are its floating-point tensors, such as the table of `rein.QLearning`.
    """
    public = {name: value for name, value in vars(agent).items() if not name.startswith("_")}
    found: dict[int, tuple[str, Tensor]] = {}
    for attribute, module in public.items():
        if isinstance(module, nn.Module):
            for name, parameter in module.named_parameters():
                path = name if attribute == "networks" else f"{attribute}.{name}"
                found.setdefault(id(parameter), (path, parameter))
    if found:
        return dict(found.values())
    return {name: x for name, x in public.items() if isinstance(x, Tensor) and x.is_floating_point()}
