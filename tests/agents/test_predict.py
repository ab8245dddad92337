"""`policy.predict` acts like `select_action`, in the format of the environment."""

from __future__ import annotations

import copy
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, create_empty_array
from torch import Tensor

import rein
from rein.errors import EnvironmentContractError
from rein.networks.recurrent import GRU
from rein.ops.trees import leaves, map_tree
from rein.spaces.conversion import Codec
from rein.testing.stateful import check_equal
from tests.agents.test_action_spaces import SPACES as ACTION_SPACES
from tests.agents.test_contracts import CASES, Case

VECTOR = spaces.Box(-1.0, 1.0, (3,))
OBSERVATION_SPACES: dict[str, spaces.Space[Any]] = {
    "vector": VECTOR,
    "float64": spaces.Box(-1.0, 1.0, (2, 2), np.float64),
    "image": spaces.Box(0, 255, (40, 40, 3), np.uint8),
    "wide integers": spaces.Box(0, 9, (2,), np.uint32),
    "one number": spaces.Box(-1.0, 1.0, ()),
    "choice": spaces.Discrete(4, start=-1),
    "choices": spaces.MultiDiscrete(np.array([[2, 3], [4, 2]]), start=np.array([[0, 1], [-1, 0]])),
    "bits": spaces.MultiBinary([2, 2]),
    "nested": spaces.Dict(a=VECTOR, b=spaces.Tuple([spaces.Discrete(3, start=2), spaces.MultiBinary(2)])),
}


def ppo(observation_space: spaces.Space[Any] = VECTOR, action_space: Any = None, **options: Any) -> Any:
    action_space = spaces.Discrete(5) if action_space is None else action_space
    return rein.PPO(observation_space, action_space, seed=0, hidden=(16,), **options)


def batch_of(space: spaces.Space[Any], values: list[Any]) -> Any:
    batched = gymnasium.vector.utils.concatenate(space, values, create_empty_array(space, len(values)))
    assert batched in batch_space(space, len(values))
    return batched


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_agent_predicts_what_its_policy_selects(case: Case) -> None:
    environment = case.environment(4, seed=0)
    agent = case.kind(environment, **case.options, seed=0)
    observation = environment.reset()
    selected, _ = agent.policy().select_action(observation)
    split = Codec("observation", environment.single_observation_space).split(observation, 4)
    policy = agent.policy()
    batch = policy.predict(batch_of(environment.single_observation_space, split))
    np.testing.assert_array_equal(batch, selected.numpy())
    for value, expected in zip(split, batch, strict=True):
        policy.reset()
        np.testing.assert_allclose(policy.predict(value), expected, atol=1e-5)


@pytest.mark.parametrize("space", OBSERVATION_SPACES.values(), ids=OBSERVATION_SPACES)
def test_observations_of_every_space_are_converted_as_in_training(space: spaces.Space[Any]) -> None:
    policy = ppo(space).policy()
    space.seed(0)
    values = [space.sample() for _ in range(5)]
    selected, _ = policy.select_action(Codec("observation", space).stack(values))
    assert policy.predict(batch_of(space, values)).tolist() == selected.tolist()
    assert [policy.predict(value) for value in values] == selected.tolist()


@pytest.mark.parametrize("space", ACTION_SPACES.values(), ids=ACTION_SPACES)
def test_actions_of_every_space_are_values_of_the_space(space: spaces.Space[Any]) -> None:
    policy = ppo(action_space=space, log_std=1.0).policy(deterministic=False)
    observation = np.zeros((5, 3), np.float32)
    state = policy.state_dict()
    action = policy.predict(observation)
    policy.load_state_dict(state)
    selected, _ = policy.select_action(torch.from_numpy(observation))
    assert action in batch_space(space, 5)
    each = [*gymnasium.vector.utils.iterate(batch_space(space, 5), action)]
    check_equal(*(map_tree(Tensor.double, tree) for tree in (Codec("action", space).stack(each), selected)))
    assert policy.predict(observation[0]) in space


def test_discrete_action_is_an_integer_from_the_start_of_the_space() -> None:
    action = ppo(action_space=spaces.Discrete(3, start=7)).policy().predict(np.zeros(3))
    assert type(action) is int
    assert 7 <= action < 10


@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Taxi-v4"])
def test_loop_of_gymnasium_plays_the_episode_of_an_evaluation(id: str) -> None:
    options: dict[str, Any] = {"max_episode_steps": 30}
    environment = rein.make(id, num_envs=1, **options)
    policy = ppo(environment.single_observation_space, environment.single_action_space).policy()
    evaluation = rein.evaluate(policy, environment, episodes=1, episode_seeds=torch.tensor([5]))
    env = gymnasium.make(id, **options)
    observation, _ = env.reset(seed=5)
    rewards, ended = [], False
    while not ended:
        observation, reward, terminated, truncated, _ = env.step(policy.predict(observation))
        rewards.append(reward)
        ended = terminated or truncated
    assert len(rewards) == evaluation.episode_length.item()
    assert sum(map(float, rewards)) == pytest.approx(evaluation.mean_return)


@pytest.mark.parametrize(
    ("space", "value", "message"),
    [
        (VECTOR, np.zeros(4), r"expected the shape \(3,\) of one value, or \(N, 3\) of N values, got \(4,\)"),
        (VECTOR, np.zeros((1, 2, 3)), r"got \(1, 2, 3\)"),
        (VECTOR, [[0.0], [0.0, 1.0]], r"got \[\[0.0\], \[0.0, 1.0\]\]"),
        (VECTOR, {"x": 1}, "got {'x': 1}"),
        (VECTOR, ["a", "b", "c"], "float32"),
        (spaces.Discrete(4), 4, "below 4"),
        (spaces.Discrete(4), 0.5, "int64"),
        (OBSERVATION_SPACES["nested"], {"a": np.zeros(3)}, r"keys \['a', 'b'\], got the keys \['a'\]"),
        (OBSERVATION_SPACES["nested"], {"a": np.zeros(3), "b": (2,)}, r"observation\['b'\].*2 entries, got 1"),
        (
            OBSERVATION_SPACES["nested"],
            {"a": np.zeros(3), "b": ([2, 2], np.zeros((2, 2), np.int8))},
            "one value of 'a' and 2 values of 'b'",
        ),
        (
            OBSERVATION_SPACES["nested"],
            {"a": np.zeros((3, 3)), "b": ([2, 2], np.zeros((2, 2), np.int8))},
            "3 values of 'a' and 2 values of 'b'",
        ),
    ],
)
def test_wrong_observation_is_rejected(space: spaces.Space[Any], value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ppo(space).policy().predict(value)


def test_action_is_valid_and_mask_without_valid_action_raises() -> None:
    space = spaces.Dict(observation=VECTOR, action_mask=spaces.MultiBinary(5))
    policy = ppo(space).policy(deterministic=False)
    observation = {"observation": np.zeros(3), "action_mask": np.array([0, 0, 1, 0, 0], np.int8)}
    assert {policy.predict(observation) for _ in range(8)} == {2}
    with pytest.raises(EnvironmentContractError, match="valid action"):
        policy.predict({**observation, "action_mask": np.zeros(5, np.int8)})


def test_critic_observation_is_not_needed() -> None:
    policy = ppo(spaces.Dict(observation=VECTOR, critic_observation=VECTOR)).policy()
    without = policy.predict({"observation": np.ones(3)})
    assert policy.predict({"observation": np.ones(3), "critic_observation": np.ones(3)}) == without


def recurrent() -> Any:
    return ppo(action_space=spaces.Box(-1.0, 1.0, (2,)), core=functools.partial(GRU, features=8))


def test_recurrent_policy_remembers_until_reset() -> None:
    policy = recurrent().policy()
    first, second = policy.predict(np.ones(3)), policy.predict(np.ones(3))
    assert not np.array_equal(first, second)
    policy.reset()
    np.testing.assert_array_equal(policy.predict(np.ones(3)), first)


def test_copy_of_a_recurrent_policy_has_its_own_memory_and_the_same_parameters() -> None:
    agent = recurrent()
    policy = agent.policy()
    policy.predict(np.ones(3))
    other = copy.copy(policy)
    expected = policy.predict(np.ones(3))
    np.testing.assert_array_equal(other.predict(np.ones(3)), expected)
    for parameter in agent.networks.parameters():
        parameter.data.zero_()
    np.testing.assert_array_equal(other.predict(np.ones(3)), np.zeros(2))


@pytest.mark.parametrize("agent", [ppo(), rein.DQN(VECTOR, spaces.Discrete(5), seed=0)], ids=["PPO", "DQN"])
def test_threads_share_a_policy_without_memory(agent: Any) -> None:
    policy = agent.policy()
    observations = np.random.default_rng(0).normal(size=(400, 3))
    expected = [policy.predict(observation) for observation in observations]
    assert len({*expected}) > 1
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(policy.predict, observations)) == expected


def test_threads_with_copies_of_a_recurrent_policy_do_not_disturb_each_other() -> None:
    policy = recurrent().policy()
    conversations = np.random.default_rng(0).normal(size=(8, 40, 3))

    def talk(observations: np.ndarray[Any, Any]) -> list[list[float]]:
        own = copy.copy(policy)
        return [own.predict(observation).tolist() for observation in observations]

    expected = [*map(talk, conversations)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(talk, conversations)) == expected


def test_acting_in_a_thread_does_not_change_the_agent() -> None:
    agent, twin = ppo(), ppo()
    observation = torch.zeros(4, 3)
    inside = []
    act = agent.networks.policy

    def select_meanwhile(*arguments: Any) -> Any:
        if not inside:  # the agent acts while the policy does
            inside.append(agent.select_action(observation)[0])
        return act(*arguments)

    agent.networks.policy = select_meanwhile
    agent.policy(deterministic=False).predict(np.zeros(3))
    assert inside[0].tolist() == twin.select_action(observation)[0].tolist()


def test_read_only_observation_is_accepted() -> None:
    observation = np.zeros((3, 6), np.float32)[:, ::2][0]
    observation.flags.writeable = False
    assert isinstance(ppo().policy().predict(observation), int)


def test_loaded_policy_and_learners_of_a_population_predict(tmp_path) -> None:
    agent = ppo()
    rein.save(agent, tmp_path / "agent.h5")
    observation = np.ones((6, 3))
    loaded = rein.load_policy(tmp_path / "agent.h5")
    np.testing.assert_array_equal(loaded.predict(observation), agent.policy().predict(observation))
    population = rein.Population(rein.PPO, rein.envs.CartPole(4), learners=2, seed=0)
    learner = population.agent(1).policy()
    selected, _ = learner.select_action(torch.ones(2, 4))
    assert learner.predict(np.ones((2, 4))).tolist() == selected.tolist()


def test_batch_without_observations_gives_no_actions() -> None:
    action = ppo(action_space=ACTION_SPACES["hybrid"]).policy().predict(np.zeros((0, 3)))
    assert [leaf.shape for _, leaf in leaves(map_tree(np.asarray, action))] == [(0,), (0, 1)]
