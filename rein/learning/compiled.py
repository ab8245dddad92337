"""Compiled functions of tensors; on a GPU they are CUDA graphs, whose many small kernels are launched at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rein.ops.trees import map_tree


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`function` by `torch.compile`, for each set of shapes anew; the same numbers to rounding."""
    return _Graphed(function) if has_graphs(device) else torch.compile(function, dynamic=False)


def graph(function: Callable[..., Any], device: torch.device) -> Callable[..., Any] | None:
    """The same where that is a CUDA graph, else None: on the host, to compile something small does not pay."""
    return _Graphed(function) if has_graphs(device) else None


def has_graphs(device: torch.device) -> bool:
    """Whether what is compiled for that device becomes CUDA graphs."""
    return device.type == "cuda"


class _Graphed:
    """`torch.compile` with CUDA graphs: each call may write over what the call before returned, so that is copied.

    A gradient of what it returns is such memory too, until the next call: whoever keeps one copies it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = torch.compile(function, dynamic=False, mode="reduce-overhead")

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return map_tree(_copy, self._function(*inputs, **options))


def _copy(output: Any) -> Any:
    return output.clone() if isinstance(output, Tensor) else output
