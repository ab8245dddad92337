"""Returns, lengths and ids of episodes are exact."""

from __future__ import annotations

import torch

import rein
from rein.episodes import EpisodeStatistics
from rein.replay.rollout import RowBuffer


def statistics_of(rewards, read_between=False):
    """Return statistics of one episode with these rewards."""
    rows = RowBuffer(len(rewards), everything=False)
    statistics = EpisodeStatistics(1, rows)
    for step, reward in enumerate(rewards):
        last = torch.tensor([step + 1 == len(rewards)])
        no = torch.tensor([False])
        rows.append({"reward": torch.tensor([reward]), "valid": ~no, "terminated": last, "truncated": no})
        if read_between:
            statistics.read("episode_return")
    return statistics


def test_returns_are_summed_in_float64():
    for read_between in (False, True):
        assert statistics_of([2.0**24, 1.0], read_between).read("episode_return") == 2**24 + 1


def test_open_return_is_saved_in_float64():
    rows = RowBuffer(2, everything=False)
    no = torch.tensor([False])
    first = {"reward": torch.tensor([2.0**24]), "valid": ~no, "terminated": no, "truncated": no}
    statistics = EpisodeStatistics(1, rows)
    for row in (first, first | {"reward": torch.tensor([1.0])}):
        rows.append(row)
    statistics.read("episode_return")
    loaded_rows = RowBuffer(2, everything=False)
    loaded = EpisodeStatistics(1, loaded_rows)
    loaded_rows.load_state_dict(rows.state_dict())
    loaded.load_state_dict(statistics.state_dict())
    loaded_rows.append(first | {"reward": torch.tensor([1.0]), "terminated": ~no})
    assert loaded.read("episode_return") == 2**24 + 2


def test_episode_ids_continue_over_epochs(scripted, listening):
    environment, store = scripted([1, 2]), rein.MemoryStore()
    rein.training_loop(listening(environment), environment, store).run(epochs=4, iterations=3)
    numbers = [n for trajectory in store.trajectories for n in trajectory.episodes.id.tolist()]
    assert numbers == list(range(12 + 6))
