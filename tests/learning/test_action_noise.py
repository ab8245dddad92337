"""Action noise: standard deviation, random streams, and resets at episode starts."""

from __future__ import annotations

import pytest
import torch

from rein.agents.base.action_noise import AdaptiveExploration, GaussianNoise, OrnsteinUhlenbeck
from rein.ops.exploration import ornstein_uhlenbeck
from rein.ops.random import generator
from rein.schedules import linear
from rein.testing import StatefulContract

NOISES = [GaussianNoise, OrnsteinUhlenbeck]


def test_gaussian_noise_is_uncorrelated_with_given_standard_deviation() -> None:
    stream, action_NA = generator(0, "noise"), torch.zeros(50_000, 2)
    noise = GaussianNoise(0.3)
    first_NA, second_NA = noise(action_NA, stream), noise(action_NA, stream)
    for noise_NA in (first_NA, second_NA):
        assert abs(noise_NA.mean()) < 4.0 * 0.3 / noise_NA.numel() ** 0.5
        assert abs(noise_NA.std() / 0.3 - 1.0) < 4.0 / (2.0 * noise_NA.numel()) ** 0.5
    assert abs((first_NA * second_NA).mean()) < 4.0 * 0.3**2 / first_NA.numel() ** 0.5


def test_ornstein_uhlenbeck_matches_the_pure_function() -> None:
    noise, stream, same = OrnsteinUhlenbeck(0.15, 0.2, mu=0.5), generator(0, "noise"), generator(0, "noise")
    state_NA = torch.full((3, 2), 0.5)
    for _ in range(5):
        state_NA = ornstein_uhlenbeck(state_NA, torch.randn(3, 2, generator=same), 0.15, 0.5, 0.2)
        assert torch.equal(noise(torch.zeros(3, 2), stream), state_NA)


def test_reset_restarts_only_masked_environments() -> None:
    def walk(mask: list[bool]) -> torch.Tensor:
        noise, stream = OrnsteinUhlenbeck(), generator(0, "noise")
        noise.reset(torch.tensor(mask))  # before the first call
        for _ in range(5):
            noise(torch.zeros(2, 3), stream)
        noise.reset(torch.tensor(mask))
        return noise(torch.zeros(2, 3), stream)

    continued, restarted = walk([False, False]), walk([True, False])
    stream = generator(0, "noise")
    last_NA = [torch.randn(2, 3, generator=stream) for _ in range(6)][-1]
    assert torch.equal(restarted[1], continued[1])
    assert torch.equal(restarted[0], 0.2 * last_NA[0])
    assert not torch.equal(restarted[0], continued[0])


@pytest.mark.parametrize("kind", NOISES)
def test_modifying_returned_noise_does_not_change_the_state(kind) -> None:
    def second(spoil: bool) -> torch.Tensor:
        noise, stream = kind(), generator(0, "noise")
        first_NA = noise(torch.zeros(2, 3), stream)
        if spoil:
            first_NA.fill_(9.0)
        return noise(torch.zeros(2, 3), stream)

    assert torch.equal(second(True), second(False))


@pytest.mark.parametrize("kind", NOISES)
def test_noise_has_shape_and_dtype_of_actions(kind) -> None:
    action_NA = torch.zeros(4, 2, 3, dtype=torch.float64)
    noise_NA = kind()(action_NA, generator(0, "noise"))
    assert (noise_NA.shape, noise_NA.dtype) == (action_NA.shape, action_NA.dtype)


def test_standard_deviation_follows_schedule_or_plateau() -> None:
    schedule, plateau = linear(1.0, 0.0, env_steps=10), AdaptiveExploration(0.2, high=0.4, up=2.0)
    for kind, name in ((GaussianNoise, "std"), (OrnsteinUhlenbeck, "sigma")):
        one, half = (kind(**{name: schedule})(torch.zeros(2, 2), generator(0, "n"), env_steps=k) for k in (0, 5))
        assert torch.allclose(half, 0.5 * one)
    noise = GaussianNoise(plateau)
    before_NA = noise(torch.zeros(2, 2), generator(0, "n"))
    plateau.observe([1.0, 1.0])
    assert torch.allclose(noise(torch.zeros(2, 2), generator(0, "n")), 2.0 * before_NA)


def test_changed_action_shape_is_rejected() -> None:
    noise, stream = OrnsteinUhlenbeck(), generator(0, "noise")
    noise(torch.zeros(2, 3), stream)
    with pytest.raises(ValueError, match=r"changed from \(2, 3\) to \(4, 3\)"):
        noise(torch.zeros(4, 3), stream)


def test_arguments_out_of_range_are_rejected() -> None:
    with pytest.raises(ValueError, match="std"):
        GaussianNoise(-0.1)
    with pytest.raises(ValueError, match="sigma"):
        OrnsteinUhlenbeck(sigma=linear(0.1, -0.1, updates=5))
    with pytest.raises(ValueError, match="theta"):
        OrnsteinUhlenbeck(theta=1.5)


def test_config_contains_the_options() -> None:
    assert GaussianNoise(0.1).config == {"noise": "gaussian", "std": 0.1}
    sigma = AdaptiveExploration(0.1)
    assert OrnsteinUhlenbeck(sigma=sigma).config["sigma"] == sigma.config


class TestStateOfOrnsteinUhlenbeck(StatefulContract):
    def make(self):
        return OrnsteinUhlenbeck(sigma=AdaptiveExploration(0.5, window=4, up=1.2, down=0.9))

    def step(self, noise):
        state_NA = noise.state_dict()["state"]
        seed = 0 if state_NA is None else int(state_NA.double().abs().sum() * 1e6)
        noise_NA = noise(torch.zeros(7, 3), generator(seed, "noise"))
        noise.reset(noise_NA[:, 0] > 0.5)
        noise.amount.observe(noise_NA[:1, 0])
        return noise_NA


class TestStateOfGaussianNoise(StatefulContract):
    def make(self):
        return GaussianNoise(AdaptiveExploration(0.5, window=4, up=1.2, down=0.9))

    def step(self, noise):
        seed = int(noise.state_dict()["amount"]["returns"].abs().sum() * 1e6)
        noise_NA = noise(torch.zeros(2, 3), generator(seed, "noise"))
        noise.amount.observe(noise_NA[:1, 0])
        return noise_NA
