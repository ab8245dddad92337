"""Evaluation in a separate process."""

from __future__ import annotations

import csv
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import rein
from rein.envs.cartpole import CartPole
from rein.handlers.checkpoint import checkpoint
from rein.handlers.evaluate_every import evaluate_every
from rein.loop import Loop
from rein.loop.state import State
from rein.types import TimeStep
from tests import programs

ROOT = Path(__file__).parents[2]


class Breaking(CartPole):
    """CartPole that raises or kills its process in the first step of an evaluation after `good` ones."""

    def __init__(self, *, good: int, kills: bool) -> None:
        super().__init__(num_envs=2, seed=1)
        self.good, self.kills, self.begun = good, kills, 0

    def reset(self, seed: int | None = None) -> Any:
        self.begun += 1
        return super().reset(seed)

    def apply_action(self, action: Any) -> TimeStep:
        if self.begun > self.good:
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("out of order")
        return super().apply_action(action)


def make(epochs: int = 4, environment: Any = None, store: Any = None, **options: Any) -> Loop:
    """Return a loop with PPO that is evaluated in each epoch."""
    training = CartPole(num_envs=4, seed=0)
    agent = rein.PPO(training, hidden=(8,), rollout_steps=8, minibatches=1, update_epochs=1, seed=0)
    loop = rein.training_loop(agent, training, store, epochs=epochs, iterations=8)
    others = CartPole(num_envs=2, seed=1) if environment is None else environment
    evaluate_every(loop, agent, others, **{"episodes": 4, "max_episode_steps": 200, "background": True, **options})
    return loop


def results(loop: Loop) -> list[Any]:
    """Return a list that collects epoch, env steps and returns of each evaluation."""
    found: list[Any] = []

    @loop.evaluation_completed
    def note(state: State) -> None:
        event = state.evaluation
        found.append((event.epoch, event.clocks["env_steps"], event.result.episode_return.tolist()))

    return found


def process_of(loop: Loop) -> Any:
    return loop.parts["evaluation_background"].process


def wait_for_result(loop: Loop) -> None:
    """Attach a handler that waits at the end of each epoch, so that each result arrives in the next epoch."""

    @loop.epoch_ended
    def wait(state: State) -> None:
        background = loop.parts["evaluation_background"]
        answer = None
        while answer is None:
            answer = background.process.answer(0.1)
        background.process._answers.put(answer)


def test_background_evaluations_equal_those_in_the_foreground() -> None:
    background, foreground = make(), make(background=False)
    found, expected = results(background), results(foreground)
    state, other = background.run(), foreground.run()
    assert found == expected
    assert [epoch for epoch, *_ in found] == [1, 2, 3, 4]
    assert state.memory["evaluations"] == other.memory["evaluations"]
    assert process_of(background).pid is None, "the process ends with the run"


def test_results_arrive_in_a_later_epoch_with_the_clocks_of_the_parameters(tmp_path: Path) -> None:
    store = rein.HDF5Store(tmp_path / "run")
    loop = make(epochs=3, store=store)
    wait_for_result(loop)
    seen: list[Any] = []
    for name in ("evaluation_started", "evaluation_episode_completed", "evaluation_completed"):
        loop.event(name).attach(lambda state, name=name: seen.append((name[11:], state.epoch, state.evaluation.epoch)))
    loop.run()
    store.close()
    kinds = [("episode_completed", 4), ("completed", 1)]
    arrived = {k: [(kind, k, k - 1) for kind, count in kinds for _ in range(count)] for k in (2, 3)}
    expected = [("started", 1, 1), *arrived[2], ("started", 2, 2), *arrived[3], ("started", 3, 3)]
    assert seen[: len(expected)] == expected
    assert "evaluation_return" not in loop.state.history[0].metrics
    assert "evaluation_return" in loop.state.history[1].metrics
    with open(tmp_path / "run/evaluations.csv", newline="", encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    assert [(row["evaluation"], row["epoch"], row["env_steps"]) for row in rows] == [
        ("1", "1", "32"),
        ("2", "2", "64"),
        ("3", "3", "96"),
    ]


@pytest.mark.slow
def test_at_end_evaluates_the_final_parameters() -> None:
    background, foreground = (make(epochs=3, every=2, at_end=True, background=on) for on in (True, False))
    found, expected = results(background), results(foreground)
    background.run()
    foreground.run()
    assert found == expected
    assert [epoch for epoch, *_ in found] == [2, 3]


@pytest.mark.slow
def test_same_episodes_are_repeated() -> None:
    loop, seeds = make(epochs=2, same_episodes=True), []
    loop.evaluation_completed(lambda state: seeds.append(state.evaluation.result.seed.tolist()))
    loop.run()
    assert len(seeds) == 2 and seeds[0] == seeds[1]


@pytest.mark.slow
def test_resumed_run_repeats_a_pending_evaluation(tmp_path: Path) -> None:
    whole, first, second = make(), make(), make()
    expected, seen, rest = results(whole), results(first), results(second)
    whole.run()
    checkpoint(first, rein.Checkpoints(tmp_path))
    checkpoint(second, rein.Checkpoints(tmp_path))
    first.epoch_ended(once=2)(lambda state: first.interrupt("enough"))
    first.run()
    assert first.parts["evaluation_background"].pending is not None
    rein.resume(second, tmp_path)
    second.run()
    assert seen + rest == expected


def test_process_that_dies_loses_its_evaluation_and_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    loop = make(epochs=3, environment=Breaking(good=2, kills=True), episodes=2)
    found = results(loop)
    assert loop.run().status == "completed"
    # the second evaluation is the second one of the first process, the third one the first of another
    assert [epoch for epoch, *_ in found] == [1, 2]
    assert "evaluation of epoch 3 is lost" in caplog.text and "SIGKILL" in caplog.text


@pytest.mark.slow
def test_next_evaluation_starts_a_new_process(caplog: pytest.LogCaptureFixture) -> None:
    loop, pids = make(epochs=3), []
    wait_for_result(loop)

    @loop.evaluation_started
    def note(state: State) -> None:
        pids.append(process_of(loop).pid)
        if state.epoch == 2:  # idle: the request of this evaluation finds that it has ended
            os.kill(pids[-1], signal.SIGKILL)
            process_of(loop)._process.wait()

    found = results(loop)
    loop.run()
    assert [epoch for epoch, *_ in found] == [1, 2, 3]
    assert pids[1] != pids[2]


def test_environment_error_ends_the_run_with_its_traceback() -> None:
    loop = make(environment=Breaking(good=0, kills=False), episodes=2)
    with pytest.raises(rein.errors.WorkerError, match="out of order"):
        loop.run()
    assert process_of(loop).pid is None


@pytest.mark.slow
def test_on_failure_drop_logs_the_error_and_continues(caplog: pytest.LogCaptureFixture) -> None:
    loop = make(epochs=2, environment=Breaking(good=0, kills=False), episodes=2, on_failure="drop")
    assert loop.run().status == "completed"
    assert caplog.text.count("metrics are dropped") == 2


@pytest.mark.parametrize("ask", [Loop.stop, Loop.interrupt])
def test_run_can_be_ended_while_it_waits_for_a_result(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make(epochs=3, environment=Slow(), episodes=2)
    process = process_of(loop)

    def answer(seconds: float = 0.0) -> None:
        if loop.state.epoch == 2:  # training waits for the evaluation of epoch 1
            ask(loop, "enough")

    monkeypatch.setattr(process, "answer", answer)
    state = loop.run()
    assert (state.status, state.epoch) == ("halted", 2) and "evaluations" not in state.memory
    assert process.pid is None
    assert loop.parts["evaluation_background"].pending["epoch"] == 1


class Slow(CartPole):
    """CartPole whose evaluations do not end."""

    def __init__(self) -> None:
        super().__init__(num_envs=2, seed=1)

    def apply_action(self, action: Any) -> TimeStep:
        time.sleep(3600.0)
        return super().apply_action(action)


PROGRAM = """
import os, sys, threading
import rein
from tests.handlers.test_background import Slow, make, process_of
loop = make(environment=Slow())
@loop.iteration_started
def report(state):
    if process_of(loop).pid is not None:
        print(process_of(loop).pid, flush=True)
        os.kill(os.getpid(), 9)
loop.run()
"""


def test_process_ends_when_its_parent_is_killed() -> None:
    done = programs.run("-c", PROGRAM, cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(done.stdout)
    while os.path.exists(f"/proc/{pid}") and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        time.sleep(0.05)


class Locked(CartPole):
    """CartPole that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a socket")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"store": rein.MemoryStore()}, ValueError, "store"),
        ({"environment": Locked(num_envs=2)}, TypeError, "Locked"),
    ],
)
def test_invalid_combinations_raise(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        training = CartPole(num_envs=4, seed=0)
        loop = rein.training_loop(rein.PPO(training), training)
        evaluate_every(
            loop, rein.PPO(training), **{"environment": CartPole(2), "episodes": 1, **options}, background=True
        )


def test_policies_of_other_classes_raise() -> None:
    class Custom:
        def select_action(self, observation: Any) -> Any: ...

        def reset(self, mask: Any = None) -> None: ...

    loop = Loop(lambda state: None)
    with pytest.raises(TypeError, match="Custom"):
        evaluate_every(loop, Custom(), CartPole(2), episodes=1, background=True)
    assert not loop.parts
