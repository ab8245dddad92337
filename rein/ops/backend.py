"""Matrix products of oneDNN on processors where they are faster than MKL's, and methods without gradients."""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

WIDE_SINCE = 26  # AMD's family of Zen 5, the first whose units for 512 bits are no two halves, but in some laptops
ENOUGH = 6_000_000  # multiplications of a product: with less, what oneDNN takes to begin one is more than it saves
NO_FACTORS = nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd
CPUINFO = Path("/proc/cpuinfo")

_MATMUL: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch's declarations lack it


def largest_matrix(networks: nn.Module) -> int:
    """How many numbers the largest matrix has that something is multiplied by on the CPU; 0 where there is none.

    It stands in the last two axes of a parameter; those that are looked up, or slid over images, are none.
    """
    multiplied = (m for m in networks.modules() if not isinstance(m, NO_FACTORS))
    parameters = (p for module in multiplied for p in module.parameters(recurse=False))
    return max((p.shape[-1] * p.shape[-2] for p in parameters if p.ndim > 1 and p.device.type == "cpu"), default=0)


@contextmanager
def fast_products(multiplications: int) -> Iterator[None]:
    """Products of float32 matrices in here, on the CPU, are oneDNN's where `suits_onednn`; elsewhere nothing changes.

    `multiplications` are those of the largest product, its rows times its `largest_matrix`; with less than `ENOUGH` of
    them nothing changes either. What oneDNN makes of a product differs from what MKL makes of it by rounding, and is
    the same each time. Whoever has set `torch.backends.mkldnn.matmul.fp32_precision`, or what it follows, has decided:
    "ieee" is MKL.

    The permission is the process's: what other threads multiply meanwhile is oneDNN's, too. In here torch refuses
    to say its `get_float32_matmul_precision()`, which its compiler asks for where it tries several products out
    (`max_autotune`); with that nothing changes.
    """
    if multiplications < ENOUGH or not _permission.is_ours or not suits_onednn() or _autotuned():
        yield
        return
    _permission.give()
    try:
        yield
    finally:
        _permission.take_back()


@functools.cache
def suits_onednn() -> bool:
    """Whether oneDNN is the faster one by far on this machine, and rounds as float32 does; found out once."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and wide_amd()):
        return False
    before, _MATMUL.fp32_precision = _MATMUL.fp32_precision, "bf16"
    try:
        with torch.autocast("cpu", enabled=False):
            return rounds_as_float32(torch.bmm)
    finally:
        _MATMUL.fp32_precision = before


def wide_amd(cpuinfo: Path = CPUINFO) -> bool:
    """Whether this is an AMD processor with units for 512 bits; False where there is no Linux to say so."""
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as file:
            first = file.read(4096)  # the same is said of each core
    except OSError:
        return False
    family = re.search(r"^cpu family\s*:\s*(\d+)$", first, re.MULTILINE)
    amd = re.search(r"^vendor_id\s*:\s*AuthenticAMD$", first, re.MULTILINE)
    return amd is not None and family is not None and int(family[1]) >= WIDE_SINCE and " avx512bw " in first


def rounds_as_float32(product: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Whether products (K, I, J) x (K, J, L) are as good as float32 allows, of standard normals and for some shapes.

    The worst of them is then off by some 3e-6 J^(1/2), and by 1e-2 J^(1/2) with factors in bfloat16.
    """
    plain = {"generator": torch.Generator().manual_seed(0), "device": "cpu", "dtype": torch.float32}
    for k, i, j, m in ((1, 64, 128, 64), (2, 64, 17, 64), (1, 64, 64, 2)):
        a, b = torch.randn(k, i, j, **plain), torch.randn(k, j, m, **plain)
        for left in (a, a.mT.contiguous().mT):
            error = (product(left, b) - left.double() @ b.double()).abs().amax()
            if not error < 2e-5 * j**0.5:  # NaN is not
                return False
    return True


def _autotuned() -> bool:
    """Whether torch's compiler is to choose products by trying them out."""
    config = sys.modules.get("torch._inductor.config")  # which is not imported for this
    return config is not None and (config.max_autotune or config.max_autotune_gemm)


class _Permission:
    """To multiply by bfloat16: given to all who asked, until the last of them takes it back."""

    def __init__(self) -> None:
        self._lock, self._asked, self._ours = threading.Lock(), 0, False

    @property
    def is_ours(self) -> bool:
        """Whether nobody else has decided."""
        return self._ours or _MATMUL.fp32_precision == "none"

    def give(self) -> None:
        with self._lock:
            self._asked += 1
            if self._asked == 1 and _MATMUL.fp32_precision == "none":
                _MATMUL.fp32_precision, self._ours = "bf16", True

    def take_back(self) -> None:
        with self._lock:
            self._asked -= 1
            if self._asked == 0 and self._ours:
                self._ours = False
                if _MATMUL.fp32_precision == "bf16":  # nobody has decided otherwise meanwhile
                    _MATMUL.fp32_precision = "none"


_permission = _Permission()


Method = TypeVar("Method", bound=Callable[..., Any])


def without_gradient(method: Method) -> Method:
    """A method of a `ReplayAgent` by which no gradient goes, its products made as those of a `Learner` are."""

    @functools.wraps(method)
    def run(agent: Any, *given: Any, **named: Any) -> Any:
        with torch.no_grad(), fast_products(agent.batch_size * agent.largest_matrix):
            return method(agent, *given, **named)

    return run  # type: ignore[return-value]  # which takes what `method` takes
