"""How an evaluated episode ended, and that it ended once."""

from __future__ import annotations

import pytest

import rein


@pytest.mark.parametrize("truncates", [[], [0]])
def test_an_episode_that_ends_in_the_last_step_allowed_ended_by_itself(scripted, listening, truncates):
    environment = scripted([5, 9], truncates)
    result = rein.evaluate(listening(environment), environment, 2, max_episode_steps=5)
    assert result.terminated.tolist() == [not truncates, False]
    assert result.truncated.tolist() == [bool(truncates), True]
    assert result.episode_length.tolist() == [5, 5]


@pytest.mark.parametrize("truncates_first", [True, False])
def test_how_a_later_episode_ends_does_not_tell_how_the_first_did(scripted, listening, truncates_first):
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
