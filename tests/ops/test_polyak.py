from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rein.ops.random import generator
from rein.ops.values import polyak_


def parameters(seed: int) -> list[Tensor]:
    stream = generator(seed, "parameters")
    return [torch.randn(shape, generator=stream).requires_grad_() for shape in ((3, 2), (4,), ())]


@pytest.mark.parametrize("tau", [0.0, 0.005, 0.3, 0.7])
def test_targets_move_by_tau_and_sources_do_not_change(tau: float) -> None:
    targets, sources = parameters(0), parameters(1)
    before = [target.detach().clone() for target in targets]
    places = [target.data_ptr() for target in targets]
    polyak_(targets, sources, tau)
    for target, source, old, kept in zip(targets, sources, before, parameters(1), strict=True):
        assert torch.allclose(target, (1.0 - tau) * old + tau * source, atol=1e-6)
        assert torch.equal(source, kept)
    assert [target.data_ptr() for target in targets] == places


def test_tau_of_one_copies_exactly() -> None:
    targets, sources = parameters(0), parameters(1)
    with torch.no_grad():
        targets[0].fill_(1e30)
        targets[1].fill_(torch.nan)
    polyak_(targets, sources, 1.0)
    assert all(torch.equal(*pair) for pair in zip(targets, sources, strict=True))


def test_no_gradient_flows() -> None:
    targets, sources = [torch.zeros(3)], [torch.ones(3, requires_grad=True)]
    polyak_(targets, sources, 0.5)
    assert not targets[0].requires_grad


def test_empty_lists_are_allowed() -> None:
    polyak_([], [], 0.5)


@pytest.mark.parametrize("tau", [-0.1, 1.1, float("nan")])
def test_tau_outside_the_unit_interval_is_rejected(tau: float) -> None:
    with pytest.raises(ValueError, match="tau"):
        polyak_(parameters(0), parameters(1), tau)


def test_lists_of_different_lengths_are_rejected() -> None:
    with pytest.raises(ValueError, match="got 3 targets for 2 sources"):
        polyak_(parameters(0), parameters(1)[:2], 0.5)
