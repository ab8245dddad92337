"""Matrix products with oneDNN on processors on which it is faster than MKL."""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WIDE_SINCE = 26  # AMD's Zen 5 family, the first with full 512-bit units, except in some laptops
ENOUGH = 6_000_000  # multiplications above which oneDNN saves more time than its start costs
NO_FACTORS = nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd
CPUINFO = Path("/proc/cpuinfo")

_MATMUL: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch's declarations lack it


def largest_matrix(networks: nn.Module) -> int:
    """Return the number of elements of the largest matrix that inputs are multiplied by on the CPU; 0 without one.

    A matrix is the last two axes of a parameter. Embeddings and convolutions do not count.
    """
    multiplied = (m for m in networks.modules() if not isinstance(m, NO_FACTORS))
    parameters = (p for module in multiplied for p in module.parameters(recurse=False))
    return max((p.shape[-1] * p.shape[-2] for p in parameters if p.ndim > 1 and p.device.type == "cpu"), default=0)


def with_fast_products(agent: Any) -> Callable[..., Any] | None:
    """Return `agent.update` of a replay agent with fast products, or None if they would change nothing."""
    if not suits_onednn():
        return None
    if "_largest_matrix" not in vars(agent):  # the sizes of networks do not change
        agent._largest_matrix = largest_matrix(agent.networks)
    multiplications = agent.batch_size * agent._largest_matrix
    if multiplications < ENOUGH:
        return None

    def update(*arguments: Any, **options: Any) -> Any:
        with fast_products(multiplications):
            return agent.update(*arguments, **options)

    return update


@contextmanager
def fast_products(multiplications: int) -> Iterator[None]:
    """Compute float32 products on the CPU with oneDNN inside this context if `suits_onednn()`.

    `multiplications` is the number of rows of the largest product times its `largest_matrix`. Nothing changes below
    `ENOUGH`. Results differ from MKL's by rounding and are deterministic. rein does not change
    `torch.backends.mkldnn.matmul.fp32_precision` if you have set it or a setting that it follows; "ieee" selects MKL.

    The setting is global: products in other threads also use oneDNN. Inside the context, torch raises in
    `get_float32_matmul_precision()`, which its compiler calls for `max_autotune`; nothing changes if that is on.
    """
    if multiplications < ENOUGH or not _permission.is_ours or not suits_onednn() or _autotuned():
        yield
        return
    _permission.give()
    try:
        yield
    finally:
        _permission.take_back()


def with_usual_products(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function outside of `fast_products`."""
    if not _permission.pause():
        return function(*arguments)
    try:
        return function(*arguments)
    finally:
        _permission.resume()


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

    def pause(self) -> bool:
        """Restore torch's setting until `resume`. Returns False if it was not changed."""
        if self._ours:
            with self._lock:
                _MATMUL.fp32_precision = "none"
        return self._ours

    def resume(self) -> None:
        with self._lock:
            if self._ours and _MATMUL.fp32_precision == "none":
                _MATMUL.fp32_precision = "bf16"

    def take_back(self) -> None:
        with self._lock:
            self._open_contexts -= 1
            if self._open_contexts == 0 and self._ours:
                self._ours = False
                if _MATMUL.fp32_precision == "bf16":  # the user has not changed it meanwhile
                    _MATMUL.fp32_precision = "none"


_permission = _Permission()
