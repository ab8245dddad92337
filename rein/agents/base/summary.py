"""Parameters of an agent: their names, and a table of the networks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn


def named_parameters(agent: Any) -> dict[str, Tensor]:
    """Return the parameters of all networks of an agent by their path, such as `actor.head.weight`.

    The paths start at the attributes of the agent, or inside of `agent.networks`. For an agent without networks, the
    parameters are its floating-point tensors, such as the table of `rein.QLearning`. The paths of a `MultiAgent` start
    with the name of a group.
    """
    if agents := getattr(agent, "agents", None):
        return {f"{name}.{path}": x for name, part in agents.items() for path, x in named_parameters(part).items()}
    return {".".join(filter(None, (layer, name))): parameter for layer, _, name, parameter in _walk(agent)}


class Parameter(NamedTuple):
    """Row of a `Summary`."""

    layer: str  # path of the module; empty for a tensor of an agent without networks
    type: str  # class of the module, or "Tensor"
    name: str  # within the module
    shape: tuple[int, ...]  # networks of equal size are stacked along the first axis
    size: int  # number of elements
    role: str  # "trainable", "frozen" or "target"


class Summary:
    """Table of the parameters of an agent. `str` and `repr` format it for a terminal.

    Attributes:
        parameters: One row for each parameter.
        trainable: Number of parameters that an optimizer updates.
        frozen: Number of parameters of an optimizer with `requires_grad=False`.
        target: Number of the other parameters, such as those of target networks.
    """

    def __init__(self, agent: Any) -> None:
        """Describe the current parameters of an agent."""
        self._agent, role = repr(agent), _roles(agent)
        self.parameters = [
            Parameter(layer, kind, name, tuple(x.shape), x.numel(), role(x)) for layer, kind, name, x in _walk(agent)
        ]
        self.trainable, self.frozen, self.target = map(self._total, ("trainable", "frozen", "target"))

    def _total(self, role: str) -> int:
        return sum(parameter.size for parameter in self.parameters if parameter.role == role)

    def __repr__(self) -> str:
        lines = [["layer", "type", "parameter", "shape", "count", ""]]
        before = ""
        for layer, kind, name, shape, size, role in self.parameters:
            repeated = layer == before != ""
            first = ["", ""] if repeated else [layer, kind]
            lines.append([*first, name, str(shape), f"{size:,}", "" if role == "trainable" else role])
            before = layer
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            line[:] = [text.ljust(width) for text, width in zip(line, widths, strict=True)]
            line[4] = line[4].strip().rjust(widths[4])
        totals = [("trainable", self.trainable), ("frozen", self.frozen), ("target", self.target)]
        totals = [f"{name} parameters: {count:,}" for name, count in totals if count or name == "trainable"]
        return "\n".join([self._agent, "", *("  ".join(line).rstrip() for line in lines), "", *totals])


def _walk(agent: Any) -> Iterator[tuple[str, str, str, Tensor]]:
    """Yield layer, type, name and value of each parameter."""
    public = {name: value for name, value in vars(agent).items() if not name.startswith("_")}
    seen: set[int] = set()
    for attribute, network in public.items():
        if not isinstance(network, nn.Module):
            continue
        modules = dict(network.named_modules())
        for path, parameter in network.named_parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            layer, _, name = path.rpartition(".")
            while isinstance(modules[layer], nn.ParameterList | nn.ParameterDict) and layer:
                layer, _, inner = layer.rpartition(".")
                name = f"{inner}.{name}"
            kind = type(modules[layer]).__name__.lstrip("_")
            if attribute != "networks":
                layer = f"{attribute}.{layer}".rstrip(".")
            yield layer, kind, name, parameter
    if not seen:
        for name, value in public.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                yield "", "Tensor", name, value


def _roles(agent: Any) -> Any:
    """Return a function of a parameter that returns its role."""
    values: list[Any] = []
    for value in vars(agent).values():
        values += (
            value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
        )
    optimizers = [getattr(value, "optimizer", value) for value in values]
    groups = [group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())]
    optimized = {id(parameter) for group in groups for parameter in group["params"]}

    def role(parameter: Tensor) -> str:
        learned = parameter.requires_grad or not isinstance(parameter, nn.Parameter)
        if not groups:
            return "trainable" if learned else "target"
        if id(parameter) not in optimized:
            return "target"
        return "trainable" if learned else "frozen"

    return role
