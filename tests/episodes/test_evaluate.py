"""Evaluation: every episode counts once, and all episodes end."""

from __future__ import annotations

import math

import gymnasium
import numpy as np
import pytest
import torch

import rein
from rein.envs.cartpole import CartPole


@pytest.mark.parametrize("episodes", [1, 2, 3, 4, 7])
def test_every_environment_plays_one_episode_per_round(scripted, listening, episodes):
    """Counting the first episodes to end would count short episodes more often."""
    environment = scripted([1, 9, 4])
    result = rein.evaluate(listening(environment), environment, episodes)
    assert result.episode_length.tolist() == ([1, 9, 4] * 3)[:episodes]
    assert result.episode_return.tolist() == ([1, 45, 10] * 3)[:episodes]


def test_mean_is_not_biased_toward_short_episodes(scripted, listening):
    environment = scripted([1, 9])
    assert rein.evaluate(listening(environment), environment, 20).mean_length == 5.0


def test_result_contains_ends_and_seeds(scripted, listening):
    environment = scripted([2, 3], truncates=[1])
    result = rein.evaluate(listening(environment), environment, 4)
    assert result.terminated.tolist() == [True, False, True, False]
    assert result.truncated.tolist() == [False, True, False, True]
    assert result.seed[:2].tolist() == [0, 100]


def test_endless_episode_is_truncated_and_counted(scripted, listening):
    environment = scripted([2, 10**9])
    result = rein.evaluate(listening(environment), environment, 2, max_episode_steps=5)
    assert result.episode_length.tolist() == [2, 5]
    assert result.episode_return.tolist() == [3, 15]
    assert result.truncated.tolist() == [False, True]


def test_standard_deviation_and_extremes_of_returns(scripted, listening):
    environment = scripted([1, 2, 3])
    result = rein.evaluate(listening(environment), environment, 3)
    assert (result.min_return, result.max_return) == (1.0, 6.0)
    assert result.std_return == pytest.approx((38 / 9) ** 0.5)  # standard deviation of 1, 3 and 6
    assert rein.evaluate(listening(environment), environment, 1).std_return == 0.0


def test_median_and_interquartile_mean_of_returns(scripted, listening):
    environment = scripted([1, 2, 3, 10])  # returns 1, 3, 6 and 55
    result = rein.evaluate(listening(environment), environment, 4)
    assert result.median_return == result.iqm_return == 4.5
    odd = rein.evaluate(listening(environment), environment, 3)
    assert (odd.median_return, odd.iqm_return) == (3.0, odd.mean_return)


@pytest.mark.parametrize("name", ["is_success", "success"])
def test_success_is_the_info_of_the_last_step(scripted, listening, name):
    environment = scripted([2, 3, 4])
    original = environment.apply_action

    def apply_action(action):
        time_step = original(action)
        short_N = time_step.terminated & (torch.arange(3) < 2) | ~time_step.terminated & (torch.arange(3) == 2)
        return time_step._replace(info={name: short_N})

    environment.apply_action = apply_action
    result = rein.evaluate(listening(environment), environment, 4)
    assert result.success.tolist() == [1, 1, 0, 1]
    assert result.success_rate == 0.75
    assert "success_rate 0.75" in repr(result)


def test_success_is_unknown_without_an_info(scripted, listening):
    environment = scripted([2, 3])
    result = rein.evaluate(listening(environment), environment, 2)
    assert result.success.tolist() == [-1, -1]
    assert math.isnan(result.success_rate)


def test_truncation_by_the_step_limit_counts_the_success_of_that_step(scripted, listening):
    environment = scripted([10, 10])
    original = environment.apply_action
    environment.apply_action = lambda action: original(action)._replace(info={"success": torch.tensor([1.0, 0.0])})
    result = rein.evaluate(listening(environment), environment, 2, max_episode_steps=3)
    assert result.success.tolist() == [1, 0]


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("value", [1.0, True, np.array([1.0], np.float32), "yes", None])
def test_gymnasium_environments_report_success_and_infos_of_the_last_step(value, vector):
    class Timed(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.steps = 0
            return 0, {}

        def step(self, action):
            self.steps += 1
            done = self.steps == 3
            return 0, 0.0, done, False, {"distance": 1.0 / self.steps} | ({"success": value} if done else {})

    mode = gymnasium.vector.AutoresetMode.SAME_STEP
    source = gymnasium.vector.SyncVectorEnv([Timed] * 2, autoreset_mode=mode) if vector else Timed
    environment = rein.make(source, *(() if vector else (2,)), seed=0, info={"distance": 0.0})
    result = rein.evaluate(rein.episodes.RandomPolicy(environment.single_action_space, seed=0), environment, 2)
    assert result.success.tolist() == [-1 if value in ("yes", None) else 1] * 2
    assert result.info["distance"].tolist() == pytest.approx([1 / 3] * 2)
    assert environment.config["info"] == {"distance": 0.0}


def test_evaluation_is_shown_as_a_summary(scripted, listening):
    environment = scripted([1, 2, 3])
    result = rein.evaluate(listening(environment), environment, 3)
    shown = "Evaluation(3 episodes, mean_return 3.3333 +- 2.0548 (1 to 6), mean_length 2)"
    assert repr(result) == shown


@pytest.mark.parametrize("episodes", [1, 2, 3, 7])
def test_episode_seeds_replay_the_episodes(episodes):
    environment = CartPole(num_envs=3, seed=0)
    policy = rein.PPO(environment, hidden=(4,)).policy()
    policy.select_action = lambda observation: ((observation[:, 2] > 0).long(), {})
    first, other = (rein.evaluate(policy, environment, episodes) for _ in range(2))
    again = rein.evaluate(policy, environment, episodes, episode_seeds=first.seed)
    assert first.seed.tolist() != other.seed.tolist()
    for one, same in zip(first[:-1], again[:-1], strict=True):
        assert one.tolist() == same.tolist()
    with pytest.raises(ValueError, match=rf"expected shape \({episodes},\)"):
        rein.evaluate(policy, environment, episodes, episode_seeds=first.seed[1:])


def test_episode_seeds_need_a_replayable_environment(scripted, listening):
    environment = scripted([2])
    with pytest.raises(TypeError, match="Scripted has no reset_to"):
        rein.evaluate(listening(environment), environment, 1, episode_seeds=torch.tensor([0]))


def test_policy_is_reset_when_episodes_begin(scripted, listening):
    environment = scripted([2, 3])
    policy, calls = listening(environment), []
    policy.reset = lambda mask=None: calls.append(None if mask is None else mask.tolist())
    rein.evaluate(policy, environment, 2)
    assert calls == [None, [False, False], [True, False], [False, True]]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"episodes": 0}, "episodes=0"), ({"episodes": 1, "max_episode_steps": 0}, "max_episode_steps=0")],
)
def test_invalid_options_raise(scripted, listening, arguments, text):
    environment = scripted([2])
    with pytest.raises(ValueError, match=text):
        rein.evaluate(listening(environment), environment, **arguments)


def test_object_that_is_not_a_policy_raises(scripted):
    with pytest.raises(TypeError, match=r"int is not a Policy$"):
        rein.evaluate(3, scripted([2]), 1)  # type: ignore[arg-type]


def test_evaluating_an_agent_evaluates_its_greedy_policy():
    environment = CartPole(4, seed=0)
    agent = rein.PPO(environment, seed=0)
    results = [rein.evaluate(policy, CartPole(4, seed=1), episodes=8) for policy in (agent, agent.policy())]
    assert results[0].episode_return.equal(results[1].episode_return)
