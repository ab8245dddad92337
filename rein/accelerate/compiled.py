"""Compiled functions, and functions that are captured as programs of a device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from rein.ops.trees import leaves, map_tree

logger = logging.getLogger("rein")


def cuda_graph(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Record the operations of a function without running them. Returns a function that runs them, and the outputs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    return graph.replay, outputs


CAPTURES: dict[str, Callable[..., Any]] = {"cuda": cuda_graph}  # by type of device; tests add others


def has_graphs(device: torch.device) -> bool:
    """Return whether programs can be captured on a device."""
    return device.type in CAPTURES


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Compile a function with `torch.compile`, as a `Program` on GPUs. Each set of shapes is compiled once."""
    return captured(torch.compile(function, dynamic=False), device)


def captured(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a `Program` of a function on GPUs, and the function itself on other devices."""
    return Program(function, device) if has_graphs(device) else function


class Program:
    """Function of trees of tensors that is captured as a CUDA graph when it is called for the third time.

    A replay takes one launch instead of one for each operation. The function may read and change other tensors in
    place, such as parameters, which must then keep their memory. It must not read values on the host, copy from or to
    the host, or draw random numbers. Numbers and other objects among the inputs are constants: a program is captured
    for each set of constants and shapes. If a capture fails, the function is called as usual, after one warning.

    Outputs are new tensors, without gradients. With `keeps_outputs`, the next call overwrites them.
    """

    is_running = False  # whether a program is called: programs within it are parts of it

    def __init__(self, function: Callable[..., Any], device: torch.device, *, keeps_outputs: bool = False) -> None:
        self._function = function
        self._capture = CAPTURES[device.type]
        self._keeps_outputs = keeps_outputs
        self._calls: dict[Any, int] = {}  # by constants and shapes of the inputs
        self._programs: dict[Any, tuple[Callable[[], None], list[Tensor], Any]] = {}
        self._failed = False

    def __call__(self, *inputs: Any) -> Any:
        """Return what the function returns."""
        if Program.is_running:
            return self._function(*inputs)
        Program.is_running = True
        try:
            return self._run(inputs)
        finally:
            Program.is_running = False

    def _run(self, inputs: tuple[Any, ...]) -> Any:
        named_inputs = list(leaves(inputs))
        key = tuple((path, x.shape, x.dtype) if isinstance(x, Tensor) else (path, x) for path, x in named_inputs)
        if self._failed or not self._prepared(key, inputs):
            return self._function(*inputs)
        replay, places, outputs = self._programs[key]
        for place, x in zip(places, (x for _, x in named_inputs if isinstance(x, Tensor)), strict=True):
            place.copy_(x)
        replay()
        return outputs if self._keeps_outputs else map_tree(_copy, outputs)

    def _prepared(self, key: Any, inputs: Any) -> bool:
        """Return whether there is a program for these inputs. Captures it at the third call."""
        if key in self._programs:
            return True
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] < 3:  # libraries initialize themselves in the first calls
            return False
        inputs = map_tree(_copy, inputs)
        places = [leaf for _, leaf in leaves(inputs) if isinstance(leaf, Tensor)]
        try:
            replay, outputs = self._capture(lambda: self._function(*inputs))
        except Exception as error:  # drivers and compilers raise many classes; the ordinary call raises errors of users
            self._failed = True
            logger.warning("a program could not be captured, so its operations run one by one: %s", error)
            return False
        self._programs[key] = replay, places, outputs
        return True


def _copy(output: Any) -> Any:
    return output.detach().clone() if isinstance(output, Tensor) else output


FUSED = {"cuda"}  # types of devices on which steps within programs are compiled; tests add others


def fuses(device: torch.device) -> bool:
    """Return whether a step within a program is compiled, so that it consists of fewer kernels."""
    return device.type in FUSED


def lowered(function: Callable[..., Any], inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a function of trees of tensors for exactly these shapes.

    Other tensors that the function reads, such as parameters, may change in place. Returns the function itself, after a
    warning, if the compiler fails.
    """
    try:
        return _lowered(function, inputs)
    except Exception as error:  # compilers raise many classes; the ordinary call raises errors of the function
        logger.warning("a step could not be compiled, so it consists of more kernels: %s", error)
        return function


def _lowered(function: Callable[..., Any], inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._inductor import compile
    from torch.fx.experimental.proxy_tensor import make_fx

    flat, structure = tree_flatten(tuple(inputs))
    structures = []

    def flattened(*flat: Tensor) -> list[Tensor]:
        outputs, structure_of_outputs = tree_flatten(function(*tree_unflatten(list(flat), structure)))
        structures.append(structure_of_outputs)
        return outputs

    with torch.no_grad():
        graph = make_fx(flattened)(*flat)
        others = as_inputs(graph)
        run: Any = compile(graph, [*flat, *others])
    return lambda *inputs: tree_unflatten(list(run(*tree_flatten(inputs)[0], *others)), structures[0])


def as_inputs(graph: Any) -> list[Tensor]:
    """Make the constants of a traced graph its last inputs, because a compiler may copy them. Returns the constants."""
    constants = [node for node in graph.graph.nodes if node.op == "get_attr"]
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    with graph.graph.inserting_before(first):
        names = dict.fromkeys(node.target for node in constants)
        places = {name: graph.graph.placeholder(f"of{name}") for name in names}
    for node in constants:
        node.replace_all_uses_with(places[node.target])
        graph.graph.erase_node(node)
    graph.recompile()
    return [getattr(graph, name).detach() for name in places]


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
