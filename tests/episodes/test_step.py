"""One step of all environments: what an agent is told, what is recorded, what the clocks say."""

from __future__ import annotations

import torch

import rein
from rein.loop.state import State
from rein.replay.rollout import RowBuffer
from rein.types import StepState


def begin(environment, episodic=False) -> State:
    active = torch.ones(environment.num_envs, dtype=torch.bool) if episodic else None
    return State(step_state=StepState(environment.reset(), active=active))


def test_batch_step_needs_no_loop_and_no_events(scripted, listening):
    environment = scripted([2, 3])
    agent, state = listening(environment), begin(environment)
    for _ in range(5):
        state.step_state = rein.batch_step(state, agent, environment)
    assert [t.reward.tolist() for t in agent.transitions] == [[1, 1], [2, 2], [1, 3], [2, 1], [1, 2]]


def test_the_transition_is_s_t_a_t_r_t_and_s_t_plus_1(scripted, listening):
    environment = scripted([2, 3])
    agent, state = listening(environment), begin(environment)
    for _ in range(7):
        state.step_state = rein.batch_step(state, agent, environment)
    for t, now in enumerate(agent.transitions):
        assert torch.equal(now.next_observation[:, 0], now.observation[:, 0] + 1)  # the final one where it ended
        assert torch.equal(now.reward, now.observation[:, 0] + 1)
        if t + 1 < len(agent.transitions):
            ended = now.terminated | now.truncated
            following = torch.where(ended, 0.0, now.next_observation[:, 0])
            assert torch.equal(agent.transitions[t + 1].observation[:, 0], following)


def test_what_an_agent_returns_from_recording_is_of_no_consequence(scripted, listening):
    """The ancestor's B1: returning its first argument there, as its documentation advised, froze the episode."""
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


def test_before_each_event_the_state_holds_what_is_known_so_far(scripted, listening):
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


def test_a_handler_may_change_the_action_before_it_is_applied(scripted, listening):
    environment = scripted([2, 3])
    agent, state = listening(environment), begin(environment)

    def emit(name):
        if name == "action_selected":
            state.step_state = state.step_state._replace(action=torch.tensor([1, 0]))

    rein.batch_step(state, agent, environment, None, emit)
    assert environment.actions[0].tolist() == [1, 0]
    assert agent.transitions[0].action.tolist() == [1, 0]


def test_a_shaped_reward_is_learned_and_both_rewards_are_kept(scripted, listening):
    environment = scripted([9])
    agent, state, rows = listening(environment), begin(environment), RowBuffer(2)

    def emit(name):
        known = state.step_state
        if name == "action_applied" and known.observation.item() >= 2:  # from the third step on
            shaped = known.transition._replace(reward=known.transition.reward * 100)
            state.step_state = known._replace(transition=shaped)

    for _ in range(5):
        state.step_state = rein.batch_step(state, agent, environment, rows, emit)
    assert [t.reward.item() for t in agent.transitions] == [1, 2, 300, 400, 500]
    assert rows["reward"][:, 0].tolist() == [1, 2, 300, 400, 500]
    assert rows["raw_reward"][:, 0].tolist() == [1, 2, 3, 4, 5]


def test_rows_hold_what_the_agent_said_and_the_seed_of_the_episode_that_the_step_belongs_to(scripted, listening):
    environment = scripted([2, 3])
    agent, state, rows = listening(environment), begin(environment), RowBuffer(8)
    for _ in range(4):
        state.step_state = rein.batch_step(state, agent, environment, rows)
    assert rows["value"].tolist() == [[0, 0], [10, 10], [0, 20], [10, 0]]
    assert rows["seed"].tolist() == [[0, 100], [0, 100], [1, 100], [1, 101]]


def test_in_an_episodic_epoch_what_follows_an_environments_own_end_is_not_valid(scripted, listening):
    """The ancestor's B18: finished simulations went on to be stepped, recorded and learned from."""
    environment = scripted([2, 4])
    agent, state = listening(environment), begin(environment, episodic=True)
    for _ in range(4):
        state.step_state = rein.batch_step(state, agent, environment)
    assert [t.valid.tolist() for t in agent.transitions] == [[True, True], [True, True], [False, True], [False, True]]
    assert [t.terminated.tolist() for t in agent.transitions][3] == [False, True]  # its second episode's end is none
    assert state.clocks.episodes == 2
    assert not state.step_state.active.any()


def test_invalid_rows_still_have_finite_values(scripted, listening):
    environment = scripted([1, 4])
    agent, state = listening(environment), begin(environment, episodic=True)
    for _ in range(4):
        state.step_state = rein.batch_step(state, agent, environment)
    assert all(t.reward.isfinite().all() and t.observation.isfinite().all() for t in agent.transitions)


def test_the_last_iteration_of_an_episodic_epoch_cuts_open_episodes_before_they_are_recorded(scripted, listening):
    environment = scripted([2, 4, 9])
    agent, state = listening(environment), begin(environment, episodic=True)
    state.max_iterations = 4
    for state._iteration in range(4):
        state.step_state = rein.batch_step(state, agent, environment)
    last = agent.transitions[-1]
    assert last.terminated.tolist() == [False, True, False]
    assert last.truncated.tolist() == [False, False, True]
    assert [bool(t.truncated.any()) for t in agent.transitions[:-1]] == [False, False, False]
    assert last.next_observation[2].item() == 4.0  # there is something to bootstrap from


def test_a_run_without_an_epochs_end_cuts_nothing(scripted, listening):
    environment = scripted([9])
    agent, state = listening(environment), begin(environment)
    state.max_iterations = 2
    for state._iteration in range(2):
        state.step_state = rein.batch_step(state, agent, environment)
    assert not agent.transitions[-1].truncated.any()
