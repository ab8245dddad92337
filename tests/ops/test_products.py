"""Products with oneDNN: used only if they have float32 precision, and only inside the context."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rein.accelerate import products
from rein.accelerate.products import ENOUGH, fast_products, largest_matrix, rounds_as_float32, suits_onednn, wide_amd
from rein.networks.mlp import Stack

ZEN_5 = """\
processor	: 0
vendor_id	: AuthenticAMD
cpu family	: 26
model		: 2
flags		: fpu avx512f avx512bw sha_ni
"""


def current_precision() -> str:
    return torch.backends.mkldnn.matmul.fp32_precision


@pytest.fixture
def default_settings() -> Iterator[None]:
    """Reset torch's settings to their defaults."""
    before = current_precision()
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    yield
    torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.fixture
def supported_machine(default_settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this machine supports fast products."""
    monkeypatch.setattr(products, "suits_onednn", lambda: True)


@pytest.mark.parametrize(
    ("batch", "rows", "inputs", "outputs"), [(2, 256, 256, 256), (1, 512, 23, 300), (3, 64, 700, 2)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_products_have_float32_precision(batch, rows, inputs, outputs, transposed) -> None:
    drawing = torch.Generator().manual_seed(1)
    a = torch.randn(batch, rows, inputs, generator=drawing)
    b = torch.randn(batch, inputs, outputs, generator=drawing)
    bias = torch.randn(batch, 1, outputs, generator=drawing)
    if transposed:
        a, b = a.mT.contiguous().mT, b.mT.contiguous().mT
    exact = a.double() @ b.double()
    with fast_products(ENOUGH):
        found = {
            "bmm": torch.bmm(a, b),
            "baddbmm": torch.baddbmm(bias, a, b) - bias,
            "mm": torch.stack([torch.mm(*factors) for factors in zip(a, b, strict=True)]),
            "linear": torch.stack([torch.nn.functional.linear(x, y.mT) for x, y in zip(a, b, strict=True)]),
        }
    limit = 5e-6 * inputs**0.5  # with bfloat16 factors it would be about 1e-2 of that root
    errors = {name: float((product - exact).abs().amax()) for name, product in found.items()}
    assert all(error < limit for error in errors.values()), (errors, limit)


def half(a: Tensor, b: Tensor) -> Tensor:
    return (a.bfloat16() @ b.bfloat16()).float()


@pytest.mark.parametrize(
    "product",
    [
        half,
        lambda a, b: a.bfloat16().float() @ b,
        lambda a, b: a @ b if a.is_contiguous() else half(a, b),
        lambda a, b: a @ b * (1.0 + 3e-5),
        lambda a, b: a @ b * torch.nan,
    ],
    ids=["bfloat16", "one factor", "transposed", "16 bits", "NaN"],
)
def test_products_without_float32_precision_are_detected(product) -> None:
    assert rounds_as_float32(torch.bmm)
    assert not rounds_as_float32(product)


def test_check_uses_float32_for_any_default_dtype(monkeypatch) -> None:
    monkeypatch.setattr(products, "wide_amd", lambda: True)
    suits_onednn.cache_clear()
    expected = suits_onednn()
    before = torch.get_default_dtype()
    try:
        suits_onednn.cache_clear()
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
            assert suits_onednn() == expected
            assert not rounds_as_float32(half)
    finally:
        torch.set_default_dtype(before)
        suits_onednn.cache_clear()


def test_machine_that_rounds_products_to_bfloat16_is_unchanged(default_settings, monkeypatch) -> None:
    seen = []

    def checked(product) -> bool:
        seen.append(current_precision())
        return False

    monkeypatch.setattr(products, "wide_amd", lambda: True)
    monkeypatch.setattr(products, "rounds_as_float32", checked)
    suits_onednn.cache_clear()
    try:
        for _ in range(2):
            with fast_products(ENOUGH):
                assert current_precision() == "none"
    finally:
        suits_onednn.cache_clear()
    if torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available():
        assert seen == ["bf16"]  # the check runs once, with the setting that it tests
    assert current_precision() == "none"


def test_interrupted_check_is_repeated(default_settings, monkeypatch) -> None:
    def interrupted() -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(products, "suits_onednn", interrupted)
    with pytest.raises(KeyboardInterrupt), fast_products(ENOUGH):
        pass
    monkeypatch.setattr(products, "suits_onednn", lambda: True)
    with fast_products(ENOUGH):
        assert current_precision() == "bf16"
    assert current_precision() == "none"


def test_precision_changes_only_inside_the_context(supported_machine) -> None:
    with fast_products(ENOUGH):
        assert current_precision() == "bf16"
        with fast_products(ENOUGH):
            assert current_precision() == "bf16"
        assert current_precision() == "bf16"
    assert current_precision() == "none"
    with pytest.raises(KeyError), fast_products(ENOUGH):
        raise KeyError
    assert current_precision() == "none"
    assert torch.get_float32_matmul_precision() == "highest"  # torch raises here while settings are mixed


def test_small_products_and_other_machines_are_unchanged(supported_machine, monkeypatch) -> None:
    with fast_products(ENOUGH - 1):
        assert current_precision() == "none"
    monkeypatch.setattr(products, "suits_onednn", lambda: False)
    with fast_products(ENOUGH):
        assert current_precision() == "none"


@pytest.mark.parametrize("setting", ["ieee", "bf16", "tf32"])
def test_precision_set_by_the_user_is_kept(supported_machine, setting: str) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = setting
    with fast_products(ENOUGH):
        assert current_precision() == setting
    assert current_precision() == setting


def test_precision_set_inside_the_context_is_kept(supported_machine) -> None:
    with fast_products(ENOUGH):
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    assert current_precision() == "ieee"


def test_max_autotune_disables_fast_products(supported_machine) -> None:
    """The compiler asks torch for the precision, and torch raises while the newer switch permits bfloat16."""
    from torch._inductor import config

    with config.patch(max_autotune=True), fast_products(ENOUGH):
        assert torch.get_float32_matmul_precision() == "highest"


def test_last_of_several_threads_restores_the_setting(supported_machine) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with fast_products(ENOUGH):
            begun.set()
            may_end.wait()

    thread = threading.Thread(target=other)
    with fast_products(ENOUGH):
        thread.start()
        assert begun.wait()
    assert current_precision() == "bf16"  # set by the other thread
    may_end.set()
    thread.join()
    assert current_precision() == "none"


@pytest.mark.parametrize(
    ("cpuinfo", "wide"),
    [
        (ZEN_5, True),
        (ZEN_5.replace(": 26", ": 27"), True),
        (ZEN_5.replace(": 26", ": 25"), False),  # Zen 4, with 256-bit units
        (ZEN_5.replace("avx512bw ", ""), False),  # hidden by a hypervisor
        (ZEN_5.replace("AuthenticAMD", "GenuineIntel"), False),
        ("processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd\n", False),
        ("", False),
    ],
)
def test_processors_with_512_bit_units_are_detected(tmp_path: Path, cpuinfo: str, wide: bool) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo + "\n" + cpuinfo)
    assert wide_amd(path) is wide


def test_detection_is_false_without_linux(tmp_path: Path) -> None:
    assert not wide_amd(tmp_path / "cpuinfo")


def test_largest_matrix_counts_only_multiplied_matrices() -> None:
    networks = nn.ModuleDict({"embedding": nn.Embedding(5_000, 32), "convolution": nn.Conv2d(4, 8, 60)})
    assert largest_matrix(networks) == 0
    networks["hidden"] = Stack(2, 17, (64, 32), "tanh", torch.Generator().manual_seed(0))
    networks["head"] = nn.Linear(32, 6)
    assert largest_matrix(networks) == 64 * 32  # of each network in the stack
    assert largest_matrix(networks.to("meta")) == 0  # not on the CPU
