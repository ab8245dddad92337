"""Inputs of networks: flat numbers, normalized numbers, or an unchanged image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rein.networks.encoder import Preprocessor
from rein.ops.random import generator

CPU = torch.device("cpu")
VECTOR = spaces.Box(-10.0, 10.0, (3,))


def rows(*shape: int, seed: int = 0) -> Tensor:
    return 3.0 + 2.0 * torch.randn(*shape, generator=generator(seed, "rows"))


def image(*shape: int) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


@pytest.mark.parametrize("shape", [(36, 36, 1), (84, 84, 3), (4, 84, 84), (36, 40, 3), (3, 40, 36)])
def test_large_images_are_unchanged(shape: tuple[int, ...]) -> None:
    encoder = Preprocessor(image(*shape), CPU)
    x = torch.zeros(2, *shape, dtype=torch.uint8)
    assert encoder.images and encoder(x) is x


@pytest.mark.parametrize("shape", [(35, 84, 3), (3, 84, 35), (10, 10, 4), (40, 5, 50), (50, 5, 40)])
def test_small_grids_are_flattened(shape: tuple[int, ...]) -> None:
    """Also if two dimensions are large but the middle one, a side of the image, is small."""
    encoder = Preprocessor(image(*shape), CPU)
    x = torch.randint(0, 256, (2, *shape), dtype=torch.uint8, generator=generator(0, "rows"))
    assert not encoder.images
    assert encoder.features == int(np.prod(shape))
    scaled = bool({shape[0], shape[-1]} & {1, 3, 4})
    assert torch.equal(encoder(x), x.flatten(1).float() / (255.0 if scaled else 1.0))
    for raw in (
        Preprocessor(image(*shape), CPU, scale_images=False),
        Preprocessor(image(*shape), CPU, custom_encoder=True),
    ):
        assert torch.equal(raw(x), x.flatten(1).float())


def test_large_images_become_floats_without_scaling() -> None:
    encoder = Preprocessor(image(36, 36, 1), CPU, scale_images=False)
    x = torch.randint(0, 256, (2, 36, 36, 1), dtype=torch.uint8, generator=generator(0, "rows"))
    assert encoder(x).dtype == torch.float32
    assert torch.equal(encoder(x), x.float())


@pytest.mark.parametrize(("scale_images", "largest"), [(True, 1.0), (False, 255.0)])
def test_images_of_any_size_in_a_dictionary_are_scaled(scale_images: bool, largest: float) -> None:
    space = spaces.Dict({"large": image(40, 40, 3), "small": image(20, 20, 3), "vector": spaces.Box(0, 255, (2,))})
    encoder = Preprocessor(space, CPU, scale_images=scale_images)
    seen = {name: torch.full((1, *(part.shape or ())), 255).to(torch.uint8) for name, part in space.items()}
    x = encoder(seen)[0]
    assert (x[:-2] == largest).all()
    assert (x[-2:] == 255.0).all()


def test_scaling_does_not_modify_the_observation() -> None:
    x = torch.full((1, 20, 20, 3), 255.0)  # already floats
    assert (Preprocessor(image(20, 20, 3), CPU)(x) == 1.0).all()
    assert (x == 255.0).all()


def test_dictionaries_become_vectors() -> None:
    space = spaces.Dict({"position": VECTOR, "cell": spaces.Discrete(4)})
    encoder = Preprocessor(space, CPU, normalize=True)
    observation = {"position": rows(5, 3), "cell": torch.tensor([0, 1, 2, 3, 0])}
    encoder.update(observation)
    assert encoder(observation).shape == (5, encoder.features) == (5, 7)


def test_numbers_beside_images_are_normalized() -> None:
    space = spaces.Dict({"camera": image(36, 36, 1), "position": VECTOR})
    encoder, alone = Preprocessor(space, CPU, normalize=True), Preprocessor(VECTOR, CPU, normalize=True)
    seen = {"camera": torch.full((20, 36, 36, 1), 9, dtype=torch.uint8), "position": rows(20, 3)}
    encoder.update(seen)
    alone.update(seen["position"])
    assert torch.equal(encoder(seen), torch.cat([torch.full((20, 36 * 36), 9.0) / 255.0, alone(seen["position"])], 1))


def test_invalid_rows_do_not_enter_the_statistics() -> None:
    one, other = (Preprocessor(VECTOR, CPU, normalize=True) for _ in range(2))
    x, valid_N = rows(20, 3), torch.arange(20) % 3 > 0
    one.update(x, valid_N)
    other.update(torch.where(valid_N[:, None], x, torch.nan), valid_N)
    third = Preprocessor(VECTOR, CPU, normalize=True)
    third.update(x[valid_N])
    assert torch.equal(one(x), other(x))
    torch.testing.assert_close(one(x), third(x))


def test_statistics_are_not_parameters_and_carry_no_graph() -> None:
    encoder = Preprocessor(VECTOR, CPU, normalize=True)
    assert not [*encoder.parameters()]
    assert not encoder(rows(2, 3).requires_grad_()).requires_grad


@pytest.mark.parametrize("space", [image(84, 84, 3), spaces.Dict({"camera": image(84, 84, 3)})], ids=str)
def test_normalizing_only_images_is_rejected(space: spaces.Space) -> None:
    with pytest.raises(ValueError, match="contains only images"):
        Preprocessor(space, CPU, normalize=True)


def test_image_beside_other_numbers_is_flattened() -> None:
    encoder = Preprocessor(spaces.Dict({"camera": image(40, 36, 1), "position": VECTOR}), CPU)
    seen = {"camera": torch.full((2, 40, 36, 1), 7, dtype=torch.uint8), "position": rows(2, 3)}
    assert encoder.images and encoder.features == 40 * 36 + 3
    assert torch.equal(encoder(seen), torch.cat([torch.full((2, 40 * 36), 7.0) / 255.0, seen["position"]], 1))


@pytest.mark.parametrize("shape", [(36, 36, 1), (84, 84), (4, 84, 84, 3)])
def test_single_image_without_a_batch_dimension_raises(shape: tuple[int, ...]) -> None:
    encoder = Preprocessor(image(*shape), CPU)
    with pytest.raises(ValueError, match="a first dimension of 1"):
        encoder(torch.zeros(shape, dtype=torch.uint8))
    assert len(encoder(torch.zeros(1, *shape, dtype=torch.uint8))) == 1


@pytest.mark.parametrize("space", [VECTOR, image(36, 36, 1)])
def test_arrays_raise_with_a_hint(space: spaces.Box) -> None:
    with pytest.raises(TypeError, match=r"observations must be tensors, got ndarray: use torch.as_tensor"):
        Preprocessor(space, CPU)(np.zeros((1, *space.shape), space.dtype))
