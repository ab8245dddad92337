"""Captures of programs for machines without a GPU, for `rein.accelerate.compiled.CAPTURES`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from rein.ops.trees import leaves

Replay = Callable[[], None]


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree in a fixed order."""
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


class Traced:
    """Records the operations of a function with `make_fx`, which runs them, and replays exactly these operations.

    As with a CUDA graph, everything else of the function is a constant, and a replay overwrites the outputs.
    """

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, function: Callable[[], Any]) -> tuple[Replay, Any]:
        outputs: list[Any] = []

        def recorded() -> list[torch.Tensor]:
            outputs.append(function())
            return tensors_of(outputs[0])

        graph = make_fx(recorded)()
        first = True

        def replay() -> None:
            nonlocal first
            self.replays += 1
            if not first:  # the trace has run the operations once
                with torch.no_grad():
                    for output, result in zip(tensors_of(outputs[0]), graph(), strict=True):
                        output.copy_(result)
            first = False

        return replay, outputs[0]


class Repeated:
    """Calls a function again instead of a replay of its operations, and overwrites the outputs."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, function: Callable[[], Any]) -> tuple[Replay, Any]:
        outputs = function()
        is_first = True

        def replay() -> None:
            nonlocal is_first
            self.replays += 1
            if not is_first:  # the function has been called once
                with torch.no_grad():
                    for output, result in zip(tensors_of(outputs), tensors_of(function()), strict=True):
                        output.copy_(result)
            is_first = False

        return replay, outputs
