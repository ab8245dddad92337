"""Check that parameters are finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rein.errors import NonFiniteError
from rein.ops.statistics import global_norm
from rein.ops.trees import Read, leaves, read_together


def check_parameters(part: Any, advice: str) -> None:
    """Raise NonFiniteError if a parameter of a module or of an agent, or its table, is not finite, or a buffer is NaN.

    Other objects have no parameters. `advice` is the end of the message.
    """
    read_together(parameter_reads(part, advice))


@torch.no_grad()
def parameter_reads(part: Any, advice: str) -> Iterator[Read]:
    """Yield the checks of `check_parameters`."""
    groups = getattr(part, "agents", None)
    inner = [*groups.values()] if isinstance(groups, dict) else []
    for agent in (*inner, *(part.agent(learner) for learner in range(getattr(part, "num_learners", 0)))):
        yield from parameter_reads(agent, advice)
    public = {name: value for name, value in getattr(part, "__dict__", {}).items() if not name.startswith("_")}
    named: dict[str, Tensor] = {}
    for path, leaf in leaves({"networks": part} if isinstance(part, nn.Module) else public):
        if isinstance(leaf, nn.Module):
            prefix = "" if path == "networks" else f"{path}."
            named |= {f"{prefix}{name}": parameter for name, parameter in leaf.named_parameters()}
            named |= {f"{prefix}{name}": _without_infinity(buffer) for name, buffer in _saved_buffers(leaf)}
        elif isinstance(leaf, nn.Parameter) or path == "table":
            named[path] = leaf
    values = {name: value for name, value in named.items() if value.is_floating_point()}
    if values:
        yield [global_norm([*values.values()])], lambda norm: _search(part, values, norm, advice)


def _search(part: Any, values: dict[str, Tensor], norm: Tensor, advice: str) -> None:
    """Raise for the first parameter that is not finite."""
    if math.isfinite(float(norm)):
        return
    for name, value in values.items():  # the norm can overflow although all values are finite
        if not bool(torch.isfinite(value).all()):
            raise NonFiniteError(f"parameter {name} of {type(part).__name__} is not finite. {advice}")


def _saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers in the state of a module, such as the means of a normalizer."""
    saved = module.state_dict()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in saved)


def _without_infinity(buffer: Tensor) -> Tensor:
    """Return a buffer with zeros instead of infinite values, which may be bounds of a space."""
    return buffer.masked_fill(buffer.isinf(), 0) if buffer.is_floating_point() else buffer
