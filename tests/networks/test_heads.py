"""Heads for actions: structure, standard deviation, and bounds of samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.networks.heads import ContinuousHead, DiscreteHead, ProductHead, action_head
from rein.ops.distributions import BallNormal, Normal, SquashedNormal
from rein.ops.random import generator
from rein.ops.trees import map_tree

ACTIONS = spaces.Box(-2.0, 2.0, (3,))
KINDS: dict[bool | str, type] = {False: Normal, True: SquashedNormal, "ball": BallNormal}


def head(space: spaces.Box = ACTIONS, **options: Any) -> ContinuousHead:
    built = action_head(8, space, generator(0, "networks"), gain=1.0, **options)
    assert isinstance(built, ContinuousHead)
    return built


def features(rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, 8, generator=generator(1, "features"))


@pytest.mark.parametrize("squash", KINDS)
def test_std_depends_on_the_observation_only_if_requested(squash: bool | str) -> None:
    fixed, result = head(squash=squash)(features()), head(squash=squash, state_dependent_std=True)(features())
    assert type(fixed) is type(result) is KINDS[squash]
    assert fixed.log_std.shape == (3,)  # type: ignore[attr-defined]  # an attribute of Gaussians
    assert result.log_std.shape == result.mean.shape == (5, 3)  # type: ignore[attr-defined]  # an attribute of Gaussians
    assert (result.log_std.std(0) > 0.01).all()  # type: ignore[attr-defined]  # an attribute of Gaussians


@pytest.mark.parametrize("state_dependent_std", [False, True])
def test_initial_log_std_is_the_option(state_dependent_std: bool) -> None:
    result = head(log_std=-0.7, state_dependent_std=state_dependent_std)(torch.zeros(2, 8))
    assert torch.equal(result.log_std.expand(2, 3), torch.full((2, 3), -0.7))  # type: ignore[attr-defined]  # an attribute of Gaussians
    assert not result.mean.any()  # type: ignore[attr-defined]  # an attribute of Gaussians


def test_ball_bounds_the_length_and_box_the_components() -> None:
    sample = torch.full((5, 3), 30.0)
    ball, box = (head(squash=squash) for squash in ("ball", True))
    action = ball.to_action(ball(features()), sample)
    torch.testing.assert_close(action.norm(dim=-1), torch.full((5,), 2.0))
    assert ACTIONS.contains(action[0].numpy())
    torch.testing.assert_close(box.to_action(box(features()), sample), torch.full((5, 3), 2.0))


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (spaces.Text(3), "use Discrete, MultiDiscrete, MultiBinary, Box, or a Dict or Tuple of these"),
        (
            spaces.Dict(word=spaces.Text(3)),
            "use Discrete, MultiDiscrete, MultiBinary, Box, or a Dict or Tuple of these",
        ),
        (spaces.Box(0, 1 << 20, (2,), np.int64), "at most 65,536 values each: give narrower bounds, or use a Box of"),
        (spaces.Box(0, 1, (0,), np.int64), "needs one or more numbers"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [rein.PPO, rein.A2C, rein.IMPALA])
def test_unsupported_action_space_is_rejected(kind, space, text) -> None:
    with pytest.raises(ValueError, match=f"(?s)the action space is .*{text}"):
        kind(spaces.Box(-1.0, 1.0, (2,)), space)


@pytest.mark.parametrize("space", [spaces.Dict(), spaces.Tuple(())], ids=str)
def test_empty_dict_or_tuple_is_rejected(space: spaces.Space[Any]) -> None:
    with pytest.raises(ValueError, match="is an empty space"):
        action_head(8, space, generator(0, "networks"))


DISCRETE = [
    (spaces.MultiBinary([2, 2]), [2] * 4, 0, 1),
    (spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 1], [1, 1]]), [2, 3, 4, 5], 1, 5),
    (spaces.Box(-2, 2, (2, 1), np.int8), [5, 5], -2, 2),
    (spaces.Box(0, 255, (2,), np.uint8), [256, 256], 0, 255),
    (spaces.Box(0, 1, (3,), np.bool_), [2] * 3, 0, 1),
    (spaces.Box(-1, 3, (), np.int64), [5], -1, 3),
]


@pytest.mark.parametrize(("space", "sizes", "low", "high"), DISCRETE, ids=str)
def test_integer_actions_cover_the_space(space: Any, sizes: list[int], low: int, high: int) -> None:
    module = action_head(8, space, generator(0, "networks"), gain=1.0)
    assert isinstance(module, DiscreteHead) and module.sizes == sizes
    distribution = module(features(4000))
    sample = distribution.sample(generator(0, "agent"))
    action = module.to_action(distribution, sample)
    assert action.shape == (4000, *space.shape) and action.dtype is torch.int64
    assert (action.min(), action.max()) == (low, high)
    assert all(space.contains(row.numpy().astype(space.dtype)) for row in action[:20])
    assert torch.equal(module.from_action(distribution, action), sample)


@pytest.mark.parametrize("squash", KINDS)
@pytest.mark.parametrize("shape", [(2, 3), (1, 2, 3), ()], ids=str)
def test_box_of_any_shape_is_a_vector_in_the_shape_of_the_box(squash: bool | str, shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape))
    box, vector = (head(spaces.Box(-2.0, 2.0, each), squash=squash) for each in (shape, (size,)))
    one, other = box(features()), vector(features())
    sample = one.sample(generator(0, "agent"))
    assert torch.equal(sample, other.sample(generator(0, "agent")))
    action = box.to_action(one, sample)
    assert action.shape == (5, *shape)
    assert torch.equal(action.reshape(5, size), vector.to_action(other, sample))
    assert torch.equal(box.from_action(one, action), vector.from_action(other, action.reshape(5, size)))


def test_components_have_heads_with_different_parameters() -> None:
    space = spaces.Dict(left=spaces.Discrete(3), right=spaces.Tuple([spaces.Discrete(3), ACTIONS]))
    module = action_head(8, space, generator(0, "networks"), gain=1.0)
    assert isinstance(module, ProductHead)
    distribution = module(features())
    left, (first, second) = distribution.factors["left"], distribution.factors["right"].factors.values()
    assert not torch.equal(left.log_probs, first.log_probs)
    assert type(second) is Normal
    sample = map_tree(torch.Tensor.detach, distribution.sample(generator(0, "agent")))
    (distribution.log_prob(sample) + distribution.entropy()).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters())


def test_components_that_do_not_change_keep_the_sample_itself() -> None:
    space = spaces.Dict(left=spaces.Discrete(3), right=spaces.Tuple([spaces.MultiBinary(3)]))
    module = action_head(8, space, generator(0, "networks"))
    distribution = module(features())
    sample = distribution.sample(generator(0, "agent"))
    assert module.to_action(distribution, sample) is sample


def test_squash_none_squashes_boxes_with_finite_bounds_only() -> None:
    space = spaces.Dict(arm=ACTIONS, leg=spaces.Box(-np.inf, np.inf, (2,)))
    distribution = action_head(8, space, generator(0, "networks"), squash=None)(features())
    assert [type(factor) for factor in distribution.factors.values()] == [SquashedNormal, Normal]  # type: ignore[attr-defined]  # a Product


@pytest.mark.parametrize(
    ("squash", "low", "high", "text"),
    [
        ("disc", [-1.0, -1.0], [1.0, 1.0], "squash='disc': use True, False or \"ball\""),
        ("ball", [-1.0, -1.0], [1.0, np.inf], "squash='ball' needs an action space with finite bounds"),
        ("ball", [-1.0, -1.0], [1.0, 2.0], 'squash="ball" needs an action space with bounds -r and r on all sides'),
        ("ball", [0.0, 0.0], [1.0, 1.0], 'squash="ball" needs an action space with bounds -r and r on all sides'),
        ("ball", [-1.0, 0.0], [1.0, 0.0], "squash='ball' needs .* low < high"),
        ("ball", [], [], 'squash="ball" needs an action space of one or more numbers'),
        (True, [-np.inf, -1.0], [1.0, 1.0], "squash=True needs an action space with finite bounds"),
        (True, [-1.0, 0.0], [1.0, 0.0], "squash=True needs .* low < high"),
        (True, [-3e38, -1.0], [3e38, 1.0], "squash=True needs .* high - low finite in float32, got .*3.*e[+]38"),
    ],
)
def test_bounds_that_do_not_fit_squash_are_rejected(
    squash: bool | str, low: list[float], high: list[float], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        head(spaces.Box(np.array(low, np.float32), np.array(high, np.float32)), squash=squash)


@pytest.mark.parametrize(("low", "high"), [(0.1, 0.1 + 1e-12), (-1e300, 1e300)])
@pytest.mark.parametrize("squash", [True, "ball"])
def test_bounds_equal_or_infinite_in_float32_are_rejected(squash: bool | str, low: float, high: float) -> None:
    with pytest.raises(ValueError, match="low < high and high - low finite in float32"):
        head(spaces.Box(low, high, (1,), np.float64), squash=squash)


def test_clipping_accepts_equal_and_infinite_bounds() -> None:
    low, high = np.float32([0.5, -3e38]), np.float32([0.5, 3e38])
    module = head(spaces.Box(low, high))
    action = module.to_action(module(features()), torch.tensor([[2.0, 1e30]]))
    assert torch.equal(action, torch.tensor([[0.5, 1e30]]))
