"""PettingZoo's parallel environments as worlds. `make test-compat` tests those of mpe2."""

from __future__ import annotations

import copy
import functools
import math
import operator
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.episodes.episode_replay import replay
from rein.errors import EnvironmentContractError, WorkerDied
from rein.testing import EnvironmentContract, StatefulContract
from rein.testing.stateful import first_difference


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
        return part.apply_action(torch.tensor([1, 2, 0] * 3))


def test_spaces_are_padded_and_groups_have_the_original_spaces() -> None:
    environment = climbers(2)
    assert environment.single_observation_space["observation"].shape == (3,)
    assert environment.single_observation_space["action_mask"] == spaces.MultiBinary(3)
    assert environment.single_action_space.n == 3
    observation = environment.reset()
    assert not observation["observation"][[1, 2, 4, 5], 2].any()
    assert observation["action_mask"].tolist() == [[1, 1, 0], [1, 1, 1], [1, 1, 1]] * 2
    groups = environment.groups
    assert {name: group.rows.tolist() for name, group in groups.items()} == {"guide": [0, 3], "climber": [1, 2, 4, 5]}
    assert groups["guide"].observation_space.shape == (3,)
    assert groups["climber"].action_space.n == 3
    assert groups["guide"].action_space.n == 2


def test_agent_id_is_one_hot() -> None:
    environment = climbers(2, agent_id=True)
    observation = environment.reset()["observation"]
    assert environment.single_observation_space["observation"].shape == (6,)
    assert not observation[[1, 2, 4, 5], 2].any()
    assert torch.equal(observation[:, 3:], torch.eye(3).repeat(2, 1))


def test_action_that_an_agent_does_not_have_raises() -> None:
    environment = climbers(2)
    environment.reset()
    with pytest.raises(EnvironmentContractError, match=r"row 3: the agent 'guide_0' .* actions 0 to 1, got 2"):
        environment.apply_action(torch.tensor([1, 2, 2, 2, 2, 2]))


@pytest.mark.parametrize("agent", ["PPO", "DQN"])
def test_agents_choose_only_actions_that_their_row_has(agent: str) -> None:
    environment = climbers(2)
    kind: Any = getattr(rein, agent)
    options = {"rollout_steps": 10, "minibatches": 2} if agent == "PPO" else {"learning_starts": 30}
    loop = rein.training_loop(kind(environment, hidden=(8,), seed=0, **options), environment, iterations=40)
    loop.run(epochs=2)  # other actions raise an error
    rein.evaluate(loop.parts["agent"], climbers(2, 1), 12)


class MaskedClimbers(Climbers):
    """Climbers may not stay where they are in odd steps. The mask is an entry of the observation, or in the infos."""

    where = "observation"

    def observation_space(self, name: str) -> spaces.Space[Any]:
        space = super().observation_space(name)
        if self.where == "info":
            return space
        mask = spaces.Box(0, 1, (self.action_space(name).n,), np.int8)
        return spaces.Dict({"observation": space, "action_mask": mask})

    def mask(self, name: str) -> np.ndarray:
        mask = np.ones(self.action_space(name).n, np.int8)
        mask[0] = self.steps % 2 == 0
        return mask

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        observations, infos = super().reset(seed)
        return self._masked(observations, infos)

    def step(self, actions: dict[str, int]) -> Any:
        assert all(self.mask(name)[action] for name, action in actions.items())
        observations, *results, infos = super().step(actions)
        observations, infos = self._masked(observations, infos)
        return observations, *results, infos

    def _masked(self, observations: Any, infos: Any) -> Any:
        if self.where == "info":
            return observations, {name: {"action_mask": self.mask(name)} for name in observations}
        return {name: {"observation": x, "action_mask": self.mask(name)} for name, x in observations.items()}, infos


class ClimbersWithInfos(MaskedClimbers):
    where = "info"


def masked(where: str, worlds: int, seed: int | None = 0, **options: Any) -> rein.PettingZooEnvironment:
    if where == "info":
        return rein.PettingZooEnvironment(ClimbersWithInfos, worlds, seed, action_mask=True, **options)
    return rein.PettingZooEnvironment(MaskedClimbers, worlds, seed, **options)


@pytest.mark.slow
class TestMaskedClimbers(EnvironmentContract):
    steps = 60

    @pytest.fixture(autouse=True, params=["observation", "info"])
    def _variant(self, request: pytest.FixtureRequest) -> None:
        self.where = request.param

    def make(self, num_envs: int, seed: int | None) -> Any:
        return masked(self.where, num_envs, seed)


@pytest.mark.parametrize("agent_id", [False, True])
@pytest.mark.parametrize("where", ["observation", "info"])
def test_masks_of_agents_are_padded_with_zeros(where: str, agent_id: bool) -> None:
    environment = masked(where, 1, agent_id=agent_id)
    assert environment.reset()["action_mask"].tolist() == [[1, 1, 0], [1, 1, 1], [1, 1, 1]]
    time_step = environment.apply_action(torch.tensor([0, 1, 2]))
    assert time_step.observation["action_mask"].tolist() == [[0, 1, 0], [0, 1, 1], [0, 1, 1]]
    assert time_step.observation["observation"].shape == (3, 6 if agent_id else 3)
    mask_space = environment.groups["guide"].observation_space["action_mask"]
    assert mask_space.shape == (2,)


def test_masks_in_infos_that_are_not_used_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with_infos = rein.PettingZooEnvironment(ClimbersWithInfos, 1, 0)
    with_infos.reset()
    assert "info['action_mask'] is not used" in caplog.text
    with pytest.raises(EnvironmentContractError, match=r"expected info\['action_mask'\] from reset"):
        climbers(1, action_mask=True).reset()


class Stuck(MaskedClimbers):
    def mask(self, name: str) -> np.ndarray:
        return np.zeros(self.action_space(name).n, np.int8)


def test_mask_without_a_valid_action_raises() -> None:
    with pytest.raises(EnvironmentContractError, match="environment 0: expected a valid action"):
        rein.PettingZooEnvironment(Stuck, 1, 0).reset()


def test_workers_give_the_same_episodes() -> None:
    one, other = climbers(3), climbers(3, workers=2)
    assert first_difference(one.reset(), other.reset()) is None
    for k in range(40):
        action = torch.tensor([k % 2, k % 3, 2] * 3)
        assert first_difference(one.apply_action(action)._asdict(), other.apply_action(action)._asdict()) is None
    again = climbers(3, workers=2)
    again.load_state_dict(copy.deepcopy(other.state_dict()))
    assert first_difference(again.state_dict(), other.state_dict()) is None
    for environment in (other, again):
        environment.close()
        environment.close()


class Failing(Climbers):
    def __init__(self, failure: str) -> None:
        super().__init__(top=99.0)
        self.failure = failure

    def step(self, actions: dict[str, int]) -> Any:
        if self.steps == 2 and self.failure == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.steps == 2:
            raise LookupError("no rope")
        return super().step(actions)


@pytest.mark.filterwarnings("ignore:.*(Worker-|Traceback|Raising the last exception)")
@pytest.mark.parametrize(
    ("failure", "error", "text"),
    [
        ("killed", WorkerDied, "killed by SIGKILL"),
        ("raises", LookupError, "no rope"),
    ],
)
def test_failures_of_workers_are_explained(failure: str, error: type[Exception], text: str) -> None:
    environment = rein.PettingZooEnvironment(Failing, 2, 5, workers=2, timeout=1.0, failure=failure)
    environment.reset()
    for _ in range(2):
        environment.apply_action(torch.ones(6, dtype=torch.int64))
    with pytest.raises(error, match=text) as raised:
        environment.apply_action(torch.ones(6, dtype=torch.int64))
    message = " ".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    worker = re.search(r"Failing, worker ([01]) of 2", message)
    assert worker is not None
    assert f"episode seed {int(environment.episode_seeds[3 * int(worker[1])])}" in message
    with pytest.raises(RuntimeError, match="build a new one"):
        environment.reset()
    environment.close()


ONE = Climbers()


class Turns(Climbers):
    def agent_iter(self) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("made", "options", "error", "text"),
    [
        (Turns, {}, TypeError, "take turns; give a function that returns a parallel environment"),
        (dict, {}, TypeError, "must return a parallel environment"),
        (ONE, {}, TypeError, "give a function that returns a parallel environment"),
        ("mpe2.simple_spread_v3", {}, TypeError, "give a function that returns a parallel environment"),
        (lambda: ONE, {"worlds": 2}, ValueError, "returned the same environment twice"),
        (Climbers, {"timeout": 3}, TypeError, "timeout"),
    ],
)
def test_source_that_does_not_fit_is_refused(made: Any, options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        rein.PettingZooEnvironment(made, **options)


def test_environment_without_frames_raises() -> None:
    class Dark(Climbers):
        def render(self) -> None:
            pass

    with pytest.raises(ValueError, match="give render_mode='rgb_array'"):
        rein.PettingZooEnvironment(Dark, 1, 0).render()


def test_group_of_agents_with_different_spaces_has_the_spaces_of_a_row() -> None:
    class Tall(Climbers):
        possible_agents = ("climber_0", "climber_1", "climber_2")

        def observation_space(self, name: str) -> spaces.Space[Any]:
            return spaces.Box(0.0, 9.0, (3 if name == "climber_1" else 2,))

        def _seen(self, names: Any) -> dict[str, np.ndarray]:
            return {name: np.full(self.observation_space(name).shape, self.height[name], np.float32) for name in names}

    environment = rein.PettingZooEnvironment(Tall, 2, 0)
    group = environment.groups["climber"]
    assert (group.observation_space, group.action_space) == (spaces.Box(0.0, 9.0, (3,)), spaces.Discrete(3))
    agent = rein.MultiAgent(environment, {"climber": rein.PPO(group, hidden=(8,), seed=0)})
    observation = environment.reset()
    alone, _ = agent.agents["climber"].policy().select_action(observation)
    assert torch.equal(agent.policy().select_action(observation)[0], alone)


class Changed(Climbers):
    """The third step returns results that `change` has modified."""

    def __init__(self, change: Callable[[list[Any]], Any]) -> None:
        super().__init__()
        self.change = change

    def step(self, actions: dict[str, int]) -> Any:
        results = [*super().step(actions)]
        if self.steps == 3:
            self.change(results)
        return tuple(results)


def third_step(environment: Any) -> None:
    environment.reset()
    for _ in range(3):
        environment.apply_action(torch.zeros(6, dtype=torch.int64))


@pytest.mark.parametrize("agent_id", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts[0].pop("climber_1"), "no observation of 'climber_1'"),
        (lambda parts: parts[1].pop("climber_1"), "no reward of 'climber_1'"),
        (lambda parts: parts[2].pop("climber_1"), "no terminated of 'climber_1'"),
        (lambda parts: parts[3].pop("climber_1"), "no truncated of 'climber_1'"),
        (lambda parts: parts[0].update(climber_1=np.zeros(1)), r"'climber_1': expected shape \(2,\), got \(1,\)"),
        (lambda parts: parts.insert(0, None), "from step, got"),
        (lambda parts: operator.setitem(parts, 0, None), "step must return observation as a dictionary"),
        (lambda parts: operator.setitem(parts, 2, None), "step must return terminated as a dictionary"),
        (lambda parts: operator.setitem(parts, 4, None), "step must return info as a dictionary"),
    ],
)
def test_incomplete_results_raise(change: Any, message: str, agent_id: bool) -> None:
    with pytest.raises(EnvironmentContractError, match=message):
        third_step(rein.PettingZooEnvironment(Changed, 2, 0, agent_id=agent_id, change=change))


def test_reset_without_an_observation_raises() -> None:
    class Incomplete(Climbers):
        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            observations, infos = super().reset(seed, options)
            del observations["climber_1"]
            return observations, infos

    with pytest.raises(EnvironmentContractError, match="reset returned no observation of 'climber_1'"):
        rein.PettingZooEnvironment(Incomplete, 2, 0).reset()


@pytest.mark.parametrize("value", ["False", 2, math.nan, None, np.array([True, False]), 1])
@pytest.mark.parametrize("part", [2, 3])
def test_flag_that_is_not_a_boolean_raises_with_its_place(part: int, value: Any) -> None:
    environment = rein.PettingZooEnvironment(Changed, 2, 0, change=lambda parts: parts[part].update(climber_1=value))
    with pytest.raises(EnvironmentContractError, match="expected bool") as raised:
        third_step(environment)
    seed = int(environment.episode_seeds[0])
    for text in ("truncated" if part == 3 else "terminated", "world 0", "'climber_1'", f"seed {seed}", "step 2"):
        assert text in str(raised.value)


@pytest.mark.parametrize("make", [climbers, functools.partial(masked, "info")], ids=["plain", "masked"])
def test_training_is_recorded_and_replayed(make: Any, tmp_path: Path) -> None:
    environment, store = make(3), rein.HDF5Store(tmp_path / "run")
    agent = rein.PPO(environment, rollout_steps=20, minibatches=2, hidden=(8,), seed=0)
    loop = rein.training_loop(agent, environment, store, iterations=20)
    metrics = loop.run(epochs=4).metrics
    store.close()
    assert {"return_guide", "return_climber", "world_return"} <= set(metrics)
    run = rein.open_run(tmp_path / "run")
    episodes = [run.episode(number) for number in run.episodes["id"].tolist()]
    assert len(episodes) > 10
    assert [result.difference for result in replay(make(3, 5), episodes, run=run)] == [None] * len(episodes)
