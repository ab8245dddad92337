"""Guards against NaN and infinity, hung loops, full disks and full memory."""

from __future__ import annotations

import logging
import logging.handlers
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rein
from rein.agents.ppo import PPO
from rein.agents.sac import SAC
from rein.envs.cartpole import CartPole
from rein.envs.pendulum import Pendulum
from rein.errors import NonFiniteError
from rein.handlers.checkpoint import checkpoint
from rein.handlers.guards import UpdateGuard, guard_data, guard_updates
from rein.handlers.watchdog import HUNG_EXIT_CODE, guard_resources, resident_bytes, watchdog
from rein.loop.state import State
from rein.store.checkpoint_file import is_finite

BAD = [float("nan"), float("inf"), -float("inf")]


def poisoned(guard: UpdateGuard | None, at: set[int], bad: float = float("nan")) -> tuple[rein.Loop, PPO]:
    """Return a loop with PPO whose rewards are `bad` in these vector steps; a rollout has 8."""
    environment = CartPole(num_envs=4, seed=0)
    spaces = environment.single_observation_space, environment.single_action_space
    agent = PPO(*spaces, rollout_steps=8, update_epochs=2, minibatches=2, seed=0, guard=guard)
    loop = rein.training_loop(agent, environment, epochs=6, iterations=8, check_finite=False)

    @loop.action_applied
    def poison(state: State) -> None:
        if state.total_iterations in at:
            transition = state.step_state.transition
            reward = torch.full_like(transition.reward, bad)
            state.step_state = state.step_state._replace(transition=transition._replace(reward=reward))

    return loop, agent


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("at", [0, 11, 23, 40])
def test_stop_raises_before_the_optimizer_step(bad, at):
    loop, agent = poisoned(UpdateGuard("stop"), {at}, bad)
    with pytest.raises(NonFiniteError, match=r"NaN or infinity in .*grad_norm.*the update was not applied"):
        loop.run()
    assert loop.state.total_iterations < at + 8
    assert all(bool(torch.isfinite(p).all()) for p in agent.networks.parameters())


@pytest.mark.parametrize("bad", BAD)
def test_skip_omits_bad_updates_and_continues(bad):
    guard = UpdateGuard("skip")
    loop, agent = poisoned(guard, {11, 30}, bad)
    guard_updates(loop, guard)
    final = loop.run()
    assert final.status == "completed"
    skipped = [record.metrics["skipped_updates"] for record in final.history]
    assert [n > 0 for n in skipped] == [False, True, False, True, False, False]
    assert sum(skipped) == guard.failures
    assert is_finite({"networks": dict(agent.networks.state_dict())})


def test_too_many_consecutive_skips_raise():
    guard = UpdateGuard("skip", limit=5)
    loop, _ = poisoned(guard, set(range(8, 48)))
    guard_updates(loop, guard)
    with pytest.raises(NonFiniteError, match="6 times in a row"):
        loop.run()


def test_good_update_resets_the_count_of_failures():
    guard, good, bad = UpdateGuard("skip", limit=1), torch.tensor(1.0), torch.tensor(float("nan"))
    assert [guard({"loss": loss}, []) for loss in (bad, good, bad, good, bad)] == [False, True, False, True, False]
    assert guard.failures == 3
    with pytest.raises(NonFiniteError, match="2 times in a row"):
        guard({"loss": bad}, [])


def test_return_restores_the_last_good_checkpoint_and_continues(tmp_path, caplog):
    guard = UpdateGuard("return")
    loop, agent = poisoned(guard, {19})  # in epoch 3
    saver = checkpoint(loop, rein.Checkpoints(tmp_path), every=1, keep_last=None)
    guard_updates(loop, guard, saver)
    parameters = []

    @loop.epoch_ended
    def remember(state: State) -> None:
        parameters.append(torch.cat([p.detach().flatten() for p in agent.networks.parameters()]))

    with caplog.at_level(logging.WARNING):
        final = loop.run()
    assert "was restored from" in caplog.text and "epoch-000002.h5" in caplog.text
    assert final.status == "completed" and final.clocks.env_steps == 6 * 8 * 4
    assert not torch.equal(parameters[-1], parameters[2])  # training continued
    assert all(bool(torch.isfinite(p).all()) for p in parameters)


def test_return_needs_a_saver_and_a_checkpoint(tmp_path):
    guard = UpdateGuard("return")
    loop, _ = poisoned(guard, {3})
    with pytest.raises(ValueError, match="needs the saver"):
        guard_updates(loop, guard)
    guard_updates(loop, guard, checkpoint(loop, rein.Checkpoints(tmp_path), every=1))
    with pytest.raises(NonFiniteError, match="no checkpoint without"):
        loop.run()


def test_large_finite_numbers_are_not_failures():
    guard = UpdateGuard("stop")
    large = torch.tensor(3e38)
    assert guard({"policy_loss": large, "value_loss": large}, [torch.ones(2)])
    assert guard({"loss": torch.tensor(1.0), "approx_kl": torch.tensor(float("inf"))}, [torch.ones(2)])
    assert guard({}, [])


@pytest.mark.parametrize("bad", BAD)
def test_bad_gradient_is_a_failure(bad):
    guard = UpdateGuard("stop")
    with pytest.raises(NonFiniteError, match="gradient 1"):
        guard({"loss": torch.tensor(1.0)}, [torch.ones(2), torch.tensor([1.0, bad])])
    with pytest.raises(NonFiniteError, match="grad_norm"):
        guard({"loss": torch.tensor(1.0), "grad_norm": torch.tensor(bad)}, [torch.ones(2)])


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("field", ["observation", "reward", "final_observation"])
def test_environment_data_is_checked_before_the_agent_receives_it(scripted, listening, field, bad):
    class Broken(scripted):
        def apply_action(self, action: torch.Tensor) -> Any:
            step = super().apply_action(action)
            if len(self.actions) == 3:
                spoiled = getattr(step, field).clone()
                spoiled[1] = bad
                step = step._replace(**{field: spoiled})
            return step

    environment = Broken([9, 9, 9])
    agent = listening(environment)
    loop = rein.training_loop(agent, environment, epochs=1, iterations=8)
    guard_data(loop)
    with pytest.raises(NonFiniteError, match=f"{field} of environment 1 is .*vector step 2"):
        loop.run()
    assert len(agent.transitions) == 2


def test_actions_are_checked_before_the_environment_receives_them(scripted, listening):
    environment = scripted([9, 9])
    agent = listening(environment)
    agent.select_action = lambda observation: (torch.tensor([0.0, float("nan")]), {})
    loop = rein.training_loop(agent, environment, epochs=1, iterations=8)
    guard_data(loop)
    with pytest.raises(NonFiniteError, match=r"action of environment 1 is nan .*vector step 0"):
        loop.run()
    assert environment.actions == []


class Ticks:
    """Replacement for the `threading.Event` of a watchdog: time passes when a test calls `tick`."""

    def __init__(self) -> None:
        self._waiting, self._ticks, self._set = threading.Semaphore(0), threading.Semaphore(0), False

    def wait(self, seconds: float) -> bool:
        self._waiting.release()
        self._ticks.acquire()
        return self._set

    def tick(self) -> None:
        """End one `wait`. Returns when the watchdog has woken up."""
        self._waiting.acquire()
        self._ticks.release()

    def wait_for_watchdog(self) -> None:
        """Return when the watchdog waits again."""
        self._waiting.acquire()
        self._waiting.release()

    def set(self) -> None:
        self._set = True
        self._ticks.release()

    def clear(self) -> None:
        self._set = False


def ticking(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    """Give the watchdog a clock that the test controls."""
    ticks = Ticks()
    names = {"Event": lambda: ticks, "Thread": threading.Thread, "TIMEOUT_MAX": threading.TIMEOUT_MAX}
    monkeypatch.setattr(sys.modules["rein.handlers.watchdog"], "threading", SimpleNamespace(**names))
    return ticks


def test_hung_loop_is_interrupted_and_stacks_are_written(tmp_path):
    before = set(threading.enumerate())

    def step(state: State) -> None:
        if state.total_iterations == 3:  # wait until the watchdog has interrupted the run
            for thread in set(threading.enumerate()) - before:
                thread.join()

    loop = rein.Loop(step, iterations=2000)
    with open(tmp_path / "stacks", "w") as file:
        watchdog(loop, seconds=0.1, file=file)
        final = loop.run()
    text = (tmp_path / "stacks").read_text()
    assert final.status == "halted"
    assert final.total_iterations <= 4
    assert final.reason == "watchdog: no iteration ended for 0.1 s"
    assert "test_guards.py" in text and "Thread" in text
    assert set(threading.enumerate()) <= before


def test_running_loop_is_not_interrupted(monkeypatch):
    before, ticks = set(threading.enumerate()), ticking(monkeypatch)
    loop = rein.Loop(lambda state: ticks.tick(), iterations=20)
    watchdog(loop, seconds=1.0)
    assert loop.run().status == "completed"
    assert set(threading.enumerate()) <= before


def hang(folder: Path) -> None:
    """Run in a separate process: the fourth iteration hangs, and the run has a worker and a log."""
    target = logging.FileHandler(folder / "log")
    logging.getLogger().addHandler(logging.handlers.MemoryHandler(100, target=target))
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(1e6,)).start()
    store = rein.Checkpoints(folder / "checkpoints")
    ticks = ticking(pytest.MonkeyPatch())

    def step(state: State) -> None:
        if state.total_iterations == 3:
            logging.getLogger().warning("the last words")
            store.flush()
            for _ in range(3):  # detected, interrupted, ended
                ticks.tick()
            threading.Event().wait()

    loop = rein.Loop(step, iterations=10)
    checkpoint(loop, store, event="iteration_completed", every=1)
    with open(folder / "stacks", "w") as file:
        watchdog(loop, seconds=0.2, kill_after=0.2, file=file)
        loop.run()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_hung_process_kills_workers_flushes_logs_and_exits(tmp_path):
    alive, held = os.pipe()  # held open by the process and its worker
    process = multiprocessing.get_context("fork").Process(target=hang, args=(tmp_path,))
    process.start()
    os.close(held)
    process.join()
    assert process.exitcode == HUNG_EXIT_CODE == 75
    assert os.read(alive, 1) == b"", "a worker is still running"
    os.close(alive)
    assert "no iteration has ended for 0.2 s more; exiting with code 75" in (tmp_path / "stacks").read_text()
    assert (tmp_path / "log").read_text() == "the last words\n"
    newest = rein.Checkpoints(tmp_path / "checkpoints").newest()
    assert newest is not None and newest.path.stem == "epoch-000001-iteration-000003"


def test_recovered_loop_is_not_killed(tmp_path, monkeypatch):
    ticks = ticking(monkeypatch)

    def step(state: State) -> None:
        if state.total_iterations == 3:
            ticks.tick()
            ticks.tick()
            ticks.wait_for_watchdog()

    loop = rein.Loop(step, iterations=2000)
    with open(tmp_path / "stacks", "w") as file:
        watchdog(loop, seconds=0.1, kill_after=5.0, file=file)
        final = loop.run()
    assert (final.status, final.total_iterations) == ("halted", 4)


def test_full_disk_or_memory_interrupts_the_run(tmp_path, caplog):
    for options, reason in (({"disk": 1e18}, "GB are free"), ({"disk": 1.0, "memory": 1e6}, "GB of memory")):
        loop = rein.Loop(lambda state: None, epochs=9, iterations=2)
        guard_resources(loop, tmp_path / "not" / "there", **options, every=2)
        final = loop.run()
        assert (final.status, final.epoch) == ("halted", 2)
        assert reason in str(final.reason) and reason in caplog.text
    roomy = rein.Loop(lambda state: None, epochs=9, iterations=2)
    guard_resources(roomy, tmp_path, disk=1.0, memory=1e15)
    assert roomy.run().status == "completed"
    assert 1e6 < resident_bytes() < 1e12


@pytest.mark.parametrize(
    "make",
    [
        lambda loop: UpdateGuard("ignore"),
        lambda loop: UpdateGuard(limit=0),
        lambda loop: guard_updates(loop, UpdateGuard()),
        lambda loop: watchdog(loop, seconds=0),
        lambda loop: watchdog(loop, kill_after=0),
        lambda loop: watchdog(loop, seconds=float("inf")),
        lambda loop: watchdog(loop, kill_after=float("inf")),
        lambda loop: watchdog(loop, kill_after=float("nan")),
        lambda loop: guard_resources(loop, disk=0),
    ],
)
def test_invalid_options_raise(make):
    with pytest.raises(ValueError, match=r"expected|owns nothing"):
        make(rein.Loop(lambda state: None))


@pytest.mark.parametrize("on_failure", ["stop", "skip"])
def test_agent_with_td_errors_per_row_is_guarded(on_failure) -> None:
    """SAC reports the TD error of each row in addition to its losses."""
    guard = UpdateGuard(on_failure)
    environment = Pendulum(num_envs=2, seed=0)
    small = {"hidden": (8,), "batch_size": 8, "learning_starts": 4, "capacity": 100}
    given = environment.single_observation_space, environment.single_action_space
    agent = SAC(*given, **small, seed=0, guard=guard)
    loop = rein.training_loop(agent, environment, epochs=1, iterations=30, check_finite=False)
    guard_updates(loop, guard)

    @loop.action_applied(once=3)
    def poison(state) -> None:
        known = state.step_state
        poisoned = known.transition._replace(reward=known.transition.reward * torch.nan)
        state.step_state = known._replace(transition=poisoned)

    if on_failure == "stop":
        with pytest.raises(NonFiniteError, match="td_error"):
            loop.run()
    else:
        loop.run()
        assert guard.failures > 0
    assert all(torch.isfinite(parameter).all() for parameter in agent.networks.parameters())
