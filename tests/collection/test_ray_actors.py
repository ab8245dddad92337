"""Tests of collection by Ray actors."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import rein
from rein.loop.state import State
from tests.collection.transitions import check_transitions

ray: Any = pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    """Two nodes, simulated on this machine."""
    nodes = importlib.import_module("ray.cluster_utils").Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    nodes.add_node(num_cpus=2)
    ray.init(address=nodes.address, log_to_driver=False)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def test_transitions_equal_those_of_a_plain_loop_with_the_same_actions(tmp_path: Path) -> None:
    env = rein.make("CartPole-v1", 4, seed=1)
    agent = rein.DQN(env, learning_starts=100, batch_size=16, hidden=(16,), seed=0)
    collection = rein.RayActors(actors=2, fragment=16)
    state = rein.train(agent, env, tmp_path / "run", env_steps=1024, iterations=32, collection=collection)
    run = rein.open_run(tmp_path / "run")
    assert check_transitions(run, "CartPole-v1") > 500
    assert len({*run.episodes["seed"].tolist()}) == len(run.episodes["seed"])
    assert state.history[-1].metrics["staleness"] > 0


def test_actors_that_are_killed_are_replaced_and_no_episode_is_stitched(tmp_path: Path) -> None:
    env = rein.make("CartPole-v1", 4, seed=1)
    agent = rein.PPO(env, rollout_steps=16, hidden=(16,), seed=0)
    loop = rein.training_loop(
        agent, env, tmp_path / "run", iterations=32, collection=rein.RayActors(max_restarts=100, fragment=16)
    )
    collector = loop.parts["collection"]

    @loop.epoch_ended
    def kill(state: State) -> None:
        pid = ray.get(collector._actors[state.epoch % 2]._actor.pid.remote())
        os.kill(pid, signal.SIGKILL)

    loop.run(epochs=4)
    assert collector.restarts >= 3
    run = rein.open_run(tmp_path / "run")
    assert check_transitions(run, "CartPole-v1") > 100
    seeds = run.episodes["seed"].tolist()
    assert len({*seeds}) == len(seeds)


def test_too_many_dead_actors_raise_worker_died() -> None:
    env = rein.make("CartPole-v1", 2, seed=1)
    loop = rein.training_loop(
        rein.A2C(env, seed=0), env, iterations=32, collection=rein.RayActors(max_restarts=0, fragment=4)
    )

    @loop.epoch_ended
    def kill(state: State) -> None:
        ray.kill(loop.parts["collection"]._actors[0]._actor)

    with pytest.raises(rein.errors.WorkerDied, match="replaced"):
        loop.run(epochs=3)


def test_an_error_of_an_environment_ends_the_run() -> None:
    class Broken(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            raise RuntimeError("the motor is hot")

    def build() -> Any:
        return Broken(gymnasium.make("CartPole-v1"))

    env = rein.make(build, 2, seed=1)
    with pytest.raises(RuntimeError, match="motor"):
        rein.train(rein.A2C(env, seed=0), env, env_steps=100, collection=rein.RayActors())


def test_a_resumed_run_begins_new_episodes(tmp_path: Path) -> None:
    def build() -> rein.Loop:
        env = rein.make("CartPole-v1", 4, seed=1)
        store = rein.HDF5Store(tmp_path / "run", exist="resume")
        agent = rein.PPO(env, rollout_steps=16, hidden=(16,), seed=0)
        loop = rein.training_loop(agent, env, store, iterations=32, collection=rein.RayActors(fragment=16))
        rein.checkpoint(loop)
        return loop

    build().run(epochs=2)
    again = build()
    rein.resume(again, tmp_path / "run")
    again.run(epochs=4)
    run = rein.open_run(tmp_path / "run")
    assert check_transitions(run, "CartPole-v1") > 100
    assert len({*run.episodes["seed"].tolist()}) == len(run.episodes["seed"])
