"""Products by oneDNN: only where they are float32's, and only as long as somebody asked for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rein.networks.mlp import Stack
from rein.ops import backend as products
from rein.ops.backend import ENOUGH, fast_products, largest_matrix, rounds_as_float32, suits_onednn, wide_amd

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
def undecided() -> Iterator[None]:
    """As torch is when nobody has said anything."""
    before = permitted()
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    yield
    torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.fixture
def suitable(undecided, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this were such a machine, whatever it is."""
    monkeypatch.setattr(products, "suits_onednn", lambda: True)


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
    limit = 5e-6 * inputs**0.5  # with factors in bfloat16 it would be some 1e-2 of that root
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
def test_what_is_not_float32_is_found_out(product) -> None:
    assert rounds_as_float32(torch.bmm)
    assert not rounds_as_float32(product)


def test_what_is_checked_is_float32_whatever_is_the_default(monkeypatch) -> None:
    monkeypatch.setattr(products, "wide_amd", lambda: True)
    suits_onednn.cache_clear()
    expected = suits_onednn()
    assert expected == (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available())
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


def test_a_machine_whose_permitted_products_are_bfloat16s_is_left_alone(undecided, monkeypatch) -> None:
    seen = []

    def checked(product) -> bool:
        seen.append(permitted())
        return False

    monkeypatch.setattr(products, "wide_amd", lambda: True)
    monkeypatch.setattr(products, "rounds_as_float32", checked)
    suits_onednn.cache_clear()
    try:
        for _ in range(2):
            with fast_products(ENOUGH):
                assert permitted() == "none"
    finally:
        suits_onednn.cache_clear()
    if torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available():
        assert seen == ["bf16"]  # what is checked, once, is what would be used
    assert permitted() == "none"


def test_a_check_that_is_broken_off_is_made_again(undecided, monkeypatch) -> None:
    def interrupted() -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(products, "suits_onednn", interrupted)
    with pytest.raises(KeyboardInterrupt), fast_products(ENOUGH):
        pass
    monkeypatch.setattr(products, "suits_onednn", lambda: True)
    with fast_products(ENOUGH):
        assert permitted() == "bf16"
    assert permitted() == "none"


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


def test_whoever_decides_in_there_is_obeyed(suitable) -> None:
    with fast_products(ENOUGH):
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    assert permitted() == "ieee"


def test_a_compiler_that_tries_products_out_is_left_alone(suitable) -> None:
    """It asks torch for the precision, which torch refuses to say while bfloat16 is permitted by its newer switch."""
    from torch._inductor import config

    with config.patch(max_autotune=True), fast_products(ENOUGH):
        assert torch.get_float32_matmul_precision() == "highest"


def test_the_last_of_several_threads_takes_the_permission_back(suitable) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with fast_products(ENOUGH):
            begun.set()
            may_end.wait()

    thread = threading.Thread(target=other)
    with fast_products(ENOUGH):
        thread.start()
        assert begun.wait()
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


def test_the_largest_matrix_is_one_that_rows_are_multiplied_by() -> None:
    networks = nn.ModuleDict({"embedding": nn.Embedding(5_000, 32), "convolution": nn.Conv2d(4, 8, 60)})
    assert largest_matrix(networks) == 0
    networks["hidden"] = Stack(2, 17, (64, 32), "tanh", torch.Generator().manual_seed(0))
    networks["head"] = nn.Linear(32, 6)
    assert largest_matrix(networks) == 64 * 32  # of each network in the stack
    assert largest_matrix(networks.to("meta")) == 0  # which is not the CPU
