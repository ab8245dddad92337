"""Ends of evaluated episodes."""

from __future__ import annotations

import pytest

import rein


@pytest.mark.parametrize("truncates", [[], [0]])
def test_episode_ending_at_the_step_limit_keeps_terminated_and_truncated(scripted, listening, truncates):
    environment = scripted([5, 9], truncates)
    result = rein.evaluate(listening(environment), environment, 2, max_episode_steps=5)
    assert result.terminated.tolist() == [not truncates, False]
    assert result.truncated.tolist() == [bool(truncates), True]
    assert result.episode_length.tolist() == [5, 5]


@pytest.mark.parametrize("truncates_first", [True, False])
def test_end_of_a_later_episode_is_ignored(scripted, listening, truncates_first):
    environment = scripted([2, 9])
    apply_action = environment.apply_action

    def other_ends_after_the_first(action):
        time_step = apply_action(action)
        if (len(environment.actions) == 2) is not truncates_first:
            return time_step
        ended_N, other_N = time_step.terminated.clone(), time_step.truncated.clone()
        ended_N[0], other_N[0] = time_step.truncated[0], time_step.terminated[0]
        return time_step._replace(terminated=ended_N, truncated=other_N)

    environment.apply_action = other_ends_after_the_first
    result = rein.evaluate(listening(environment), environment, 2)
    assert result.truncated.tolist() == [truncates_first, False]
    assert result.terminated.tolist() == [not truncates_first, True]
    assert result.episode_length.tolist() == [2, 9]
    assert result.episode_return.tolist() == [3, 45]
