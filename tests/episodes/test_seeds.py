"""Episode seeds depend on (seed, environment, episode), for tensors and for single environments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rein.envs.base.seeding import EpisodeSeeds, HostEpisodeSeeds
from rein.ops.random import episode_seeds, hash_bits

N = 5


def masks(steps: int) -> list[torch.Tensor]:
    """Return which of N episodes end in each step: some, none or all."""
    return [hash_bits(torch.arange(N), step) % (2 + step % 3) == 0 for step in range(steps)]


def test_host_seeds_equal_tensor_seeds() -> None:
    tensors, host = EpisodeSeeds(N, 7), HostEpisodeSeeds(N, 7)
    tensors.advance()
    assert [host.advance(index) for index in range(N)] == tensors.current.tolist()
    for mask_N in masks(1000):
        tensors.advance(mask_N)
        for index in mask_N.nonzero().flatten().tolist():
            assert host.advance(index) == tensors.current[index]
        assert torch.equal(host.current, tensors.current)
    assert torch.equal(host.indices, tensors.indices)
    assert int(host.indices.max()) > 256


@pytest.mark.parametrize("kind", [EpisodeSeeds, HostEpisodeSeeds])
class TestBothKinds:
    def advanced(self, kind: Any, seed: int | None, times: int) -> Any:
        seeds = kind(N, seed)
        for _ in range(times):
            self.advance(seeds)
        return seeds

    def advance(self, seeds: Any) -> torch.Tensor:
        if isinstance(seeds, EpisodeSeeds):
            seeds.advance()
        else:
            [seeds.advance(index) for index in range(N)]
        return seeds.current

    def test_returned_seeds_do_not_change(self, kind: Any) -> None:
        seeds = self.advanced(kind, 1, 1)
        before = seeds.current
        copy = before.clone()
        self.advance(seeds)
        assert torch.equal(before, copy)
        assert not torch.equal(before, seeds.current)

    def test_state_can_be_loaded_into_either_kind(self, kind: Any) -> None:
        state = self.advanced(kind, 1, 300).state_dict()
        for other in (EpisodeSeeds, HostEpisodeSeeds):
            seeds, loaded = self.advanced(kind, 1, 300), self.advanced(other, 2, 5)
            loaded.load_state_dict(state)
            assert torch.equal(loaded.current, seeds.current)
            assert torch.equal(self.advance(loaded), self.advance(seeds))
            with pytest.raises(RuntimeError):
                loaded.reseed(3)

    def test_episodes_after_an_override_are_seeded_as_usual(self, kind: Any) -> None:
        seeds, expected = self.advanced(kind, 1, 3), self.advanced(kind, 1, 4)
        seeds.override(torch.arange(N))
        assert seeds.current.tolist() == list(range(N))
        assert torch.equal(self.advance(seeds), expected.current)

    def test_random_seed_is_drawn_and_reported(self, kind: Any) -> None:
        seeds = kind(N)
        assert seeds.seed is None
        first = self.advance(seeds)
        assert torch.equal(first, self.advanced(kind, seeds.seed, 1).current)


def test_override_lasts_until_the_episode_ends() -> None:
    seeds = EpisodeSeeds(N, 1)
    seeds.override(torch.arange(N))
    seeds.advance(torch.tensor([True, False, False, False, True]))
    assert seeds.current[1:4].tolist() == [1, 2, 3]
    assert seeds.current[0] == episode_seeds(1, torch.tensor([0]), torch.tensor([0]))
