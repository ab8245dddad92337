"""PettingZoo's parallel environments as worlds. Tests with mpe2 are skipped if it is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.episodes.replay import replay
from rein.testing import EnvironmentContract, StatefulContract


class Climbers:
    """Parallel environment in which climbers leave at the top. Observations and actions differ in their sizes."""

    metadata: dict[str, Any] = {"render_fps": 5}  # noqa: RUF012
    possible_agents = ("guide_0", "climber_0", "climber_1")

    def __init__(self, top: float = 3.0, limit: int = 15) -> None:
        self.top, self.limit = top, limit
        self.agents: list[str] = []

    def observation_space(self, name: str) -> spaces.Space[Any]:
        return spaces.Box(0.0, 9.0, (3 if name == "guide_0" else 2,))

    def action_space(self, name: str) -> spaces.Space[Any]:
        return spaces.Discrete(2 if name == "guide_0" else 3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.random = np.random.default_rng(seed)
        self.agents, self.steps = [*self.possible_agents], 0
        self.height = {name: self.random.uniform(0, 1) for name in self.agents}
        return self._seen(self.agents), {name: {} for name in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        assert actions.keys() == set(self.agents), "actions of agents that have left, or missing ones"
        assert all(self.action_space(name).contains(action) for name, action in actions.items())
        before, self.steps = self.agents, self.steps + 1
        for name, action in actions.items():
            self.height[name] += 0.2 * action * self.random.uniform(0.5, 1.0)
        reached = {name: self.height[name] > self.top for name in before}
        late = {name: self.steps >= self.limit for name in before}
        self.agents = [name for name in before if not (reached[name] or late[name])]
        rewards = {name: float(actions[name]) for name in before}
        return self._seen(before), rewards, reached, late, {name: {} for name in before}

    def _seen(self, names: Any) -> dict[str, np.ndarray]:
        both = [self.height["climber_0"], self.height["climber_1"]]
        full = {name: [self.height[name], *both] for name in names}
        return {name: np.array(full[name][: 3 if name == "guide_0" else 2], np.float32) for name in names}

    def close(self) -> None:
        pass


def climbers(worlds: int, seed: int | None = 0, **options: Any) -> rein.PettingZooEnvironment:
    return rein.PettingZooEnvironment(Climbers, worlds, seed, **options)


class TestClimbers(EnvironmentContract):
    steps = 60

    @pytest.fixture(autouse=True, params=[False, True])
    def _variant(self, request: pytest.FixtureRequest) -> None:
        self.agent_id = request.param

    def make(self, num_envs: int, seed: int | None) -> Any:
        return climbers(num_envs, seed, agent_id=self.agent_id)


class TestClimbersState(StatefulContract):
    def make(self) -> Any:
        environment = climbers(3)
        environment.reset()
        return environment

    def step(self, part: Any) -> Any:
        return part.apply_action(torch.arange(9) % 3)


def test_spaces_are_padded_and_groups_have_the_original_spaces() -> None:
    environment = climbers(2)
    assert environment.single_observation_space.shape == (3,)
    assert environment.single_action_space.n == 3
    assert not environment.reset()[[1, 2, 4, 5], 2].any()
    groups = environment.groups
    assert {name: group.rows.tolist() for name, group in groups.items()} == {"guide": [0, 3], "climber": [1, 2, 4, 5]}
    assert groups["guide"].observation_space.shape == (3,)
    assert groups["climber"].action_space.n == 3
    assert groups["guide"].action_space.n == 2


def test_agent_id_is_one_hot() -> None:
    environment = climbers(2, agent_id=True)
    observation = environment.reset()
    assert environment.single_observation_space.shape == (6,)
    assert torch.equal(observation[:, 3:], torch.eye(3).repeat(2, 1))


def test_action_that_an_agent_does_not_have_becomes_its_last() -> None:
    environment = climbers(1)
    environment.reset()
    assert environment.apply_action(torch.tensor([2, 2, 2])).reward.tolist() == [1.0, 2.0, 2.0]


def test_environment_in_which_agents_take_turns_is_refused() -> None:
    class Turns(Climbers):
        def agent_iter(self) -> Any:
            raise NotImplementedError

    with pytest.raises(TypeError, match="take turns; give a function that returns a parallel environment"):
        rein.PettingZooEnvironment(Turns)
    with pytest.raises(TypeError, match="must return a parallel environment"):
        rein.PettingZooEnvironment(dict)


def test_training_is_recorded_and_replayed(tmp_path: Path) -> None:
    environment, store = climbers(3), rein.HDF5Store(tmp_path / "run")
    agent = rein.PPO(environment, rollout_steps=20, minibatches=2, hidden=(8,), seed=0)
    loop = rein.training_loop(agent, environment, store, iterations=20)
    metrics = loop.run(epochs=4).metrics
    store.close()
    assert {"return_guide", "return_climber", "world_return"} <= set(metrics)
    run = rein.open_run(tmp_path / "run")
    episodes = [run.episode(number) for number in run.episodes["id"].tolist()]
    assert len(episodes) > 10
    assert [result.difference for result in replay(climbers(3, 5), episodes, run=run)] == [None] * len(episodes)


class TestSimpleSpread(EnvironmentContract):
    num_envs = 3
    steps = 60

    def make(self, num_envs: int, seed: int | None) -> Any:
        module = pytest.importorskip("mpe2.simple_spread_v3")
        return rein.PettingZooEnvironment(module.parallel_env, num_envs, seed, max_cycles=25)


def test_ppo_learns_simple_spread() -> None:
    module = pytest.importorskip("mpe2.simple_spread_v3")
    environment, other = (rein.PettingZooEnvironment(module.parallel_env, 8, seed) for seed in (0, 1))
    agent = rein.PPO(environment, learning_rate=2e-3, rollout_steps=50, gamma=0.9, seed=0)
    before = rein.evaluate(agent, other, 96).mean_return
    rein.train(agent, environment, epochs=25, iterations=50, progress=False)
    assert rein.evaluate(agent, other, 96).mean_return > before + 3.0


def test_groups_of_simple_tag() -> None:
    module = pytest.importorskip("mpe2.simple_tag_v3")
    environment = rein.PettingZooEnvironment(module.parallel_env, 2, 0, continuous_actions=True)
    assert {name: len(group.rows) for name, group in environment.groups.items()} == {"adversary": 6, "agent": 2}
    assert environment.single_observation_space.shape == (16,)
    assert environment.reset().shape == (8, 16)
