"""One seed for a run, and from it a stream for every role: derived by hashing, so that no stream depends on another.

Counter-based, as Salmon et al. 2011 ("Parallel random numbers: as easy as 1, 2, 3") propose: a number is a function of
(key, counter) and not of what was drawn before, so N streams are one tensor operation and need no state but a counter.
The mixing function is the finalizer of SplitMix64 (Steele et al. 2014).

Shapes: N streams.
"""

from __future__ import annotations

import hashlib
import operator
from typing import Any

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: the odd fraction of the golden ratio
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def stream_seed(seed: int, role: str, index: int = 0) -> int:
    """The seed, in [0, 2**31), of the stream that `role` number `index` draws from under `seed`."""
    digest = hashlib.blake2b(f"{seed}/{role}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 33


def checked_seed(seed: int | None) -> int | None:
    """The seed as an int, numpy's included; TypeError for what is no integer."""
    if seed is None:
        return None
    try:
        return operator.index(seed)
    except TypeError:
        raise TypeError(f"seed={seed!r}: a seed is an integer, or None to have one drawn") from None


def generator(seed: int, role: str, index: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator on `device` for one stream. Raises ValueError for a device that is not there."""
    try:
        drawing = torch.Generator(device=device)
    except RuntimeError as error:  # which goes on about shared libraries
        raise ValueError(f'device="{device}": torch finds none here; use device="cpu"') from error
    return drawing.manual_seed(stream_seed(seed, role, index))


def restore(generator: torch.Generator, state: Tensor) -> None:
    """Have a generator go on from a saved state. Raises ValueError for the state of one on another kind of device."""
    mine = generator.get_state()
    if state.shape != mine.shape:
        raise ValueError(f"a generator's state is {tuple(mine.shape)} on {generator.device}, not {tuple(state.shape)}")
    generator.set_state(state.to("cpu"))  # where generators keep it, whatever their device


def own_state(own: torch.Generator | None) -> Tensor | None:
    """The state of a policy's own generator; None for a policy that draws nothing."""
    return None if own is None else own.get_state()


def restore_own(own: torch.Generator | None, state: Tensor | None) -> None:
    """The inverse of `own_state`. Raises ValueError where only one of the two policies draws."""
    if (state is None) != (own is None):
        raise ValueError("the generator in the state is that of a deterministic policy, or this policy is one")
    if own is not None and state is not None:
        restore(own, state)


def _mix(x: Any) -> Any:
    """SplitMix64's finalizer on int64, whose products wrap and whose shifts are made logical by a mask."""
    x = x ^ ((x >> 30) & 0x3FFFFFFFF)
    x *= _MIX_1  # in place from here on: where streams are many, fresh memory costs more than the arithmetic
    x ^= (x >> 27) & 0x1FFFFFFFFF
    x *= _MIX_2
    x ^= (x >> 31) & 0x1FFFFFFFF
    return x


def hash_bits(key_N: Tensor, counter: Tensor | int) -> Tensor:
    """(N,) int64, all 64 bits random: the number at `counter` of the stream `key_N`.

    On the host the same bits come from numpy, in a third of the time for few streams and in half of it for many.
    """
    if isinstance(counter, int):  # the products of tensors wrap, Python's do not
        step: Any = (counter * _GOLDEN + 2**63) % 2**64 - 2**63
    else:
        step = counter * _GOLDEN
    if key_N.device.type != "cpu" or key_N.ndim == 0 or torch.compiler.is_compiling():
        return _mix(_mix(key_N + _GOLDEN) + step)
    return torch.from_numpy(_mix(_mix(key_N.numpy() + _GOLDEN) + (step if isinstance(step, int) else step.numpy())))


def episode_seeds(seed: int, index_N: Tensor, episode_N: Tensor) -> Tensor:
    """(N,) int64 in [0, 2**31): what episode `episode_N` of environment `index_N` is reset with under `seed`."""
    return episode_seeds_of(environment_keys(seed, index_N), episode_N)


def environment_keys(seed: int, index_N: Tensor) -> Tensor:
    """(N,) int64: the stream from which environment `index_N` draws the seeds of its episodes under `seed`."""
    return hash_bits(torch.full_like(index_N, stream_seed(seed, "environment")), index_N)


def episode_seeds_of(key_N: Tensor, episode_N: Tensor) -> Tensor:
    """(N,) int64 in [0, 2**31): the seed of episode `episode_N` of the environment whose key is `key_N`."""
    return (hash_bits(key_N, episode_N) >> 33) & 0x7FFFFFFF


def uniform(key_N: Tensor, counter: Tensor | int) -> Tensor:
    """(N,) float32, uniform on [0, 1): 24 random bits each, so no draw is ever 1."""
    return ((hash_bits(key_N, counter) >> 40) & 0xFFFFFF).to(torch.float32) * (1.0 / 16777216.0)


def integers(key_N: Tensor, counter: Tensor | int, high: int) -> Tensor:
    """(N,) int64, uniform on {0, ..., high - 1}; the bias is below high / 2**31."""
    return (((hash_bits(key_N, counter) >> 33) & 0x7FFFFFFF) * high) >> 31
