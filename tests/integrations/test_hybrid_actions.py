"""Actions with components through a whole run: Gymnasium, processes, store, resume, replay, saved policies, Minari."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

import rein
from rein.agents.a2c import A2C
from rein.agents.impala import IMPALA
from rein.agents.ppo import PPO
from rein.envs.gymnasium import GymnasiumEnvironment, GymnasiumVectorEnvironment
from rein.episodes.episode_replay import replay
from rein.ops.trees import leaves, map_tree
from rein.testing.environment_contract import random_actions
from rein.testing.stateful import first_difference
from tests.workers import in_workers

N = 4
SMALL: dict[str, Any] = {"rollout_steps": 8, "hidden": (8,), "seed": 0}


class Drone(gymnasium.Env[Any, Any]):
    """Gear, thrust in a matrix, and lights. The observation depends on every number of every action."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,))
    action_space = spaces.Tuple(
        [
            spaces.Discrete(3, start=-1),
            spaces.Box(-1.0, 1.0, (2, 2), np.float64),
            spaces.Dict(lights=spaces.MultiBinary(2), level=spaces.Box(-2, 2, (1,), np.int32)),
        ]
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, 4)
        return self.place, {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        gear, thrust, more = action
        self.place = self.place + 0.1 * gear * thrust.reshape(4) + 0.1 * more["lights"].sum() + 0.1 * more["level"]
        ended = bool(self.np_random.uniform() < 0.1)
        return self.place, -float(np.abs(self.place).mean()), ended, False, {}


class Board(gymnasium.Env[Any, Any]):
    """Drone whose action is a matrix of bits."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,))
    action_space = spaces.MultiBinary([2, 3])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, 1)
        return self.place, {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.place = self.place + (action * [[1, 2, 3], [-1, -2, -3]]).sum()
        return self.place, -float(np.abs(self.place).mean()), bool(self.np_random.uniform() < 0.1), False, {}


def loop_of(store: Any, kind: Any = PPO, make: Any = Drone) -> tuple[Any, Any, Any]:
    environment = GymnasiumEnvironment(make, N, seed=3)
    agent = kind(environment, **SMALL)
    loop = rein.training_loop(agent, environment, store)
    rein.checkpoint(loop, every=1)
    return loop, agent, environment


@pytest.mark.default_cases("PPO-Board")
@pytest.mark.parametrize(("kind", "make"), [(PPO, Drone), (PPO, Board), (A2C, Drone), (IMPALA, Drone)])
def test_resumed_run_equals_a_run_without_a_break(tmp_path: Path, kind: Any, make: Any) -> None:
    """The open episodes are resumed by repeating their actions."""
    loop, whole, _ = loop_of(rein.HDF5Store(tmp_path / "whole"), kind, make)
    loop.run(epochs=4, iterations=13)
    loop, _, _ = loop_of(rein.HDF5Store(tmp_path / "parts"), kind, make)
    loop.run(epochs=2, iterations=13)
    loop, resumed, _ = loop_of(rein.HDF5Store(tmp_path / "parts", exist="resume"), kind, make)
    rein.resume(loop)
    loop.run(epochs=4, iterations=13)
    assert first_difference(whole.state_dict(), resumed.state_dict()) is None
    fields = [[dict(trajectory.fields) for trajectory in rein.open_run(tmp_path / name)] for name in ("whole", "parts")]
    assert first_difference(*map_tree(lambda x: torch.from_numpy(np.array(x)), fields)) is None


@pytest.mark.default_cases("Board")
@pytest.mark.parametrize("make", [Drone, Board])
def test_stored_episodes_are_replayed_bit_by_bit(tmp_path: Path, make: Any) -> None:
    loop, _, _ = loop_of(rein.HDF5Store(tmp_path / "run"), make=make)
    loop.run(epochs=3, iterations=20)
    run = rein.open_run(tmp_path / "run")
    episodes = [run.episode(index) for index in range(8)]
    for result in replay(GymnasiumEnvironment(make, N, seed=9), episodes):
        assert result.difference is None


class FilmedDrone(Drone):
    """Drone that draws its place."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def render(self) -> Any:
        shade = (np.abs(self.place) * 1000).astype(np.int64) % 256
        return np.repeat(shade.astype(np.uint8).reshape(2, 2, 1), 3, axis=2)


def test_replay_films_the_recorded_states(tmp_path: Path) -> None:
    loop, _, _ = loop_of(rein.HDF5Store(tmp_path / "run"), make=FilmedDrone)
    loop.run(epochs=3, iterations=20)
    episode = max((rein.open_run(tmp_path / "run").episode(index) for index in range(8)), key=lambda each: each.length)
    frames: list[Any] = []
    (result,) = replay(
        GymnasiumEnvironment(FilmedDrone, N, seed=9, render_mode="rgb_array"), [episode], film=frames.append
    )
    assert result.difference is None and len(frames) == episode.length > 2
    places = episode.fields["observation"]
    shades = (np.abs(np.asarray(places)) * 1000).astype(np.int64)
    for frame, shade in zip(frames, shades, strict=True):  # observations are stored in float32
        assert (np.abs(frame[..., 0].reshape(4).astype(np.int64) - shade % 256) % 255 <= 1).all()


def test_actions_are_stored_as_groups_of_fields(tmp_path: Path) -> None:
    loop, _, _ = loop_of(rein.HDF5Store(tmp_path / "run"))
    loop.run(epochs=1, iterations=20)
    trajectory = next(iter(rein.open_run(tmp_path / "run")))
    shapes = {path: (x.shape[2:], str(x.dtype)) for path, x in leaves(trajectory.fields["action"])}
    assert shapes == {
        "0": ((), "int64"),
        "1": ((2, 2), "float32"),
        "2.lights": ((2,), "int64"),
        "2.level": ((1,), "int64"),
    }


def test_saved_policy_acts_like_the_agent(tmp_path: Path) -> None:
    loop, agent, environment = loop_of(rein.HDF5Store(tmp_path / "run"))
    loop.run(epochs=2, iterations=10)
    observation = torch.rand(3, 4)
    loaded = rein.load_policy(tmp_path / "run").select_action(observation)[0]
    assert first_difference(agent.policy().select_action(observation)[0], loaded) is None
    assert rein.evaluate(rein.load_policy(tmp_path / "run"), environment, 5).episode_return.shape == (5,)


def test_actions_in_processes_equal_those_of_single_environments() -> None:
    def episode(environment: Any) -> list[Any]:
        first = environment.reset(seed=5)
        steps = [environment.apply_action(action) for action in random_actions(environment, 12)]
        environment.close()
        return [first, *steps]

    expected = episode(GymnasiumEnvironment(Drone, N))
    assert first_difference(expected, episode(in_workers(Drone, N, workers=2))) is None
    assert len(episode(GymnasiumVectorEnvironment(SyncVectorEnv([Drone] * N)))) == 13  # Drone checks its actions
