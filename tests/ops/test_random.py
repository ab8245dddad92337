"""Hashed random streams: SplitMix64, uniformity, and independence of streams."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from rein.ops.random import checked_seed, episode_seeds, generator, hash_bits, integers, stream_seed, uniform

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15
SAMPLES = 1 << 16


def splitmix64_mix(z: int) -> int:
    """Compute the finalizer of SplitMix64 with Python integers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return z ^ (z >> 31)


def unsigned(bits: torch.Tensor) -> list[int]:
    return [x % WORD for x in bits.tolist()]


def keys(count: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + count)


def test_finalizer_matches_the_published_splitmix64() -> None:
    """The first outputs for seed 1234567, as published by several libraries."""
    outputs = [splitmix64_mix((1234567 + k * GOLDEN) % WORD) for k in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_stream_is_splitmix64_started_at_its_hashed_key() -> None:
    chosen = torch.tensor([0, 1, 2, 12345, 2**31 - 1, 2**62 + 1, -1, -(2**63)])
    for counter in (0, 1, 2, 1000, 2**40, -1):
        for key, bits in zip(chosen.tolist(), unsigned(hash_bits(chosen, counter)), strict=True):
            begin = splitmix64_mix((key + GOLDEN) % WORD)
            assert bits == splitmix64_mix((begin + counter * GOLDEN) % WORD)


def test_uniform_numbers_are_uniform_and_never_one() -> None:
    u = uniform(keys(SAMPLES), 3)
    assert u.dtype is torch.float32
    assert 0 <= u.min() < 0.001
    assert 0.999 < u.max() < 1
    counts = torch.histc(u, 64, 0, 1).double()
    expected = SAMPLES / 64
    # 63 degrees of freedom: exceeded for one seed in a thousand
    assert ((counts - expected) ** 2 / expected).sum() < 103.4


@pytest.mark.parametrize("high", [1, 2, 3, 5, 100])
def test_integers_are_uniform_below_high(high: int) -> None:
    x = integers(keys(SAMPLES), 11, high)
    counts = torch.bincount(x, minlength=high).double()
    assert len(counts) == high
    expected = SAMPLES / high
    freedom = max(high - 1, 1)
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 4.5 * (2 * freedom) ** 0.5 + 5


def test_rows_are_independent() -> None:
    for function in (hash_bits, uniform, lambda key, counter: integers(key, counter, 10)):
        assert torch.equal(function(keys(1000), 5)[:7], function(keys(7), 5))
        assert torch.equal(function(keys(1000), 5)[100:], function(keys(900, first=100), 5))


def test_tensors_and_numpy_arrays_give_the_same_bits() -> None:
    """A single key, and keys on other devices, are hashed as tensors. Many keys on the CPU are hashed by numpy."""
    for counter in (0, 3, -1, 2**40):
        one_by_one = torch.stack([hash_bits(key, counter) for key in keys(50)])
        assert torch.equal(one_by_one, hash_bits(keys(50), counter))
        assert torch.equal(one_by_one, hash_bits(keys(50), torch.tensor(counter)))


def test_shapes_broadcast() -> None:
    both = hash_bits(keys(6)[:, None], torch.arange(4))
    assert both.shape == (6, 4)
    assert torch.equal(both[:, 2], hash_bits(keys(6), 2))


def test_episode_seeds_are_below_two_to_the_31_and_rarely_equal() -> None:
    row, episode = torch.arange(256)[:, None].expand(256, 256), torch.arange(256).expand(256, 256)
    seeds = episode_seeds(0, row, episode)
    assert seeds.dtype is torch.int64
    assert int(seeds.min()) >= 0
    assert int(seeds.max()) < 2**31
    twice = seeds.numel() - seeds.unique().numel()
    assert twice <= 6  # one pair is expected (birthday problem)


def test_episode_seeds_depend_on_seed_environment_and_episode() -> None:
    zero, one = torch.tensor([0]), torch.tensor([1])
    seeds = [episode_seeds(*at) for at in [(0, zero, zero), (1, zero, zero), (0, one, zero), (0, zero, one)]]
    assert torch.cat(seeds).unique().numel() == 4


def test_stream_seeds_depend_only_on_seed_role_and_index() -> None:
    chosen = [(seed, role, index) for seed in range(5) for role in ("agent", "environment") for index in range(5)]
    seeds = [stream_seed(*stream) for stream in chosen]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [stream_seed(*stream) for stream in chosen]
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert stream_seed(1, "agent", 23) != stream_seed(12, "agent", 3)


def test_generator_is_independent_of_the_global_one() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = torch.rand(3, generator=generator(0, "agent"))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(one, torch.rand(3, generator=generator(0, "agent")))
    assert not torch.equal(one, torch.rand(3, generator=generator(0, "agent", 1)))


@pytest.mark.parametrize("seed", [-1, np.int8(-1)])
def test_negative_seed_raises(seed: Any) -> None:
    for function in (checked_seed, functools.partial(stream_seed, role="agent")):
        with pytest.raises(ValueError, match="seed=-1"):
            function(seed)
