"""Products by oneDNN: only where they are float32's, and only as long as somebody asked for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rein.ops import products
from rein.ops.products import ENOUGH, fast_products, largest_matrix, rounds_as_float32, suits_onednn, wide_amd

ZEN_5 = """\
processor	: 0
vendor_id	: AuthenticAMD
cpu family	: 26
model		: 2
flags		: fpu avx512f avx512bw sha_ni
"""


def permitted() -> str:
    return torch.backends.mkldnn.matmul.fp32_precision


@pytest.fixture
def suitable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if this were such a machine, whatever it is."""
    monkeypatch.setattr(products, "suits_onednn", lambda: True)
    before = permitted()
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    yield
    torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.parametrize(
    ("batch", "rows", "inputs", "outputs"), [(2, 256, 256, 256), (1, 512, 23, 300), (3, 64, 700, 2)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_products_are_as_good_as_float32_allows(batch, rows, inputs, outputs, transposed) -> None:
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
    for name, product in found.items():
        error = (product - exact).abs().amax()
        assert error < 5e-6 * inputs**0.5, (
            f"{name} is off by {error}"
        )  # with factors in bfloat16 some 1e-2 of that root


def test_what_bfloat16_multiplies_is_found_out() -> None:
    def half(a: Tensor, b: Tensor) -> Tensor:
        return (a.bfloat16() @ b.bfloat16()).float()

    def one_of_them(a: Tensor, b: Tensor) -> Tensor:
        return a.bfloat16().float() @ b

    def nothing(a: Tensor, b: Tensor) -> Tensor:
        return torch.full((*a.shape[:2], b.shape[2]), torch.nan)

    assert rounds_as_float32(torch.bmm)
    assert not any(map(rounds_as_float32, (half, one_of_them, nothing)))


def test_a_machine_whose_permitted_products_are_bfloat16s_is_left_alone(suitable, monkeypatch) -> None:
    seen = []

    def checked(product) -> bool:
        seen.append(permitted())
        return False

    monkeypatch.setattr(products, "wide_amd", lambda: True)
    monkeypatch.setattr(products, "rounds_as_float32", checked)
    for before in ("none", "ieee"):
        torch.backends.mkldnn.matmul.fp32_precision = before
        suits_onednn.cache_clear()
        try:
            assert not suits_onednn()
        finally:
            suits_onednn.cache_clear()
        assert permitted() == before
    if torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available():
        assert seen == ["bf16", "bf16"]  # what is checked is what would be used


def test_it_is_permitted_in_there_and_nowhere_else(suitable) -> None:
    with fast_products(ENOUGH):
        assert permitted() == "bf16"
        with fast_products(ENOUGH):
            assert permitted() == "bf16"
        assert permitted() == "bf16"
    assert permitted() == "none"
    with pytest.raises(KeyError), fast_products(ENOUGH):
        raise KeyError
    assert permitted() == "none"
    assert torch.get_float32_matmul_precision() == "highest"  # which torch refuses to say while settings are mixed


def test_small_products_and_other_machines_are_left_alone(suitable, monkeypatch) -> None:
    with fast_products(ENOUGH - 1):
        assert permitted() == "none"
    monkeypatch.setattr(products, "suits_onednn", lambda: False)
    with fast_products(ENOUGH):
        assert permitted() == "none"


@pytest.mark.parametrize("decided", ["ieee", "bf16", "tf32"])
def test_whoever_has_decided_is_obeyed(suitable, decided: str) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = decided
    with fast_products(ENOUGH):
        assert permitted() == decided
    assert permitted() == decided


def test_the_last_of_several_threads_takes_the_permission_back(suitable) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with fast_products(ENOUGH):
            begun.set()
            may_end.wait(60)

    thread = threading.Thread(target=other)
    with fast_products(ENOUGH):
        thread.start()
        assert begun.wait(60)
    assert permitted() == "bf16"  # that thread's
    may_end.set()
    thread.join()
    assert permitted() == "none"


@pytest.mark.parametrize(
    ("said", "wide"),
    [
        (ZEN_5, True),
        (ZEN_5.replace(": 26", ": 27"), True),
        (ZEN_5.replace(": 26", ": 25"), False),  # Zen 4, whose units are of 256 bits
        (ZEN_5.replace("avx512bw ", ""), False),  # where a hypervisor hides it
        (ZEN_5.replace("AuthenticAMD", "GenuineIntel"), False),
        ("processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd\n", False),
        ("", False),
    ],
)
def test_which_processors_have_512_bits(tmp_path: Path, said: str, wide: bool) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(said + "\n" + said)
    assert wide_amd(path) is wide


def test_without_linux_nothing_is_known(tmp_path: Path) -> None:
    assert not wide_amd(tmp_path / "cpuinfo")


def test_the_largest_matrix_is_that_of_one_network() -> None:
    shapes = [(2, 17, 64), (2, 1, 64), (64, 32), (500,), (), (8, 4, 3, 3)]
    assert largest_matrix(map(torch.zeros, shapes)) == 64 * 32
    assert largest_matrix([torch.zeros(3)]) == 0
