"""Optimizations for particular hardware. A reader of the algorithms can skip this module.

`REIN_PLAIN=1` in the environment turns them off, along with the fused layers of `rein.ops.stack`, the closed-form
gradients of `rein.agents.base.learner` and the numba code of `rein.replay`. Results are the same up to rounding.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rein.ops.trees import leaves, map_tree

PLAIN = os.environ.get("REIN_PLAIN", "0") not in ("", "0")  # whether all optimizations are off

WIDE_SINCE = 26  # AMD's Zen 5 family, the first with full 512-bit units, except in some laptops
ENOUGH = 6_000_000  # multiplications above which oneDNN saves more time than its start costs
NO_FACTORS = nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd
CPUINFO = Path("/proc/cpuinfo")

_MATMUL: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch's declarations lack it
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)

Method = TypeVar("Method", bound=Callable[..., Any])


def without_gradient(method: Method) -> Method:
    """Decorate a method of a `ReplayAgent` to run without gradients, with the matmul precision of `Learner`."""

    @functools.wraps(method)
    def run(agent: Any, *args: Any, **options: Any) -> Any:
        with torch.no_grad(), fast_products(agent.batch_size * agent.largest_matrix):
            return method(agent, *args, **options)

    return run  # type: ignore[return-value]  # takes the arguments of `method`


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for later allocations instead of returning it to the system.

    Otherwise the memory of activations may be returned and faulted in again for every batch. In threads this always
    happened and took a fourth of the time. In some single-threaded runs it took half of the time. Does nothing without
    glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" and not PLAIN else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 256 << 20)


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Compile a function with `torch.compile`, with CUDA graphs on GPUs. Each set of shapes is compiled once."""
    return _Graphed(function) if has_graphs(device) else torch.compile(function, dynamic=False)


def graph(function: Callable[..., Any], device: torch.device) -> Callable[..., Any] | None:
    """Compile a small function on GPUs. Returns None on the CPU, where compiling does not pay off."""
    return _Graphed(function) if has_graphs(device) else None


def captured(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a `CudaGraph` of a function on GPUs, and the function itself on other devices."""
    return CudaGraph(function) if has_graphs(device) and not PLAIN else function


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
        given = list(leaves(inputs))
        key = tuple((path, x.shape, x.dtype) if isinstance(x, Tensor) else (path, x) for path, x in given)
        tensors = [x for _, x in given if isinstance(x, Tensor)]
        if key not in self._graphs:
            self._calls[key] = self._calls.get(key, 0) + 1
            if self._calls[key] < 3:  # libraries initialize themselves in the first calls
                return self._function(*inputs)
            self._graphs[key] = self._capture(inputs)
        captured, kept, outputs = self._graphs[key]
        for place, x in zip(kept, tensors, strict=True):
            place.copy_(x)
        captured.replay()
        return map_tree(_copy, outputs)

    def _capture(self, inputs: Any) -> tuple[Any, list[Tensor], Any]:
        """Return the graph, the memory of its inputs, and its outputs."""
        inputs = map_tree(_copy, inputs)
        kept = [leaf for _, leaf in leaves(inputs) if isinstance(leaf, Tensor)]
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            outputs = self._function(*inputs)
        return captured, kept, outputs


def _copy(output: Any) -> Any:
    return output.clone() if isinstance(output, Tensor) else output


def compiled_for(function: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...]) -> Callable[..., Any]:
    """Compile a function for exactly the shapes of `inputs`. Flags are returned as uint8, which is faster than bool.

    `torch.compile` would check the inputs in every call, at twice the cost of a step of a thousand environments.
    """
    if PLAIN:
        return function
    from torch._inductor import compile
    from torch.fx.experimental.proxy_tensor import make_fx

    def lowered(*inputs: Tensor) -> tuple[Tensor, ...]:
        results = function(*inputs)
        return tuple(x.to(torch.float32).to(torch.uint8) if x.dtype is torch.bool else x for x in results)

    with torch.no_grad():
        return compile(make_fx(lowered)(*inputs), list(inputs))  # type: ignore[return-value]  # its return type is not declared


def largest_matrix(networks: nn.Module) -> int:
    """Return the number of elements of the largest matrix that inputs are multiplied by on the CPU; 0 without one.

    A matrix is the last two axes of a parameter. Embeddings and convolutions do not count.
    """
    multiplied = (m for m in networks.modules() if not isinstance(m, NO_FACTORS))
    parameters = (p for module in multiplied for p in module.parameters(recurse=False))
    return max((p.shape[-1] * p.shape[-2] for p in parameters if p.ndim > 1 and p.device.type == "cpu"), default=0)


@contextmanager
def fast_products(multiplications: int) -> Iterator[None]:
    """Compute float32 products on the CPU with oneDNN inside this context if `suits_onednn()`.

    `multiplications` is the number of rows of the largest product times its `largest_matrix`. Nothing changes below
    `ENOUGH`. Results differ from MKL's by rounding and are deterministic. rein does not change
    `torch.backends.mkldnn.matmul.fp32_precision` if you have set it or a setting that it follows; "ieee" selects MKL.

    The setting is global: products in other threads also use oneDNN. Inside the context, torch raises in
    `get_float32_matmul_precision()`, which its compiler calls for `max_autotune`; nothing changes if that is on.
    """
    if PLAIN or multiplications < ENOUGH or not _permission.is_ours or not suits_onednn() or _autotuned():
        yield
        return
    _permission.give()
    try:
        yield
    finally:
        _permission.take_back()


@functools.cache
def suits_onednn() -> bool:
    """Return whether oneDNN is much faster than MKL here and as precise as float32; measured once."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and wide_amd()):
        return False
    before, _MATMUL.fp32_precision = _MATMUL.fp32_precision, "bf16"
    try:
        with torch.autocast("cpu", enabled=False):
            return rounds_as_float32(torch.bmm)
    finally:
        _MATMUL.fp32_precision = before


def wide_amd(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether this is an AMD processor with 512-bit units. Always False without Linux."""
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as file:
            first = file.read(4096)  # every core has the same entry
    except OSError:
        return False
    family = re.search(r"^cpu family\s*:\s*(\d+)$", first, re.MULTILINE)
    amd = re.search(r"^vendor_id\s*:\s*AuthenticAMD$", first, re.MULTILINE)
    return amd is not None and family is not None and int(family[1]) >= WIDE_SINCE and " avx512bw " in first


def rounds_as_float32(product: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Return whether products (K, I, J) x (K, J, L) of normal numbers have the precision of float32, for some shapes.

    The largest error is then about 3e-6 J^(1/2); with factors in bfloat16 it is 1e-2 J^(1/2).
    """
    plain = {"generator": torch.Generator().manual_seed(0), "device": "cpu", "dtype": torch.float32}
    for k, i, j, m in ((1, 64, 128, 64), (2, 64, 17, 64), (1, 64, 64, 2)):
        a, b = torch.randn(k, i, j, **plain), torch.randn(k, j, m, **plain)
        for left in (a, a.mT.contiguous().mT):
            error = (product(left, b) - left.double() @ b.double()).abs().amax()
            if not error < 2e-5 * j**0.5:  # also true for NaN
                return False
    return True


def _autotuned() -> bool:
    """Return whether torch's compiler selects kernels by timing them."""
    config = sys.modules.get("torch._inductor.config")  # not imported only for this check
    return config is not None and (config.max_autotune or config.max_autotune_gemm)


class _Permission:
    """Counts the open `fast_products` contexts; torch's setting is restored when the last one closes."""

    def __init__(self) -> None:
        self._lock, self._open_contexts, self._ours = threading.Lock(), 0, False

    @property
    def is_ours(self) -> bool:
        """Return whether the user has left torch's setting at its default."""
        return self._ours or _MATMUL.fp32_precision == "none"

    def give(self) -> None:
        with self._lock:
            self._open_contexts += 1
            if self._open_contexts == 1 and _MATMUL.fp32_precision == "none":
                _MATMUL.fp32_precision, self._ours = "bf16", True

    def take_back(self) -> None:
        with self._lock:
            self._open_contexts -= 1
            if self._open_contexts == 0 and self._ours:
                self._ours = False
                if _MATMUL.fp32_precision == "bf16":  # the user has not changed it meanwhile
                    _MATMUL.fp32_precision = "none"


_permission = _Permission()
