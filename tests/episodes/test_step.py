"""One step of all environments: phases, records and clocks."""

from __future__ import annotations

import torch

import rein
from rein.loop.state import State
from rein.replay.rollout import RowBuffer
from rein.types import StepState


def begin(environment, episodic=False) -> State:
    active = torch.ones(environment.num_envs, dtype=torch.bool) if episodic else None
    return State(step_state=StepState(environment.reset(), active=active))


def test_transition_contains_s_a_r_and_next_s(scripted, listening):
    environment = scripted([2, 3])
    agent, state = listening(environment), begin(environment)
    for _ in range(7):
        state.step_state = rein.batch_step(state, agent, environment)
    for t, now in enumerate(agent.transitions):
        assert torch.equal(now.next_observation[:, 0], now.observation[:, 0] + 1)  # the final observation at an end
        assert torch.equal(now.reward, now.observation[:, 0] + 1)
        if t + 1 < len(agent.transitions):
            ended = now.terminated | now.truncated
            following = torch.where(ended, 0.0, now.next_observation[:, 0])
            assert torch.equal(agent.transitions[t + 1].observation[:, 0], following)


def test_result_of_record_observation_is_ignored(scripted, listening):
    """Bug B1 of the predecessor: a return value of this method froze the episode."""
    environment = scripted([5])
    agent, state = listening(environment), begin(environment)
    for _ in range(3):
        state.step_state = rein.batch_step(state, agent, environment)
    assert state.step_state.observation.item() == 3.0


def test_clocks_count_rows_steps_updates_and_episodes(scripted, listening):
    environment = scripted([2, 3])
    agent, state = listening(environment, learns_every=2), begin(environment)
    for _ in range(6):
        state.step_state = rein.batch_step(state, agent, environment)
    clocks = state.clocks
    assert (clocks.env_steps, clocks.vector_steps, clocks.updates, clocks.episodes) == (12, 6, 3, 5)


def test_step_state_at_each_event(scripted, listening):
    environment = scripted([2, 3])
    agent, state, seen = listening(environment), begin(environment), []

    def emit(name):
        known = state.step_state
        seen.append((name, [f for f in StepState._fields if getattr(known, f) is not None], state.clocks.env_steps))

    rein.batch_step(state, agent, environment, RowBuffer(4), emit)
    acted = ["observation", "action", "extras"]
    applied = [*acted, "time_step", "transition"]
    assert seen == [
        ("action_selected", acted, 0),
        ("action_applied", applied, 0),
        ("observation_recorded", applied, 2),
        ("model_optimized", [*applied, "metrics"], 2),
        ("trajectory_persisted", [*applied, "metrics"], 2),
    ]


def test_handler_can_replace_the_action(scripted, listening):
    environment = scripted([2, 3])
    agent, state = listening(environment), begin(environment)

    def emit(name):
        if name == "action_selected":
            state.step_state = state.step_state._replace(action=torch.tensor([1, 0]))

    rein.batch_step(state, agent, environment, None, emit)
    assert environment.actions[0].tolist() == [1, 0]
    assert agent.transitions[0].action.tolist() == [1, 0]


def test_rows_contain_extras_and_episode_seeds(scripted, listening):
    environment = scripted([2, 3])
    agent, state, rows = listening(environment), begin(environment), RowBuffer(8)
    for _ in range(4):
        state.step_state = rein.batch_step(state, agent, environment, rows)
    assert rows["value"].tolist() == [[0, 0], [10, 10], [0, 20], [10, 0]]
    assert rows["seed"].tolist() == [[0, 100], [0, 100], [1, 100], [1, 101]]


def test_steps_after_the_end_are_invalid_in_episodic_epochs(scripted, listening):
    """Bug B18 of the predecessor: finished simulations were still stepped, recorded and learned from."""
    environment = scripted([2, 4])
    agent, state = listening(environment), begin(environment, episodic=True)
    for _ in range(4):
        state.step_state = rein.batch_step(state, agent, environment)
    assert [t.valid.tolist() for t in agent.transitions] == [[True, True], [True, True], [False, True], [False, True]]
    assert [t.terminated.tolist() for t in agent.transitions][3] == [
        False,
        True,
    ]  # the end of its second episode does not count
    assert state.clocks.episodes == 2
    assert not state.step_state.active.any()


def test_invalid_rows_have_finite_values(scripted, listening):
    environment = scripted([1, 4])
    agent, state = listening(environment), begin(environment, episodic=True)
    for _ in range(4):
        state.step_state = rein.batch_step(state, agent, environment)
    assert all(t.reward.isfinite().all() and t.observation.isfinite().all() for t in agent.transitions)


def test_last_iteration_of_an_episodic_epoch_truncates_open_episodes(scripted, listening):
    environment = scripted([2, 4, 9])
    agent, state = listening(environment), begin(environment, episodic=True)
    state.max_iterations = 4
    for state._iteration in range(4):
        state.step_state = rein.batch_step(state, agent, environment)
    last = agent.transitions[-1]
    assert last.terminated.tolist() == [False, True, False]
    assert last.truncated.tolist() == [False, False, True]
    assert [bool(t.truncated.any()) for t in agent.transitions[:-1]] == [False, False, False]
    assert last.next_observation[2].item() == 4.0  # the observation to bootstrap from


def test_continuing_run_does_not_truncate(scripted, listening):
    environment = scripted([9])
    agent, state = listening(environment), begin(environment)
    state.max_iterations = 2
    for state._iteration in range(2):
        state.step_state = rein.batch_step(state, agent, environment)
    assert not agent.transitions[-1].truncated.any()
