"""Invalid rows, from environments that reset in a separate step."""

from __future__ import annotations

import torch

import rein
from rein.loop.state import State
from rein.types import StepState


def with_invalid_rows(environment, when):
    """Return the environment with invalid rows full of wrong values at each (vector step, environment)."""
    apply_action = environment.apply_action

    def apply_with_invalid_rows(action):
        time_step = apply_action(action)
        step = len(environment.actions) - 1
        invalid_N = torch.tensor([(step, n) in when for n in range(environment.num_envs)])
        return time_step._replace(
            reward=torch.where(invalid_N, 1000.0, time_step.reward),
            terminated=time_step.terminated | invalid_N,
            valid=~invalid_N,
        )

    environment.apply_action = apply_with_invalid_rows
    return environment


def test_invalid_rows_are_not_learned_or_counted(scripted, listening):
    environment = with_invalid_rows(scripted([2, 3]), {(1, 1), (2, 0), (4, 0)})
    agent, state = listening(environment), State()
    state.step_state = StepState(environment.reset())
    episodes = []
    for _ in range(6):
        state.step_state = rein.batch_step(state, agent, environment)
        episodes.append(state.clocks.episodes)
    valid = [[True, True], [True, False], [False, True], [True, True], [False, True], [True, True]]
    assert [t.valid.tolist() for t in agent.transitions] == valid
    assert episodes == [0, 1, 2, 3, 3, 5]  # after steps (2, 4, 6) and (3, 6), without invalid rows


def test_episodic_epoch_continues_over_invalid_rows(scripted, listening):
    environment = with_invalid_rows(scripted([4, 2]), {(1, 0), (2, 0), (3, 1)})
    agent, state = listening(environment), State()
    state.step_state = StepState(environment.reset(), torch.ones(2, dtype=torch.bool))
    active, episodes = [], []
    for _ in range(4):
        state.step_state = rein.batch_step(state, agent, environment)
        active.append(state.step_state.active.tolist())
        episodes.append(state.clocks.episodes)
    assert [t.valid.tolist() for t in agent.transitions] == [[True, True], [False, True], [False, False], [True, False]]
    assert active == [[True, True], [True, False], [True, False], [False, False]]
    assert episodes == [0, 1, 1, 2]
    ended = [(t.terminated | t.truncated).tolist() for t in agent.transitions]
    assert ended == [[False, False], [False, True], [False, False], [True, False]]


def test_evaluation_excludes_invalid_rows(scripted, listening):
    environment = with_invalid_rows(scripted([4, 2]), {(0, 1), (1, 0), (2, 0)})
    result = rein.evaluate(listening(environment), environment, 2)
    assert result.episode_return.tolist() == [1 + 4, 2]
    assert result.episode_length.tolist() == [2, 1]
    assert result.terminated.tolist() == [True, True]
