"""Reset options: curricula that handlers set, stored with each episode, resumed and replayed."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import rein
from rein.cli import main
from rein.envs.host.episode_inputs import ResetOptions
from rein.envs.wrappers.observations import FlattenObservation
from rein.envs.wrappers.time import TimeLimit
from rein.episodes.episode_replay import replay
from rein.episodes.recorder import Recorder
from rein.store.memory_store import MemoryStore
from rein.testing.stateful import check_plain, copy_state, first_difference

N = 3
RIGHT = torch.ones(N, dtype=torch.int64)

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")


class Levels(gymnasium.Env[Any, Any]):
    """Observes the level of its options and the step. An episode has 3 steps."""

    observation_space = spaces.Box(-1.0, 99.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.level, self.steps = -1.0 if options is None else options.get("level", -1.0), 0
        return self.observe(), {}

    def observe(self) -> Any:
        return np.array([self.level, self.steps], np.float32)

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observe(), float(self.level), self.steps == 3, False, {}


def make(kind: str = "single", seed: int = 0) -> Any:
    if kind == "vector":
        return rein.make(SyncVectorEnv([Levels] * N, autoreset_mode=AutoresetMode.DISABLED), seed=seed)
    return rein.make(Levels, N, seed, **({} if kind == "single" else {"workers": 2, "mode": kind}))


def levels(observation: Any) -> list[float]:
    return observation[:, 0].tolist()


KINDS = ["single", "processes", "threads", "vector"]


@pytest.mark.parametrize("kind", KINDS)
def test_options_are_used_from_the_next_reset_on(kind: str) -> None:
    environment = make(kind)
    assert environment.episode_options is None
    environment.set_options({"level": 1})
    assert levels(environment.reset()) == [1.0] * N
    environment.set_options({"level": 2}, environments=[0, 2])
    assert environment.episode_options == [{"level": 1}] * N
    for expected in ([1.0] * N, [1.0] * N, [2.0, 1.0, 2.0], [2.0, 1.0, 2.0]):
        assert levels(environment.apply_action(RIGHT).observation) == expected
    assert environment.episode_options == [{"level": 2}, {"level": 1}, {"level": 2}]
    environment.set_options(None)
    environment.reset()
    assert levels(environment.reset()) == [-1.0] * N
    environment.close()


@pytest.mark.parametrize("kind", KINDS)
def test_each_environment_has_separate_options(kind: str) -> None:
    environment = make(kind)
    environment.set_options([{"level": 5}, None, {"level": 7}])
    assert levels(environment.reset()) == [5.0, -1.0, 7.0]
    for _ in range(3):
        time_step = environment.apply_action(RIGHT)
    assert levels(time_step.observation) == [5.0, -1.0, 7.0]
    environment.set_options([{"level": 8}], environments=torch.tensor([1]))
    for _ in range(3):
        time_step = environment.apply_action(RIGHT)
    assert levels(time_step.observation) == [5.0, 8.0, 7.0]
    environment.close()


def test_partial_reset_uses_the_options() -> None:
    environment = make()
    environment.reset()
    environment.set_options({"level": 4})
    assert levels(environment.reset_where(torch.tensor([False, True, False]))) == [-1.0, 4.0, -1.0]


def test_episodes_with_options_equal_those_of_gymnasium() -> None:
    environment = rein.make("CartPole-v1", 2, 0)
    environment.set_options({"low": -0.2, "high": 0.1})
    first = environment.reset()
    for index, seed in enumerate(environment.episode_seeds.tolist()):
        expected, _ = gymnasium.make("CartPole-v1").reset(seed=seed, options={"low": -0.2, "high": 0.1})
        assert first[index].tolist() == expected.tolist()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_vector_environment_that_resets_itself_refuses_options(mode: AutoresetMode) -> None:
    environment = rein.make(SyncVectorEnv([Levels] * N, autoreset_mode=mode))
    with pytest.raises(ValueError, match="set_options needs the autoreset mode DISABLED"):
        environment.set_options({"level": 1})


@pytest.mark.parametrize(
    ("options", "environments", "error", "message"),
    [
        ({"level": object()}, None, TypeError, r"options\['level'\]: reset options are stored as JSON"),
        ({"level": {1: 2}}, None, TypeError, "keys of reset options must be strings"),
        ({"level": float("nan")}, None, ValueError, "must be finite"),
        (3, None, TypeError, "not iterable"),
        ([3], [0], TypeError, "must be a dictionary or None, got 3"),
        ([{}], None, ValueError, "got 1 dictionaries of options for 3 environments"),
        ({}, [3], ValueError, "got 3, but there are 3 environments"),
    ],
)
def test_invalid_options_raise(options: Any, environments: Any, error: type[Exception], message: str) -> None:
    environment = make()
    with pytest.raises(error, match=message):
        environment.set_options(options, environments)
    assert environment.episode_options is None


def test_options_are_copied_and_become_json_values() -> None:
    options = ResetOptions(1)
    given = {"level": np.float32(0.5), "size": (1, np.int64(2)), "map": np.eye(2), "name": "a", "on": True}
    options.set(given, None)
    given["level"] = 9
    got = options.begin(0)
    assert got == {"level": 0.5, "size": [1, 2], "map": [[1.0, 0.0], [0.0, 1.0]], "name": "a", "on": True}
    assert json.loads(json.dumps(got)) == got
    got["level"] = 3  # type: ignore[index]
    assert options.of(0)["level"] == 0.5  # type: ignore[index]


def test_changes_of_returned_options_do_not_change_the_episode() -> None:
    environment = make()
    environment.set_options({"level": 1, "map": [1]})
    environment.reset()
    options = environment.episode_options[0]
    options["level"] += 1
    options["map"].append(2)
    assert environment.episode_options == [{"level": 1, "map": [1]}] * N
    environment.set_options(options)
    assert levels(environment.reset()) == [2.0] * N


@pytest.mark.parametrize("wrap", [lambda x: x, FlattenObservation, functools.partial(TimeLimit, max_episode_steps=2)])
def test_loaded_environment_continues_bit_for_bit(wrap: Any) -> None:
    one, other = wrap(make()), wrap(make(seed=1))
    one.set_options({"level": 1})
    one.reset()
    one.apply_action(RIGHT)
    one.set_options([{"level": 2}, None, {"level": 3}])
    check_plain(one.state_dict())
    other.load_state_dict(copy_state(one.state_dict()))
    for _ in range(10):
        assert first_difference(one.apply_action(RIGHT), other.apply_action(RIGHT)) is None
        assert one.episode_options == other.episode_options


def test_vector_environment_keeps_its_options_on_resume() -> None:
    one, other = make("vector"), make("vector", 1)
    one.set_options([{"level": 2}, None, {"level": 3}])
    one.reset()
    other.load_state_dict(copy_state(one.state_dict()))
    assert levels(other.reset()) == [2.0, -1.0, 3.0]


def test_wrapper_has_set_options_only_if_the_environment_has() -> None:
    assert hasattr(FlattenObservation(make()), "set_options")
    assert not hasattr(FlattenObservation(rein.envs.CartPole(2)), "set_options")


def trained(store: Any, epochs: int = 4) -> Any:
    """Return a loop that raises the level in each epoch, in the first two environments."""
    environment = make()
    agent = rein.PPO(environment, seed=0, rollout_steps=5)
    loop = rein.training_loop(agent, environment, store, epochs=epochs, iterations=5)

    @loop.epoch_ended
    def raise_level(state: Any) -> None:
        environment.set_options({"level": int(state.epoch)}, environments=[0, 1])

    return loop


def test_options_are_stored_with_each_episode(tmp_path: Path) -> None:
    trained(tmp_path / "run").run()
    run = rein.open_run(tmp_path / "run")
    assert any(run.episodes["options"] == b"")
    seen = set()
    for id in run.episodes["id"].tolist():
        episode = run.episode(id)
        level = float(episode.fields["observation"][0, 0])
        assert episode.options == (None if level < 0 else {"level": int(level)})
        seen.add((episode.environment, level))
    assert {level for environment, level in seen if environment == 2} == {-1.0}
    assert {level for environment, level in seen if environment == 0} >= {-1.0, 1.0, 2.0}


def test_stores_agree(tmp_path: Path) -> None:
    memory = MemoryStore()
    trained(memory).run()
    trained(tmp_path / "run").run()
    run = rein.open_run(tmp_path / "run")
    loaded = MemoryStore()
    loaded.load_state_dict(copy_state(memory.state_dict()))
    for store in (memory, loaded):
        for trajectory in store.trajectories:
            expected, got = trajectory.episodes.options, run.trajectory(trajectory.epoch).episodes.options
            assert (expected is None and got is None) or expected.tolist() == got.tolist()
    assert memory.trajectories[0].episodes.options is None
    assert memory.trajectories[-1].episodes.options.tolist().count(b"") == 1


def test_compacted_run_keeps_options(tmp_path: Path) -> None:
    loop = trained(tmp_path / "run")
    loop.run()
    loop.parts["store"].close()
    main(["compact", str(tmp_path / "run"), str(tmp_path / "small")])
    one, other = (rein.open_run(tmp_path / name).episodes["options"] for name in ("run", "small"))
    assert one.tolist() == other.tolist()


def test_replayed_episodes_agree(tmp_path: Path) -> None:
    trained(tmp_path / "run").run()
    run = rein.open_run(tmp_path / "run")
    episodes = [run.episode(id) for id in run.episodes["id"].tolist()]
    assert any(episode.options for episode in episodes)
    environment = make("processes", 5)
    assert all(result.difference is None for result in replay(environment, episodes))
    environment.close()
    without = [episode._replace(options=None) for episode in episodes]
    assert any(result.difference is not None for result in replay(make(seed=5), without))


class NeedsOptions(Levels):
    """Cannot be reset without options."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        assert options is not None
        return super().reset(seed=seed, options=options)


def test_episodes_that_begin_during_a_replay_have_options(tmp_path: Path) -> None:
    environment = rein.make(NeedsOptions, N, 0)
    environment.set_options({"level": 1})
    agent = rein.PPO(environment, seed=0, rollout_steps=8)
    rein.training_loop(agent, environment, tmp_path / "run", epochs=1, iterations=8).run()
    run = rein.open_run(tmp_path / "run")
    episodes = [run.episode(id) for id in run.episodes["id"].tolist()]
    assert all(result.difference is None for result in replay(rein.make(NeedsOptions, N), episodes))


def test_replay_refuses_environments_without_options(tmp_path: Path) -> None:
    trained(tmp_path / "run").run()
    run = rein.open_run(tmp_path / "run")
    episode = next(run.episode(id) for id in run.episodes["id"].tolist() if run.episodes["options"][id])
    with pytest.raises(ValueError, match="recorded with reset options, but CartPole has no set_options"):
        replay(rein.envs.CartPole(1), [episode])


def test_completed_episode_has_its_options() -> None:
    environment = make()
    environment.set_options({"level": 1}, environments=[0])
    loop = rein.training_loop(rein.PPO(environment, seed=0, rollout_steps=4), environment, epochs=1, iterations=4)
    seen = []

    @loop.episodes_completed
    def keep(state: Any) -> None:
        seen.extend((episode.environment, episode.options) for episode in state.episodes_completed)

    loop.run()
    assert seen == [(0, {"level": 1}), (1, None), (2, None)]


def test_recorder_stores_options_of_evaluated_episodes(tmp_path: Path) -> None:
    environment = make()
    environment.set_options({"level": 6}, environments=[1])
    agent = rein.PPO(environment, seed=0)
    store = rein.HDF5Store(tmp_path / "played")
    rein.evaluate(agent, environment, episodes=N, recorder=Recorder(store, N))
    store.close()
    table = rein.open_run(tmp_path / "played").episodes
    assert table["options"].tolist() == [b"", b'{"level": 6}', b""]


@pytest.mark.parametrize("text", [b"[1]", b"{", b"\xff", b"[" * 9_999])
def test_damaged_options_are_refused(tmp_path: Path, text: bytes) -> None:
    memory = MemoryStore()
    trained(memory, epochs=3).run()
    store = rein.HDF5Store(tmp_path / "run")
    for trajectory in memory.trajectories:
        texts = np.array([text] * len(trajectory.episodes.id))
        store.append(trajectory._replace(episodes=trajectory.episodes._replace(options=texts)))
    store.close()
    run = rein.open_run(tmp_path / "run")
    with pytest.raises(rein.errors.StoreError, match="reset options are not a JSON dictionary"):
        run.episode(0)
    with pytest.raises(SystemExit):
        main(["verify", str(tmp_path / "run")])


@pytest.mark.parametrize(("epochs", "expected"), [(1, False), (3, True)])
def test_only_files_with_options_have_the_dataset(tmp_path: Path, epochs: int, expected: bool) -> None:
    trained(tmp_path / "run", epochs).run()
    (path,) = (tmp_path / "run" / "trajectories").glob("*.h5")
    with h5py.File(path) as file:
        assert ("entry/episodes/options" in file) == expected
