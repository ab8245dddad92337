"""Tests of the training loop: resets, episodes, trajectories, seeds, stores and handlers."""

from __future__ import annotations

import csv
import functools
import math
from pathlib import Path

import gymnasium
import pytest
import torch
from gymnasium import spaces

import rein
from rein.agents.dqn import DQN
from rein.agents.ppo import PPO
from rein.agents.pqn import PQN
from rein.agents.sac import SAC
from rein.envs.cartpole import CartPole
from rein.envs.pendulum import Pendulum
from rein.handlers.checkpoint import checkpoint
from rein.handlers.evaluate_every import evaluate_every
from rein.handlers.stop_at import stop_at
from rein.store.memory_store import MemoryStore, to_host
from rein.store.verify import verify_run
from rein.testing.stateful import first_difference


def trace(loop):
    seen = []
    for name, event in loop.events.items():
        event.attach(lambda state, name=name: seen.append(name))
    return seen


def rows_of(path):
    """Return the rows of a CSV file without the wall time."""
    with open(path, newline="", encoding="utf-8") as file:
        return [{name: cell for name, cell in row.items() if name != "seconds"} for row in csv.DictReader(file)]


def test_events_of_phases_fire_in_order(scripted, listening):
    environment = scripted([9])
    loop = rein.training_loop(listening(environment), environment)
    seen = trace(loop)
    loop.run(iterations=1)
    phases = ["action_selected", "action_applied", "observation_recorded", "model_optimized", "trajectory_persisted"]
    assert seen[2:-4] == ["iteration_started", *phases]


def test_muted_phase_is_counted(scripted, listening):
    environment = scripted([9])
    loop, seen = rein.training_loop(listening(environment), environment), []
    loop.model_optimized(every=4)(lambda state: seen.append(state.total_iterations))
    loop.run(epochs=1, iterations=3)
    with loop.muted("model_optimized"):
        loop.run(epochs=2, iterations=3)
    loop.run(epochs=3, iterations=3)
    assert seen == [7], "expected the eighth step, which is not finished yet"


@pytest.mark.parametrize("episodic", [False, True])
def test_muted_events_do_not_change_learning_or_storage(scripted, listening, tmp_path, episodic):
    def run(name, muted):
        environment, store = scripted([2, 3]), rein.HDF5Store(tmp_path / name)
        agent = listening(environment)
        loop = rein.training_loop(agent, environment, store, episodic=episodic)
        evaluate_every(loop, listening(environment), scripted([2]), episodes=1, event="iteration_completed", every=1)
        names = [event for event in loop.events if event != "iteration_completed"] if muted else []
        with loop.muted(*names):
            loop.run(epochs=3, iterations=9)
        rows = [rows_of(tmp_path / name / file) for file in ("metrics.csv", "evaluations.csv")]
        return agent.transitions, rein.open_run(tmp_path / name).epochs["number"].tolist(), rows

    (heard, epochs, rows), (muted, muted_epochs, muted_rows) = run("heard", False), run("muted", True)
    assert len(heard) == len(muted)
    assert all(torch.equal(one.reward, other.reward) for one, other in zip(heard, muted, strict=True))
    assert epochs == muted_epochs
    assert rows == muted_rows
    assert len(rows[0]) == 3 and len(rows[1]) == 27 if not episodic else rows[1]


def test_wiring_is_not_listed_and_runs_before_handlers(scripted, listening):
    environment, store = scripted([2]), MemoryStore()
    loop = rein.training_loop(listening(environment), environment, store, episodic=True)
    assert not any(event.handlers for event in loop.events.values())
    seen = []
    loop.epoch_started(lambda state: seen.append(environment.resets))
    loop.run(epochs=2, iterations=9)
    assert seen == [1, 2]
    for function in loop.epoch_started.wiring:
        with pytest.raises(ValueError, match="is not attached"):
            loop.epoch_started.detach(function)


def test_episodes_completed_fires_when_episodes_end(scripted, listening):
    environment = scripted([2, 3])
    loop = rein.training_loop(listening(environment), environment)
    ended = []
    loop.episodes_completed.attach(lambda state: ended.append((state.clocks.vector_steps, state.clocks.episodes)))
    loop.run(iterations=6)
    assert ended == [(2, 1), (3, 2), (4, 3), (6, 5)]


def test_continuing_run_resets_once(scripted, listening):
    environment = scripted([4])
    agent = listening(environment)
    rein.training_loop(agent, environment).run(epochs=5, iterations=3)
    assert environment.resets == 1
    assert [t.reward.item() for t in agent.transitions] == [1, 2, 3, 4] * 3 + [1, 2, 3]
    assert [mask.tolist() for mask in agent.resets] == [[True]]


def test_second_run_continues_without_reset(scripted, listening):
    environment = scripted([4])
    agent = listening(environment)
    loop = rein.training_loop(agent, environment)
    loop.run(epochs=1, iterations=3)
    loop.run(epochs=2, iterations=3)
    assert environment.resets == 1
    assert len(agent.transitions) == 6


def test_episodic_run_resets_each_epoch_and_notifies_agent(scripted, listening):
    environment = scripted([2, 3])
    agent = listening(environment)
    rein.training_loop(agent, environment, episodic=True).run(epochs=4, iterations=9)
    assert environment.resets == 4
    assert len(agent.resets) == 4
    assert all(mask.all() for mask in agent.resets)


def test_episodic_epoch_halts_when_all_episodes_ended(scripted, listening):
    environment = scripted([2, 3])
    state = rein.training_loop(listening(environment), environment, episodic=True).run(epochs=2, iterations=9)
    assert [(record.status, record.iterations) for record in state.history] == [("halted", 3), ("halted", 3)]


def test_episodic_epoch_completes_at_iterations(scripted, listening):
    environment = scripted([2, 9])
    agent = listening(environment)
    state = rein.training_loop(agent, environment, episodic=True).run(epochs=1, iterations=4)
    assert state.history[-1].status == "completed"
    assert agent.transitions[-1].truncated.tolist() == [False, True]


def test_episodes_ending_in_last_iteration_halt_epoch(scripted, listening):
    environment = scripted([2, 4], truncates=[1])
    state = rein.training_loop(listening(environment), environment, episodic=True).run(epochs=1, iterations=4)
    assert state.history[-1].status == "halted"


def test_episodic_epoch_has_one_episode_per_environment(scripted, listening):
    environment, store = scripted([2, 3, 9]), rein.MemoryStore()
    rein.training_loop(listening(environment), environment, store, episodic=True).run(epochs=3, iterations=5)
    for trajectory in store.trajectories:
        assert sorted(trajectory.episodes.environment.tolist()) == [0, 1, 2]
        assert sorted(trajectory.episodes.length.tolist()) == [2, 3, 5]


def test_epoch_metrics_are_available_at_end_and_in_history(scripted, listening):
    environment = scripted([2])
    loop = rein.training_loop(listening(environment), environment)
    seen = []
    loop.epoch_completed.attach(lambda state: seen.append(state.metrics["episode_return"]))
    state = loop.run(epochs=2, iterations=4)
    assert seen == [3.0, 3.0]
    assert state.history[-1].metrics["episode_length"] == 2.0
    assert math.isnan(state.history[-1].metrics["episode_return_100"])


def test_store_gets_every_epoch_with_custom_fields_and_extras(scripted, listening):
    environment, store = scripted([2, 3]), rein.MemoryStore()
    agent = listening(environment)
    loop = rein.training_loop(
        agent, environment, store, state_to_trajectory=lambda state: {"double": 2 * state.step_state.transition.reward}
    )
    loop.run(epochs=2, iterations=4)
    first, second = store.trajectories
    assert (first.epoch, first.first_step, second.epoch, second.first_step) == (1, 0, 2, 4)
    assert torch.as_tensor(second.fields["double"]).tolist() == (2 * torch.as_tensor(second.fields["reward"])).tolist()
    assert torch.as_tensor(first.fields["value"]).shape == (4, 2)
    assert torch.as_tensor(first.next_observation)[:, 0].tolist() == [0.0, 1.0]  # observation of the next action
    assert "next_observation" not in first.fields


def test_halted_and_skipped_epochs_are_stored(scripted, listening):
    environment, store = scripted([9]), rein.MemoryStore()
    loop = rein.training_loop(listening(environment), environment, store)
    loop.iteration_completed(once=2)(lambda state: state.halt_epoch())
    loop.epoch_started(once=2)(lambda state: state.halt_epoch())
    loop.run(epochs=3, iterations=4)
    lengths = [len(t.fields.get("reward", [])) for t in store.trajectories]
    assert [(t.status, n) for t, n in zip(store.trajectories, lengths, strict=True)] == [
        ("halted", 2),
        ("halted", 0),
        ("completed", 4),
    ]


def test_halt_in_handler_does_not_skip_store_or_later_handlers(scripted, listening):
    environment, store, seen = scripted([2, 3]), rein.MemoryStore(), []
    loop = rein.training_loop(listening(environment), environment, store, episodic=True)
    loop.epoch_halted.attach(lambda state: state.halt_epoch())
    loop.epoch_halted.attach(lambda state: seen.append(("halted", state.epoch)))
    loop.epoch_ended(every=2)(lambda state: seen.append(("every second", state.epoch)))
    loop.run(epochs=4, iterations=9)
    assert [t.epoch for t in store.trajectories] == [1, 2, 3, 4]
    assert seen == [
        ("halted", 1),
        ("halted", 2),
        ("every second", 2),
        ("halted", 3),
        ("halted", 4),
        ("every second", 4),
    ]


@pytest.mark.parametrize("epochs", [0, -1])
def test_epochs_below_one_raise(scripted, listening, epochs):
    environment = scripted([2])
    with pytest.raises(ValueError, match=f"epochs={epochs}: give 1 or more"):
        rein.training_loop(listening(environment), environment, epochs=epochs)
    with pytest.raises(ValueError, match=f"epochs={epochs}: give 1 or more"):
        rein.training_loop(listening(environment), environment).run(epochs=epochs, iterations=1)


def test_store_is_flushed_if_handler_fails(scripted, listening):
    class Flushed(rein.MemoryStore):
        flushes = 0

        def flush(self):
            self.flushes += 1

    environment, store = scripted([2]), Flushed()
    loop = rein.training_loop(listening(environment), environment, store)
    loop.epoch_started(once=3)(lambda state: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.run(epochs=5, iterations=2)
    assert ([t.epoch for t in store.trajectories], store.flushes) == ([1, 2], 1)


def test_loop_seeds_parts_without_seed(scripted, listening):
    environment = scripted([2])
    agent = listening(environment)
    agent.seed, environment.seed = None, 7
    rein.training_loop(agent, environment, seed=3)
    assert (agent.seed, environment.seed) == (3, 7)


def test_random_seed_is_drawn_without_seed(scripted, listening):
    seeds = set()
    for _ in range(3):
        environment = scripted([2])
        agent = listening(environment)
        agent.seed = environment.seed = None
        rein.training_loop(agent, environment)
        assert agent.seed == environment.seed
        seeds.add(agent.seed)
    assert len(seeds) == 3


def test_spaces_that_do_not_fit_raise(scripted, listening):
    environment, other = scripted([2]), scripted([2])
    agent = listening(environment)
    other.single_action_space = type(other.single_action_space)(5)
    with pytest.raises(ValueError, match=r"actions in Discrete\(2\), but those of the environment .* Discrete\(5\)"):
        rein.training_loop(agent, other)


def test_invalid_agent_raises_with_missing_attributes(scripted, listening):
    environment = scripted([2])
    agent = listening(environment)
    with pytest.raises(TypeError, match=r"Scripted is not a valid Agent; it lacks .*select_action"):
        rein.training_loop(environment, environment)
    with pytest.raises(TypeError, match=r"Listening is not a valid Environment; it lacks .*apply_action"):
        rein.training_loop(agent, agent)
    with pytest.raises(TypeError, match="are swapped"):
        rein.training_loop(environment, agent)
    with pytest.raises(TypeError, match=r"TimeLimit is not a valid Environment; .*rein\.make\(id_or_factory, num_env"):
        rein.training_loop(agent, gymnasium.make("CartPole-v1"))


@pytest.mark.parametrize("budget", [{}, {"epochs": 1, "env_steps": 10}])
def test_train_requires_exactly_one_budget(scripted, listening, budget):
    environment = scripted([2])
    with pytest.raises(ValueError, match="expected one of epochs= and env_steps="):
        rein.train(listening(environment), environment, **budget)


def test_store_error_ends_run(scripted, listening):
    class Full(rein.MemoryStore):
        def append(self, trajectory):
            raise rein.errors.StoreError("runs/x: no space left")

    environment = scripted([2])
    loop = rein.training_loop(listening(environment), environment, Full())
    with pytest.raises(rein.errors.StoreError, match="no space left") as caught:
        loop.run(epochs=2, iterations=2)
    assert any("write_trajectory" in note and "epoch 1" in note for note in caught.value.__notes__)


def test_environment_contract_is_checked_in_first_step(scripted, listening):
    environment = scripted([3])
    apply_action = environment.apply_action
    environment.apply_action = lambda action: apply_action(action)._replace(reward=torch.zeros(1, dtype=torch.int64))
    with pytest.raises(rein.errors.EnvironmentContractError, match="reward: expected float32"):
        rein.training_loop(listening(environment), environment).run(iterations=1)


@pytest.mark.parametrize("episodic", [False, True])
def test_environments_that_await_reset_are_reset_after_resume(scripted, listening, episodic):
    def make():
        environment = scripted([4, 9])
        agent = listening(environment)
        return environment, agent, rein.training_loop(agent, environment, episodic=episodic)

    _, _, first = make()
    first.iteration_completed(once=5)(lambda state: first.interrupt())
    first.run(epochs=1, iterations=9)
    environment, agent, second = make()
    second.load_state_dict(first.state_dict())
    environment.awaits_reset = True
    state = second.run(epochs=1, iterations=9)
    assert len(agent.resets) == 1
    assert agent.transitions[0].observation[:, 0].tolist() == [0.0, 0.0]
    if episodic:  # ended episodes stay ended
        assert agent.transitions[0].valid.tolist() == [False, True]
    assert state.status == "completed"


def test_return_is_correct_after_resume_without_open_episodes(scripted, listening):
    def make():
        environment = scripted([9])
        return environment, rein.training_loop(listening(environment), environment, rein.MemoryStore())

    _, first = make()
    first.iteration_completed(once=5)(lambda state: first.interrupt())
    first.run(epochs=1, iterations=16)
    environment, second = make()
    second.load_state_dict(first.state_dict())
    environment.awaits_reset = True
    second.run(epochs=1, iterations=16)
    episodes = second.parts["store"].trajectories[-1].episodes
    assert (episodes.episode_return.tolist(), episodes.length.tolist()) == ([45.0], [9])


def test_environments_without_state_are_reset_with_warning(scripted, listening, caplog):
    def make():
        class Forgetful(scripted):
            state_dict = load_state_dict = property()

        environment = Forgetful([9])
        return environment, rein.training_loop(listening(environment), environment)

    _, first = make()
    first.run(epochs=1, iterations=5)
    environment, second = make()
    second.load_state_dict(first.state_dict())
    second.run(epochs=2, iterations=5)
    assert environment.resets == 1
    assert "were not saved; new episodes begin" in caplog.text


def test_evaluation_in_training_environments_is_detected(scripted, listening, caplog):
    environment = scripted([4])
    agent = listening(environment)
    loop = rein.training_loop(agent, environment)
    loop.run(epochs=1, iterations=6)
    rein.evaluate(agent, environment, 1)
    agent.transitions.clear()
    loop.run(epochs=2, iterations=6)
    assert "by other code that used the training environments; new episodes begin" in caplog.text
    assert [t.reward.item() for t in agent.transitions] == [1, 2, 3, 4, 1, 2]
    assert len(agent.resets) == 2


def test_default_epoch_of_continuing_run_has_128_steps(scripted, listening):
    environment = scripted([4])
    assert rein.train(listening(environment), environment, epochs=2).clocks.vector_steps == 256


def test_env_steps_of_second_train_call_are_additional(scripted, listening):
    environment = scripted([4, 9])
    agent = listening(environment)
    assert [rein.train(agent, environment, env_steps=600).clocks.vector_steps for _ in range(2)] == [300, 300]


def test_metrics_added_at_epoch_end_are_stored(scripted, listening):
    environment, store = scripted([2]), rein.MemoryStore()
    loop = rein.training_loop(listening(environment), environment, store)
    loop.epoch_ended.attach(lambda state: state.metrics.__setitem__("score", state.epoch * 1.5))
    loop.run(epochs=2, iterations=4)
    assert [t.metrics["score"] for t in store.trajectories] == [1.5, 3.0]
    assert store.trajectories[0].metrics["episode_return"] == 3.0


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_handler_of_epoch_ended_reads_the_trajectory_that_is_stored_afterwards(scripted, listening, tmp_path, kind):
    store = rein.MemoryStore() if kind == "memory" else rein.HDF5Store(tmp_path / "run", every=5, fields=["reward"])
    environment, seen = scripted([2, 3]), []
    loop = rein.training_loop(listening(environment), environment, store)

    @loop.epoch_ended
    def read(state):
        state.metrics["total"] = state.trajectory.fields["reward"].sum()
        seen.append(to_host(state.trajectory))  # a copy

    loop.run(epochs=3, iterations=4)
    assert [t.epoch for t in seen] == [1, 2, 3]
    assert all({"observation", "action", "valid"} <= t.fields.keys() and "total" in t.metrics for t in seen)
    if kind == "memory":
        pairs = zip(seen, store.trajectories, strict=True)
        assert all(first_difference(a._replace(clocks={}), b._replace(clocks={})) is None for a, b in pairs)


def test_trajectory_is_unavailable_after_the_handlers_of_epoch_ended(scripted, listening):
    environment = scripted([2, 3])
    loop = rein.training_loop(listening(environment), environment, rein.MemoryStore())
    loop.epoch_ended(lambda state: 1 / 0)

    @loop.on("epoch_completed", "failed")
    def read(state):
        with pytest.raises(RuntimeError, match="epoch_ended"):
            print(state.trajectory)

    with pytest.raises(ZeroDivisionError):
        loop.run(epochs=1, iterations=4)
    read(loop.state)


def test_trajectory_without_a_store_raises(scripted, listening):
    environment = scripted([2, 3])
    loop = rein.training_loop(listening(environment), environment)
    loop.epoch_ended(lambda state: print(state.trajectory))
    with pytest.raises(RuntimeError, match="MemoryStore"):
        loop.run(epochs=1, iterations=4)


@pytest.mark.parametrize("name", ["reward", "raw_reward", "observation", "seed"])
def test_reserved_field_names_raise(scripted, listening, name):
    environment = scripted([2])
    loop = rein.training_loop(
        listening(environment), environment, rein.MemoryStore(), state_to_trajectory=lambda state: {name: torch.ones(1)}
    )
    with pytest.raises(ValueError, match=f"state_to_trajectory: the names {name} are reserved"):
        loop.run(iterations=1)


@pytest.mark.parametrize("reward", [torch.tensor(1.0), torch.ones(2, 1), torch.ones(2, dtype=torch.int64), 1.0])
def test_misshapen_reward_of_handler_raises(scripted, listening, reward):
    environment = scripted([4, 4])
    loop = rein.training_loop(listening(environment), environment)

    @loop.action_applied(once=3)
    def replace_reward(state):
        known = state.step_state
        state.step_state = known._replace(transition=known.transition._replace(reward=reward))

    with pytest.raises(rein.errors.EnvironmentContractError, match=r"transition.reward: expected"):
        loop.run(iterations=5)


def test_misshapen_reward_of_environment_raises(scripted, listening):
    environment = scripted([4, 4])
    apply_action, steps = environment.apply_action, []

    def misshapen(action):
        steps.append(action)
        time_step = apply_action(action)
        return time_step._replace(reward=time_step.reward[:1]) if len(steps) == 3 else time_step

    environment.apply_action = misshapen
    with pytest.raises(rein.errors.EnvironmentContractError, match="reward"):
        rein.training_loop(listening(environment), environment).run(iterations=5)


def test_step_state_has_no_fields_of_previous_step(scripted, listening):
    environment = scripted([4])
    loop, seen = rein.training_loop(listening(environment), environment), []
    loop.action_selected.attach(lambda state: seen.append(state.step_state[4:]))
    loop.run(iterations=3)
    assert seen == [(None, None, None)] * 3


def test_strict_allows_learning_in_some_steps_only(scripted, listening):
    environment = scripted([4])
    agent = listening(environment, learns_every=2)
    assert rein.training_loop(agent, environment, strict=True).run(iterations=4).status == "completed"


def test_invalid_store_raises(scripted, listening):
    environment = scripted([4])
    with pytest.raises(TypeError, match=r"int is not a valid Store; pass .*HDF5Store"):
        rein.training_loop(listening(environment), environment, 3)


@pytest.mark.parametrize("kind", [str, Path])
def test_path_becomes_new_store(scripted, listening, tmp_path, kind):
    for folder in ("run", "run-2"):
        environment = scripted([4])
        loop = rein.training_loop(listening(environment), environment, kind(tmp_path / "run"))
        loop.run(epochs=2, iterations=6)
        assert loop.parts["store"].path == tmp_path / folder
        assert [*rein.open_run(tmp_path / folder).epochs["number"]] == [1, 2]


def test_parts_that_do_not_fit_create_no_folder(scripted, listening, tmp_path):
    with pytest.raises(ValueError, match="observations"):
        rein.training_loop(listening(scripted([4])), CartPole(1), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("terminal", "shown"), [(True, {}), (False, {"progress": False}), (False, {})])
def test_train_shows_progress_on_a_terminal_only(scripted, listening, capsys, monkeypatch, terminal, shown):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal or bool(shown), raising=False)
    monkeypatch.setenv("TERM", "dumb")
    environment = scripted([4])
    rein.train(listening(environment), environment, env_steps=8, iterations=4, **shown)
    assert ("env_steps" in capsys.readouterr().out) == terminal


def test_state_can_be_loaded_into_used_loop(scripted, listening, caplog):
    environment = scripted([4])
    agent = listening(environment)
    loop = rein.training_loop(agent, environment)
    loop.run(epochs=1, iterations=6)
    saved = loop.state_dict()
    loop.run(epochs=3, iterations=6)
    first = [t.reward.item() for t in agent.transitions[6:12]]
    loop.load_state_dict(saved)
    agent.transitions.clear()
    loop.run(epochs=2, iterations=6)
    assert [t.reward.item() for t in agent.transitions] == first
    assert not caplog.records


@pytest.mark.parametrize("name", ["a/b", "", ".x", 0])
def test_field_names_that_store_rejects_raise_before_run(scripted, listening, tmp_path, name):
    environment = scripted([2])
    environment.single_observation_space = spaces.Dict({"inner": spaces.Dict({name: spaces.Discrete(2)})})
    agent = listening(environment)
    agent.observation_space = environment.single_observation_space
    for store in (rein.MemoryStore(), rein.HDF5Store(tmp_path / "run")):
        message = (
            f"invalid field name {name!r} in observation.inner: .*; rename it with an environment wrapper, or flatten"
        )
        with pytest.raises(ValueError, match=message):
            rein.training_loop(agent, environment, store)
    for number, options in enumerate(
        ({"every": 0}, {"fields": ["action", "reward"]})
    ):  # stores that do not keep the observation
        rein.training_loop(agent, environment, rein.HDF5Store(tmp_path / str(number), **options))
    rein.training_loop(
        agent, environment, type("Any", (), {"config": {}} | dict.fromkeys(("append", "flush", "close")))()
    )


def test_levels_of_dictionaries_that_files_do_not_support_raise_before_run(scripted, listening, tmp_path):
    environment = scripted([2])
    agent = listening(environment)

    def loop(levels, store):
        space = functools.reduce(lambda inner, _: spaces.Dict({"a": inner}), range(levels), spaces.Discrete(2))
        agent.observation_space = environment.single_observation_space = space
        return rein.training_loop(agent, environment, store)

    for store in (rein.MemoryStore(), rein.HDF5Store(tmp_path / "run")):
        with pytest.raises(ValueError, match=r"observation\.a.*levels"):
            loop(32, store)
    loop(31, rein.MemoryStore())


@pytest.mark.parametrize("event", ["action_selected", "action_applied", "observation_recorded", "trajectory_persisted"])
def test_stored_transitions_do_not_cross_reset_after_failed_step(tmp_path, event):
    environment = Pendulum(num_envs=2)
    shape = environment.single_observation_space, environment.single_action_space
    agent = SAC(*shape, hidden=(8,), learning_starts=10**6)
    store, seen, record = rein.HDF5Store(tmp_path / "run"), [], agent.record_observation
    agent.record_observation = lambda transition: seen.append(transition) or record(transition)  # type: ignore  # a spy
    loop = rein.training_loop(agent, environment, store, seed=1, epochs=2, iterations=9)

    @loop.event(event)(once=5)
    def fail(state):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        loop.run()
    loop.run()
    store.close()
    run = rein.open_run(tmp_path / "run")
    found = run.transitions()[: len(run.transitions())]

    def pairs(one):
        return {tuple(row) for row in torch.cat((one.observation, one.next_observation), 1).tolist()}

    assert len(found.reward) >= 30 and pairs(found) <= set().union(*map(pairs, seen))
    windows = run.sequences(3)[: len(run.sequences(3))]
    assert torch.equal(windows.next_observation[:, :-1], windows.observation[:, 1:])
    assert verify_run(run.path).problems == []


@pytest.mark.parametrize(
    ("returned", "error", "text"),
    [
        (None, TypeError, "returned None"),
        (torch.ones(2), TypeError, r"returned a tensor of shape \(2,\)"),
        ([torch.ones(2)], TypeError, "returned list"),
        ({"x": 1.0}, TypeError, "x is float 1.0"),
        ({"x": None, "y": 3}, TypeError, "y is int 3"),
        ({"x": torch.tensor(1.0)}, ValueError, r"x has shape \(\)"),
        ({"x": {"y": torch.ones(3)}}, ValueError, r"x\.y has shape \(3,\); .* each of the 2 environments"),
    ],
)
def test_custom_fields_are_checked_in_first_step(scripted, listening, returned, error, text):
    environment, store = scripted([2, 3]), MemoryStore()
    loop = rein.training_loop(listening(environment), environment, store, state_to_trajectory=lambda state: returned)
    with pytest.raises(error, match=f"state_to_trajectory.*{text}"):
        loop.run(iterations=5)
    assert loop.state.total_iterations == 0


@pytest.mark.parametrize("returned", [torch.ones(()), 0.5, [("loss", 1.0)]])
def test_metrics_of_optimize_model_are_checked_in_first_step(scripted, listening, returned):
    environment = scripted([2, 3])
    agent = listening(environment)
    agent.optimize_model = lambda: returned
    with pytest.raises(TypeError, match=r"optimize_model\(\) returned .*; it must return a dictionary of metrics"):
        rein.training_loop(agent, environment).run(iterations=5)


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (PPO, {"rollout_steps": 4096}, "rollout_steps=4096"),
        (PQN, {"rollout_steps": 4096}, "rollout_steps=4096"),
        (DQN, {"capacity": 200, "learning_starts": 50}, "learning_starts=50"),
        (DQN, {"capacity": 200, "learning_starts": 0, "train_frequency": 100}, "train_frequency=100"),
    ],
)
@pytest.mark.parametrize("limit", ["completed", "halted"])
def test_run_without_update_warns(kind, options, named, limit, caplog):
    environment = CartPole(num_envs=2, seed=0)
    spaces = environment.single_observation_space, environment.single_action_space
    loop = rein.training_loop(kind(*spaces, hidden=(4,), seed=0, **options), environment, iterations=5)
    if limit == "halted":
        stop_at(loop, env_steps=8)
    loop.run(epochs=1)
    assert loop.state.status == limit
    assert named in caplog.text


@pytest.mark.parametrize("ending", ["an update", "an interrupt"])
def test_run_with_update_or_interrupt_does_not_warn(ending, caplog):
    environment = CartPole(num_envs=2, seed=0)
    spaces = environment.single_observation_space, environment.single_action_space
    agent = PPO(*spaces, hidden=(4,), rollout_steps=4 if ending == "an update" else 100, seed=0)
    loop = rein.training_loop(agent, environment, iterations=5)
    loop.iteration_completed(lambda state: loop.interrupt() if ending == "an interrupt" else None)
    loop.run(epochs=1)
    assert "update" not in caplog.text


class Reporting(rein.Agent):
    """Returns metrics of several kinds from every fourth step, without declaring them."""

    def build(self, generator):
        self.rollout = rein.replay.Rollout(4)

    def act(self, observation, explore):
        return torch.zeros(len(observation), dtype=torch.int64)

    def update(self, rollout):
        return {"policy_loss": torch.tensor(self.updates + 1.0), "share": self.updates / 8, **self.others()}

    def others(self):
        return {"td_error": torch.zeros(3), "note": "text", "optional": None if self.updates < 1 else 5}


def reporting(kind=Reporting, **options):
    environment = CartPole(2, seed=0)
    return rein.training_loop(kind(environment, seed=0), environment, **options)


def test_metrics_of_update_are_means_over_the_epoch_without_a_declaration():
    state = reporting(epochs=2, iterations=8).run()
    names = ("policy_loss", "share", "optional")
    found = [[record.metrics[name] for name in names] for record in state.history]
    assert found == [[1.5, 1 / 16, 5.0], [3.5, 5 / 16, 5.0]]
    assert not {"td_error", "note"} & {*state.metrics}


def test_undeclared_metric_is_nan_in_epochs_without_an_update():
    records = reporting(epochs=5, iterations=2).run().history
    assert "policy_loss" not in records[0].metrics
    assert [record.metrics["policy_loss"] for record in records if record.epoch in (2, 4)] == [1.0, 2.0]
    assert math.isnan(records[2].metrics["policy_loss"])


def test_undeclared_metrics_resume_in_an_open_epoch(tmp_path):
    def build(path):
        loop = reporting(store=rein.HDF5Store(path, exist="resume"), epochs=2, iterations=11)
        checkpoint(loop)
        return loop

    whole, cut = build(tmp_path / "whole"), build(tmp_path / "cut")
    whole.run()
    cut.iteration_completed(once=10)(lambda state: cut.interrupt())
    cut.run()
    cut.parts["store"].close()
    resumed = build(tmp_path / "cut")
    rein.resume(resumed)
    assert (resumed.state.iteration, resumed.metrics["policy_loss"]) == (10, 1.5)
    resumed.run()
    assert rows_of(tmp_path / "cut" / "metrics.csv") == rows_of(tmp_path / "whole" / "metrics.csv")


def test_declared_metric_replaces_the_one_of_the_same_name():
    loop = reporting(epochs=1, iterations=8)
    loop.metric("policy_loss", "policy_loss", "max")
    assert loop.run().metrics["policy_loss"] == 2.0


def test_update_that_returns_a_metric_of_the_loop_raises():
    class Taking(Reporting):
        def others(self):
            return {"episode_return": 1.0}

    with pytest.raises(ValueError, match="'episode_return'") as raised:
        reporting(Taking, epochs=1, iterations=8).run()
    assert "in the metrics of the step" in raised.value.__notes__[0]


def test_population_reports_undeclared_means_over_its_learners():
    class Numbers(Reporting):
        def others(self):
            return {}

    environment = CartPole(2, seed=0)
    agent = rein.Population(Numbers, environment, learners=1, seed=0)
    state = rein.training_loop(agent, environment, epochs=1, iterations=8).run()
    assert state.metrics["policy_loss"] == 1.5
    assert not any(name.endswith("per_learner") for name in state.metrics)
