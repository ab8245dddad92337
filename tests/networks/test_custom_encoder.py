"""Custom encoders: their input, the generator that initializes them, and rejected encoders."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.encoder import Preprocessor, encoder_for
from rein.ops.random import generator

BOX = spaces.Box(-1.0, 1.0, (3,))
CAMERA = spaces.Box(0, 255, (36, 40, 3), np.uint8)
MIXED = spaces.Dict({"camera": CAMERA, "cell": spaces.Discrete(4)})


class Linear(nn.Module):
    """Encoder as users write it, without explicit generators."""

    def __init__(
        self, space: spaces.Space[Any], source: torch.Generator, *, features: int = 5, outputs: int = 0
    ) -> None:
        super().__init__()
        self.features = features
        self.layers = nn.Sequential(nn.Linear(spaces.flatdim(space), outputs or features), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Echo(nn.Module):
    """Encoder that keeps its last input."""

    features = 1

    def __init__(self, space: spaces.Space[Any], source: torch.Generator) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.view(len(x), -1).unflatten(1, x.shape[1:])  # in memory order
        return torch.zeros(len(x), 1)


def flat(encoder: nn.Module | None) -> Tensor:
    assert encoder is not None
    return torch.cat([parameter.detach().flatten() for parameter in encoder.parameters()])


def test_initialization_uses_the_generator_and_not_the_global_one() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = encoder_for(BOX, generator(0, "encoder"), Linear)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(flat(first), flat(encoder_for(BOX, generator(0, "encoder"), Linear)))
    assert not torch.equal(flat(first), flat(encoder_for(BOX, generator(1, "encoder"), Linear)))


def test_two_encoders_from_one_generator_differ() -> None:
    source = generator(0, "encoder")
    assert not torch.equal(flat(encoder_for(BOX, source, Linear)), flat(encoder_for(BOX, source, Linear)))


def test_default_encoder_of_vectors_draws_nothing() -> None:
    source = generator(0, "encoder")
    before = source.get_state()
    assert encoder_for(BOX, source) is None
    assert torch.equal(source.get_state(), before)


def test_existing_module_is_copied() -> None:
    module = Linear(BOX, generator(0, "encoder"))
    one, other = (encoder_for(BOX, generator(0, "encoder"), lambda space, source: module) for _ in range(2))
    assert one is not other and one is not module and torch.equal(flat(one), flat(module))


def test_partial_passes_options() -> None:
    assert encoder_for(BOX, generator(0, "encoder"), functools.partial(Linear, features=7)).features == 7  # type: ignore[union-attr]  # not None here


def test_lazy_layer_is_initialized() -> None:
    class Lazy(Linear):
        def __init__(self, space: spaces.Space[Any], source: torch.Generator) -> None:
            super().__init__(space, source)
            self.layers = nn.Sequential(nn.LazyLinear(5))

    assert len(flat(encoder_for(BOX, generator(0, "encoder"), Lazy))) == 3 * 5 + 5


@pytest.mark.parametrize(
    ("space", "observation", "shape", "dtype"),
    [
        (BOX, torch.ones(6, 3), (6, 3), torch.float32),
        (spaces.Box(0, 9, (4, 5, 2), np.uint8), torch.ones(6, 4, 5, 2, dtype=torch.uint8), (6, 40), torch.float32),
        (spaces.Discrete(4), torch.ones(6, dtype=torch.int64), (6, 4), torch.float32),
        (CAMERA, torch.ones(6, 36, 40, 3, dtype=torch.uint8), (6, 36, 40, 3), torch.uint8),
        (spaces.Box(-np.inf, np.inf, (3, 40, 36)), torch.ones(6, 3, 40, 36), (6, 3, 40, 36), torch.float32),
        (
            MIXED,
            {"camera": torch.ones(6, 36, 40, 3, dtype=torch.uint8), "cell": torch.ones(6, dtype=torch.int64)},
            (6, 36 * 40 * 3 + 4),
            torch.float32,
        ),
    ],
    ids=["vector", "grid", "number", "bytes", "floats", "mixed"],
)
def test_trial_input_matches_real_input(
    space: spaces.Space[Any], observation: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tried: Any = encoder_for(space, generator(0, "encoder"), Echo)
    x = Preprocessor(space, torch.device("cpu"))(observation)
    assert (x.shape, x.dtype) == (shape, dtype)
    assert (tried.seen.shape, tried.seen.dtype) == ((2, *shape[1:]), dtype) and not tried.seen.any()


@pytest.mark.parametrize("given", [3, "LSTM", Linear(BOX, generator(0, "encoder"))], ids=["number", "name", "module"])
def test_invalid_factory_is_rejected(given: Any) -> None:
    with pytest.raises(
        TypeError, match=r"encoder is .*pass a factory that is called as encoder\(observation_space, gen"
    ):
        encoder_for(BOX, generator(0, "encoder"), given)


class Half(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).half()


def with_features(features: Any) -> Any:
    def factory(space: spaces.Space[Any], source: torch.Generator) -> nn.Module:
        module = Linear(space, source)
        del module.features
        module.features = features
        return module

    return factory


@pytest.mark.parametrize(
    ("factory", "error", "text"),
    [
        (lambda space, source: 3, TypeError, r"expected a torch\.nn\.Module from the factory, got int"),
        (lambda space, source: nn.Linear(3, 4), ValueError, r"Linear\.features is missing"),
        *[(with_features(each), ValueError, r"Linear\.features is ") for each in (0, True, 2.0, nn.Linear(1, 1))],
        (functools.partial(Linear, outputs=4), ValueError, r"returned \(2, 4\) of torch.float32 .*\(2, 5\) of"),
        (Half, ValueError, r"returned \(2, 5\) of torch.float16"),
    ],
)
def test_invalid_encoder_is_rejected(factory: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        encoder_for(BOX, generator(0, "encoder"), factory)


def test_error_in_the_trial_notes_the_input() -> None:
    wrong = functools.partial(Linear, spaces.Box(-1.0, 1.0, (8,)))
    with pytest.raises(RuntimeError) as raised:
        encoder_for(BOX, generator(0, "encoder"), lambda space, source: wrong(source))
    assert raised.value.__notes__ == ["encoder: Linear was called with two observations, zeros (2, 3) of torch.float32"]


@pytest.mark.parametrize("layer", [nn.Dropout(0.1), nn.BatchNorm1d(5)], ids=["dropout", "batch norm"])
def test_layer_that_varies_in_training_is_rejected_unless_in_eval(layer: nn.Module) -> None:
    def factory(space: spaces.Space[Any], source: torch.Generator, *, training: bool) -> nn.Module:
        module = Linear(space, source)
        module.layers.append(layer.train(training))
        return module

    with pytest.raises(ValueError, match=f"Linear contains {type(layer).__name__}.*use nn.LayerNorm"):
        encoder_for(BOX, generator(0, "encoder"), functools.partial(factory, training=True))
    assert encoder_for(BOX, generator(0, "encoder"), functools.partial(factory, training=False)) is not None
