from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from rein.networks.convolution import Convolution
from rein.ops.random import generator
from rein.spaces import image_layout

H, W, C, FEATURES = 44, 36, 3, 16
SMALL = ((8, 8, 4), (16, 4, 2), (16, 3, 1))


def box(*shape: int, dtype: type = np.uint8) -> spaces.Box:
    return spaces.Box(0, 255 if dtype is np.uint8 else 1, shape, dtype)


def encoder(*shape: int, seed: int = 0) -> Convolution:
    return Convolution(box(*shape), FEATURES, generator(seed, "encoder"), layers=SMALL)


def images(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator(0, "images"))


def kinds(network: Convolution, kind: type[nn.Module]) -> list:
    return [layer for layer in network.layers if isinstance(layer, kind)]


def test_features_match_three_convolutions_and_a_linear_layer() -> None:
    network, x = encoder(C, H, W), images(5, C, H, W)
    expected = x.float() / 255.0
    for convolution, (_, kernel, stride) in zip(kinds(network, nn.Conv2d), SMALL, strict=True):
        assert convolution.weight.shape[-2:] == (kernel, kernel)
        expected = F.conv2d(expected, convolution.weight, convolution.bias, stride).relu()
    (linear,) = kinds(network, nn.Linear)
    expected = F.linear(expected.flatten(1), linear.weight, linear.bias).relu()
    assert network.features == FEATURES
    torch.testing.assert_close(network(x), expected)
    assert (expected > 0.0).any() and (expected == 0.0).any()


def test_default_is_the_network_of_mnih_2015() -> None:
    network = Convolution(box(4, 84, 84), 512, generator(0, "encoder"))
    shapes = [tuple(p.shape) for p in network.parameters() if p.ndim > 1]
    assert shapes == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 7 * 7 * 64)]


@pytest.mark.parametrize(("shape", "small"), [((4, 42, 42), True), ((90, 63, 3), True), ((4, 64, 64), False)])
def test_small_image_gets_smaller_kernels_and_strides(shape: tuple[int, ...], small: bool) -> None:
    (first, *_) = kinds(Convolution(box(*shape), 512, generator(0, "encoder")), nn.Conv2d)
    assert (first.kernel_size, first.stride) == (((4, 4), (2, 2)) if small else ((8, 8), (4, 4)))


@pytest.mark.parametrize("height", range(36, 53))
def test_every_pixel_matters(height: int) -> None:
    network, x = encoder(C, height, W), (images(64, C, height, W) / 255.0).requires_grad_()
    network(x).square().sum().backward()
    assert x.grad is not None
    assert (x.grad.abs().amax(dim=(0, 1)) > 0.0).all()


def test_image_that_strides_do_not_divide_is_padded_on_both_sides() -> None:
    x = images(5, C, 41, W)  # 41 x 36 becomes 44 x 36
    of_it, of_padded = encoder(C, 41, W), encoder(C, 44, W)
    torch.testing.assert_close(of_it(x), of_padded(F.pad(x, (0, 0, 1, 2))))


@pytest.mark.parametrize("channels", [1, C])
def test_channels_can_be_first_or_last(channels: int) -> None:
    first, last, x = encoder(channels, H, W), encoder(H, W, channels), images(5, channels, H, W)
    torch.testing.assert_close(last(x.permute(0, 2, 3, 1)), first(x))
    torch.testing.assert_close(last(x.permute(0, 2, 3, 1).contiguous()), first(x))


def test_channels_are_first_if_the_shape_is_ambiguous() -> None:
    network, x = encoder(H, W, H), images(2, H, W, H)
    (first, *_) = kinds(network, nn.Conv2d)
    before = F.conv2d(x.float() / 255.0, first.weight, first.bias, first.stride)
    torch.testing.assert_close(network(x), network.layers[1:](before))


def test_bytes_equal_the_same_image_in_fractions() -> None:
    x = images(5, C, H, W)
    network = encoder(C, H, W)
    assert torch.equal(network(x), network(x.float() / 255.0))
    torch.testing.assert_close(network(x.double() / 255.0), network(x))
    of_floats = Convolution(box(C, H, W, dtype=np.float32), FEATURES, generator(0, "encoder"), layers=SMALL)
    assert torch.equal(of_floats(x.float() / 255.0), network(x))


@pytest.mark.parametrize("leading", [(), (1,), (6,), (2, 3), (1, 2, 3), (0,), (4, 0)])
@pytest.mark.parametrize("shape", [(C, H, W), (H, W, C)])
def test_leading_dimensions_are_kept(leading: tuple[int, ...], shape: tuple[int, ...]) -> None:
    network, x = encoder(*shape), images(*leading, *shape)
    features = network(x)
    assert features.shape == (*leading, FEATURES)
    for place in itertools.product(*map(range, leading)):
        torch.testing.assert_close(features[place], network(x[place]))


def test_time_and_environments_can_be_swapped_without_a_copy() -> None:
    network, x = encoder(C, H, W), images(2, 3, C, H, W)
    torch.testing.assert_close(network(x.transpose(0, 1)), network(x).transpose(0, 1))


def test_weights_are_orthogonal_with_gain_sqrt_2_and_biases_zero() -> None:
    network = encoder(C, H, W)
    for layer in [*kinds(network, nn.Conv2d), *kinds(network, nn.Linear)]:
        rows = layer.weight.detach().flatten(1)
        torch.testing.assert_close(rows @ rows.T, 2.0 * torch.eye(len(rows)), atol=1e-5, rtol=0.0)
        assert (layer.bias == 0.0).all()


def test_weights_are_drawn_only_from_the_generator() -> None:
    before = torch.get_rng_state()
    one, same, other = encoder(C, H, W), encoder(C, H, W), encoder(C, H, W, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    for left, right in zip(one.parameters(), same.parameters(), strict=True):
        assert torch.equal(left, right)
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        assert left.ndim == 1 or not torch.equal(left, right)


@pytest.mark.parametrize("layers", [SMALL, ((8, 3, 1),), ((8, 4, 3), (8, 5, 2)), ()])
def test_smallest_size_in_an_error_is_the_smallest_that_works(layers: tuple[tuple[int, int, int], ...]) -> None:
    def build(height: int, width: int) -> Convolution:
        return Convolution(box(1, height, width), FEATURES, generator(0, "encoder"), layers=layers)

    smallest = next(size for size in range(1, 50) if math.prod(_sizes(size, layers)) > 0)
    assert build(smallest, smallest + 3)(images(2, 1, smallest, smallest + 3)).shape == (2, FEATURES)
    for size in range(1, smallest):
        for height, width in ((size, smallest), (smallest, size)):
            with pytest.raises(ValueError, match=rf"{height} x {width} .* need {smallest} x {smallest} or more"):
                build(height, width)


def _sizes(size: int, layers: tuple[tuple[int, int, int], ...]) -> list[int]:
    """Return the size after each layer, counting kernel positions; 1 without layers."""
    found = [1]
    for _, kernel, stride in layers:
        size = len([start for start in range(0, size, stride) if start + kernel <= size])
        found.append(size)
    return found


@pytest.mark.parametrize("shape", [(2, 2, 1), (5, 5, 3), (3, 10, 35)])
def test_layers_proposed_by_an_error_work(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="try layers=") as caught:
        Convolution(box(*shape), FEATURES, generator(0, "encoder"))
    proposed = str(caught.value).split("layers=")[-1]
    values = [int(x) for x in proposed.replace("(", "").replace(")", "").split(",") if x]
    network = Convolution(box(*shape), FEATURES, generator(0, "encoder"), layers=[tuple(values)])
    assert network(images(2, *shape)).shape == (2, FEATURES)


@pytest.mark.parametrize("layer", [(0, 3, 1), (8, 0, 1), (8, 3, 0)])
def test_layer_with_a_zero_raises(layer: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"\(features, kernel, stride\), all 1 or more"):
        Convolution(box(C, H, W), FEATURES, generator(0, "encoder"), layers=[layer])


NO_IMAGES = [
    spaces.Box(0.0, 1.0, (84, 84)),
    spaces.Box(0.0, 1.0, (4, 84, 84, 3)),
    spaces.Box(0, 255, (2, 4, 84, 84, 3), np.uint8),
    spaces.Box(-1.0, 1.0, (4,)),
    spaces.Discrete(4),
    spaces.MultiBinary((4, 84, 84)),
    spaces.Dict({"camera": box(C, H, W)}),
]


@pytest.mark.parametrize("space", NO_IMAGES, ids=str)
def test_error_for_a_space_that_is_not_an_image_shows_the_space(space: spaces.Space) -> None:
    assert image_layout(space) is None
    with pytest.raises(ValueError, match="is not an image") as caught:
        Convolution(space, FEATURES, generator(0, "encoder"))
    assert str(space) in str(caught.value)


def test_boxes_with_three_dimensions_and_bytes_with_two_or_four_are_images() -> None:
    for space in (box(84, 42, 3), box(4, 84, 42, dtype=np.float32), box(84, 42), box(4, 84, 42, 3), box(4, 3, 84, 42)):
        assert image_layout(space).size == (84, 42)


def test_bytes_without_channels_have_one_channel() -> None:
    x = images(5, H, W)
    torch.testing.assert_close(encoder(H, W)(x), encoder(1, H, W)(x.unsqueeze(1)))


@pytest.mark.parametrize("last", [True, False])
def test_channels_of_stacked_frames_are_concatenated(last: bool) -> None:
    x = images(5, 4, C, H, W)  # four frames of C channels
    together = encoder(4 * C, H, W)(x.flatten(1, 2))
    stacked = encoder(4, H, W, C)(x.movedim(2, -1)) if last else encoder(4, C, H, W)(x)
    torch.testing.assert_close(stacked, together)


@pytest.mark.parametrize("shape", [(2, H, W, C), (2, C, W, H), (H, W), (C * H * W,)])
def test_images_of_another_shape_raise(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"expected images of shape \(..., {C}, {H}, {W}\)"):
        encoder(C, H, W)(images(*shape))
