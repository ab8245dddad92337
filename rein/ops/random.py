"""One seed for a run, and from it a stream for every role: derived by hashing, so that no stream depends on another.

Counter-based, as Salmon et al. 2011 ("Parallel random numbers: as easy as 1, 2, 3") propose: a number is a function of
(key, counter) and not of what was drawn before, so N streams are one tensor operation and need no state but a counter.
The mixing function is the finalizer of SplitMix64 (Steele et al. 2014).

Shapes: N streams.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: the odd fraction of the golden ratio
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def stream_seed(seed: int, role: str, index: int = 0) -> int:
    """The seed, in [0, 2**31), of the stream that `role` number `index` draws from under `seed`."""
    digest = hashlib.blake2b(f"{seed}/{role}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 33


def generator(seed: int, role: str, index: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator on `device` for one stream."""
    return torch.Generator(device=device).manual_seed(stream_seed(seed, role, index))


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64, whose products wrap and whose shifts are made logical by a mask."""
    x = x ^ _shifted(x, 30, 0x3FFFFFFFF)
    x *= _MIX_1  # in place from here on: with many streams, fresh memory costs more than the arithmetic
    x ^= _shifted(x, 27, 0x1FFFFFFFFF)
    x *= _MIX_2
    x ^= _shifted(x, 31, 0x1FFFFFFFF)
    return x


def _shifted(x: Tensor, places: int, mask: int) -> Tensor:
    y = x >> places
    y &= mask
    return y


def hash_bits(key_N: Tensor, counter: Tensor | int) -> Tensor:
    """(N,) int64, all 64 bits random: the number at `counter` of the stream `key_N`."""
    if isinstance(counter, int):  # torch's products wrap, Python's do not
        return _mix(_mix(key_N + _GOLDEN) + (((counter * _GOLDEN) + 2**63) % 2**64 - 2**63))
    return _mix(_mix(key_N + _GOLDEN) + counter * _GOLDEN)


def episode_seeds(seed: int, index_N: Tensor, episode_N: Tensor) -> Tensor:
    """(N,) int64 in [0, 2**31): what episode `episode_N` of environment `index_N` is reset with under `seed`."""
    key_N = hash_bits(torch.full_like(index_N, stream_seed(seed, "environment")), index_N)
    return (hash_bits(key_N, episode_N) >> 33) & 0x7FFFFFFF


def uniform(key_N: Tensor, counter: Tensor | int) -> Tensor:
    """(N,) float32, uniform on [0, 1): 24 random bits each, so no draw is ever 1."""
    return ((hash_bits(key_N, counter) >> 40) & 0xFFFFFF).to(torch.float32) * (1.0 / 16777216.0)


def integers(key_N: Tensor, counter: Tensor | int, high: int) -> Tensor:
    """(N,) int64, uniform on {0, ..., high - 1}; the bias is below high / 2**31."""
    return (((hash_bits(key_N, counter) >> 33) & 0x7FFFFFFF) * high) >> 31
