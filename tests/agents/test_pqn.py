"""PQN: the contracts, the probes, its targets, and what must not change its results."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.agents.base.learner import Batch
from rein.agents.pqn import PQN, squared_error
from rein.envs.gridworld import Gridworld
from rein.envs.probes import Bandit, ConstantReward, Corridor, DelayedReward, Fork, ObservedReward
from rein.ops.returns import discounted_returns
from rein.ops.values import td_target
from rein.schedules import linear
from rein.testing import AgentContract, StatefulContract
from rein.testing.stateful import copy_state, first_difference

SMALL = {"rollout_steps": 8, "update_epochs": 2, "minibatches": 2, "hidden": (16,), "epsilon": 0.3}


def fitted(environment, **options) -> PQN:
    return PQN(environment.single_observation_space, environment.single_action_space, **{**SMALL, **options})


class TestAgent(AgentContract):
    options: ClassVar[dict[str, Any]] = {}

    def make(self, seed):
        return fitted(self.environment(1, 0), seed=seed, **self.options)

    def environment(self, num_envs, seed):
        return Gridworld(num_envs=num_envs, seed=seed, max_episode_steps=9)


class TestWithEveryPart(TestAgent):
    options: ClassVar[dict[str, Any]] = {
        "dueling": True,
        "layer_norm": False,
        "normalize_observation": True,
        "normalize_reward": True,
        "epsilon": linear(1.0, 0.1, env_steps=100),
        "learning_rate": linear(1e-3, 0.0, env_steps=10_000),
        "max_grad_norm": None,
    }


class TestState(StatefulContract):
    """Saved in the middle of its second rollout: after 7 steps of 8."""

    steps_before = 15
    options: ClassVar[dict[str, Any]] = {"normalize_observation": True, "normalize_reward": True}

    def make(self):
        environment = Gridworld(num_envs=4, seed=0, max_episode_steps=9)
        return _Run(environment, fitted(environment, seed=1, **self.options))

    def step(self, part):
        return part.step()


class TestStateOfTheOptimizerOfThePaper(TestState):
    options: ClassVar[dict[str, Any]] = {"optimizer": torch.optim.RAdam}


class _Run:
    """An agent in its environments."""

    def __init__(self, environment, agent):
        self.parts = {"agent": agent, "environment": environment}
        self.state = rein.State(step_state=rein.StepState(environment.reset()))

    def step(self):
        self.state.step_state = rein.batch_step(self.state, **self.parts)
        return {"action": self.state.step_state.action, "metrics": self.state.step_state.metrics}

    def state_dict(self):
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        return {**parts, "observation": self.state.step_state.observation}

    def load_state_dict(self, state):
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.state.step_state = rein.StepState(state["observation"].clone())


PROBES = {
    "constant reward": (lambda n, s: ConstantReward(n, seed=s), 20),
    "observed reward": (lambda n, s: ObservedReward(n, seed=s), 40),
    "delayed reward": (lambda n, s: DelayedReward(n, seed=s), 40),
    "bandit": (lambda n, s: Bandit(n, seed=s), 30),
    "corridor": (lambda n, s: Corridor(n, seed=s), 40),
    "fork": (lambda n, s: Fork(n, seed=s), 50),  # who takes a truncation for an end prefers the prize paid at once
}
PROBE = {"rollout_steps": 16, "minibatches": 4, "hidden": (32,), "learning_rate": 1e-2, "gamma": 0.9}


@functools.cache
def trained_on(name, q_lambda):
    make, epochs = PROBES[name]
    environment = make(64, 0)
    explore = linear(1.0, 0.05, env_steps=epochs * 64 * 16 // 2)
    agent = fitted(environment, seed=0, **PROBE, epsilon=explore, q_lambda=q_lambda)
    rein.train(agent, environment, epochs=epochs, iterations=16)
    return agent


@pytest.mark.parametrize("q_lambda", [0.0, 0.65])
@pytest.mark.parametrize("name", PROBES)
def test_it_solves_the_probe(name, q_lambda):
    environment = PROBES[name][0](64, 1)
    reached = rein.evaluate(trained_on(name, q_lambda).policy(), environment, 256).mean_return
    assert reached >= environment.optimal_return - 0.05 * max(1.0, abs(environment.optimal_return))


@pytest.mark.parametrize("name", PROBES)
def test_its_value_is_that_of_the_best_action(name):
    """One step at a time it does not matter what exploring costs later."""
    environment = PROBES[name][0](64, 1)
    observation = environment.reset()
    found = trained_on(name, 0.0).select_action(observation)[1]["value"]
    torch.testing.assert_close(found, environment.optimal_value(observation, 0.9), rtol=0.1, atol=0.1)


def a_batch(q_lambda, normalize=False):
    """The rows that an agent is about to learn from, and its rollout, in which episodes end in both ways."""
    environment = Corridor(6, length=3, seed=0, max_episode_steps=5)
    agent = fitted(environment, seed=0, rollout_steps=16, epsilon=0.5, gamma=0.9, q_lambda=q_lambda)
    state = rein.State(step_state=rein.StepState(environment.reset()))
    while len(agent.rollout) < 15:
        state.step_state = rein.batch_step(state, agent, environment)
    optimize, agent.optimize_model = agent.optimize_model, dict
    rein.batch_step(state, agent, environment)
    agent.optimize_model = optimize
    assert agent.rollout["terminated"].any() and agent.rollout["truncated"].any()
    return agent, agent.batch(agent.rollout), agent.rollout


def next_values(agent, rollout):
    """Of what truly came next, each looked up by itself."""
    with torch.no_grad():
        return agent.networks(agent.networks.preprocess(rollout.flat("next_observation"))).amax(1).view(16, 6)


def test_with_a_lambda_of_0_the_target_is_that_of_one_step_of_q_learning():
    agent, batch, rollout = a_batch(0.0)
    expected = td_target(rollout["reward"], rollout["terminated"], next_values(agent, rollout), 0.9)
    torch.testing.assert_close(batch.target, expected.flatten())


def test_with_a_lambda_of_1_the_target_is_the_discounted_return():
    agent, batch, rollout = a_batch(1.0)
    ends = rollout["terminated"], rollout["truncated"]
    expected = discounted_returns(rollout["reward"], *ends, next_values(agent, rollout), gamma=0.9)
    torch.testing.assert_close(batch.target, expected.flatten())


def test_targets_are_not_cut_at_exploratory_actions():
    """An agent that always explores sees the same targets as one that acts greedily and happens to do the same."""
    agent, batch, rollout = a_batch(1.0)
    greedy = agent.policy().select_action(rollout.flat("observation"))[0]
    explored = (greedy != batch.action).view(16, 6)
    went_on = explored[1:] & ~(rollout["terminated"] | rollout["truncated"])[:-1]
    step, n = (int(x[0]) for x in went_on.nonzero(as_tuple=True))
    target_TN = batch.target.view(16, 6)
    torch.testing.assert_close(target_TN[step, n], rollout["reward"][step, n] + 0.9 * target_TN[step + 1, n])


def test_no_target_reaches_over_a_reset_outside_a_step():
    """It bootstraps from what the environment had come to; in the others nothing changes."""
    agent, other = (fitted(Gridworld(2, seed=0), seed=0, rollout_steps=2, q_lambda=1.0) for _ in range(2))
    observation = Gridworld(num_envs=4, seed=0).reset()
    before, after = observation[:2], observation[2:]
    flags = torch.zeros(2, dtype=torch.bool)
    for one in (agent, other):
        for reward in (torch.zeros(2), torch.full((2,), 100.0)):
            action, extras = one.select_action(before)
            one.record_observation(rein.Transition(before, action, reward, flags, flags, after, ~flags, extras))
            if one is agent:
                one.observe_reset(before, torch.tensor([True, False]))
    target_TN, went_on_TN = (one.batch(one.rollout).target.view(2, 2) for one in (agent, other))
    value_N = agent.select_action(after)[1]["value"]
    torch.testing.assert_close(target_TN[0, 0], agent.gamma * value_N[0])
    assert float(went_on_TN[0, 0]) > 90.0
    torch.testing.assert_close(target_TN[:, 1], went_on_TN[:, 1])


def test_the_running_return_of_normalized_rewards_ends_at_a_reset_between_two_rollouts():
    agent = fitted(Gridworld(2, seed=0), seed=0, rollout_steps=1, minibatches=1, normalize_reward=True)
    observation = Gridworld(num_envs=2, seed=0).reset()
    flags = torch.zeros(2, dtype=torch.bool)
    action, extras = agent.select_action(observation)
    agent.record_observation(
        rein.Transition(observation, action, flags + 1.0, flags, flags, observation, ~flags, extras)
    )
    agent.optimize_model()
    agent.observe_reset(observation, torch.tensor([True, False]))
    assert agent.state_dict()["reward_normalizer"]["running_return"].tolist() == [0.0, 1.0]


def test_the_values_of_other_actions_are_no_part_of_the_loss():
    agent, batch, _ = a_batch(0.65)
    value_BA = agent.networks(batch.features)
    taken_B = torch.stack([row[a] for row, a in zip(value_BA, batch.action, strict=True)])
    loss, metrics = squared_error(agent.networks, batch, None)
    torch.testing.assert_close(loss, 0.5 * torch.nn.functional.mse_loss(taken_B, batch.target))
    torch.testing.assert_close(metrics["action_value"], taken_B.mean().detach())


def test_rows_that_do_not_count_are_no_part_of_the_loss():
    agent, batch, _ = a_batch(0.65)
    valid = torch.arange(batch.size) % 3 == 0
    masked = batch._replace(valid=valid, target=torch.where(valid, batch.target, torch.nan))
    torch.testing.assert_close(
        squared_error(agent.networks, masked, None)[0],
        squared_error(agent.networks, batch.rows(valid.nonzero().flatten()), None)[0],
    )
    assert isinstance(masked.rows(slice(0, 4)), Batch)


def learned(seed=0, steps=48, **options) -> PQN:
    environment = Gridworld(num_envs=8, seed=0, max_episode_steps=9)
    agent = fitted(environment, seed=seed, **options)
    rein.train(agent, environment, epochs=1, iterations=steps)
    return agent


def assert_nearly_equal(one: PQN, other: PQN):
    for mine, theirs in zip(one.networks.parameters(), other.networks.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("micro_batch", [1, 5, 16])
def test_micro_batches_change_nothing_but_rounding(micro_batch):
    whole, parts = learned(), learned(micro_batch=micro_batch)
    assert whole.updates == parts.updates == 6 * 2 * 2
    assert_nearly_equal(whole, parts)


def test_threads_change_nothing_at_all():
    one, two = learned(micro_batch=5), learned(micro_batch=5, threads=2)
    assert first_difference(dict(one.networks.state_dict()), dict(two.networks.state_dict())) is None


def test_epsilon_reaches_its_end_at_its_horizon():
    """From there on, at 0, its actions are those of the greedy policy; before, they are not."""
    epsilon = linear(1.0, 0.0, env_steps=8 * 40)
    observation = Gridworld(num_envs=256, seed=3).reset()
    for steps, greedy in ((32, False), (40, True)):
        agent = learned(steps=steps, epsilon=epsilon)
        action, expected = agent.select_action(observation)[0], agent.policy().select_action(observation)[0]
        assert torch.equal(action, expected) == greedy


def test_an_exploring_policy_explores_as_much_as_the_agent():
    agent = learned(epsilon=0.5)
    observation = Gridworld(num_envs=4096, seed=3).reset()
    greedy = agent.policy().select_action(observation)[0]
    for actor in (agent, agent.policy(deterministic=False)):
        differ = (actor.select_action(observation)[0] != greedy).float().mean()
        assert float(differ) == pytest.approx(0.5 * 3 / 4, abs=0.05)  # of four actions one is the best


def test_the_learning_rate_reaches_its_end_at_its_horizon():
    agent = learned(learning_rate=linear(1e-3, 0.0, env_steps=8 * 40), steps=40)
    assert agent.learners["networks"].optimizer.param_groups[0]["lr"] == 0.0


def test_a_guard_that_refuses_leaves_the_parameters_as_they_are():
    asked = []

    def guard(metrics, gradients):
        asked.append(sorted(metrics))
        return False

    untouched, agent = learned(steps=1), learned(guard=guard)
    assert first_difference(dict(untouched.networks.state_dict()), dict(agent.networks.state_dict())) is None
    assert len(asked) == 24
    assert all("grad_norm" in metrics for metrics in asked)
    assert {"grad_norm", "value_loss", "action_value"} <= set(asked[-1])  # in the last pass, which is reported


def test_it_learns_in_half_precision_nearly_the_same():
    whole, half = learned(), learned(precision="bfloat16")
    for one, other in zip(whole.networks.parameters(), half.networks.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.05)
    assert first_difference(dict(whole.networks.state_dict()), dict(half.networks.state_dict())) is not None


def test_metrics_say_what_the_last_pass_found():
    told = []

    def guard(metrics, gradients):
        told.append({name: float(value) for name, value in metrics.items()})
        return True

    for options in ({}, {"guard": guard}):  # which is told of all passes, and of the last one all
        environment = Gridworld(num_envs=8, seed=0, max_episode_steps=9)
        agent = fitted(environment, seed=0, minibatches=1, **options)
        found = rein.train(agent, environment, epochs=1, iterations=8).step_state.metrics
        assert set(found) == {"value_loss", "action_value", "grad_norm", "explained_variance", "epsilon"}
        assert float(found["epsilon"]) == pytest.approx(0.3)
    assert float(found["value_loss"]) == told[-1]["value_loss"]
    assert float(found["grad_norm"]) == told[-1]["grad_norm"] != told[0]["grad_norm"]


def test_trajectories_show_the_value_of_the_best_action():
    environment = Gridworld(num_envs=8, seed=0)
    agent, observation = fitted(environment, seed=0), environment.reset()
    _, extras = agent.select_action(observation)
    assert set(extras) == {"value"}
    best = agent.networks(agent.networks.preprocess(observation)).amax(1).detach()
    torch.testing.assert_close(extras["value"], best)


def test_actions_of_somebody_else_are_valued_by_its_own_networks():
    """Whatever that one said along with them."""
    agents = [fitted(Gridworld(8, seed=0), seed=0) for _ in range(2)]
    environment = Gridworld(num_envs=8, seed=0, max_episode_steps=9)
    flags = torch.zeros(8, dtype=torch.bool)
    observation = environment.reset()
    for _ in range(8):
        own, _ = agents[0].select_action(observation)
        now = environment.apply_action(own)
        ends = now.reward, now.terminated, now.truncated, now.final_observation, ~flags
        for agent, extras in zip(
            agents, ({"value": agents[0]._values(observation).amax(1)}, {"value": now.reward}), strict=True
        ):
            agent.record_observation(rein.Transition(observation, own, *ends, extras))
        observation = now.observation
    torch.testing.assert_close(agents[0].batch(agents[0].rollout).target, agents[1].batch(agents[1].rollout).target)


def test_actions_of_somebody_else_may_be_of_a_narrower_type():
    agent, flags = fitted(Gridworld(8, seed=0), seed=0), torch.zeros(8, dtype=torch.bool)
    observation = Gridworld(num_envs=8, seed=0).reset()
    own, _ = agent.select_action(observation)
    for action in (own, torch.ones(8, dtype=torch.uint8), own.int()):
        kept = rein.Transition(observation, action, torch.zeros(8), flags, flags, observation, ~flags, {})
        agent.record_observation(kept)
    assert agent.rollout["action"].dtype is torch.int64


def test_a_look_at_other_observations_in_between_changes_no_value_that_is_kept():
    agents, flags = [fitted(Gridworld(8, seed=0), seed=0) for _ in range(2)], torch.zeros(8, dtype=torch.bool)
    observation = Gridworld(num_envs=8, seed=0).reset()
    for agent, asked in zip(agents, (False, True), strict=True):
        action, _ = agent.select_action(observation)
        if asked:
            agent.select_action(torch.zeros_like(observation))
        kept = rein.Transition(observation, action, torch.zeros(8), flags, flags, observation, ~flags, {})
        agent.record_observation(kept)
    one, other = (agent.rollout["value"] for agent in agents)
    assert torch.equal(one, other)


def test_actions_are_counted_from_the_start_of_the_space():
    space = spaces.Discrete(3, start=5)
    agent = PQN(spaces.Box(-1.0, 1.0, (2,)), space, seed=0, **{**SMALL, "learning_rate": 3e-2})
    observation, flags = torch.ones(32, 2), torch.zeros(32, dtype=torch.bool)
    for _ in range(8 * 25):
        action, extras = agent.select_action(observation)
        assert all(space.contains(row.numpy()) for row in action[:2])
        transition = (observation, action, (action == 6).float(), ~flags, flags, observation, ~flags, extras)
        agent.record_observation(rein.Transition(*transition))
        agent.optimize_model()
    assert agent.policy().select_action(observation[:1])[0].tolist() == [6]


def test_images_are_learned_from_as_bytes():
    space = spaces.Box(0, 255, (4, 36, 36), np.uint8)
    agent = PQN(space, spaces.Discrete(2), seed=0, **{**SMALL, "update_epochs": 1, "hidden": ()})
    observation = torch.zeros(2, 4, 36, 36, dtype=torch.uint8)
    flags = torch.zeros(2, dtype=torch.bool)
    metrics = {}
    for _ in range(8):
        action, extras = agent.select_action(observation)
        transition = (observation, action, action.float(), ~flags, flags, observation, ~flags, extras)
        agent.record_observation(rein.Transition(*transition))
        metrics = agent.optimize_model()
    assert agent.rollout["observation"].dtype is torch.uint8
    assert agent.updates == 2 and float(metrics["value_loss"]) > 0.0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"update_epochs": 0}, r"PQN\(update_epochs=0\): give 1 or more"),
        ({"rollout_steps": 0}, r"PQN\(rollout_steps=0\)"),
        ({"minibatches": 0}, r"PQN\(minibatches=0\)"),
        ({"q_lambda": 1.5}, r"PQN\(q_lambda=1.5\): give a number from 0 to 1"),
        ({"gamma": -0.1}, r"PQN\(gamma=-0.1\)"),
        ({"epsilon": linear(2.0, 0.0, env_steps=10)}, r"PQN\(epsilon=.*\): give a number from 0 to 1"),
        ({"precision": "float8"}, "bfloat16"),
    ],
)
def test_nonsense_is_refused_where_it_is_written(options, text):
    with pytest.raises(ValueError, match=text):
        PQN(spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(2), **options)


def test_an_action_space_without_a_value_for_each_action_is_refused():
    with pytest.raises(ValueError, match="requires Discrete actions"):
        PQN(spaces.Box(-1.0, 1.0, (2,)), spaces.Box(-1.0, 1.0, (1,)))


def test_its_configuration_says_what_it_was_built_with():
    optimizer = functools.partial(torch.optim.RAdam, weight_decay=0.1)
    config = fitted(Gridworld(2, seed=0), seed=4, q_lambda=0.5, optimizer=optimizer).config
    expected = {**SMALL, "hidden": [16], "q_lambda": 0.5, "seed": 4, "layer_norm": True}
    assert {name: config[name] for name in expected} == expected
    assert config["optimizer"]["type"] == "torch.optim.radam.RAdam" and config["optimizer"]["weight_decay"] == 0.1


def test_a_handler_may_replace_the_action_and_what_was_said_of_it():
    environment = Gridworld(num_envs=4, seed=0)
    agent = fitted(environment, seed=0)
    loop = rein.training_loop(agent, environment, seed=0)

    @loop.action_selected
    def replace(state):
        action = torch.zeros_like(state.step_state.action)
        state.step_state = state.step_state._replace(action=action, extras={})

    assert loop.run(epochs=1, iterations=16).status == "completed"
    assert agent.updates > 0


def test_a_state_of_the_other_kind_of_rewards_is_refused_before_anything_is_loaded():
    environment = Gridworld(num_envs=4, seed=0)
    plain, scaled = fitted(environment, seed=0), fitted(environment, seed=1, normalize_reward=True)
    before = copy_state(plain.state_dict())
    with pytest.raises(ValueError, match="reward_normalizer"):
        plain.load_state_dict(scaled.state_dict())
    assert first_difference(before, plain.state_dict()) is None
