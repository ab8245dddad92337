"""PPO: contract tests, probe environments, and settings that must not change results."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import rein
from rein.envs.probes import Reach
from rein.networks.recurrent import MinimalGRU
from rein.schedules import linear
from rein.testing.stateful import copy_state, first_difference

SMALL = {"rollout_steps": 8, "update_epochs": 2, "minibatches": 2, "hidden": (16,)}


def fitted(environment, **options) -> rein.PPO:
    return rein.PPO(environment.single_observation_space, environment.single_action_space, **{**SMALL, **options})


def learned(seed=0, steps=48, **options) -> rein.PPO:
    environment = rein.envs.Gridworld(num_envs=8, seed=0, max_episode_steps=9)
    agent = fitted(environment, seed=seed, **options)
    rein.train(agent, environment, epochs=1, iterations=steps)
    return agent


SCHEDULES = {
    "learning_rate": (3e-3, 1e-4),
    "clip": (0.5, 1e-3),
    "entropy_coefficient": (0.1, 0.0),
}


@pytest.mark.parametrize(("clock", "horizon"), [("env_steps", 8 * 40), ("updates", 4 * 4)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_end_at_their_horizon(name, clock, horizon):
    """At the horizon, the update is bit-identical to that of the constant end value; before the horizon it is not."""
    start, end = SCHEDULES[name]
    common = {"learning_rate": 1e-2, "update_epochs": 2, "minibatches": 2, "clip": 0.2}
    scheduled = {h: {**common, name: linear(start, end, **{clock: horizon + h})} for h in (0, 1)}
    before = learned(steps=32, **scheduled[0]).state_dict()
    last = []
    for options in ({**common, name: end}, *scheduled.values()):
        environment = rein.envs.Gridworld(num_envs=8, seed=5, max_episode_steps=9)
        agent = fitted(environment, seed=0, **options)
        agent.load_state_dict(copy_state(before))
        rein.train(agent, environment, epochs=1, iterations=8)
        assert agent.counts == {"env_steps": 8 * 40, "updates": 5 * 4}
        last.append(dict(agent.networks.state_dict()))
    constant, exact, longer = last
    assert first_difference(constant, exact) is None
    assert first_difference(constant, longer) is not None


def test_target_kl_zero_stops_after_one_pass():
    assert learned(target_kl=0.0, update_epochs=7).updates == 6 * 2
    assert learned(target_kl=1e9, update_epochs=7).updates == 6 * 2 * 7


def test_guard_can_skip_all_updates():
    calls = []

    def guard(metrics, gradients):
        calls.append(sorted(metrics))
        return False

    untouched, agent = learned(steps=1), learned(guard=guard)
    assert first_difference(dict(untouched.networks.state_dict()), dict(agent.networks.state_dict())) is None
    assert len(calls) == agent.updates == 24  # skipped updates count too
    assert (
        first_difference(
            untouched.learners["networks"].optimizer.state_dict(), agent.learners["networks"].optimizer.state_dict()
        )
        is None
    )
    assert all("grad_norm" in metrics for metrics in calls)
    assert {"grad_norm", "approx_kl", "entropy"} <= set(calls[3])  # metrics of the last pass


def test_gradients_are_clipped_by_global_norm():
    """A step of gradient descent is at most as long as the limit times the learning rate."""
    sgd: Any = functools.partial(torch.optim.SGD, lr=1.0)
    far: Any = {"learning_rate": 1.0, "update_epochs": 1, "minibatches": 1}
    initial, limited, free = (
        learned(steps=s, optimizer=sgd, max_grad_norm=m, **far) for s, m in ((1, 1), (8, 0.01), (8, None))
    )
    start = torch.nn.utils.parameters_to_vector(initial.networks.parameters())
    moved = [torch.nn.utils.parameters_to_vector(a.networks.parameters()) - start for a in (limited, free)]
    assert moved[0].norm().item() == pytest.approx(0.01, rel=1e-3)
    assert moved[1].norm().item() > 0.02
    torch.testing.assert_close(moved[0] / moved[0].norm(), moved[1] / moved[1].norm(), atol=1e-3, rtol=0)


def test_observation_statistics_change_only_between_rollouts():
    environment = rein.envs.CartPole(8, seed=0)
    agent = fitted(environment, seed=0, normalize_observation=True)
    policy, seen = agent.policy(), []
    loop = rein.training_loop(agent, environment, epochs=1, iterations=24)
    x = torch.ones(1, 4)

    @loop.iteration_completed
    def look(state):
        before = copy_state(dict(agent.networks.preprocess.state_dict()))
        policy.select_action(10.0 * x)
        assert first_difference(before, dict(agent.networks.preprocess.state_dict())) is None
        seen.append(agent.networks.preprocess(x))

    loop.run()
    changed = [t for t in range(1, 24) if not torch.equal(seen[t], seen[t - 1])]
    assert changed == [7, 15, 23]
    assert agent.networks.preprocess.normalizer.rows == 24 * 8


@pytest.mark.parametrize("options", [{}, {"normalize_observation": True, "normalize_reward": True}])
def test_evaluation_does_not_change_training(options):
    states = []
    for evaluates in (False, True):
        environment = rein.envs.CartPole(8, seed=0)
        agent = fitted(environment, seed=0, **options)
        loop = rein.training_loop(agent, environment, epochs=4, iterations=10)

        @loop.iteration_completed(every=3 if evaluates else 0)
        def look(state, agent=agent):
            for deterministic in (True, False):
                rein.evaluate(agent.policy(deterministic), rein.envs.CartPole(3, seed=1), 3, max_episode_steps=20)

        loop.run()
        states.append(copy_state(agent.state_dict()))
    assert first_difference(*states) is None


@pytest.mark.parametrize("mine", [False, True])
def test_state_with_other_normalizers_is_rejected(mine):
    environment = rein.envs.CartPole(1, seed=0)
    agent, other = (fitted(environment, seed=0, normalize_reward=normalizes) for normalizes in (mine, not mine))
    with pytest.raises(ValueError, match="reward_normalizer"):
        agent.load_state_dict(other.state_dict())


def test_normalized_rewards_do_not_depend_on_scale():
    results = []
    for unit in (1.0, 1000.0):
        environment = rein.envs.Gridworld(8, seed=0, max_episode_steps=9)
        agent = fitted(environment, seed=0, normalize_reward=True)
        loop = rein.training_loop(agent, environment, epochs=1, iterations=24)

        @loop.action_applied
        def scale(state, unit=unit):
            shaped = state.step_state.transition._replace(reward=state.step_state.transition.reward * unit)
            state.step_state = state.step_state._replace(transition=shaped)

        loop.run()
        results.append(dict(agent.networks.state_dict()))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "kept"), [(lambda: rein.envs.Gridworld(4, seed=0), False), (lambda: Reach(4, seed=0), True)]
)
def test_sample_is_recorded_only_if_it_differs_from_the_action(make, kept):
    environment = make()
    _, extras = fitted(environment, seed=0).select_action(environment.reset())
    assert set(extras) == {"value", "log_prob"} | ({"sample"} if kept else set())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"core": functools.partial(MinimalGRU, features=8)}], ids=["rows", "sequences"]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by the compiler
def test_compiled_training_changes_rounding_only(options):
    """Unlike the fast tests, which only trace, this test runs the compiler."""
    eager, compiled = (learned(steps=16, compile=compile, **options) for compile in (False, True))
    for one, other in zip(eager.networks.parameters(), compiled.networks.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-5)


def test_normalizing_a_single_row_is_rejected():
    with pytest.raises(ValueError, match="an update has one row only"):
        learned(steps=8, minibatches=64)
    assert learned(steps=8, minibatches=64, normalize_advantage=False).updates == 2 * 64


def test_wrong_observation_shape_is_rejected():
    agent = fitted(rein.envs.CartPole(2, seed=0))
    for wrong in (torch.zeros(4), torch.zeros(2, 3)):
        with pytest.raises(ValueError, match="4 numbers each"):
            agent.select_action(wrong)


def test_config_describes_the_optimizer():
    one, other = (
        fitted(rein.envs.Gridworld(2, seed=0), optimizer=functools.partial(torch.optim.RMSprop, alpha=alpha)).config[
            "optimizer"
        ]
        for alpha in (0.9, 0.5)
    )
    assert one["type"] == other["type"] and (one["alpha"], other["alpha"]) == (0.9, 0.5)
    assert one["type"] != fitted(rein.envs.Gridworld(2, seed=0)).config["optimizer"]["type"]
