"""PQN: contract tests, probe environments, targets, and settings that must not change results."""

from __future__ import annotations

import functools

import pytest
import torch
from gymnasium import spaces

import rein
from rein.agents.base.learner import Batch
from rein.agents.pqn import PQN, squared_error
from rein.envs.gridworld import Gridworld
from rein.envs.probes import Bandit, ConstantReward, Corridor, DelayedReward, Fork, ObservedReward
from rein.schedules import linear
from rein.testing.stateful import first_difference
from tests.agents.steps import practice

SMALL = {"rollout_steps": 8, "update_epochs": 2, "minibatches": 2, "hidden": (16,), "epsilon": 0.3}


def fitted(environment, **options) -> PQN:
    return PQN(environment.single_observation_space, environment.single_action_space, **{**SMALL, **options})


PROBES = {
    "constant reward": (lambda n, s: ConstantReward(n, seed=s), 20),
    "observed reward": (lambda n, s: ObservedReward(n, seed=s), 40),
    "delayed reward": (lambda n, s: DelayedReward(n, seed=s), 40),
    "bandit": (lambda n, s: Bandit(n, seed=s), 30),
    "corridor": (lambda n, s: Corridor(n, seed=s), 40),
    "fork": (lambda n, s: Fork(n, seed=s), 50),  # solved only if truncated episodes bootstrap
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


@pytest.mark.default_cases("constant reward-0.0", "delayed reward-0.65", "bandit-0.65", "corridor-0.65")
@pytest.mark.parametrize("q_lambda", [0.0, 0.65])
@pytest.mark.parametrize("name", PROBES)
def test_solves_probe(name, q_lambda):
    environment = PROBES[name][0](64, 1)
    reached = rein.evaluate(trained_on(name, q_lambda).policy(), environment, 256).mean_return
    assert reached >= environment.optimal_return - 0.05 * max(1.0, abs(environment.optimal_return))


@pytest.mark.default_cases("constant reward", "observed reward")
@pytest.mark.parametrize("name", PROBES)
def test_value_is_the_optimal_value(name):
    """With lambda 0, later exploration does not change the values."""
    environment = PROBES[name][0](64, 1)
    observation = environment.reset()
    found = trained_on(name, 0.0).select_action(observation)[1]["value"]
    torch.testing.assert_close(found, environment.optimal_value(observation, 0.9), rtol=0.1, atol=0.1)


def a_batch(q_lambda, normalize=False):
    """Return an agent, its next batch, and its rollout, which has terminated and truncated episodes."""
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


def test_reset_outside_a_step_cuts_the_trace():
    """The reset environment bootstraps from its last observation. Other environments are unaffected."""
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
    target_TN, continued_TN = (one.batch(one.rollout).target.view(2, 2) for one in (agent, other))
    value_N = agent.select_action(after)[1]["value"]
    torch.testing.assert_close(target_TN[0, 0], agent.gamma * value_N[0])
    assert float(continued_TN[0, 0]) > 90.0
    torch.testing.assert_close(target_TN[:, 1], continued_TN[:, 1])


def test_reset_between_rollouts_clears_the_running_return():
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


def test_loss_uses_only_values_of_recorded_actions():
    agent, batch, _ = a_batch(0.65)
    value_BA = agent.networks(batch.features)
    taken_B = torch.stack([row[a] for row, a in zip(value_BA, batch.action, strict=True)])
    loss, metrics = squared_error(agent.networks, batch, None)
    torch.testing.assert_close(loss, 0.5 * torch.nn.functional.mse_loss(taken_B, batch.target))
    torch.testing.assert_close(metrics["action_value"], taken_B.mean().detach())


def test_loss_ignores_invalid_rows():
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


def test_epsilon_schedule_ends_at_its_horizon():
    """With epsilon 0 at the horizon, actions equal those of the greedy policy."""
    epsilon = linear(1.0, 0.0, env_steps=8 * 40)
    observation = Gridworld(num_envs=256, seed=3).reset()
    for steps, greedy in ((32, False), (40, True)):
        agent = learned(steps=steps, epsilon=epsilon)
        action, expected = agent.select_action(observation)[0], agent.policy().select_action(observation)[0]
        assert torch.equal(action, expected) == greedy


def test_bfloat16_changes_rounding_only():
    whole, half = learned(), learned(precision="bfloat16")
    for one, other in zip(whole.networks.parameters(), half.networks.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.05)
    assert first_difference(dict(whole.networks.state_dict()), dict(half.networks.state_dict())) is not None


def test_metrics_are_those_of_the_last_pass():
    reported = []

    def guard(metrics, gradients):
        reported.append({name: float(value) for name, value in metrics.items()})
        return True

    for options in ({}, {"guard": guard}):  # the guard receives the metrics of all passes
        environment = Gridworld(num_envs=8, seed=0, max_episode_steps=9)
        agent = fitted(environment, seed=0, minibatches=1, **options)
        found = rein.train(agent, environment, epochs=1, iterations=8).step_state.metrics
        assert set(found) == {"value_loss", "action_value", "grad_norm", "explained_variance", "epsilon"}
        assert float(found["epsilon"]) == pytest.approx(0.3)
    assert float(found["value_loss"]) == reported[-1]["value_loss"]
    assert float(found["grad_norm"]) == reported[-1]["grad_norm"] != reported[0]["grad_norm"]


def test_extras_contain_the_largest_action_value():
    environment = Gridworld(num_envs=8, seed=0)
    agent, observation = fitted(environment, seed=0), environment.reset()
    _, extras = agent.select_action(observation)
    assert set(extras) == {"value"}
    best = agent.networks(agent.networks.preprocess(observation)).amax(1).detach()
    torch.testing.assert_close(extras["value"], best)


def test_external_actions_are_valued_by_the_agent():
    """The `value` in the extras of the other program is ignored."""
    agents = [fitted(Gridworld(8, seed=0), seed=0) for _ in range(2)]
    environment = Gridworld(num_envs=8, seed=0, max_episode_steps=9)
    flags = torch.zeros(8, dtype=torch.bool)
    observation = environment.reset()
    for _ in range(8):
        selected, _ = agents[0].select_action(observation)
        now = environment.apply_action(selected)
        ends = now.reward, now.terminated, now.truncated, now.final_observation, ~flags
        for agent, extras in zip(
            agents, ({"value": agents[0]._values(observation).amax(1)}, {"value": now.reward}), strict=True
        ):
            agent.record_observation(rein.Transition(observation, selected, *ends, extras))
        observation = now.observation
    torch.testing.assert_close(agents[0].batch(agents[0].rollout).target, agents[1].batch(agents[1].rollout).target)


def test_external_actions_are_cast_to_int64():
    agent, flags = fitted(Gridworld(8, seed=0), seed=0), torch.zeros(8, dtype=torch.bool)
    observation = Gridworld(num_envs=8, seed=0).reset()
    selected, _ = agent.select_action(observation)
    for action in (selected, torch.ones(8, dtype=torch.uint8), selected.int()):
        kept = rein.Transition(observation, action, torch.zeros(8), flags, flags, observation, ~flags, {})
        agent.record_observation(kept)
    assert agent.rollout["action"].dtype is torch.int64


def test_extra_select_action_does_not_change_recorded_values():
    agents, flags = [fitted(Gridworld(8, seed=0), seed=0) for _ in range(2)], torch.zeros(8, dtype=torch.bool)
    observation = Gridworld(num_envs=8, seed=0).reset()
    for agent, extra_call in zip(agents, (False, True), strict=True):
        action, _ = agent.select_action(observation)
        if extra_call:
            agent.select_action(torch.zeros_like(observation))
        kept = rein.Transition(observation, action, torch.zeros(8), flags, flags, observation, ~flags, {})
        agent.record_observation(kept)
    one, other = (agent.rollout["value"] for agent in agents)
    assert torch.equal(one, other)


def test_action_space_start_is_respected():
    space = spaces.Discrete(3, start=5)
    agent = PQN(spaces.Box(-1.0, 1.0, (2,)), space, seed=0, **{**SMALL, "learning_rate": 3e-2})
    observation = torch.ones(32, 2)
    practice(agent, observation, lambda action: (action == 6).float(), 8 * 25)
    assert {*agent.select_action(observation)[0].tolist()} <= {5, 6, 7}
    assert agent.policy().select_action(observation[:1])[0].tolist() == [6]
