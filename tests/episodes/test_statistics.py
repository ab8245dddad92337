"""Episode statistics: sums of raw rewards over terminated and truncated episodes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rein.episodes import EpisodeStatistics
from rein.loop.state import State
from rein.replay.rollout import RowBuffer
from rein.types import StepState


def play(scripted, listening, lengths, steps, *, truncates=(), read_at=(), everything=True, epoch_at=()):
    """Return the statistics after some steps. They are also read at `read_at`, and an epoch begins at `epoch_at`."""
    import rein

    environment = scripted(lengths, truncates)
    agent, rows = listening(environment), RowBuffer(4, everything=everything)
    statistics = EpisodeStatistics(environment.num_envs, rows)
    state = State(step_state=StepState(environment.reset()))
    for step in range(steps):
        if step in epoch_at:
            statistics.begin_epoch(step)
            rows.clear()
        state.step_state = rein.batch_step(state, agent, environment, rows)
        if step in read_at:
            statistics.read("episode_return")
    return statistics


def test_metrics_are_means_over_ended_episodes(scripted, listening):
    statistics = play(scripted, listening, [2, 3], 6)  # three episodes of return 3, two of return 6
    assert statistics.read("episode_return") == pytest.approx((3 * 3 + 2 * 6) / 5)
    assert statistics.read("episode_length") == pytest.approx((3 * 2 + 2 * 3) / 5)


def test_truncated_episodes_count_like_terminated_ones(scripted, listening):
    assert play(scripted, listening, [2, 3], 6, truncates=[0, 1]).read("episode_return") == pytest.approx(21 / 5)


def test_return_is_nan_before_an_episode_has_ended(scripted, listening):
    assert math.isnan(play(scripted, listening, [7], 6).read("episode_return"))


def test_windowed_metrics_are_nan_before_100_episodes(scripted, listening):
    assert math.isnan(play(scripted, listening, [1], 99).read("episode_return_100"))
    assert play(scripted, listening, [1], 100).read("episode_return_100") == 1.0


def test_window_spans_epochs_and_drops_the_oldest(scripted, listening):
    statistics = play(scripted, listening, [1, 50], 100, epoch_at=[30, 60])  # 100 of length 1, two of length 50
    kept = [1] * 98 + [50] * 2
    assert statistics.read("episode_length_100") == pytest.approx(sum(kept) / 100)


def test_epoch_mean_excludes_earlier_epochs(scripted, listening):
    statistics = play(scripted, listening, [4], 6, epoch_at=[5])
    assert math.isnan(statistics.read("episode_return"))


def test_episode_across_epochs_has_its_full_return(scripted, listening):
    statistics = play(scripted, listening, [4], 8, epoch_at=[6])
    assert statistics.read("episode_return") == 1 + 2 + 3 + 4


def test_results_do_not_depend_on_read_times(scripted, listening):
    lengths = [2, 3, 5]
    seldom = play(scripted, listening, lengths, 17)
    often = play(scripted, listening, lengths, 17, read_at=range(17))
    assert all(np.array_equal(a, b) for a, b in zip(seldom.episodes()[:-1], often.episodes()[:-1], strict=True))
    assert seldom.read("episode_return") == often.read("episode_return")


def test_episodes_have_steps_seeds_and_ends(scripted, listening):
    episodes = play(scripted, listening, [2, 3], 6, truncates=[1]).episodes()
    rows = zip(episodes.environment, episodes.first_step, episodes.last_step, episodes.seed, strict=True)
    assert list(rows) == [(0, 0, 1, 0), (1, 0, 2, 100), (0, 2, 3, 1), (0, 4, 5, 2), (1, 3, 5, 101)]
    assert episodes.id.tolist() == [0, 1, 2, 3, 4]
    assert episodes.terminated.tolist() == [True, False, True, True, False]
    assert episodes.truncated.tolist() == [False, True, False, False, True]
    assert episodes.final_observation[:, 0].tolist() == [2, 3, 2, 2, 3]


def test_ids_continue_over_epochs(scripted, listening):
    assert play(scripted, listening, [2], 10, epoch_at=[4]).episodes().id.tolist() == [2, 3, 4]


def test_statistics_need_no_observations(scripted, listening):
    statistics = play(scripted, listening, [2, 3], 6, everything=False)
    assert statistics.read("episode_return") == pytest.approx(21 / 5)
    assert statistics.episodes().final_observation is None


def test_invalid_rows_are_excluded():
    rows = RowBuffer(4)
    statistics = EpisodeStatistics(1, rows)
    for reward, valid, ended in [(1.0, True, True), (50.0, False, True), (2.0, True, False), (3.0, True, True)]:
        flag = torch.tensor([ended])
        rows.append(
            {
                "reward": torch.tensor([reward]),
                "valid": torch.tensor([valid]),
                "terminated": flag,
                "truncated": ~flag & flag,
            }
        )
    episodes = statistics.episodes()
    assert episodes.episode_return.tolist() == [1.0, 5.0]
    assert episodes.length.tolist() == [1, 2]
    assert list(zip(episodes.first_step, episodes.last_step, strict=True)) == [(0, 0), (2, 3)]


def test_state_with_another_number_of_environments_raises():
    with pytest.raises(ValueError, match="the state has 3 environments, but the loop has 2"):
        EpisodeStatistics(2, RowBuffer(1)).load_state_dict(EpisodeStatistics(3, RowBuffer(1)).state_dict())


def test_open_returns_and_lengths_are_those_of_running_episodes(scripted, listening):
    statistics = play(scripted, listening, [2, 3, 9], 5, epoch_at=[3])  # rewards are 1, 2, 3, ... in each episode
    assert statistics.open_lengths().tolist() == [1, 2, 5]
    assert statistics.open_returns().tolist() == [1.0, 3.0, 15.0]
    statistics.open_returns()[:] = 0.0  # a copy
    assert statistics.open_returns().tolist() == [1.0, 3.0, 15.0]
    statistics.observe_reset()
    assert statistics.open_lengths().tolist() == [0, 0, 0]


def test_open_returns_in_a_training_loop_contain_the_last_step(scripted, listening):
    import rein

    environment = scripted([2, 3])
    loop = rein.training_loop(listening(environment), environment, iterations=4)
    seen = []
    loop.iteration_completed(lambda state: seen.append(loop.parts["statistics"].open_returns().tolist()))
    loop.run(epochs=1)
    assert seen == [[1.0, 1.0], [0.0, 3.0], [1.0, 0.0], [0.0, 1.0]]
