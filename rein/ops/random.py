"""Random streams, derived by hashing: one seed per run, and one independent stream per role.

The generators are counter-based (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): a number is a
function of (key, counter), not of earlier draws. N streams are therefore one tensor operation, and their only state
is a counter. The mixing function is the finalizer of SplitMix64 (Steele et al. 2014).

Shapes: N streams.
"""

from __future__ import annotations

import hashlib
import operator
from typing import Any

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: the golden ratio's fraction times 2**64, made odd
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def stream_seed(seed: int, role: str, index: int = 0) -> int:
    """Return the seed, in [0, 2**31), of stream number `index` of `role`, derived from `seed`; see `checked_seed`."""
    digest = hashlib.blake2b(f"{checked_seed(seed)}/{role}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 33


def checked_seed(seed: int | None) -> int | None:
    """Return the seed as an int (numpy integers included).

    Raises TypeError if it is not an integer, and ValueError if it is negative.
    """
    if seed is None:
        return None
    try:
        number = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed={seed!r}: a seed must be an integer, or None for a random one") from None
    if number < 0:
        raise ValueError(f"seed={number}: give 0 or more, or None for a random seed")
    return number


def generator(seed: int, role: str, index: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a torch generator on `device` for one stream. Raises ValueError if the device does not exist."""
    try:
        created = torch.Generator(device=device)
    except RuntimeError as error:  # its message is about shared libraries
        raise ValueError(f'device="{device}": torch finds no such device on this machine; use device="cpu"') from error
    return created.manual_seed(stream_seed(seed, role, index))


def restore(generator: torch.Generator, state: Tensor) -> None:
    """Set a generator to a saved state. Raises ValueError if the state is from another kind of device."""
    own = generator.get_state()
    if state.shape != own.shape:
        raise ValueError(
            f"the state of a generator has shape {tuple(own.shape)} on {generator.device}, got {tuple(state.shape)}"
        )
    generator.set_state(state.to("cpu"))  # generators of all devices keep their state on the CPU


def own_state(own: torch.Generator | None) -> Tensor | None:
    """Return the state of a policy's generator; None for a policy without one."""
    return None if own is None else own.get_state()


def restore_own(own: torch.Generator | None, state: Tensor | None) -> None:
    """Load the result of `own_state`. Raises ValueError if only one of the two policies has a generator."""
    if (state is None) != (own is None):
        raise ValueError(
            "the generator in the state does not fit: the saved policy or this policy is deterministic, but not both"
        )
    if own is not None and state is not None:
        restore(own, state)


def _mix(x: Any) -> Any:
    """Apply SplitMix64's finalizer to int64: products wrap around, masks make the shifts logical."""
    x = x ^ ((x >> 30) & 0x3FFFFFFFF)
    x *= _MIX_1  # in place: for many streams, allocation costs more than the arithmetic
    x ^= (x >> 27) & 0x1FFFFFFFFF
    x *= _MIX_2
    x ^= (x >> 31) & 0x1FFFFFFFF
    return x


def hash_bits(key_N: Tensor, counter: Tensor | int) -> Tensor:
    """Return the number at `counter` of the stream `key_N`, (N,) int64 with 64 random bits.

    On the CPU, numpy computes the same bits in a third (few streams) to a half (many streams) of the time.
    """
    if isinstance(counter, int):  # products of tensors wrap around, products of Python ints do not
        step: Any = (counter * _GOLDEN + 2**63) % 2**64 - 2**63
    else:
        step = counter * _GOLDEN
    if key_N.device.type != "cpu" or key_N.ndim == 0 or torch.compiler.is_compiling():
        return _mix(_mix(key_N + _GOLDEN) + step)
    return torch.from_numpy(_mix(_mix(key_N.numpy() + _GOLDEN) + (step if isinstance(step, int) else step.numpy())))


def episode_seeds(seed: int, index_N: Tensor, episode_N: Tensor) -> Tensor:
    """Return the reset seed of episode `episode_N` of environment `index_N`, (N,) int64 in [0, 2**31)."""
    return episode_seeds_of(environment_keys(seed, index_N), episode_N)


def environment_keys(seed: int, index_N: Tensor) -> Tensor:
    """Return the key of the stream of episode seeds of environment `index_N`, (N,) int64."""
    return hash_bits(torch.full_like(index_N, stream_seed(seed, "environment")), index_N)


def episode_seeds_of(key_N: Tensor, episode_N: Tensor) -> Tensor:
    """Return the seed of episode `episode_N` of the environment with key `key_N`, (N,) int64 in [0, 2**31)."""
    return (hash_bits(key_N, episode_N) >> 33) & 0x7FFFFFFF


def uniform(key_N: Tensor, counter: Tensor | int) -> Tensor:
    """Return uniform numbers in [0, 1), (N,) float32, with 24 random bits each: 1 is never drawn."""
    return ((hash_bits(key_N, counter) >> 40) & 0xFFFFFF).to(torch.float32) * (1.0 / 16777216.0)


def integers(key_N: Tensor, counter: Tensor | int, high: int) -> Tensor:
    """Return uniform integers in {0, ..., high - 1}, (N,) int64. The bias is below high / 2**31."""
    return (((hash_bits(key_N, counter) >> 33) & 0x7FFFFFFF) * high) >> 31
