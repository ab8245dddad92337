"""Compiled functions, and functions that are captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rein.ops.trees import leaves, map_tree


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Compile a function with `torch.compile`, with CUDA graphs on GPUs. Each set of shapes is compiled once."""
    return _Graphed(function) if has_graphs(device) else torch.compile(function, dynamic=False)


def captured(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a `CudaGraph` of a function on GPUs, and the function itself on other devices."""
    return CudaGraph(function) if has_graphs(device) else function


def has_graphs(device: torch.device) -> bool:
    """Return whether functions compiled for a device become CUDA graphs."""
    return device.type == "cuda"


class _Graphed:
    """`torch.compile` with CUDA graphs. Outputs are copied, because the next call may overwrite them.

    Gradients of the outputs use the same memory, so a caller that keeps one must copy it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = torch.compile(function, dynamic=False, mode="reduce-overhead")

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return map_tree(_copy, self._function(*inputs, **options))


class CudaGraph:
    """Function of trees of tensors that is captured as a CUDA graph when it is called for the third time.

    A replay takes one launch instead of one for each operation. The function may change tensors in place, but must not
    read values on the host, and may draw no random numbers. Numbers among the inputs become constants of the graph.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._calls: dict[Any, int] = {}  # by the shapes of the inputs
        self._graphs: dict[Any, tuple[Any, list[Tensor], Any]] = {}

    def __call__(self, *inputs: Any) -> Any:
        """Return what the function returns, in new memory."""
        named_inputs = list(leaves(inputs))
        key = tuple((path, x.shape, x.dtype) if isinstance(x, Tensor) else (path, x) for path, x in named_inputs)
        tensors = [x for _, x in named_inputs if isinstance(x, Tensor)]
        if key not in self._graphs:
            self._calls[key] = self._calls.get(key, 0) + 1
            if self._calls[key] < 3:  # libraries initialize themselves in the first calls
                return self._function(*inputs)
            self._graphs[key] = self._capture(inputs)
        captured, places, outputs = self._graphs[key]
        for place, x in zip(places, tensors, strict=True):
            place.copy_(x)
        captured.replay()
        return map_tree(_copy, outputs)

    def _capture(self, inputs: Any) -> tuple[Any, list[Tensor], Any]:
        """Return the graph, the memory of its inputs, and its outputs."""
        inputs = map_tree(_copy, inputs)
        places = [leaf for _, leaf in leaves(inputs) if isinstance(leaf, Tensor)]
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            outputs = self._function(*inputs)
        return captured, places, outputs


def _copy(output: Any) -> Any:
    return output.clone() if isinstance(output, Tensor) else output


def compiled_for(function: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...]) -> Callable[..., Any]:
    """Compile a function for exactly the shapes of `inputs`. Flags are returned as uint8, which is faster than bool.

    `torch.compile` would check the inputs in every call, at twice the cost of a step of a thousand environments.
    """
    from torch._inductor import compile
    from torch.fx.experimental.proxy_tensor import make_fx

    def lowered(*inputs: Tensor) -> tuple[Tensor, ...]:
        results = function(*inputs)
        return tuple(x.to(torch.float32).to(torch.uint8) if x.dtype is torch.bool else x for x in results)

    with torch.no_grad():
        return compile(make_fx(lowered)(*inputs), list(inputs))  # type: ignore[return-value]  # its return type is not declared
