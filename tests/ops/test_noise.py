from __future__ import annotations

import torch

from rein.ops.exploration import ornstein_uhlenbeck, reset_noise
from rein.ops.random import generator

# Noise of ten steps of a reference implementation, and its states: default options, two numbers at a time.
NOISE = [
    (-0.807607, -0.241849), (0.575223, 0.004252), (-0.400349, 0.208980), (1.796830, 1.323680), (-0.179431, 0.717577),
    (0.821321, 0.665132), (1.366795, -0.030842), (-0.269779, -0.362603), (-1.562419, -0.550427), (-1.797313, -0.325825),
]  # fmt: skip
WALK = [
    (-0.161521315574646, -0.04836982488632202), (-0.022248566150665283, -0.040264029055833817),
    (-0.09898112714290619, 0.007571600377559662), (0.2752320170402527, 0.27117177844047546),
    (0.19806107878684998, 0.3740113377571106), (0.3326162099838257, 0.45093610882759094),
    (0.5560828447341919, 0.3771272897720337), (0.41871464252471924, 0.24803756177425385),
    (0.04342368245124817, 0.10074643790721893), (-0.3225524425506592, 0.020469389855861664),
]  # fmt: skip


def test_walk_matches_the_reference_for_the_same_noise() -> None:
    state_NA = torch.zeros(1, 2)
    for noise, expected in zip(NOISE, WALK, strict=True):
        state_NA = ornstein_uhlenbeck(state_NA, torch.tensor([noise]), theta=0.15, mu=0.0, sigma=0.2)
        assert torch.allclose(state_NA, torch.tensor([expected]), atol=1e-6, rtol=0.0)


def test_without_noise_the_state_does_not_change() -> None:
    state_NA = torch.tensor([[3.0, -4.0]])
    for sigma in (0.0, torch.tensor(0.0)):
        assert torch.equal(ornstein_uhlenbeck(state_NA, torch.ones(1, 2), 0.5, 1.0, sigma), state_NA)


def test_walk_has_the_expected_mean_and_deviation() -> None:
    theta, mu, sigma, stream = 0.15, 2.0, 0.2, generator(0, "noise")
    state_NA = torch.full((50_000, 1), mu)
    for _ in range(100):
        state_NA = ornstein_uhlenbeck(state_NA, torch.randn(state_NA.shape, generator=stream), theta, mu, sigma)
    expected = sigma / (1.0 - (1.0 - theta) ** 2) ** 0.5
    assert abs(state_NA.mean() - mu) < 4.0 * expected / len(state_NA) ** 0.5
    assert abs(state_NA.std() / expected - 1.0) < 4.0 / (2.0 * len(state_NA)) ** 0.5


def test_reset_affects_only_environments_of_the_mask() -> None:
    state_NA, mask_N = torch.arange(1.0, 7.0).view(3, 2), torch.tensor([True, False, True])
    assert reset_noise(state_NA, mask_N, 0.5).tolist() == [[0.5, 0.5], [3.0, 4.0], [0.5, 0.5]]
    assert reset_noise(state_NA.view(3, 2, 1), mask_N, 0.5).flatten().tolist() == [0.5, 0.5, 3.0, 4.0, 0.5, 0.5]
