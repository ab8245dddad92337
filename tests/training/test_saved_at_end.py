"""A run with a store saves its state when it ends, also without `rein.checkpoint`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rein
from rein.store.loading import find
from rein.training.supervised import trainer
from tests import programs

SMALL: dict[str, Any] = {"rollout_steps": 8, "hidden": (8,), "minibatches": 1, "update_epochs": 1}
REPLAY: dict[str, Any] = {"hidden": (8,), "batch_size": 8, "learning_starts": 40, "capacity": 400}


@pytest.fixture(autouse=True)
def _handler_of_a_terminal() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def make(store: Any, kind: Any = rein.PPO, **options: Any) -> rein.Loop:
    env = rein.envs.CartPole(4, seed=0)
    agent = kind(env, seed=0, **(options or SMALL))
    return rein.training_loop(agent, env, store, iterations=8)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("*.h5"))


def resumed(folder: Path, kind: Any = rein.PPO, **options: Any) -> rein.Loop:
    loop = make(rein.HDF5Store(folder, exist="resume"), kind, **options)
    rein.resume(loop)
    return loop


def check_used(folder: Path) -> None:
    """Evaluate a run, predict with its policy and continue it, only from its files and the code of its parts."""
    policy = rein.load_policy(folder)
    assert policy.predict(np.zeros(4)) in (0, 1)
    assert rein.evaluate(policy, rein.envs.CartPole(2, seed=1), episodes=2).mean_return > 0
    loop = resumed(folder)
    before = loop.state.total_iterations
    assert before
    loop.run(epochs=4)
    whole = make(None)
    whole.run(epochs=4)
    pairs = zip(*(each.parts["agent"].networks.parameters() for each in (loop, whole)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_run_can_be_evaluated_and_resumed_exactly(tmp_path):
    make(tmp_path / "run").run(epochs=2)
    assert files(tmp_path / "run") == ["epoch-000002.h5"]
    check_used(tmp_path / "run")


def test_train_saves_its_last_state(tmp_path):
    env = rein.envs.CartPole(4, seed=0)
    rein.train(rein.PPO(env, seed=0, **SMALL), env, tmp_path / "run", epochs=2, iterations=8, progress=False)
    check_used(tmp_path / "run")


def test_first_ctrl_c_saves_the_open_epoch(tmp_path):
    loop = make(tmp_path / "run")
    loop.iteration_completed(once=12)(lambda state: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        loop.run(epochs=4)
    assert files(tmp_path / "run") == ["epoch-000002-iteration-000004.h5"]
    check_used(tmp_path / "run")


def test_each_run_replaces_the_state_of_the_last_one_and_no_other_checkpoint(tmp_path):
    loop = make(tmp_path / "run")
    rein.checkpoint(loop, every=2, keep_last=None)
    loop.run(epochs=3)
    kept = files(tmp_path / "run")
    loop.parts["store"].close()
    loop = resumed(tmp_path / "run")
    for epochs in (4, 5):
        loop.run(epochs=epochs)
    assert files(tmp_path / "run") == [*kept, "epoch-000005.h5"]


def test_run_that_does_nothing_saves_nothing(tmp_path, monkeypatch):
    make(tmp_path / "run").run(epochs=1)
    loop = resumed(tmp_path / "run")
    monkeypatch.setattr(loop.parts["store"].checkpoints, "take", None)
    assert loop.run(epochs=1).status == "completed"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_attached_checkpoint_saves_the_state_once(tmp_path, elsewhere):
    loop, taken = make(tmp_path / "run"), []
    checkpoints = loop.parts["store"].checkpoints
    take = checkpoints.take
    checkpoints.take = lambda *arguments, **options: taken.append(take(*arguments, **options))
    rein.checkpoint(loop, rein.Checkpoints(tmp_path / "other") if elsewhere else None)
    loop.run(epochs=1)
    assert len(taken) == 1
    assert files(tmp_path / "run") == ["epoch-000001.h5"]


def test_failed_run_keeps_the_last_good_checkpoint(tmp_path):
    loop = make(tmp_path / "run")
    loop.run(epochs=1)

    @loop.iteration_completed
    def fail(state):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        loop.run(epochs=2)
    assert files(tmp_path / "run") == ["epoch-000001.h5"]


def test_state_with_nan_parameters_is_not_saved(tmp_path, caplog):
    env = rein.envs.CartPole(4, seed=0)
    agent = rein.PPO(env, seed=0, **SMALL)
    loop = rein.training_loop(agent, env, tmp_path / "run", iterations=8, check_finite=False)
    loop.run(epochs=1)
    next(agent.networks.parameters()).data.fill_(torch.nan)
    loop.run(epochs=2)
    assert files(tmp_path / "run") == ["epoch-000001.h5"]
    assert "not finite" in caplog.text


def test_state_that_cannot_be_saved_is_reported_and_does_not_fail_the_run(tmp_path, caplog):
    loop = make(tmp_path / "run")
    loop.own("mine", type("Mine", (), {"state_dict": lambda self: {"x": object()}, "load_state_dict": None})())
    assert loop.run(epochs=1).status == "completed"
    assert "cannot hold" in caplog.text


def test_objects_that_the_run_does_not_own_are_named_when_it_is_resumed(tmp_path, caplog):
    loop, other = make(tmp_path / "run"), rein.envs.CartPole(1, seed=3)

    @loop.epoch_ended
    def reset_other(state):
        other.reset()

    loop.run(epochs=1)
    assert not caplog.records
    resumed(tmp_path / "run")
    assert "CartPole 'other' in a handler of epoch_ended" in caplog.text


@pytest.mark.parametrize("store", [rein.MemoryStore, lambda: None])
def test_store_without_a_folder_saves_nothing(store):
    assert make(store()).run(epochs=1).status == "completed"


def test_only_the_first_of_several_processes_saves(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["rein.handlers.checkpoint"], "rank", lambda: 1)
    make(tmp_path / "run").run(epochs=1)
    assert files(tmp_path / "run") == []


KINDS = {
    "DQN": (rein.DQN, REPLAY),
    "prioritized": (rein.DQN, {**REPLAY, "prioritized": True}),
    "recurrent": (rein.RecurrentDQN, {**REPLAY, "sequence_length": 4, "burn_in": 0}),
}


@pytest.mark.parametrize(("kind", "options"), KINDS.values(), ids=KINDS)
def test_large_replay_is_left_out_and_filled_again_before_learning_continues(
    tmp_path, monkeypatch, caplog, kind, options
):
    monkeypatch.setattr(sys.modules["rein.handlers.checkpoint"], "MOST_REPLAY", 1000)
    make(tmp_path / "run", kind, **options).run(epochs=4)
    (record,) = caplog.records
    assert "rein.checkpoint(loop)" in record.getMessage()
    assert rein.load_policy(tmp_path / "run").predict(np.zeros(4)) in (0, 1)
    caplog.clear()
    loop = resumed(tmp_path / "run", kind, **options)
    assert "not loaded: the replay" in caplog.text
    agent: Any = loop.parts["agent"]
    env_steps, updates = agent.env_steps, agent.updates
    assert (env_steps, len(agent.replay)) == (128, 0)
    assert updates
    seen = []
    loop.iteration_completed(lambda state: seen.append((agent.env_steps - env_steps, agent.updates > updates)))
    loop.run(epochs=6)
    assert [learns for steps, learns in seen if steps <= 40] == [False] * 10
    assert [learns for steps, learns in seen if steps > 40] == [True] * 6
    assert agent.updates - updates <= 24  # skipped updates are not made later


def test_frames_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["rein.handlers.checkpoint"], "MOST_REPLAY", 1000)

    def build(store: Any) -> rein.Loop:
        env = rein.envs.wrappers.FrameStack(rein.envs.Gridworld(4, seed=0, observation="vector"), 3)
        agent = rein.DQN(env, seed=0, frame_stack=3, **REPLAY)
        return rein.training_loop(agent, env, store, iterations=16)

    build(tmp_path / "run").run(epochs=1)
    loop = build(rein.HDF5Store(tmp_path / "run", exist="resume"))
    rein.resume(loop)
    assert loop.run(epochs=2).status == "completed"


def test_interrupted_refill_continues_after_a_resume(tmp_path, monkeypatch):
    module = sys.modules["rein.handlers.checkpoint"]
    monkeypatch.setattr(module, "MOST_REPLAY", 1000)
    make(tmp_path / "run", rein.DQN, **REPLAY).run(epochs=4)
    monkeypatch.setattr(module, "MOST_REPLAY", 1 << 20)
    loop = resumed(tmp_path / "run", rein.DQN, **REPLAY)
    updates = loop.parts["agent"].updates
    loop.run(epochs=5)
    loop.parts["store"].close()
    loop = resumed(tmp_path / "run", rein.DQN, **REPLAY)
    agent: Any = loop.parts["agent"]
    loop.run(epochs=5 + 1)
    assert len(agent.replay) == 64
    assert 0 < agent.updates - updates <= 24


def test_learners_of_a_population_are_saved_together(tmp_path):
    def build(store: Any) -> rein.Loop:
        env = rein.envs.CartPole(4, seed=0)
        return rein.training_loop(rein.Population(rein.PPO, env, learners=2, seed=0, **SMALL), env, store, iterations=8)

    build(tmp_path / "run").run(epochs=1)
    loop = build(rein.HDF5Store(tmp_path / "run", exist="resume"))
    rein.resume(loop)
    assert loop.parts["agent"].agent(1).env_steps == 16


def test_offline_and_supervised_runs_are_saved(tmp_path):
    env = rein.envs.CartPole(4, seed=0)
    rein.train(rein.PPO(env, seed=0, **SMALL), env, tmp_path / "data", epochs=1, iterations=8, progress=False)
    agent = rein.BC(env, seed=0, hidden=(8,), batch_size=8)
    rein.offline_loop(agent, rein.open_run(tmp_path / "data"), tmp_path / "offline", iterations=2).run(epochs=1)
    assert rein.load_policy(tmp_path / "offline").predict(np.zeros(4)) in (0, 1)
    model = torch.nn.Linear(2, 1)
    loop = trainer(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters()), tmp_path / "fit")
    loop.run([(torch.ones(4, 2), torch.ones(4, 1))], epochs=1)
    assert find(tmp_path / "fit").state["parts"]


SCRIPT = """
import rein, sys
env = rein.envs.CartPole(4, seed=0)
agent = rein.PPO(env, seed=0, rollout_steps=8, hidden=(8,), minibatches=1, update_epochs=1)
if sys.argv[1] == "train":
    print("running", flush=True)
    rein.train(agent, env, "run", epochs=int(sys.argv[2]), iterations=8)
elif sys.argv[1] == "resume":
    loop = rein.training_loop(agent, env, rein.HDF5Store("run", exist="resume"), iterations=8)
    rein.resume(loop)
    before = loop.state.total_iterations
    loop.run(epochs=loop.state.epoch + 1)
    print(before > 0 and loop.state.total_iterations > before)
else:
    print(rein.load_policy("run").predict([0.0, 0.0, 0.0, 0.0]) in (0, 1))
"""


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [False, True])
def test_run_is_evaluated_and_resumed_in_new_processes(tmp_path, interrupted):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, str(script), "train", "1000000" if interrupted else "2"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        running.stdout.readline()
        while interrupted and not (tmp_path / "run/metrics.csv").exists():
            assert running.poll() is None
        if interrupted:
            running.send_signal(signal.SIGINT)
        _, errors = running.communicate()
    assert (running.returncode != 0) == interrupted, errors
    assert not interrupted or "rein.resume(loop, " in errors
    for arguments in ([script, "predict"], [script, "resume"]):
        done = programs.run(*arguments, cwd=tmp_path)
        assert done.stdout.strip() == "True"
    programs.run("-m", "rein", "evaluate", "run", "--episodes", "2", cwd=tmp_path)
