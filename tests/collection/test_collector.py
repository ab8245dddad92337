"""Tests of collection from environments that do not step together."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.agents.base.action_noise import OrnsteinUhlenbeck
from rein.envs.gymnasium.adapter import GymnasiumEnvironment
from rein.loop.state import State
from rein.networks.recurrent import LSTM
from rein.ops.trees import map_tree
from rein.types import TimeStep, Tree
from tests.collection.transitions import check_transitions


class Shuffled(GymnasiumEnvironment):
    """Environments that finish their steps in random order."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.order = random.Random(0)
        self.sent: dict[int, Tree] = {}
        self.batches: list[int] = []
        self.furthest = 0
        self.steps = [0] * self.num_envs

    def send(self, action: Tree, rows: Sequence[int]) -> None:
        assert not self.sent.keys() & set(rows), "a row was sent while it was stepping"
        self.batches.append(len(rows))
        for place, row in enumerate(rows):
            self.sent[row] = map_tree(lambda x, place=place: x[place], action)

    def receive(self, timeout: float | None = None) -> tuple[list[int], TimeStep]:
        rows = sorted(self.order.sample(sorted(self.sent), self.order.randint(1, len(self.sent))))
        action = map_tree(lambda x: x.new_zeros(self.num_envs, *x.shape), self.sent[rows[0]])
        mask = torch.zeros(self.num_envs, dtype=torch.bool)
        for row in rows:
            chosen = self.sent.pop(row)
            map_tree(lambda x, new, row=row: x[row].copy_(new), action, chosen)
            mask[row] = True
            self.steps[row] += 1
        self.furthest = max(self.furthest, max(self.steps) - min(self.steps))
        time_step = self.apply_action_where(action, mask)
        return rows, map_tree(lambda x: x[rows], time_step)


LSTM_CORE = functools.partial(LSTM, features=8)
AGENTS: dict[str, Any] = {
    "PPO": functools.partial(rein.PPO, rollout_steps=8, update_epochs=2),
    "recurrent PPO": functools.partial(rein.PPO, rollout_steps=8, update_epochs=2, core=LSTM_CORE),
    "A2C": rein.A2C,
    "IMPALA": functools.partial(rein.IMPALA, rollout_steps=8),
    "PQN": functools.partial(rein.PQN, rollout_steps=8),
    "DQN": functools.partial(rein.DQN, learning_starts=50, batch_size=8),
    "RecurrentDQN": functools.partial(rein.RecurrentDQN, learning_starts=100, batch_size=2, sequence_length=4),
    "DiscreteSAC": functools.partial(rein.DiscreteSAC, learning_starts=100, batch_size=8),
}
CONTINUOUS: dict[str, Any] = {
    "SAC": functools.partial(rein.SAC, learning_starts=100, batch_size=8),
    "DDPG": functools.partial(rein.DDPG, learning_starts=50, batch_size=8, noise=OrnsteinUhlenbeck()),
}
COLLECTIONS = {"first come": rein.FirstCome(), "asynchronous": rein.Asynchronous(ahead=8)}


def pendulums() -> Shuffled:
    return Shuffled("Pendulum-v1", 4, seed=1, max_episode_steps=20)


def cart_poles() -> Shuffled:
    return Shuffled("CartPole-v1", 4, seed=1)


@pytest.mark.default_cases(
    "PPO-first come", "recurrent PPO-asynchronous", "A2C-asynchronous", "DQN-first come", "SAC-asynchronous"
)
@pytest.mark.parametrize("collection", COLLECTIONS)
@pytest.mark.parametrize("name", [*AGENTS, *CONTINUOUS])
def test_transitions_equal_those_of_a_plain_loop_with_the_same_actions(
    name: str, collection: str, tmp_path: Path
) -> None:
    env = cart_poles() if name in AGENTS else pendulums()
    agent = (AGENTS | CONTINUOUS)[name](env, hidden=(8,), seed=0)
    options: dict[str, Any] = {"iterations": 16, "collection": COLLECTIONS[collection]}
    rein.train(agent, env, tmp_path / "run", env_steps=240, **options)
    assert agent.updates > 0
    assert env.furthest > 1
    assert check_transitions(rein.open_run(tmp_path / "run"), "CartPole-v1" if name in AGENTS else "Pendulum-v1") > 50


@pytest.mark.parametrize("name", ["PPO", "recurrent PPO"])
def test_first_come_actions_of_a_rollout_follow_the_current_policy(name: str) -> None:
    env = cart_poles()
    agent = AGENTS[name](env, hidden=(8,), seed=0, update_epochs=1, minibatches=1)
    loop = rein.training_loop(agent, env, iterations=8, collection=rein.FirstCome())
    divergences = []

    @loop.epoch_ended
    def keep(state: State) -> None:
        divergences.append(state.metrics["approx_kl"])
        assert state.metrics["staleness"] == 0.0

    loop.run(epochs=4)
    assert max(map(abs, divergences)) < 1e-6  # log_prob of the actor and of the learner agree


@pytest.mark.parametrize("collection", COLLECTIONS)
def test_q_learning_acts_with_the_table_that_it_has_learned(collection: str) -> None:
    env = Shuffled("FrozenLake-v1", 4, seed=1, is_slippery=False)
    agent = rein.QLearning(env, epsilon=0.0, seed=0)
    loop = rein.training_loop(agent, env, collection=COLLECTIONS[collection])
    loop.run(epochs=1, iterations=20)
    loop.run(epochs=2, iterations=20)
    acting = loop.parts["collection"]._policy._copy
    loop.parts["collection"]._refresh()
    assert torch.equal(acting.table, agent.table)


def test_an_environment_is_at_most_ahead_steps_ahead() -> None:
    for collection in (rein.FirstCome(ahead=3), rein.Asynchronous(ahead=3)):
        env = cart_poles()
        rein.train(AGENTS["DQN"](env, hidden=(8,)), env, env_steps=400, collection=collection)
        assert 1 < env.furthest <= 3  # how far depends on the times of the threads


def test_min_batch_of_all_environments_is_lock_step() -> None:
    env = cart_poles()
    rein.train(AGENTS["DQN"](env, hidden=(8,)), env, env_steps=200, collection=rein.FirstCome(min_batch=4))
    assert set(env.batches) == {4}


def test_max_wait_of_zero_acts_at_once() -> None:
    env = cart_poles()
    collection = rein.FirstCome(min_batch=4, max_wait=0.0)
    rein.train(AGENTS["DQN"](env, hidden=(8,)), env, env_steps=200, collection=collection)
    assert min(env.batches) == 1


def test_asynchronous_collection_reports_staleness() -> None:
    env = cart_poles()
    agent = AGENTS["DQN"](env, hidden=(8,), seed=0)
    state = rein.train(agent, env, env_steps=512, iterations=32, collection=rein.Asynchronous(ahead=8, refresh=4))
    assert 0.0 < state.history[-1].metrics["staleness"] <= (8 + 1) * 4 + 4  # ahead rows of 4 updates, and refresh


def test_each_environment_has_its_epsilon() -> None:
    env = Shuffled("CartPole-v1", 4, seed=1)
    agent = rein.DQN(env, learning_starts=0, hidden=(8,), learning_rate=0.0, epsilon=1.0, seed=0)
    greedy = agent.policy()
    loop = rein.training_loop(agent, env, collection=rein.Asynchronous(epsilon=[0.0, 0.0, 1.0, 1.0]))
    same = torch.zeros(4)

    @loop.observation_recorded
    def count(state: State) -> None:
        transition = state.step_state.transition
        same.add_((greedy.select_action(transition.observation)[0] == transition.action).float())

    loop.run(epochs=1, iterations=100)
    assert same[:2].tolist() == [100, 100]
    assert same[2:].max() < 75


def test_a_second_run_continues_the_open_episodes(tmp_path: Path) -> None:
    env = pendulums()
    loop = rein.training_loop(
        CONTINUOUS["SAC"](env, hidden=(8,)), env, tmp_path / "run", iterations=15, collection=rein.Asynchronous()
    )
    loop.run(epochs=1)
    loop.run(epochs=3)
    run = rein.open_run(tmp_path / "run")
    assert run.episodes["length"].tolist() == [20] * 8
    assert check_transitions(run, "Pendulum-v1") == 160


@pytest.mark.default_cases("asynchronous")
@pytest.mark.parametrize("collection", COLLECTIONS)
def test_a_resumed_run_begins_new_episodes(collection: str, tmp_path: Path, caplog: Any) -> None:
    def build() -> rein.Loop:
        env = pendulums()
        agent = CONTINUOUS["SAC"](env, hidden=(8,), seed=0)
        store = rein.HDF5Store(tmp_path / "run", exist="resume")
        options: dict[str, Any] = {"iterations": 15, "collection": COLLECTIONS[collection]}
        loop = rein.training_loop(agent, env, store, **options)
        rein.checkpoint(loop)
        return loop

    build().run(epochs=1)
    again = build()
    rein.resume(again, tmp_path / "run")
    again.run(epochs=3)
    assert "could not be restored" in caplog.text
    run = rein.open_run(tmp_path / "run")
    assert check_transitions(run, "Pendulum-v1") > 0
    assert len({*run.episodes["seed"].tolist()}) == len(run.episodes["seed"])


def test_an_error_of_an_environment_ends_the_run() -> None:
    class Broken(Shuffled):
        def receive(self, timeout: float | None = None) -> Any:
            if self.batches.count(1) > 20:
                raise RuntimeError("the motor is hot")
            return super().receive(timeout)

    for collection in COLLECTIONS.values():
        env = Broken("CartPole-v1", 4, seed=1)
        with pytest.raises(RuntimeError, match="motor"):
            rein.train(AGENTS["DQN"](env, hidden=(8,)), env, env_steps=10_000, collection=collection)


def test_handlers_before_the_step_are_refused() -> None:
    env = cart_poles()
    loop = rein.training_loop(AGENTS["A2C"](env), env, collection=rein.FirstCome())
    loop.action_applied(lambda state: None)
    with pytest.raises(ValueError, match="observation_recorded"):
        loop.run(epochs=1)


def test_wrong_combinations_are_refused() -> None:
    plain = rein.envs.CartPole(4)
    with pytest.raises(TypeError, match="workers"):
        rein.training_loop(rein.A2C(plain), plain, collection=rein.FirstCome())
    env = cart_poles()
    with pytest.raises(ValueError, match="episodic"):
        rein.training_loop(rein.A2C(env), env, collection=rein.FirstCome(), episodic=True)
    with pytest.raises(ValueError, match="epsilon"):
        rein.training_loop(rein.DQN(env), env, collection=rein.Asynchronous(epsilon=[0.1]))
    with pytest.raises(TypeError, match="epsilon"):
        rein.training_loop(rein.A2C(env), env, collection=rein.Asynchronous(epsilon=[0.1] * 4))
    with pytest.raises(TypeError, match="part of the environments"):
        rein.training_loop(_NotAnAgent(rein.A2C(env)), env, collection=rein.FirstCome())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_batch"):
        rein.FirstCome(min_batch=0)


class _NotAnAgent:
    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)


class Overheats(gymnasium.Env[Any, Any]):
    """Observes nothing; its process ends, or it raises an error, in the step `limit` of an episode."""

    observation_space, action_space = spaces.Box(0.0, 1.0, (1,)), spaces.Discrete(2)

    def __init__(self, dies: bool, limit: int = 30) -> None:
        self.dies, self.limit = dies, limit

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.left = self.limit
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        if not self.left and self.dies:
            os._exit(3)
        if not self.left:
            raise ZeroDivisionError("the motor is hot")
        return np.zeros(1, np.float32), 1.0, False, False, {}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.default_cases("first come-error", "first come-plain", "first come-death", "asynchronous-error")
@pytest.mark.parametrize("failure", ["error", "death", "plain"])
@pytest.mark.parametrize("collection", COLLECTIONS)
def test_handlers_of_failed_run_after_an_environment_has_failed(collection: str, failure: str, tmp_path: Path) -> None:
    workers = {} if failure == "plain" else {"workers": 2}
    env = rein.make(functools.partial(Overheats, failure == "death"), 4, seed=0, **workers)
    agent = rein.A2C(env, hidden=(8,), rollout_steps=4, seed=0)
    loop = rein.training_loop(agent, env, tmp_path / "run", iterations=8, collection=COLLECTIONS[collection])
    called, error = [], rein.errors.WorkerDied if failure == "death" else ZeroDivisionError
    loop.failed(lambda state: called.append(state.epoch))
    with pytest.raises(error) as caught:
        loop.run(epochs=9)
    env.close()
    assert called
    run = rein.open_run(tmp_path / "run")
    assert len(run.epochs["number"]) == called[0] - 1 > 0
    (summary,) = rein.list_runs(tmp_path)
    assert (summary.status, summary.note) == ("failed", f"{error.__name__}: {caught.value}")


def test_handlers_of_failed_run_if_an_environment_fails_after_another_error() -> None:
    class Breaks(Shuffled):
        is_broken = False

        def receive(self, timeout: float | None = None) -> Any:
            if self.is_broken:
                raise RuntimeError("the motor is hot")
            return super().receive(timeout)

    env = Breaks("CartPole-v1", 4, seed=1)
    loop = rein.training_loop(AGENTS["DQN"](env, hidden=(8,)), env, collection=rein.FirstCome())
    called: list[str] = []
    loop.failed(lambda state: called.append(state.status))

    @loop.observation_recorded
    def fail(state: State) -> None:
        if loop.parts["collection"]._in_flight():
            env.is_broken = True
            raise LookupError("the log is full")

    with pytest.raises(LookupError, match="the log is full"):
        loop.run(epochs=1)
    assert called == ["failed"]


def test_run_after_a_failed_environment_begins_new_episodes() -> None:
    env = rein.make(functools.partial(Overheats, False), 4, seed=0)
    loop = rein.training_loop(rein.A2C(env, hidden=(8,), seed=0), env, iterations=20, collection=rein.FirstCome())
    with pytest.raises(ZeroDivisionError):
        loop.run(epochs=2)
    state = loop.run(epochs=2)
    assert state.status == "completed"
    assert state.epoch == 2


@pytest.mark.parametrize("kind", [rein.DQN, rein.RecurrentDQN])
def test_actions_before_learning_starts_are_uniform_whatever_epsilon_is(kind: Any) -> None:
    env = Shuffled("CartPole-v1", 4, seed=1)
    agent = kind(env, learning_starts=100_000, hidden=(8,), seed=0)
    loop = rein.training_loop(agent, env, collection=rein.Asynchronous(epsilon=[0.0] * 4))
    chosen = torch.zeros(4)

    @loop.observation_recorded
    def count(state: State) -> None:
        chosen.add_(state.step_state.transition.action)

    loop.run(epochs=1, iterations=200)
    assert ((chosen > 70) & (chosen < 130)).all()  # 100 are expected, with a standard deviation of 7
