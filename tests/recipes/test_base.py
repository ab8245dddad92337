"""The decorator of recipes: options, defaults, signature, docstring and flags."""

from __future__ import annotations

import inspect

import pytest

from rein.agents.dqn import DQN
from rein.agents.ppo import PPO
from rein.agents.q_learning import QLearning
from rein.agents.recurrent_dqn import RecurrentDQN
from rein.cli.arguments import parse_options
from rein.envs.cartpole import CartPole
from rein.envs.gridworld import Gridworld
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.handlers import evaluate_every
from rein.loop import Loop
from rein.recipes.recipe import Builder, recipe
from rein.schedules import Schedule, linear
from rein.store.memory_store import MemoryStore


@recipe(CartPole, PPO, num_envs=4, hidden=(8,), epochs=2, iterations=16)
def small(build: Builder, gamma: float = 0.9, evaluate_every: int = 5) -> Loop:
    """PPO on few carts.

    Args:
        gamma: discount factor of the test.
    """
    environment = build.environment()
    return build.loop(build.agent(environment, gamma=gamma), environment)


def test_parts_use_declared_and_given_options():
    parts = small(num_envs=3, clip=0.1, max_episode_steps=7, seed=5).parts
    agent, environment = parts["agent"].config, parts["environment"].config
    assert [environment[name] for name in ("num_envs", "max_episode_steps", "seed")] == [3, 7, 5]
    assert [agent[name] for name in ("hidden", "clip", "gamma", "seed")] == [[8], 0.1, 0.9, 5]
    assert agent["value_coefficient"] == PPO(CartPole(1)).config["value_coefficient"]


def test_rollout_steps_default_to_iterations():
    assert small(iterations=8).parts["agent"].config["rollout_steps"] == 8
    assert small(iterations=8, rollout_steps=4).parts["agent"].config["rollout_steps"] == 4


def test_epochs_and_iterations_set_the_length_of_the_run():
    state = small().run()
    assert (state.epoch, state.total_iterations) == (2, 32)


def test_env_steps_are_rounded_up_to_epochs():
    @recipe(CartPole, PPO, num_envs=4, iterations=16)
    def counted(build: Builder, env_steps: int = 65) -> Loop:
        environment = build.environment()
        return build.loop(build.agent(environment), environment)

    assert "epochs" not in inspect.signature(counted).parameters
    assert counted().run().epoch == 2


def test_signature_and_docstring_list_every_option():
    parameters = inspect.signature(small).parameters
    assert next(iter(parameters)) == "store"
    assert [parameters[name].default for name in ("num_envs", "hidden", "gamma", "clip", "epochs")] == [
        *(4, (8,), 0.9, 0.2, 2)
    ]
    assert small.__doc__ is not None
    for line in ("gamma: discount factor of the test.", "minibatches: minibatches per pass", "num_envs: number of"):
        assert line in small.__doc__
    assert all(f"\n    {name}: " in small.__doc__ for name in parameters)


def test_unknown_option_raises_with_a_suggestion():
    with pytest.raises(TypeError, match="small: there is no option clipp; did you mean clip"):
        small(clipp=0.1)
    with pytest.raises(TypeError, match="small: there is no option n_envs; use num_envs"):
        small(n_envs=2)


def test_default_of_an_unknown_option_raises():
    with pytest.raises(TypeError, match="@recipe of broken: there is no option hiden; did you mean hidden"):

        @recipe(CartPole, PPO, hiden=(8,))
        def broken(build: Builder) -> Loop:
            raise AssertionError


def test_computed_options_cannot_be_given():
    @recipe(Gridworld, QLearning, computed=["possible_targets"], epochs=1, iterations=5)
    def computed(build: Builder) -> Loop:
        environment = build.environment(possible_targets=[(1, 1)])
        return build.loop(build.agent(environment), environment)

    assert computed().parts["environment"].config["possible_targets"] == [[1, 1]]
    with pytest.raises(TypeError, match="no option possible_targets"):
        computed(possible_targets=[(2, 2)])


def test_environment_can_be_a_gymnasium_id_or_a_function():
    def carts(num_envs: int = 2, seed: int | None = None, *, limit: int = 9) -> CartPole:
        """Make carts.

        Args:
            limit: steps of an episode.
        """
        return CartPole(num_envs, seed=seed, max_episode_steps=limit)

    def build_loop(build: Builder) -> Loop:
        environment = build.environment()
        return build.loop(build.agent(environment), environment)

    by_id = recipe("CartPole-v1", PPO, num_envs=3)(build_loop)().parts["environment"]
    assert isinstance(by_id, GymnasiumEnvironment)
    assert by_id.num_envs == 3
    by_function = recipe(carts, PPO)(build_loop)
    assert by_function(limit=4).parts["environment"].max_episode_steps == 4
    assert "limit: steps of an episode." in (by_function.__doc__ or "")


def test_other_agent_class_keeps_its_defaults():
    @recipe(CartPole, RecurrentDQN, gamma=0.5)
    def either(build: Builder) -> Loop:
        environment = build.environment()
        return build.loop(build.agent(environment, DQN), environment)

    config = either(burn_in=3, tau=0.25).parts["agent"].config
    assert (config["gamma"], config["tau"], config["batch_size"]) == (0.5, 0.25, 128)


def test_flags_cover_options_with_simple_values():
    @recipe(CartPole, DQN)
    def scheduled(build: Builder) -> Loop:
        raise AssertionError

    options = parse_options(scheduled, "x", ["--learning-rate", "0.5", "--hidden", "4", "5", "--huber", "None"])
    assert (options["learning_rate"], options["hidden"], options["huber"]) == (0.5, (4, 5), None)
    assert isinstance(options["epsilon"], Schedule)
    assert parse_options(scheduled, "x", ["--epsilon", "0.25"])["epsilon"] == 0.25
    assert not {"stem", "optimizer", "guard", "store"} & options.keys()
    with pytest.raises(ValueError, match="no option --stem"):
        parse_options(scheduled, "x", ["--stem", "y"])


def test_option_can_be_a_schedule_in_python():
    schedule = linear(0.3, 0.1, env_steps=100)
    assert small(clip=schedule).parts["agent"].config["clip"] == schedule.config


def test_learners_share_the_rows_of_one_environment_and_differ_in_listed_options():
    parts = small(learners=3, gamma=[0.9, 0.95, 0.99], clip=[0.1, 0.2, 0.3], seed=5).parts
    agents = [parts["agent"].agent(number) for number in range(3)]
    assert parts["environment"].num_envs == 3 * 4
    assert [(agent.gamma, agent.clip(), agent.seed) for agent in agents] == [
        *((0.9, 0.1, 5), (0.95, 0.2, 6), (0.99, 0.3, 7))
    ]
    assert {agent.hidden for agent in agents} == {(8,)}


def test_options_that_a_recipe_computes_differ_between_learners():
    @recipe(CartPole, PPO, num_envs=4, iterations=16)
    def scheduled(build: Builder, learning_rate: float = 0.1) -> Loop:
        environment = build.environment()
        agent = build.agent(environment, learning_rate=linear(learning_rate, 0.0, env_steps=100))
        return build.loop(agent, environment)

    agent = scheduled(learners=2, learning_rate=[0.1, 0.2]).parts["agent"]
    assert [agent.agent(number).learning_rate(env_steps=50) for number in range(2)] == [0.05, 0.1]


def test_limits_and_evaluation_environments_count_for_each_learner():
    @recipe(CartPole, PPO, num_envs=4, iterations=16)
    def counted(build: Builder, env_steps: int = 128) -> Loop:
        environment = build.environment()
        loop = build.loop(build.agent(environment), environment)
        loop.own("test", build.evaluation_environment(10))
        return loop

    loop = counted(learners=3)
    assert loop.parts["test"].num_envs == 12
    assert loop.run().epoch == 2
    assert loop.state.clocks.env_steps == 128


def test_recipe_builds_its_loop_once_for_all_learners():
    stores = []

    @recipe(CartPole, PPO, num_envs=4, iterations=16)
    def evaluated_twice(build: Builder) -> Loop:
        environment = build.environment()
        agent = build.agent(environment)
        stores.append(build.store)
        loop = build.loop(agent, environment)
        for name in ("first", "second"):
            evaluate_every(loop, agent.policy(), build.evaluation_environment(2), episodes=2, name=name)
        return loop

    store = MemoryStore()
    evaluated_twice(store, learners=2)
    assert stores == [store]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"learners": 0}, "learners"),
        ({"learners": 2, "clip": [0.1, 0.2, 0.3]}, "clip"),
        ({"clip": [0.1]}, "clip"),
    ],
)
def test_invalid_learners_raise(options, word):
    with pytest.raises(ValueError, match=word):
        small(**options)


def test_learners_of_different_classes_raise():
    @recipe(CartPole, RecurrentDQN, num_envs=4, iterations=16)
    def either(build: Builder, recurrent: bool = True) -> Loop:
        environment = build.environment()
        return build.loop(build.agent(environment, RecurrentDQN if recurrent else DQN), environment)

    with pytest.raises(ValueError, match="single class"):
        either(learners=2, recurrent=[True, False])
