"""PPO, A2C and IMPALA with every action space: MultiBinary, integers and matrices, and actions with components.

Shapes: N environments.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.agents.base.segments import PrioritizedSegments
from rein.envs import SimulatedEnvironment
from rein.envs.base.contract import check_action
from rein.episodes.random_policy import RandomPolicy
from rein.networks.recurrent import GRU
from rein.ops.trees import leaves, map_tree
from rein.spaces import tensors_of
from rein.testing import AgentContract, EnvironmentContract
from rein.testing.stateful import first_difference
from rein.types import Transition

OBSERVATION = spaces.Box(-1.0, 1.0, (2,))
SMALL: dict[str, Any] = {"rollout_steps": 8, "hidden": (16,), "learning_rate": 1e-2, "gamma": 0.9}
HYBRID = spaces.Dict(move=spaces.Discrete(2), amount=spaces.Box(-1.0, 1.0, (1,)))
SPACES: dict[str, spaces.Space[Any]] = {
    "bits": spaces.MultiBinary(3),
    "matrix of bits": spaces.MultiBinary([2, 2]),
    "matrix of choices": spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[0, 1], [-1, 0]]),
    "integers": spaces.Box(np.array([-2, 0]), np.array([1, 6]), dtype=np.int64),
    "bytes": spaces.Box(0, 7, (2, 2), np.uint8),
    "one integer": spaces.Box(-1, 2, (), np.int32),
    "matrix": spaces.Box(-1.0, 1.0, (2, 3)),
    "one number": spaces.Box(-1.0, 1.0, ()),
    "hybrid": HYBRID,
    "discrete components": spaces.Dict(left=spaces.Discrete(3), right=spaces.MultiBinary(2)),
    "nested": spaces.Tuple(
        [spaces.Discrete(3, start=1), spaces.Dict(arm=spaces.Box(-2.0, 2.0, (2, 2)), grip=spaces.MultiBinary(2))]
    ),
}
each_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
each_agent = pytest.mark.parametrize("kind", [rein.PPO, rein.A2C, rein.IMPALA])


class Aim(SimulatedEnvironment):
    """Choose the side of a target, and how far to go: reward 1 - |amount - distance| on its side, otherwise -1."""

    single_observation_space = spaces.Box(-1.0, 3.0, (3,))
    single_action_space = HYBRID
    initial_range = ((0.0, 0.0), (-1.0, 1.0), (-0.8, 0.8))  # time, side, distance

    def dynamics(self, state_SN, action):
        time_N, side_N, distance_N = state_SN
        miss_N = (action["amount"][:, 0] - distance_N).abs()
        reward_N = torch.where(action["move"] == (side_N > 0), 1.0 - miss_N, -1.0)
        return torch.stack([time_N + 1.0, -side_N, -distance_N]), reward_N, time_N + side_N > 1.5


class Match(SimulatedEnvironment):
    """Reward for actions close to 1 in every number of any action space, for about three steps."""

    single_observation_space = OBSERVATION
    initial_range = ((0.0, 0.0), (0.0, 1.0))

    def __init__(self, space: spaces.Space[Any], num_envs: int = 4, **options: Any) -> None:
        self.single_action_space = self.space = space
        super().__init__(num_envs, **options)

    def dynamics(self, state_SN, action):
        time_N, drawn_N = state_SN
        parts = [x.float().reshape(len(x), -1).clamp(-3.0, 9.0) for _, x in leaves(action)]
        reward_N = -(torch.cat(parts, 1) - 1.0).abs().mean(1)
        return torch.stack([time_N + 1.0, drawn_N]), reward_N, time_N + drawn_N > 2.0


def fitted(environment: Any, kind: Any = rein.PPO, **options: Any) -> Any:
    return kind(environment, **{**SMALL, **options})


class TestAim(EnvironmentContract):
    """A simulated environment may have an action with components."""

    def make(self, num_envs, seed):
        return Aim(num_envs, seed=seed)


class TestHybridPPO(AgentContract):
    steps, num_envs = 40, 4

    def make(self, seed):
        return fitted(self.environment(1, 0), seed=seed, update_epochs=2, minibatches=2)

    def environment(self, num_envs, seed):
        return Aim(num_envs, seed=seed)


@pytest.mark.slow
class TestHybridRecurrent(TestHybridPPO):
    def make(self, seed):
        return fitted(self.environment(1, 0), seed=seed, core=functools.partial(GRU, features=8), minibatches=2)


@pytest.mark.slow
class TestNestedPPO(TestHybridPPO):
    def environment(self, num_envs, seed):
        return Match(SPACES["nested"], num_envs, seed=seed)


@pytest.mark.default_cases("one number", "matrix", "hybrid")
@each_space
def test_ppo_learns_the_best_action_of_a_space(space: spaces.Space[Any]) -> None:
    environment = Match(space, 32, seed=0)
    agent = fitted(environment, seed=0, learning_rate=1e-2, squash=space is SPACES["matrix"])
    rein.train(agent, environment, epochs=20, iterations=40)
    action, _ = agent.policy().select_action(torch.zeros(1, 2))
    assert all(((part - 1).abs() <= 0.3).all() for _, part in leaves(action)), action


@each_space
@each_agent
def test_actions_are_in_the_space_and_updates_are_finite(kind: Any, space: spaces.Space[Any]) -> None:
    environment = Match(space, 4, seed=0)
    agent = fitted(environment, kind, seed=0)
    observation = environment.reset()
    for _ in range(16):
        action, extras = agent.select_action(observation)
        check_action(action, 4, space)
        step = environment.apply_action(action)
        ends = step.reward, step.terminated, step.truncated, step.final_observation, step.valid
        agent.record_observation(Transition(observation, action, *ends, extras))
        metrics = agent.optimize_model()
        observation = step.observation
    assert agent.updates and all(value.isfinite() for value in metrics.values())
    gaussian = any(isinstance(part, spaces.Box) and part.dtype.kind == "f" for _, part in tensors_of(space))
    assert ("log_std" in metrics) == gaussian


@each_space
def test_log_prob_of_an_action_is_that_of_its_sample(space: spaces.Space[Any]) -> None:
    agent = fitted(Match(space), seed=0, squash=True)
    networks, x = agent.networks, torch.rand(5, 2)
    distribution, _, _ = networks.step(networks.preprocess(x))
    sample = distribution.sample(agent.generator)
    action = networks.policy_head.to_action(distribution, sample)
    back = networks.policy_head.from_action(distribution, action)
    torch.testing.assert_close(distribution.log_prob(back), distribution.log_prob(sample), rtol=1e-3, atol=1e-2)
    assert distribution.log_prob(sample).shape == distribution.entropy().shape == (5,)
    shapes = [x.shape[1:] for _, x in leaves(action)]
    assert shapes == [x.shape[1:] for _, x in leaves(RandomPolicy(space, 0).select_action(x)[0])]


@each_space
def test_actions_of_another_program_are_evaluated(space: spaces.Space[Any]) -> None:
    environment = Match(space, 4, seed=0)
    agent, other = fitted(environment, seed=0), RandomPolicy(space, 1)
    observation = environment.reset()
    for step in range(8):
        action, extras = agent.select_action(observation)
        if step % 2:
            action = other.select_action(observation)[0]
        now = environment.apply_action(action)
        ends = now.reward, now.terminated, now.truncated, now.final_observation, now.valid
        agent.record_observation(Transition(observation, action, *ends, extras))
        observation = now.observation
    batch = agent.batch(*[agent.rollout["reward"]] * 2, None)
    distribution, value = agent.networks.distribution_and_value(batch.features, None, None)
    torch.testing.assert_close(distribution.log_prob(batch.sample), batch.log_prob)
    torch.testing.assert_close(value, batch.value)


def test_copied_extras_of_a_replaced_action_are_not_kept() -> None:
    environment = Match(SPACES["nested"], 4, seed=0)
    agent, observation = fitted(environment, seed=0), environment.reset()
    _, extras = agent.select_action(observation)
    other = map_tree(torch.clone, RandomPolicy(SPACES["nested"], 1).select_action(observation)[0])
    now = environment.apply_action(other)
    ends = now.reward, now.terminated, now.truncated, now.final_observation, now.valid
    agent.record_observation(Transition(observation, other, *ends, map_tree(torch.clone, extras)))
    assert first_difference(map_tree(lambda x: x[0], agent.rollout["action"]), map_tree(_as_agents, other)) is None
    assert not torch.equal(agent.rollout["log_prob"][0], extras["log_prob"])


def _as_agents(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_floating_point() else x.long()


@pytest.mark.parametrize("name", ["matrix", "one number"])
def test_closed_form_gradient_of_a_matrix_equals_that_of_a_vector(name: str) -> None:
    space = SPACES[name]
    vector = spaces.Box(-1.0, 1.0, (int(np.prod(space.shape)),))
    agents = []
    for shape in (space, vector):
        environment = Match(shape, 8, seed=0)
        agents.append(fitted(environment, seed=0))
        rein.train(agents[-1], environment, epochs=1, iterations=16)
    first, second = (dict(agent.networks.named_parameters()) for agent in agents)
    assert first_difference(first, second) is None


def test_bits_are_as_many_choices_of_two() -> None:
    trained = []
    for space in (spaces.MultiBinary(3), spaces.MultiDiscrete([2, 2, 2]), spaces.Box(0, 1, (3,), np.int64)):
        environment = Match(space, 8, seed=0)
        agent = fitted(environment, seed=0)
        rein.train(agent, environment, epochs=1, iterations=16)
        trained.append(dict(agent.networks.named_parameters()))
    assert first_difference(trained[0], trained[1]) is None
    assert first_difference(trained[0], trained[2]) is None


@pytest.mark.parametrize(
    "options",
    [
        {"shared": True},
        {"micro_batch": 5, "threads": 2},
        {"segments": PrioritizedSegments()},
        {"state_dependent_std": True, "squash": True},
        {"normalize_observation": True, "normalize_reward": True},
        {"max_grad_norm": None, "precision": "bfloat16"},
    ],
    ids=str,
)
def test_options_work_with_components(options: Mapping[str, Any]) -> None:
    environment = Aim(8, seed=0)
    agent = fitted(environment, seed=0, **options)
    rein.train(agent, environment, epochs=1, iterations=16)
    assert agent.updates
    assert all(parameter.isfinite().all() for parameter in agent.networks.parameters())


@pytest.mark.parametrize(
    "kind",
    [
        rein.DQN,
        rein.IQN,
        rein.RecurrentDQN,
        rein.DiscreteSAC,
        rein.PQN,
        rein.QLearning,
        rein.SAC,
        rein.TD3,
        rein.IQL,
        rein.BC,
    ],
)
@pytest.mark.parametrize("name", ["bits", "integers", "hybrid", "nested"])
def test_other_agents_reject_the_space_and_name_agents_that_support_it(kind: Any, name: str) -> None:
    with pytest.raises(ValueError, match=r"(?s)space.* (Dict|Tuple|MultiBinary|Box).*; use A2C, IMPALA or PPO$"):
        kind(OBSERVATION if kind is not rein.QLearning else spaces.Discrete(2), SPACES[name])


@pytest.mark.parametrize("kind", [rein.DQN, rein.IQN, rein.RecurrentDQN, rein.DiscreteSAC, rein.PQN])
def test_agents_of_discrete_actions_reject_continuous_ones(kind: Any) -> None:
    with pytest.raises(ValueError, match="requires Discrete actions"):
        kind(OBSERVATION, spaces.Box(-1.0, 1.0, (2,)))


def test_custom_agents_can_use_networks_for_components() -> None:
    generator = torch.Generator().manual_seed(0)
    actor = rein.networks.actor(OBSERVATION, SPACES["nested"], generator=generator)
    distribution = actor(torch.rand(5, 2))
    for action in (distribution.sample(generator), distribution.mode()):
        check_action(action, 5, SPACES["nested"])
        assert distribution.log_prob(action).shape == distribution.entropy().shape == (5,)
    assert (action["1"]["arm"].abs() < 2.0).all()  # squashed, because its bounds are finite
