"""Tests of runs that continue after an exception within a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rein
from rein.agents.dqn import DQN
from rein.envs.cartpole import CartPole
from rein.episodes import PHASES
from rein.episodes.episode_replay import replay
from rein.store.verify import verify_run

WARNING = "were in a step that failed; new episodes begin"


def press_ctrl_c(state: rein.State) -> None:
    raise KeyboardInterrupt


def composed(folder: Path) -> rein.Loop:
    environment = CartPole(num_envs=2, seed=0)
    spaces = environment.single_observation_space, environment.single_action_space
    store = rein.HDF5Store(folder, exist="resume" if folder.exists() else "new")
    return rein.training_loop(DQN(*spaces, seed=0, learning_starts=10**6), environment, store, seed=0, iterations=30)


def check_stored(folder: Path) -> None:
    """Check that the stored run is undamaged and that its episodes can be replayed exactly."""
    assert verify_run(folder).problems == []
    run = rein.open_run(folder)
    played = replay(CartPole(num_envs=2, seed=0), [run.episode(id) for id in run.episodes["id"].tolist()])
    assert len(played) >= 2
    assert [result for result in played if result.difference is not None] == []


def check_clocks(loop: rein.Loop) -> None:
    clocks = loop.state.clocks
    assert clocks.env_steps == loop.parts["agent"].env_steps == 2 * clocks.vector_steps
    assert clocks.vector_steps == clocks.iterations == sum(record.iterations for record in loop.state.history)


@pytest.mark.default_cases(
    "action_selected-30", "action_applied-1", "observation_recorded-1", "model_optimized-1", "trajectory_persisted-1"
)
@pytest.mark.parametrize("firing", [1, 30])
@pytest.mark.parametrize("phase", PHASES)
def test_run_continued_after_ctrl_c_is_stored_correctly(
    phase: str, firing: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = composed(tmp_path / "run")
    loop.event(phase)(once=firing)(press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        loop.run(epochs=3)
    assert loop.run(epochs=3).status == "completed"
    loop.parts["store"].close()
    assert caplog.text.count(WARNING) == 1
    assert loop.state.clocks.vector_steps == 90
    check_clocks(loop)
    check_stored(tmp_path / "run")


@pytest.mark.parametrize("phase", ["action_applied", "observation_recorded"])
def test_run_resumed_from_state_after_ctrl_c_is_stored_correctly(
    phase: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = composed(tmp_path / "run")
    loop.event(phase)(once=40)(press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        loop.run(epochs=3)
    saver = rein.Checkpoints(tmp_path / "taken")
    loop.parts["store"].flush()
    saver.take(loop, {"last": None, "every": None, "best": None}, None, "raise")
    saver.close()
    loop.parts["store"].close()
    resumed = composed(tmp_path / "run")
    rein.resume(resumed, tmp_path / "taken")
    resumed.run(epochs=3)
    resumed.parts["store"].close()
    assert caplog.text.count(WARNING) == 1
    check_clocks(resumed)
    check_stored(tmp_path / "run")


def test_recorded_but_unpersisted_step_has_invalid_row(scripted: Any, listening: Any) -> None:
    environment, store = scripted([9, 9]), rein.MemoryStore()
    agent = listening(environment)
    loop = rein.training_loop(agent, environment, store)
    loop.model_optimized(once=3)(press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        loop.run(iterations=6)
    loop.run(iterations=6)
    fields = store.trajectories[0].fields
    assert torch.as_tensor(fields["valid"])[:, 0].tolist() == [True, True, False, True, True, True]
    assert torch.as_tensor(fields["observation"])[3:, 0, 0].tolist() == [0.0, 1.0, 2.0]
    assert (len(agent.transitions), len(agent.resets)) == (6, 2)


@pytest.mark.parametrize("strict", [False, True])
def test_error_after_end_of_step_keeps_episodes(
    strict: bool, scripted: Any, listening: Any, caplog: pytest.LogCaptureFixture
) -> None:
    environment, store = scripted([3, 9]), rein.MemoryStore()
    agent = listening(environment)
    loop = rein.training_loop(agent, environment, store, strict=strict)
    error: type[Exception] = TypeError if strict else ZeroDivisionError
    if strict:

        @loop.trajectory_persisted(once=3)
        def drift(state: rein.State) -> None:
            state.step_state = state.step_state._replace(extras={})
    else:
        loop.episodes_completed(once=1)(lambda state: 1 / 0)
    with pytest.raises(error):
        loop.run(iterations=6)
    loop.run(iterations=6)
    assert (WARNING in caplog.text, environment.resets) == (False, 1)
    assert [t.reward[1].item() for t in agent.transitions] == [1, 2, 3, 4, 5, 6]
    assert loop.state.clocks.vector_steps == loop.state.total_iterations == 6
    assert torch.as_tensor(store.trajectories[0].fields["reward"])[:, 1].tolist() == [1, 2, 3, 4, 5, 6]


def test_error_before_action_selection_keeps_episodes(
    scripted: Any, listening: Any, caplog: pytest.LogCaptureFixture
) -> None:
    environment = scripted([9])
    agent = listening(environment)
    loop, select, due = rein.training_loop(agent, environment), agent.select_action, [3, 2, 1]

    def select_action(observation: torch.Tensor) -> Any:
        if due and due.pop() == 3:
            raise KeyboardInterrupt
        return select(observation)

    agent.select_action = select_action
    with pytest.raises(KeyboardInterrupt):
        loop.run(iterations=6)
    loop.run(iterations=6)
    assert (WARNING in caplog.text, environment.resets) == (False, 1)
    assert [t.reward.item() for t in agent.transitions] == [1, 2, 3, 4, 5, 6]


def test_episodic_epoch_continues_with_open_episodes(scripted: Any, listening: Any) -> None:
    environment, store = scripted([2, 5]), rein.MemoryStore()
    loop = rein.training_loop(listening(environment), environment, store, episodic=True)
    loop.action_applied(once=4)(press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        loop.run(iterations=20)
    state = loop.run(iterations=20)
    assert (state.history[-1].status, state.iteration) == ("halted", 3 + 5)
    episodes = store.trajectories[0].episodes
    assert (episodes.environment.tolist(), episodes.length.tolist()) == ([0, 1], [2, 5])


def test_error_between_steps_keeps_episodes(scripted: Any, listening: Any) -> None:
    for event in ("iteration_started", "iteration_completed"):
        environment = scripted([9])
        agent = listening(environment)
        loop = rein.training_loop(agent, environment)
        handle = loop.event(event).attach(press_ctrl_c, once=3)
        with pytest.raises(KeyboardInterrupt):
            loop.run(iterations=6)
        handle.detach()
        loop.run(iterations=6)
        assert [t.reward.item() for t in agent.transitions] == [1, 2, 3, 4, 5, 6]


def test_state_to_trajectory_without_store_raises(scripted: Any, listening: Any) -> None:
    environment = scripted([2])
    with pytest.raises(ValueError, match=r"state_to_trajectory=\.\.\.\): the fields need a store"):
        rein.training_loop(listening(environment), environment, state_to_trajectory=lambda state: {})


def test_exception_without_a_text_is_raised_and_recorded(tmp_path: Path) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise LookupError("no text")

    environment = rein.envs.CartPole(2, seed=0)
    loop = rein.training_loop(rein.A2C(environment, hidden=(8,), seed=0), environment, tmp_path / "run")

    @loop.observation_recorded
    def fail(state: rein.State) -> None:
        raise Unprintable

    @loop.failed
    def fail_again(state: rein.State) -> None:
        raise Unprintable

    with pytest.raises(Unprintable):
        loop.run(epochs=1)
    (summary,) = rein.list_runs(tmp_path)
    assert (summary.status, summary.note) == ("failed", "Unprintable")
