"""Default encoders of images, alone or as a part of an observation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rein.networks.convolution import Convolution, MixedEncoder
from rein.networks.encoder import Flatten, encoder_for
from rein.ops.random import generator
from rein.spaces import scales

CAMERA = spaces.Box(0, 255, (36, 40, 3), np.uint8)
DEPTH = spaces.Box(0.0, 1.0, (1, 36, 36))
POSITION = spaces.Box(-1.0, 1.0, (2,))
MIXED = spaces.Dict(
    {"camera": CAMERA, "cell": spaces.Discrete(4), "inner": spaces.Dict({"depth": DEPTH}), "position": POSITION}
)


def observation(rows: int) -> dict[str, Any]:
    drawn = generator(0, "observations")
    return {
        "camera": torch.randint(0, 256, (rows, 36, 40, 3), dtype=torch.uint8, generator=drawn),
        "cell": torch.arange(rows) % 4,
        "inner": {"depth": torch.rand(rows, 1, 36, 36, generator=drawn)},
        "position": torch.rand(rows, 2, generator=drawn),
    }


def mixed_encoder(space: spaces.Space[Any] = MIXED) -> MixedEncoder:
    encoder = encoder_for(space, generator(0, "encoder"))
    assert isinstance(encoder, MixedEncoder)
    return encoder


def test_each_image_has_its_own_convolution_and_other_numbers_are_kept() -> None:
    encoder, seen = mixed_encoder(), observation(5)
    camera, depth = encoder.images
    one_hot = torch.nn.functional.one_hot(seen["cell"], 4).float()
    wanted = torch.cat([camera(seen["camera"]), one_hot, depth(seen["inner"]["depth"]), seen["position"]], 1)
    found = encoder(Flatten(MIXED, scales=scales)(seen))
    assert found.shape == (5, encoder.features) == (5, 2 * 512 + 4 + 2)
    torch.testing.assert_close(found, wanted)


def test_sequences_are_encoded_step_by_step() -> None:
    encoder, flat = mixed_encoder(), Flatten(MIXED, scales=scales)(observation(6))
    torch.testing.assert_close(encoder(flat.unflatten(0, (3, 2))), encoder(flat).unflatten(0, (3, 2)))


def test_tuple_is_encoded_like_a_dictionary() -> None:
    space = spaces.Tuple((POSITION, CAMERA))
    seen = observation(3)
    flat = Flatten(space, scales=scales)({"0": seen["position"], "1": seen["camera"]})
    encoder = mixed_encoder(space)
    torch.testing.assert_close(encoder(flat)[:, 2:], encoder.images[0](seen["camera"]))


def test_single_image_gets_a_convolution() -> None:
    assert isinstance(encoder_for(CAMERA, generator(0, "encoder")), Convolution)


SMALL = spaces.Box(0, 255, (35, 84, 3), np.uint8)


@pytest.mark.parametrize("space", [POSITION, SMALL, spaces.Dict({"grid": SMALL, "position": POSITION})], ids=str)
def test_vectors_and_small_grids_have_no_encoder(space: spaces.Space[Any]) -> None:
    assert encoder_for(space, generator(0, "encoder")) is None


def box(*shape: int, low: int = 0, high: int = 255, dtype: Any = np.uint8) -> spaces.Box:
    return spaces.Box(low, high, shape, dtype)


@pytest.mark.parametrize("shape", [(20, 20, 3), (3, 20, 20), (7, 7, 3), (35, 84, 1), (4, 10, 10), (84, 84, 3)])
def test_byte_images_with_one_three_or_four_channels_are_scaled(shape: Any) -> None:
    assert scales(box(*shape))


@pytest.mark.parametrize("shape", [(84, 84), (84, 84, 2), (4, 84, 84, 3)])
def test_bytes_for_convolutions_are_scaled(shape: Any) -> None:
    assert scales(box(*shape))


@pytest.mark.parametrize(
    "space",
    [
        *[box(20, 20, 2), box(20, 20), box(20), box(4, 20, 20, 3), box(20, 20, 3, high=10), box(20, 20, 3, low=1)],
        *[box(20, 20, 3, dtype=np.int16), box(20, 20, 3, dtype=np.float32), box(84, 84, 3, dtype=np.float32)],
        *[spaces.MultiBinary([20, 20, 3]), spaces.Discrete(255)],
    ],
    ids=str,
)
def test_other_spaces_are_not_scaled(space: spaces.Space[Any]) -> None:
    assert not scales(space)
