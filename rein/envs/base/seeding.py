"""Episode seeds as a function of (seed, environment, episode), and a base class of environments with such seeds.

Shapes: N environments, R selected environments, E episodes, K precomputed episodes, P = N (K + 1) entries of the table
of episodes, S the start of one episode.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rein.envs.base.contract import CLOSED, check_begun, check_open, check_rows_of, restored
from rein.errors import explain
from rein.ops.random import checked_seed, environment_keys, episode_seeds, episode_seeds_of
from rein.types import Tree

UNKNOWN = -1  # the seed of an episode before the first reset
_AHEAD = 256  # episodes whose seeds are hashed at once on the host: 0.15 ms in total, 0.6 us per episode


def _identity(seeds: Tensor) -> Tensor:
    return seeds


class EpisodeSeeds:
    """Episode counters, episode seeds and episode starts of N environments, as tensors.

    Seeds and starts are computed K episodes ahead, because hashing takes about a hundred small operations, and a lookup
    takes two.

    Args:
        num_envs: number of environments N.
        seed: random seed of all environments. By default the first `advance` draws it from the operating system.
        device: device of the tensors.
        draw: stateless function from seeds (...) to the starts of their episodes `(..., *S)`. By default the seeds
            themselves.
    """

    def __init__(
        self,
        num_envs: int,
        seed: int | None = None,
        device: torch.device | str = "cpu",
        draw: Callable[[Tensor], Tensor] = _identity,
    ) -> None:
        self._draw = draw
        self._row_N = torch.arange(num_envs, device=device)
        self._on_host = self._row_N.device.type == "cpu"
        self._ahead = min(64, max(4, 131072 // num_envs))
        self.restart(seed)

    @property
    def current(self) -> Tensor:
        """(N,) int64: seeds of the current episodes; -1 before the first. Never modified in place."""
        if self._current_N is None:
            self._current_N = self._seed_P.index_select(0, self._place_N)
        return self._current_N

    @property
    def indices(self) -> Tensor:
        """(N,) int64: indices of the current episodes, from 0; -1 before the first."""
        return self._index_N + self._used()

    def reseed(self, seed: int) -> None:
        """Set `seed`. Raises RuntimeError after the first episode has begun."""
        _refuse_if(self.started, seed, self.seed)
        self.restart(seed)

    def advance(self, mask: Tensor | None = None) -> Tensor:
        """Begin the next episode where `mask` (N,) is True, or of every environment without a mask.

        Returns the starts `(N, *S)` of the current episodes, undefined in rows where `mask` is False.
        """
        place_N, start_PS = self.table()
        self.go_to(place_N + (1 if mask is None else mask))
        return start_PS.index_select(0, self._place_N)

    def begin(self, row_R: np.ndarray) -> np.ndarray:
        """Begin the next episode of the environments `row_R` (R,) and return its start `(R, *S)`. For the host only."""
        place, start_PS = self.table()
        place_N = place.numpy()
        place_R = place_N[row_R] + 1
        place_N[row_R] = place_R
        self._current_N = None
        return start_PS.numpy().take(place_R, 0)

    def table(self) -> tuple[Tensor, Tensor]:
        """Return the indices (N,) of the current episodes in the table of episode starts, and the table `(P, *S)`.

        Use it in pure functions. The next episode of an environment has the next index. Pass the new indices to
        `go_to` before the next call.
        """
        if self._left == 0:
            self._prepare()
        self._left -= 1
        return self._place_N, self._start_PS

    def cover(self, steps: int) -> tuple[Tensor, Tensor]:
        """Return seeds (P,) and starts `(P, *S)` of a new table of episodes, which lasts for this many steps."""
        self._look_ahead(steps)
        self._left = 0  # the caller uses all steps
        return self._seed_P, self._start_PS

    @property
    def place(self) -> Tensor:
        """(N,) int64: indices of the current episodes in the table."""
        return self._place_N

    def go_to(self, place_N: Tensor) -> None:
        """Make the episodes at these indices (N,) of the table the current ones."""
        self._place_N, self._current_N = place_N, None

    def override(self, seeds: Tensor) -> Tensor:
        """Make the episodes with these seeds (N,) the current ones. Later episodes are seeded as usual.

        Returns the starts `(N, *S)`.
        """
        check_rows_of("reset_to", seeds, len(self._row_N), torch.int64)
        self.started = True
        self._set_current(self.indices, seeds.to(self._row_N, copy=True))
        return self._draw(self.current)

    def state_dict(self) -> dict[str, Any]:
        """Return the seed, and the index and seed of every current episode."""
        return {"seed": self.seed, "index": self.indices, "current": self.current, "started": self.started}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. Raises ValueError for another number of environments."""
        index_N, current_N = (restored(state, name, self._row_N) for name in ("index", "current"))
        self.restart(state["seed"])
        self.started = state["started"]
        self._set_current(index_N, current_N)

    def restart(self, seed: int | None) -> None:
        """Set `seed`. The next episode of every environment is episode 0."""
        self.seed = checked_seed(seed)
        self.started = False
        self._key_N: Tensor | None = None
        self._set_current(torch.full_like(self._row_N, -1), torch.full_like(self._row_N, UNKNOWN))

    def _set_current(self, index_N: Tensor, current_N: Tensor) -> None:
        """Set the current episodes, and discard the precomputed ones."""
        self._index_N = index_N
        self._current_N: Tensor | None = current_N
        self._seed_P, self._start_PS, self._width = current_N, current_N, 1
        self._place_N = self._row_N.clone()
        self._left = 0  # calls of `table` before an environment can run out of precomputed episodes

    def _used(self) -> Tensor:
        return self._place_N - self._row_N * self._width

    def _prepare(self) -> None:
        if self._on_host:  # on another device, reading the count would wait
            self._left = self._width - 1 - int(self._used().max())
        if self._left == 0:
            self._look_ahead(self._ahead)

    def _keys(self) -> Tensor:
        """Return the keys (N,) of the seed streams, which depend on the seed only."""
        if self._key_N is None:
            self.seed = secrets.randbits(31) if self.seed is None else self.seed
            self._key_N = environment_keys(self.seed, self._row_N)
        return self._key_N

    def _look_ahead(self, ahead: int) -> None:
        key_N, self.started = self._keys(), True
        index_N, current_N = self.indices, self.current
        ahead_K = torch.arange(1, ahead + 1, device=self._row_N.device)
        seed_NK = episode_seeds_of(key_N[:, None], index_N[:, None] + ahead_K)
        self._index_N, self._width, self._left = index_N, ahead + 1, ahead
        self._seed_P = torch.cat([current_N[:, None], seed_NK], 1).flatten()
        self._start_PS = self._draw(self._seed_P)
        self._place_N = self._row_N * self._width


class HostEpisodeSeeds:
    """`EpisodeSeeds` for environments that are stepped one by one on the host. Gives the same seeds as Python ints.

    `first` is the number of the first environment, if the environments are a part of a larger number.
    """

    def __init__(self, num_envs: int, seed: int | None = None, first: int = 0) -> None:
        self.num_envs, self._first = num_envs, first
        self._tensor_N: Tensor | None = None  # cache of `current`
        self.restart(seed)

    @property
    def current(self) -> Tensor:
        """(N,) int64: seeds of the current episodes; -1 before the first. Never modified in place."""
        if self._tensor_N is None:
            self._tensor_N = torch.tensor(self._current, dtype=torch.int64, device="cpu")
        return self._tensor_N

    @property
    def indices(self) -> Tensor:
        """(N,) int64: indices of the current episodes, from 0; -1 before the first."""
        return torch.tensor(self._indices, dtype=torch.int64, device="cpu")

    def reseed(self, seed: int) -> None:
        """Set `seed`. Raises RuntimeError after the first episode has begun."""
        _refuse_if(self.started, seed, self.seed)
        self.restart(seed)

    def of(self, environment: int) -> int:
        """Return the seed of the current episode of one environment."""
        return self._current[environment]

    def advance(self, environment: int) -> int:
        """Begin the next episode of one environment and return its seed."""
        ahead = self._ahead[environment] or self._look_ahead(environment)
        self._indices[environment] += 1
        self._current[environment] = seed = ahead.pop()
        self._tensor_N = None
        return seed

    def override(self, seeds: Tensor) -> list[int]:
        """Make the episodes with these seeds (N,) the current ones. Later episodes are seeded as usual."""
        check_rows_of("reset_to", seeds, self.num_envs, torch.int64)
        self.started = True
        self._current, self._tensor_N = seeds.tolist(), None
        return self._current

    def start(self) -> int:
        """Return the seed. It is drawn if there is none, and `reseed` raises from now on."""
        self.seed = seed = secrets.randbits(31) if self.seed is None else self.seed
        self.started = True
        return seed

    def part(self, rows: range) -> tuple[int | None, list[int], list[int]]:
        """Return the seed, and the indices and seeds of the current episodes of some environments."""
        return self.seed, self._indices[rows.start : rows.stop], self._current[rows.start : rows.stop]

    def set_part(self, seed: int, indices: list[int], current: list[int]) -> None:
        """Set the result of `part`."""
        if (seed, indices) != (self.seed, self._indices):
            self.restart(seed)
        self._indices, self._current, self._tensor_N, self.started = [*indices], [*current], None, True

    def follow(self, row: int, index: int, seed: int) -> None:
        """Set the current episode of one environment, which was begun elsewhere."""
        self._indices[row], self._current[row], self._tensor_N = index, seed, None

    def state_dict(self) -> dict[str, Any]:
        """Return the same dictionary as `EpisodeSeeds.state_dict`."""
        return {"seed": self.seed, "index": self.indices, "current": self.current, "started": self.started}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. Raises ValueError for another number of environments."""
        index_N, current_N = (restored(state, name, self.current) for name in ("index", "current"))
        self.restart(state["seed"])
        self._indices, self._current, self.started = index_N.tolist(), current_N.tolist(), state["started"]

    def restart(self, seed: int | None) -> None:
        """Set `seed`. The next episode of every environment is episode 0."""
        self.seed = checked_seed(seed)
        self.started = False
        self._indices = [-1] * self.num_envs
        self._current, self._tensor_N = [UNKNOWN] * self.num_envs, None
        self._ahead: list[list[int]] = [[] for _ in range(self.num_envs)]  # upcoming seeds, the next one last

    def _look_ahead(self, environment: int) -> list[int]:
        seed = self.start()
        begun = self._indices[environment] + 1
        episode_E = torch.arange(begun, begun + _AHEAD, device="cpu")
        seeds_E = episode_seeds(seed, torch.full_like(episode_E, self._first + environment), episode_E)
        self._ahead[environment] = seeds_E.flip(0).tolist()
        return self._ahead[environment]


def _refuse_if(started: bool, seed: int, current: int | None) -> None:
    if started:
        raise RuntimeError(f"reseed({seed}): episodes have begun with seed {current}; call reset(seed={seed})")


@explain("ENVIRONMENT_ATTRIBUTES")
class SeededEnvironment:
    """Base class of environments whose episodes begin together and are seeded by `EpisodeSeeds`."""

    _seeds: EpisodeSeeds
    _ended: str | None = None  # the error that ended the episodes, or CLOSED

    def _begin(self, start: Tensor, /) -> Tree:
        """Begin the episodes with these starts `(N, *S)`. Returns the observation."""
        raise NotImplementedError

    @property
    def seed(self) -> int | None:
        """Random seed of all environments; None until given or drawn at the first reset."""
        return self._seeds.seed

    @property
    def episode_seeds(self) -> Tensor:
        """(N,) int64: seeds of the current episodes; -1 before the first reset."""
        return self._seeds.current

    def reset(self, seed: int | None = None) -> Tree:
        """Begin the next episode of every environment, from episode 0 if `seed` is given. Returns the observation."""
        check_open(type(self).__name__, "reset", self._ended)
        if seed is not None:
            self._seeds.restart(seed)
        return self._begin(self._seeds.advance())

    def reseed(self, seed: int) -> None:
        """Set the random seed. Raises RuntimeError after the first reset."""
        self._seeds.reseed(seed)

    def close(self) -> None:
        """Refuse further steps. The environment holds no resources."""
        self._ended = CLOSED

    def _check_begun(self, method: str) -> None:
        """Raise RuntimeError before the first reset, after an error, and if the environment is closed."""
        check_begun(type(self).__name__, method, self._seeds.started, self._ended)


class ReplayableEnvironment(SeededEnvironment):
    """Base class of environments that can repeat episodes by their seeds."""

    def reset_to(self, episode_seeds: Tensor) -> Tree:
        """Begin the episodes with these seeds (N,), for a replay. Later episodes are seeded as usual."""
        check_open(type(self).__name__, "reset_to", self._ended)
        return self._begin(self._seeds.override(episode_seeds))
