"""Different agents for the groups of multi-agent environments."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

import rein
from rein.agents.base.summary import named_parameters
from rein.envs.wrappers import FrameStack, RescaleAction, SignReward
from rein.errors import CheckpointError
from rein.networks.recurrent import GRU
from rein.ops.trees import map_tree
from rein.testing import AgentContract
from rein.testing.stateful import copy_state, first_difference


class Tag:
    """Parallel environment on a circle: hunters get a reward near the prey, and the prey far from them.

    Hunters have 3 actions and see 2 numbers. The prey has 2 actions and sees 3 numbers.
    """

    possible_agents = ("hunter_0", "prey_0", "hunter_1")
    agents: list[str]

    def observation_space(self, name: str) -> spaces.Space[Any]:
        return spaces.Box(-1.0, 1.0, (3 if name == "prey_0" else 2,))

    def action_space(self, name: str) -> spaces.Space[Any]:
        return spaces.Discrete(2 if name == "prey_0" else 3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.steps = [*self.possible_agents], 0
        self.place = dict(zip(self.agents, np.random.default_rng(seed).uniform(0, 6.28, 3), strict=True))
        return self._seen(), {}

    def step(self, actions: dict[str, int]) -> Any:
        names, self.steps = self.agents, self.steps + 1
        for name, action in actions.items():
            assert self.action_space(name).contains(action)
            self.place[name] += 0.1 * (action - 1)
        late, never = dict.fromkeys(names, self.steps >= 10), dict.fromkeys(names, False)
        self.agents = [] if self.steps >= 10 else names
        return self._seen(), self.rewards(actions), never, late, {}

    def rewards(self, actions: dict[str, int]) -> dict[str, float]:
        near = {name: float(np.cos(self.place[name] - self.place["prey_0"])) for name in actions}
        return {**near, "prey_0": -near["hunter_0"] - near["hunter_1"]}

    def _seen(self) -> dict[str, np.ndarray]:
        prey = self.place["prey_0"]
        near = {name: [np.cos(x - prey), np.sin(x - prey)] for name, x in self.place.items()}
        near["prey_0"] = [np.cos(prey), *[near[name][1] for name in ("hunter_0", "hunter_1")]]
        return {name: np.array(value, np.float32) for name, value in near.items()}

    def close(self) -> None:
        pass


class Opposite(Tag):
    """Hunters get a reward for action 2, and the prey for action 0."""

    def rewards(self, actions: dict[str, int]) -> dict[str, float]:
        return {name: float(action == (0 if name == "prey_0" else 2)) for name, action in actions.items()}


def tag(worlds: int = 3, seed: int | None = 0) -> rein.PettingZooEnvironment:
    return rein.PettingZooEnvironment(Tag, worlds, seed)


def on_policy(group: Any, seed: int | None = None, **options: Any) -> rein.PPO:
    return rein.PPO(group, rollout_steps=8, update_epochs=1, minibatches=2, hidden=(8,), seed=seed, **options)


def off_policy(group: Any) -> rein.DQN:
    return rein.DQN(group, hidden=(8,), batch_size=8, learning_starts=16, capacity=200)


def multi_agent(env: Any, seed: int | None = 0, prey: Any = on_policy) -> rein.MultiAgent:
    groups = env.groups
    return rein.MultiAgent(env, {"hunter": on_policy(groups["hunter"]), "prey": prey(groups["prey"])}, seed=seed)


@pytest.mark.default_cases("PPO")
class TestMultiAgent(AgentContract):
    num_envs, steps = 9, 40

    @pytest.fixture(
        autouse=True,
        params=[on_policy, off_policy, functools.partial(on_policy, core=functools.partial(GRU, features=4))],
        ids=["PPO", "DQN", "recurrent PPO"],
    )
    def _variant(self, request: pytest.FixtureRequest) -> None:
        self.prey = request.param

    def make(self, seed: int | None) -> rein.MultiAgent:
        return multi_agent(tag(), seed, self.prey)

    def environment(self, num_envs: int, seed: int) -> Any:
        return tag(num_envs // 3, seed)

    def learned(self, agent: rein.MultiAgent) -> Any:
        return {name: super(TestMultiAgent, self).learned(part) for name, part in agent.agents.items()}


def test_group_learns_as_an_agent_that_trains_alone_on_its_rows() -> None:
    env = tag()
    agent = multi_agent(env, seed=None)
    for name, part in agent.agents.items():
        part.reseed({"hunter": 1, "prey": 2}[name])
    alone = on_policy(env.groups["prey"], seed=2)
    rows = env.groups["prey"].rows
    observation = env.reset()
    for _ in range(20):
        action, extras = agent.select_action(observation)
        step = env.apply_action(action)
        transition = rein.Transition(
            observation,
            action,
            step.reward,
            step.terminated,
            step.truncated,
            step.final_observation,
            step.valid,
            extras,
        )
        agent.record_observation(transition)
        agent.optimize_model()
        seen, final = (x["observation"] for x in (observation, step.final_observation))
        one, more = alone.select_action(seen[rows])
        assert torch.equal(one, action[rows])
        ends = step.terminated[rows], step.truncated[rows], final[rows], step.valid[rows]
        alone.record_observation(rein.Transition(seen[rows], one, step.reward[rows], *ends, more))
        alone.optimize_model()
        observation = step.observation
    assert alone.updates
    assert first_difference(alone.state_dict(), agent.agents["prey"].state_dict()) is None


def test_metrics_have_the_group_as_prefix() -> None:
    env = tag()
    agent = multi_agent(env)
    state = rein.train(agent, env, epochs=1, iterations=16)
    assert np.isfinite(state.metrics["hunter/policy_loss"])
    assert np.isfinite(state.metrics["prey/policy_loss"])
    assert state.metrics["prey/learning_rate"] == pytest.approx(3e-4)
    assert {name.partition(".")[0] for name in named_parameters(agent)} == {"hunter", "prey"}


def test_run_is_stored_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    def build(folder: str) -> Any:
        env = tag()
        agent = multi_agent(env, prey=off_policy)
        loop = rein.training_loop(agent, env, rein.HDF5Store(tmp_path / folder), seed=0, epochs=4, iterations=13)
        return agent, loop

    whole, loop = build("whole")
    loop.run()
    _, loop = build("half")
    rein.checkpoint(loop)
    loop.run(epochs=2)
    again, loop = build_resumed(tmp_path / "half")
    loop.run(epochs=4)
    assert first_difference(copy_state(whole.state_dict()), again.state_dict()) is None
    fields = rein.open_run(tmp_path / "half").fields
    assert {"value", "log_prob"} <= {*fields}


def build_resumed(path: Path) -> Any:
    env = tag()
    agent = multi_agent(env, prey=off_policy)
    loop = rein.training_loop(agent, env, rein.HDF5Store(path, exist="resume"), seed=0, epochs=4, iterations=13)
    rein.resume(loop, path)
    return agent, loop


def test_policy_evaluates_with_another_number_of_worlds() -> None:
    agent = multi_agent(tag())
    env = tag(5, seed=1)
    result = rein.evaluate(agent, env, 15)
    assert {name: len(x) for name, x in result.group_returns(env).items()} == {"hunter": 10, "prey": 5}


def test_saved_agent_loads(tmp_path: Path) -> None:
    env = tag()
    agent, other = multi_agent(env, 0), multi_agent(env, 1)
    rein.save(agent, tmp_path / "agent.h5")
    rein.load(other, tmp_path / "agent.h5")
    assert first_difference(agent.state_dict(), other.state_dict()) is None
    rein.save(agent.agents["prey"], tmp_path / "prey.h5")
    assert rein.load_agent(tmp_path / "prey.h5").action_space.n == 2


def test_seeded_agent_keeps_its_seed() -> None:
    env = tag()
    prey = on_policy(env.groups["prey"], seed=7)
    agent = rein.MultiAgent(env, {"hunter": on_policy(env.groups["hunter"]), "prey": prey}, seed=0)
    assert prey.seed == 7
    assert agent.agents["hunter"].seed not in (None, 0)


def test_wrong_agents_are_refused() -> None:
    env = tag()
    hunter, prey = on_policy(env.groups["hunter"]), on_policy(env.groups["prey"])
    with pytest.raises(ValueError, match="groups of the environment are 'hunter', 'prey', but agents were given for"):
        rein.MultiAgent(env, {"hunter": hunter})
    with pytest.raises(ValueError, match=r"the observation_space of the agent of 'prey' is .* PPO\(env.groups\['prey'"):
        rein.MultiAgent(env, {"hunter": hunter, "prey": hunter})
    with pytest.raises(ValueError, match="groups of the environment are empty"):
        rein.MultiAgent(rein.envs.Navigation(2), {"hunter": hunter, "prey": prey})


class Sliders(rein.envs.SimulatedWorlds):
    """A pair of sliders in each world. The actions are in [0, 4]."""

    agents = 2
    agent_groups: ClassVar = {"left": (0,), "right": (1,)}
    single_observation_space = spaces.Box(-100.0, 100.0, (1,))
    single_action_space = spaces.Box(0.0, 4.0, (1,))
    initial_range = ((0.0, 1.0),)

    def dynamics(self, state: Tensor, action: Tensor) -> Any:
        moved = state + action[..., 0]
        return moved, -moved[0], moved[0] > 9.0


@pytest.mark.parametrize(("wrapper", "make"), [(FrameStack, Sliders), (RescaleAction, Sliders), (FrameStack, tag)])
def test_groups_have_the_spaces_that_a_wrapper_changes(wrapper: Any, make: Any) -> None:
    env = wrapper(make(worlds=3, seed=0))
    for group in env.groups.values():
        assert (group.observation_space, group.action_space) == (env.single_observation_space, env.single_action_space)
    parts = {name: on_policy(group) for name, group in env.groups.items()}
    agent = rein.MultiAgent(env, parts, seed=0)
    rein.train(agent, env, epochs=1, iterations=8, progress=False)
    for name, group in env.groups.items():
        seen = env.reset()
        alone, _ = parts[name].policy().select_action(map_tree(lambda x, rows=group.rows: x[rows], seen))
        assert torch.equal(agent.policy().select_action(seen)[0][group.rows], alone)


def test_wrapper_that_changes_no_space_keeps_the_spaces_of_groups() -> None:
    assert SignReward(tag()).groups["prey"].action_space.n == 2


def test_rows_of_a_part_of_a_world_raise() -> None:
    env = tag()
    observation = map_tree(lambda x: x[:4], env.reset())
    with pytest.raises(ValueError, match="whole worlds of 3 agents, got 4 rows"):
        multi_agent(env).policy().select_action(observation)


def test_groups_learn_different_policies() -> None:
    env = rein.PettingZooEnvironment(Opposite, 8, 0)
    parts = {name: rein.PPO(group, rollout_steps=20, learning_rate=1e-2) for name, group in env.groups.items()}
    agent = rein.MultiAgent(env, parts, seed=0)
    rein.train(agent, env, env_steps=5_000)
    returns = rein.evaluate(agent, env, 24).group_returns(env)
    assert returns["hunter"].tolist() == [10.0] * 16
    assert returns["prey"].tolist() == [10.0] * 8


@pytest.mark.slow
def test_background_evaluation_equals_that_in_the_foreground():
    def run(background):
        env, found = tag(), []
        loop = rein.training_loop(multi_agent(env), env, epochs=2, iterations=8)
        options = {"episodes": 3, "max_episode_steps": 9, "background": background}
        rein.evaluate_every(loop, loop.parts["agent"], tag(seed=1), **options)
        loop.evaluation_completed(lambda state: found.append(state.evaluation.result.episode_return.tolist()))
        loop.run()
        return found, copy_state(loop.parts["agent"].state_dict())

    (expected, state), (found, other) = run(False), run(True)
    assert found == expected and len(found) == 2
    assert first_difference(state, other) is None


def test_failed_load_changes_nothing(tmp_path: Path) -> None:
    env = tag()
    agent = multi_agent(env)
    before = copy_state(agent.state_dict())
    rein.save(on_policy(env.groups["prey"], seed=1), tmp_path / "prey.h5")
    with pytest.raises(CheckpointError, match="does not fit MultiAgent"):
        rein.load(agent, tmp_path / "prey.h5", strict=False)
    assert not agent.loaded and first_difference(before, agent.state_dict()) is None
