"""Which seed each episode is reset with: a function of (seed, environment, episode), whoever steps the environment.

Shapes: N environments, R of them, E episodes, K episodes ahead, P = N (K + 1) places in a table of them, S the shape of
what an episode begins with.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rein.envs.base.contract import check_rows_of, restored
from rein.ops.random import checked_seed, environment_keys, episode_seeds, episode_seeds_of

UNKNOWN = -1  # the seed of an episode before the first reset
_AHEAD = 256  # episodes whose seeds are hashed at once on the host: 0.15 ms of tensor operations, 0.6 us an episode


def _itself(seeds: Tensor) -> Tensor:
    return seeds


class EpisodeSeeds:
    """Counts the episodes of N environments, and gives the seed of each and what it begins with: for tensors.

    `draw` maps seeds (...) to what their episodes begin with (..., *S), without state; the seeds themselves by default.
    Both are worked out K episodes ahead, for hashing takes a hundred small operations and looking up takes two.
    `seed` is None until it is given; a first `advance` without one draws it from the operating system.
    """

    def __init__(
        self,
        num_envs: int,
        seed: int | None = None,
        device: torch.device | str = "cpu",
        draw: Callable[[Tensor], Tensor] = _itself,
    ) -> None:
        self._draw = draw
        self._row_N = torch.arange(num_envs, device=device)
        self._on_host = self._row_N.device.type == "cpu"
        self._ahead = min(64, max(4, 131072 // num_envs))
        self._begin_anew(seed)

    @property
    def current(self) -> Tensor:
        """(N,) int64: the seeds of the current episodes; -1 before the first. Never written to."""
        if self._current_N is None:
            self._current_N = self._seed_P.index_select(0, self._place_N)
        return self._current_N

    @property
    def indices(self) -> Tensor:
        """(N,) int64: how many episodes each environment has begun, less one; -1 before the first."""
        return self._index_N + self._used()

    def restart(self, seed: int) -> None:
        """Take `seed` and begin anew before episode 0 of every environment."""
        self._begin_anew(seed)

    def reseed(self, seed: int) -> None:
        """Take `seed`; RuntimeError after the first episode has begun."""
        _refuse_if(self.started, seed, self.seed)
        self._begin_anew(seed)

    def advance(self, mask: Tensor | None = None) -> Tensor:
        """Begin the next episode where `mask` (N,) is True, everywhere without one.

        Returns (N, *S), what the current episodes begin with; where `mask` is False it need not be theirs.
        """
        place_N, start_PS = self.table()
        self.go_to(place_N + (1 if mask is None else mask))
        return start_PS.index_select(0, self._place_N)

    def begin(self, row_R: np.ndarray) -> np.ndarray:
        """Begin the next episode of the environments `row_R` (R,); returns (R, *S). For the host, where R is known."""
        place, start_PS = self.table()
        place_N = place.numpy()
        place_R = place_N[row_R] + 1
        place_N[row_R] = place_R
        self._current_N = None
        return start_PS.numpy().take(place_R, 0)

    def table(self) -> tuple[Tensor, Tensor]:
        """For pure functions: places (N,) of the current episodes in the table (P, *S) of what episodes begin with.

        An environment's next episode has the next place. `go_to` takes the new places, before another look at these.
        """
        if self._left == 0:
            self._prepare()
        self._left -= 1
        return self._place_N, self._start_PS

    def go_to(self, place_N: Tensor) -> None:
        """The current episodes are now those at these places of the table."""
        self._place_N, self._current_N = place_N, None

    def override(self, seeds: Tensor) -> Tensor:
        """Have the current episodes be those of `seeds` (N,), outside the streams; the next ones follow the streams.

        Returns (N, *S), what they begin with.
        """
        check_rows_of("reset_to", seeds, len(self._row_N), torch.int64)
        self.started = True
        self._stand_at(self.indices, seeds.to(self._row_N, copy=True))
        return self._draw(self.current)

    def state_dict(self) -> dict[str, Any]:
        """The seed, and the index and seed of every current episode."""
        return {"seed": self.seed, "index": self.indices, "current": self.current, "started": self.started}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; ValueError for another number of environments."""
        index_N, current_N = (restored(state, name, self._row_N) for name in ("index", "current"))
        self._begin_anew(state["seed"])
        self.started = state["started"]
        self._stand_at(index_N, current_N)

    def _begin_anew(self, seed: int | None) -> None:
        self.seed = checked_seed(seed)
        self.started = False
        self._key_N: Tensor | None = None
        self._stand_at(torch.full_like(self._row_N, -1), torch.full_like(self._row_N, UNKNOWN))

    def _stand_at(self, index_N: Tensor, current_N: Tensor) -> None:
        """Know the current episodes and nothing of those to come."""
        self._index_N = index_N
        self._current_N: Tensor | None = current_N
        self._seed_P, self._start_PS, self._width = current_N, current_N, 1
        self._place_N = self._row_N.clone()
        self._left = 0  # so many more calls of `table` and nobody can have run out of episodes

    def _used(self) -> Tensor:
        return self._place_N - self._row_N * self._width

    def _prepare(self) -> None:
        if self._on_host:  # elsewhere, to know would be to wait for the device
            self._left = self._width - 1 - int(self._used().max())
        if self._left == 0:
            self._look_ahead()

    def _keys(self) -> Tensor:
        """(N,) the environments' streams of seeds, which stay the same under one seed."""
        if self._key_N is None:
            self.seed = secrets.randbits(31) if self.seed is None else self.seed
            self._key_N = environment_keys(self.seed, self._row_N)
        return self._key_N

    def _look_ahead(self) -> None:
        key_N, self.started = self._keys(), True
        index_N, current_N = self.indices, self.current
        ahead_K = torch.arange(1, self._ahead + 1, device=self._row_N.device)
        seed_NK = episode_seeds_of(key_N[:, None], index_N[:, None] + ahead_K)
        self._index_N, self._width, self._left = index_N, self._ahead + 1, self._ahead
        self._seed_P = torch.cat([current_N[:, None], seed_NK], 1).flatten()
        self._start_PS = self._draw(self._seed_P)
        self._place_N = self._row_N * self._width


class HostEpisodeSeeds:
    """`EpisodeSeeds` for environments that are stepped one by one on the host: Python integers, the same numbers."""

    def __init__(self, num_envs: int, seed: int | None = None) -> None:
        self.num_envs = num_envs
        self._tensor_N: Tensor | None = None  # `current`, once somebody has asked
        self._begin_anew(seed)

    @property
    def current(self) -> Tensor:
        """(N,) int64: the seeds of the current episodes; -1 before the first. Never written to."""
        if self._tensor_N is None:
            self._tensor_N = torch.tensor(self._current, dtype=torch.int64, device="cpu")
        return self._tensor_N

    @property
    def indices(self) -> Tensor:
        """(N,) int64: how many episodes each environment has begun, less one; -1 before the first."""
        return torch.tensor(self._indices, dtype=torch.int64, device="cpu")

    def restart(self, seed: int) -> None:
        """Take `seed` and begin anew before episode 0 of every environment."""
        self._begin_anew(seed)

    def reseed(self, seed: int) -> None:
        """Take `seed`; RuntimeError after the first episode has begun."""
        _refuse_if(self.started, seed, self.seed)
        self._begin_anew(seed)

    def of(self, environment: int) -> int:
        """The seed of the current episode of one environment."""
        return self._current[environment]

    def advance(self, environment: int) -> int:
        """Begin the next episode of one environment; returns its seed."""
        ahead = self._ahead[environment] or self._look_ahead(environment)
        self._indices[environment] += 1
        self._current[environment] = seed = ahead.pop()
        self._tensor_N = None
        return seed

    def override(self, seeds: Tensor) -> list[int]:
        """Have the current episodes be those of `seeds` (N,), outside the streams; the next ones follow the streams."""
        check_rows_of("reset_to", seeds, self.num_envs, torch.int64)
        self.started = True
        self._current, self._tensor_N = seeds.tolist(), None
        return self._current

    def state_dict(self) -> dict[str, Any]:
        """The seed, and the index and seed of every current episode: the same as that of `EpisodeSeeds`."""
        return {"seed": self.seed, "index": self.indices, "current": self.current, "started": self.started}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; ValueError for another number of environments."""
        index_N, current_N = (restored(state, name, self.current) for name in ("index", "current"))
        self._begin_anew(state["seed"])
        self._indices, self._current, self.started = index_N.tolist(), current_N.tolist(), state["started"]

    def _begin_anew(self, seed: int | None) -> None:
        self.seed = checked_seed(seed)
        self.started = False
        self._indices = [-1] * self.num_envs
        self._current, self._tensor_N = [UNKNOWN] * self.num_envs, None
        self._ahead: list[list[int]] = [[] for _ in range(self.num_envs)]  # what comes next, the next one last

    def _look_ahead(self, environment: int) -> list[int]:
        self.seed = secrets.randbits(31) if self.seed is None else self.seed
        self.started = True
        begun = self._indices[environment] + 1
        episode_E = torch.arange(begun, begun + _AHEAD, device="cpu")
        seeds_E = episode_seeds(self.seed, torch.full_like(episode_E, environment), episode_E)
        self._ahead[environment] = seeds_E.flip(0).tolist()
        return self._ahead[environment]


def _refuse_if(started: bool, seed: int, current: int | None) -> None:
    if started:
        raise RuntimeError(f"reseed({seed}): episodes have begun under seed {current}; reset(seed={seed}) begins anew")
