"""Changes that handlers make to step_state affect the next phase, the record and the next step."""

from __future__ import annotations

import pytest
import torch

import rein
from rein.loop.state import State
from rein.replay.rollout import RowBuffer
from rein.types import StepState


@pytest.mark.parametrize("event", ["observation_recorded", "model_optimized", "trajectory_persisted"])
def test_change_in_a_late_phase_is_returned(scripted, listening, event):
    environment = scripted([9])
    agent, state = listening(environment), State(step_state=StepState(environment.reset()))

    def emit(name):
        if name == event:
            state.step_state = state.step_state._replace(extras={"note": torch.tensor([7.0])})

    result = rein.batch_step(state, agent, environment, None, emit)
    assert set(result.extras) == {"note"}
    assert result.observation.item() == 1.0


def test_transition_replaced_after_recording_is_stored(scripted, listening):
    environment = scripted([9])
    agent, rows = listening(environment), RowBuffer(4)
    state = State(step_state=StepState(environment.reset()))

    def emit(name):
        known = state.step_state
        if name == "observation_recorded":
            state.step_state = known._replace(transition=known.transition._replace(valid=torch.tensor([False])))

    rein.batch_step(state, agent, environment, rows, emit)
    assert agent.transitions[0].valid.tolist() == [True]
    assert rows["valid"].tolist() == [[False]]


def test_raw_reward_is_stored_if_some_rewards_are_shaped(scripted, listening):
    environment = scripted([9])
    agent, rows = listening(environment), RowBuffer(2)
    state = State(step_state=StepState(environment.reset()))

    def emit(name):
        known = state.step_state
        if name == "action_applied" and known.observation.item() in (1, 4):
            shaped = known.transition._replace(reward=known.transition.reward * 100)
            state.step_state = known._replace(transition=shaped)

    for _ in range(6):
        state.step_state = rein.batch_step(state, agent, environment, rows, emit)
    assert rows["reward"][:, 0].tolist() == [1, 200, 3, 4, 500, 6]
    assert rows["raw_reward"][:, 0].tolist() == [1, 2, 3, 4, 5, 6]


def test_observation_replaced_at_episode_end_is_used(scripted, listening):
    environment = scripted([2])
    agent = listening(environment)
    loop = rein.training_loop(agent, environment)

    @loop.episodes_completed
    def move(state):
        state.step_state = state.step_state._replace(observation=state.step_state.observation + 100.0)

    loop.run(iterations=4)
    assert [t.observation.item() for t in agent.transitions] == [0.0, 1.0, 100.0, 1.0]
