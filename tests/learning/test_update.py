"""Optimizer steps: gradient clipping, guards, optimizer states, and Adam."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rein.agents.base.optimizers import Adam, apply_gradients, set_learning_rate
from rein.ops.random import generator
from rein.ops.trees import load_plain_state, plain_state
from rein.testing.stateful import check_plain, copy_state, first_difference

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "rein's Adam": functools.partial(Adam, eps=1e-5),
    "Adam": functools.partial(torch.optim.Adam, lr=1e-2),
    "RMSprop": functools.partial(torch.optim.RMSprop, alpha=0.99, eps=1e-5, lr=1e-2),
    "SGD": functools.partial(torch.optim.SGD, momentum=0.9, lr=1e-2),
}
SHAPES = ((3, 2), (4,))


def parameters(seed: int = 0) -> list[Tensor]:
    stream = generator(seed, "parameters")
    return [torch.randn(shape, generator=stream).requires_grad_() for shape in SHAPES]


def give_gradients(of: list[Tensor], seed: int, scale: float = 1.0) -> list[Tensor]:
    stream = generator(seed, "gradients")
    for parameter in of:
        parameter.grad = scale * torch.randn(parameter.shape, generator=stream)
    return [parameter.grad.clone() for parameter in of if parameter.grad is not None]


def step(optimizer: Any, of: list[Tensor], seed: int, **options: Any) -> Tensor:
    give_gradients(of, seed)
    return apply_gradients(optimizer, {}, **{"max_grad_norm": None, **options})


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_gradients_are_clipped_by_global_norm(scale: float) -> None:
    """Clipping keeps directions and does not change small gradients. The returned norm is that before clipping."""
    p = parameters()
    before, seen = give_gradients(p, 0, scale), []

    def look(metrics: Any, gradients: list[Tensor]) -> bool:
        seen.extend(gradient.clone() for gradient in gradients)
        return True

    norm = apply_gradients(torch.optim.SGD(p, lr=0.1), {}, max_grad_norm=0.5, guard=look)
    expected = torch.cat([gradient.flatten() for gradient in before]).norm()
    torch.testing.assert_close(norm, expected)
    for mine, whole in zip(seen, before, strict=True):
        torch.testing.assert_close(mine, whole * (0.5 / expected).clamp(max=1.0), rtol=1e-4, atol=1e-6)


def test_gradients_are_not_clipped_without_limit() -> None:
    p, q = parameters(), parameters()
    gradients = give_gradients(p, 0, 100.0)
    apply_gradients(torch.optim.SGD(p, lr=0.1), {}, max_grad_norm=None)
    for mine, initial, gradient in zip(p, q, gradients, strict=True):
        torch.testing.assert_close(mine, initial - 0.1 * gradient)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipped_step_changes_nothing(name: str) -> None:
    p = parameters()
    optimizer = OPTIMIZERS[name](p)
    step(optimizer, p, 0)
    before = copy_state([[*p], plain_state(optimizer)])
    step(optimizer, p, 1, guard=lambda metrics, gradients: False)
    assert first_difference(before, [[x.detach() for x in p], plain_state(optimizer)]) is None
    assert all(parameter.grad is None for parameter in p)  # gradients of a skipped step are cleared
    step(optimizer, p, 2, guard=lambda metrics, gradients: True)
    assert first_difference(before, [[x.detach() for x in p], plain_state(optimizer)]) is not None


def test_guard_can_skip_non_finite_gradients() -> None:
    p = parameters()
    initial = [parameter.detach().clone() for parameter in p]
    give_gradients(p, 0)
    p[0].grad[0, 0] = torch.nan  # type: ignore[index]  # it has a gradient
    guard = lambda metrics, gradients: bool(torch.isfinite(metrics["grad_norm"]))  # noqa: E731  # shorter than a function
    norm = apply_gradients(Adam(p), {}, max_grad_norm=0.5, guard=guard)
    assert norm.isnan()
    assert all(torch.equal(mine, before) for mine, before in zip(p, initial, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_is_restored_exactly_and_copied(name: str) -> None:
    p = parameters()
    optimizer = OPTIMIZERS[name](p)
    for seed in range(3):
        step(optimizer, p, seed)
    state = copy_state(plain_state(optimizer))
    kept, q = copy_state(state), [x.detach().clone().requires_grad_() for x in p]
    check_plain(state)
    other = OPTIMIZERS[name](q)
    load_plain_state(other, state)
    for seed in range(3, 6):
        assert first_difference(plain_state(optimizer), plain_state(other)) is None
        step(optimizer, p, seed)
        step(other, q, seed)
        assert all(torch.equal(one, two) for one, two in zip(p, q, strict=True))
    assert first_difference(state, kept) is None


def test_learning_rate_is_set_for_all_groups() -> None:
    p = parameters()
    optimizer = torch.optim.SGD([{"params": [p[0]]}, {"params": [p[1]], "lr": 5.0}], lr=0.1)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_matches_torch(weight_decay: float) -> None:
    p, q = parameters(), parameters()
    mine = Adam(p, lr=1e-2, eps=1e-5, weight_decay=weight_decay)
    torchs = torch.optim.Adam(q, lr=1e-2, eps=1e-5, weight_decay=weight_decay)
    for seed in range(5):
        for optimizer, of in ((mine, p), (torchs, q)):
            step(optimizer, of, seed)
        for one, other in zip(p, q, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


GRADIENTS = {
    "channels side by side": lambda: torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(7, 5).t(),
    "one number for all": lambda: torch.randn(()).expand(5, 7),
    "every other": lambda: torch.randn(5, 14)[:, ::2],
}


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("last", [False, True])
def test_adam_supports_all_memory_layouts(kind: str, last: bool) -> None:
    torch.manual_seed(0)
    p = torch.randn(GRADIENTS[kind]().shape)
    p = p.to(memory_format=torch.channels_last) if last and p.ndim == 4 else p
    q = p.clone()
    mine, torchs = Adam([p], lr=1e-2), torch.optim.Adam([q], lr=1e-2)
    for _ in range(3):
        p.grad = GRADIENTS[kind]()
        q.grad = p.grad.clone(memory_format=torch.contiguous_format)
        mine.step()
        torchs.step()
    torch.testing.assert_close(p, q)


def test_adam_skips_parameters_without_gradient() -> None:
    p = parameters()
    initial = p[1].detach().clone()
    optimizer = Adam(p, lr=1e-2)
    p[0].grad = torch.ones_like(p[0])
    optimizer.step()
    assert torch.equal(p[1], initial)
    assert [float(n) for n in optimizer.state_dict()["steps"]] == [1.0, 0.0]


def test_adam_rejects_state_of_other_parameters() -> None:
    with pytest.raises(ValueError, match="means"):
        Adam(parameters()).load_state_dict(Adam(parameters()[:1]).state_dict())
