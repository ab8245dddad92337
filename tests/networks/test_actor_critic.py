"""Actor-critic networks: `forward`, `step`, `sequence`, `policy` and `value` agree.

Shapes: T steps, N environments, F features, C numbers of a carry.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rein.networks.actor_critic import ActorCritic
from rein.networks.recurrent import GRU, LSTM, MinimalGRU
from rein.ops.random import generator

T, N, F = 6, 4, 3
OBSERVATION = spaces.Box(-1.0, 1.0, (F,))
ACTIONS = {
    "discrete": spaces.Discrete(3),
    "multi-discrete": spaces.MultiDiscrete([2, 3]),
    "continuous": spaces.Box(-1.0, 1.0, (2,)),
}
CORES = {kind.__name__: functools.partial(kind, features=5) for kind in (LSTM, GRU, MinimalGRU)}


def make(action: spaces.Space[Any] = ACTIONS["discrete"], **options: Any) -> ActorCritic:
    return ActorCritic(OBSERVATION, action, generator(0, "networks"), hidden=(8, 7), **options)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, "numbers"))


def parts(distribution: Any) -> list[Tensor]:
    """Return the parameters of a distribution."""
    return [distribution.mode().float(), distribution.entropy(), distribution.log_prob(distribution.mode())]


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(parts(one), parts(other), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("action", ACTIONS)
def test_policy_and_value_match_forward(action: str, shared: bool) -> None:
    networks, x = make(ACTIONS[action], shared=shared), numbers(N, F)
    distribution, value_N = networks(x)
    assert value_N.shape == (N,)
    torch.testing.assert_close(networks.value(x), value_N)
    alone, carry = networks.policy(x)
    assert_same(alone, distribution)
    assert carry is None and networks.carry_size == 0


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("core", CORES)
def test_with_a_core_policy_and_value_match_step(core: str, shared: bool) -> None:
    networks, x = make(core=CORES[core], shared=shared), numbers(N, F)
    carry = numbers(N, networks.carry_size, seed=1)
    distribution, value_N, after = networks.step(x, carry)
    torch.testing.assert_close(networks.value(x, carry), value_N)
    alone, after_alone = networks.policy(x, carry)
    assert_same(alone, distribution)
    assert after is not None and after_alone is not None
    torch.testing.assert_close(after_alone, after)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("action", ["discrete", "continuous"])
def test_sequence_matches_steps(action: str, core: str, shared: bool) -> None:
    networks, x_TNF = make(ACTIONS[action], core=CORES[core], shared=shared), numbers(T, N, F)
    carry = first = numbers(N, networks.carry_size, seed=1)
    reset_TN = numbers(T, N, seed=2) < -0.5
    steps_results = []
    for x_NF, reset_N in zip(x_TNF, reset_TN, strict=True):
        distribution, value_N, carry = networks.step(x_NF, torch.where(reset_N[:, None], 0.0, carry))
        steps_results.append([*parts(distribution), value_N])
    distribution, value_TN = networks.sequence(x_TNF, first, reset_TN)
    for stepped, whole in zip(zip(*steps_results, strict=True), [*parts(distribution), value_TN], strict=True):
        torch.testing.assert_close(torch.stack(stepped), whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("core", CORES)
def test_actor_and_critic_have_separate_carries(core: str) -> None:
    """The carry of the critic does not change the policy, and vice versa."""
    networks, x = make(core=CORES[core]), numbers(N, F)
    carry = numbers(N, networks.carry_size, seed=1)
    actor, critic = carry.clone(), carry.clone()
    half = networks.carry_size // 2
    actor[:, :half] += 1.0
    critic[:, half:] += 1.0
    (before, value_N, _), (moved, same_N, _), (kept, other_N, _) = (networks.step(x, c) for c in (carry, actor, critic))
    assert torch.equal(same_N, value_N) and not torch.equal(other_N, value_N)
    assert torch.equal(kept.entropy(), before.entropy()) and not torch.equal(moved.entropy(), before.entropy())


@pytest.mark.parametrize(("shape", "first"), [((84, 84, 3), False), ((3, 84, 84), True), ((40, 36, 1), False)])
def test_both_losses_train_the_image_encoder(shape: tuple[int, ...], first: bool) -> None:
    space = spaces.Box(0, 255, shape, np.uint8)
    networks = ActorCritic(space, ACTIONS["discrete"], generator(0, "networks"), hidden=(8,))
    image = torch.randint(0, 256, (2, *shape), dtype=torch.uint8, generator=generator(0, "images"))
    distribution, value_N = networks(networks.preprocess(image))
    torch.testing.assert_close(networks.value(image), value_N)
    assert networks.encoder is not None
    for what in (value_N.sum(), distribution.entropy().sum()):
        gradients = torch.autograd.grad(what, [*networks.encoder.parameters()], retain_graph=True)
        assert all(gradient.any() for gradient in gradients)


def test_sequences_of_images_keep_their_shape() -> None:
    space = spaces.Box(0, 255, (36, 36, 1), np.uint8)
    networks = ActorCritic(space, ACTIONS["discrete"], generator(0, "networks"), hidden=(8,), core=CORES["GRU"])
    image = torch.randint(0, 256, (3, 2, 36, 36, 1), dtype=torch.uint8, generator=generator(0, "images"))
    carry = torch.zeros(2, networks.carry_size)
    _, value_TN = networks.sequence(image, carry, torch.zeros(3, 2, dtype=torch.bool))
    torch.testing.assert_close(value_TN[0], networks.value(image[0], carry), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("core", CORES)
def test_autocast_affects_only_products(core: str) -> None:
    """The carry stays in float32: in half precision a gate near 1 would round to 1."""
    networks, x_TNF = make(core=CORES[core]), numbers(T, N, F)
    first, reset_TN = torch.zeros(N, networks.carry_size), torch.zeros(T, N, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16):
        _, rough_TN = networks.sequence(x_TNF, first, reset_TN)
        _, _, carry = networks.step(x_TNF[0], first)
        y_TNH, last = networks.cores[0].sequence(numbers(T, N, 7), first.chunk(2, 1)[0], reset_TN)  # type: ignore[operator]  # a core
    _, value_TN = networks.sequence(x_TNF, first, reset_TN)
    torch.testing.assert_close(rough_TN.float(), value_TN, atol=0.03, rtol=0.03)
    assert carry is not None
    assert {carry.dtype, y_TNH.dtype, last.dtype} == {torch.float32}
