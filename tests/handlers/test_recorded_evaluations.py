"""Evaluations recorded in a separate store."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.agents.ppo import PPO
from rein.envs.cartpole import CartPole
from rein.episodes import RandomPolicy, Recorder
from rein.episodes import evaluate as play
from rein.handlers.checkpoint import checkpoint
from rein.handlers.evaluate_every import evaluate_every
from rein.handlers.loggers.attach import attach
from rein.handlers.loggers.csv import CSVLogger
from rein.handlers.record_metrics import record_metrics
from rein.store.compact import compact
from rein.store.memory_store import MemoryStore
from rein.store.verify import verify_run


def make_loop(store: Any, played: Any, episodes: int = 6) -> tuple[rein.Loop, PPO]:
    """Return a loop of six epochs with PPO, evaluated every second epoch."""
    environment = CartPole(num_envs=4, seed=0)
    spaces = environment.single_observation_space, environment.single_action_space
    agent = PPO(*spaces, hidden=(8,), rollout_steps=8, minibatches=1, update_epochs=1, seed=0)
    loop = rein.training_loop(agent, environment, store, epochs=6, iterations=8, seed=0)
    others = CartPole(num_envs=4, seed=1)
    evaluate_every(loop, agent.policy(), others, episodes=episodes, max_episode_steps=30, every=2, store=played)
    return loop, agent


def test_each_round_is_stored_as_an_epoch_of_whole_episodes(tmp_path: Path) -> None:
    store, played = rein.HDF5Store(tmp_path / "run", every=0), rein.HDF5Store(tmp_path / "run" / "evaluation")
    loop, _ = make_loop(store, played)
    means = []
    loop.epoch_ended(every=2)(lambda state: means.append(state.metrics["evaluation_return"]))
    loop.run()
    run = rein.open_run(tmp_path / "run" / "evaluation")
    assert run.epochs["number"].tolist() == [1, 2, 3, 4, 5, 6]  # 3 evaluations of 4 and of 2 episodes
    assert len(run.episodes["id"]) == 18
    assert run.episodes["return"].reshape(3, 6).mean(1).tolist() == pytest.approx(means)
    assert (run.episodes["terminated"] ^ run.episodes["truncated"]).all()
    assert (run.episodes["truncated"] <= (run.episodes["length"] == 30)).all()
    assert run.field("valid").sum() == run.episodes["length"].sum() == len(run.transitions())
    assert verify_run(run.path).problems == []
    assert run.info["parts"]["environment"]["config"]["seed"] == 1  # seed of the evaluation environment
    assert list((tmp_path / "run" / "trajectories").iterdir()) == []


def test_invalid_observation_names_raise_immediately(scripted: Any, listening: Any) -> None:
    environment = scripted([2])
    environment.single_observation_space = spaces.Dict({"a/b": spaces.Discrete(2)})
    loop = rein.Loop(lambda state: None)
    with pytest.raises(ValueError, match=r"'a/b' in observation: .* rename it with an environment wrapper"):
        evaluate_every(loop, listening(environment), environment, episodes=1, store=MemoryStore())
    assert "evaluation_environment" not in loop.parts


def test_recording_does_not_affect_training() -> None:
    kept, plain = make_loop(None, MemoryStore()), make_loop(None, None)
    for loop, *_ in (kept, plain):
        loop.run()
    for a, b in zip(kept[1].networks.parameters(), plain[1].networks.parameters(), strict=True):
        assert torch.equal(a, b)
    found, expected = (
        [record.metrics["evaluation_return"] for record in one[0].state.history if record.epoch % 2 == 0]
        for one in (kept, plain)
    )
    assert found == expected


def test_training_store_and_its_folder_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rein.store.folder.fcntl", None)  # as on Windows, where two stores can open a folder
    store = MemoryStore()
    with pytest.raises(ValueError, match="'store' of the loop already writes"):
        make_loop(store, store)
    with pytest.raises(ValueError, match="'store' of the loop already writes to this folder"):
        make_loop(rein.HDF5Store(tmp_path / "run"), rein.HDF5Store(tmp_path / "run", exist="resume"))


def test_verify_accepts_more_rounds_than_epochs(tmp_path: Path) -> None:
    store, played = rein.HDF5Store(tmp_path / "run"), rein.HDF5Store(tmp_path / "run" / "evaluation")
    loop, _ = make_loop(store, played, episodes=40)
    checkpoint(loop, store, every=2)
    loop.run()
    assert len(rein.open_run(played.path).epochs["number"]) > 6
    assert verify_run(tmp_path / "run").problems == []


@pytest.mark.slow
def test_compacted_evaluations_can_be_resumed(tmp_path: Path) -> None:
    def begin(exist: Any, name: str) -> tuple[rein.Loop, rein.HDF5Store, rein.HDF5Store]:
        store = rein.HDF5Store(tmp_path / name, exist=exist)
        played = rein.HDF5Store(tmp_path / name / "evaluation", exist=exist, max_epochs=1)
        loop, _ = make_loop(store, played)
        checkpoint(loop, store, every=4)
        return loop, store, played

    loop, *stores = begin("error", "run")
    loop.run(epochs=6)
    for store in stores:
        store.close()
    (tmp_path / "run" / "checkpoints" / "epoch-000006.h5").unlink(missing_ok=True)
    compact(tmp_path / "run", tmp_path / "compacted")
    loop, *stores = begin("resume", "compacted")
    rein.resume(loop, tmp_path / "compacted")
    loop.run()
    for store in stores:
        store.close()
    assert rein.open_run(tmp_path / "compacted" / "evaluation").epochs["number"].tolist() == [1, 2, 3, 4, 5, 6]


class Breaking(CartPole):
    """Environment that raises in a chosen step."""

    left = 10**9

    def apply_action(self, action: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("it broke")
        return super().apply_action(action)


def test_failed_round_is_discarded() -> None:
    played, policy = MemoryStore(), make_loop(None, None)[1].policy()
    environment, recorder = Breaking(num_envs=4, seed=1), Recorder(played, 4)
    play(policy, environment, 4, recorder=recorder)
    environment.left = 40  # raise after some episodes have ended
    with pytest.raises(RuntimeError, match="it broke"):
        play(policy, environment, 4, recorder=recorder)
    play(policy, environment, 4, recorder=recorder)
    ids = [number for trajectory in played.trajectories for number in trajectory.episodes.id.tolist()]
    assert ids == list(range(8))
    assert [trajectory.epoch for trajectory in played.trajectories] == [1, 2]
    assert (played.trajectories[1].episodes.length == played.trajectories[1].episodes.episode_return).all()


def test_store_errors_are_raised_with_on_failure_drop() -> None:
    class Full(MemoryStore):
        def append(self, trajectory: Any) -> None:
            raise rein.errors.StoreError("no room")

    environment = CartPole(num_envs=4, seed=0)
    agent = PPO(environment.single_observation_space, environment.single_action_space, rollout_steps=8, seed=0)
    loop = rein.training_loop(agent, environment, epochs=2, iterations=8, seed=0)
    others, options = CartPole(num_envs=4, seed=1), {"episodes": 4, "max_episode_steps": 9, "on_failure": "drop"}
    evaluate_every(loop, agent.policy(), others, store=Full(), **options)
    with pytest.raises(rein.errors.StoreError, match="no room"):
        loop.run()


@pytest.mark.parametrize(("num_envs", "extras", "text"), [(3, {}, "4 environments"), (4, {"reward": 0}, "'reward'")])
def test_invalid_records_raise(num_envs: int, extras: dict[str, Any], text: str) -> None:
    class Constant:
        def select_action(self, observation: Any) -> Any:
            return torch.zeros(4, dtype=torch.int64), extras

        def reset(self, mask: Any = None) -> None:
            pass

    with pytest.raises(ValueError, match=text):
        play(Constant(), CartPole(num_envs=4, seed=0), 4, recorder=Recorder(MemoryStore(), num_envs))


def rows_of(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file without the wall time."""
    with open(path, newline="", encoding="utf-8") as file:
        return [{name: cell for name, cell in row.items() if name != "seconds"} for row in csv.DictReader(file)]


class Asking(CartPole):
    """Environment that calls `ask` in a chosen step."""

    left = 0

    def apply_action(self, action: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            self.ask()
        return super().apply_action(action)


@pytest.mark.default_cases("35")
@pytest.mark.parametrize("step", [5, 35, 60])
def test_interrupted_evaluation_is_recorded_once(tmp_path: Path, step: int) -> None:
    """The interrupt comes in the first round, in a later round, and in a later evaluation."""

    def make(name: str, exist: str) -> tuple[rein.Loop, Asking]:
        store = rein.HDF5Store(tmp_path / name, exist=exist)
        played = rein.HDF5Store(tmp_path / name / "evaluation", exist=exist)
        loop = rein.Loop(lambda state: None, epochs=4, iterations=2)
        loop.own("store", store)
        record_metrics(loop, store.path)
        environment = Asking(num_envs=4, seed=1)
        policy = RandomPolicy(environment.single_action_space, seed=0)
        attach(loop, CSVLogger(tmp_path / name / "mine.csv"), every=2)
        evaluate_every(loop, policy, environment, episodes=6, max_episode_steps=30, every=2, store=played)
        checkpoint(loop, store, every=1)
        return loop, environment

    whole, _ = make("whole", "error")
    whole.run()
    loop, environment = make("broken", "error")
    environment.left, environment.ask = step, lambda: loop.interrupt("enough")
    assert loop.run().reason == "enough"
    for store in (part for part in loop.parts.values() if isinstance(part, rein.HDF5Store)):
        store.close()
    resumed, _ = make("broken", "resume")
    rein.resume(resumed, tmp_path / "broken")
    resumed.run()
    for file in ("metrics.csv", "evaluations.csv", "mine.csv"):
        assert rows_of(tmp_path / "broken" / file) == rows_of(tmp_path / "whole" / file), file
    runs = [rein.open_run(tmp_path / name / "evaluation") for name in ("whole", "broken")]
    for field in ("observation", "action", "reward", "valid"):
        expected, kept = (run.field(field) for run in runs)
        np.testing.assert_array_equal(kept, expected, field)
    assert runs[0].epochs["number"].tolist() == runs[1].epochs["number"].tolist()
    for column in ("id", "first_step", "return", "seed"):
        assert (runs[0].episodes[column] == runs[1].episodes[column]).all(), column
