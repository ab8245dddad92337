"""Adapter for JAX environments. The tests of gymnax and Brax need these packages."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

import rein
from rein.testing import EnvironmentContract

N, LIMIT = 4, 20


@pytest.fixture(scope="module")
def cartpole() -> Any:
    gymnax = pytest.importorskip("gymnax")
    env, params = gymnax.make("CartPole-v1")
    return env, params.replace(max_steps_in_episode=LIMIT)


class TestGymnax(EnvironmentContract):
    steps = 60

    @pytest.fixture(autouse=True)
    def _environment(self, cartpole: Any) -> None:
        self.parts = cartpole  # one object, so that JAX compiles once

    def make(self, num_envs: int, seed: int | None) -> Any:
        return rein.JaxEnvironment(*self.parts, num_envs=num_envs, seed=seed)


def test_gymnax_separates_truncation_from_termination(cartpole: Any) -> None:
    environment = rein.JaxEnvironment(*cartpole, num_envs=N, seed=0)
    environment.reset()
    steps, ends = torch.zeros(N, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for k in range(100):
        action = torch.full((N,), k % 2)
        action[0] = 1  # falls over
        time_step = environment.apply_action(action)
        steps += 1
        assert torch.equal(time_step.truncated, steps == LIMIT)
        fallen = (time_step.final_observation[:, 2].abs() > 0.2095) | (time_step.final_observation[:, 0].abs() > 2.4)
        assert torch.equal(time_step.terminated, fallen)
        ended = time_step.terminated | time_step.truncated
        assert (time_step.observation[ended].abs() <= 0.05).all()
        steps[ended] = 0
        ends += torch.stack([time_step.terminated.sum(), time_step.truncated.sum()])
    assert (ends > 0).all()


def test_state_of_another_environment_is_refused(cartpole: Any) -> None:
    environment = rein.JaxEnvironment(*cartpole, num_envs=N, seed=0)
    environment.reset()
    state = environment.state_dict()
    state["state"] = state["state"][1:]
    with pytest.raises(ValueError, match="the state has 5 arrays, this environment 6"):
        environment.load_state_dict(state)


def test_pair_of_environment_and_parameters_is_refused() -> None:
    pytest.importorskip("jax")
    with pytest.raises(TypeError, match="returns two arguments"):
        rein.JaxEnvironment((object(), object()))


@pytest.fixture(scope="module")
def point() -> Any:
    """Return an environment with Brax's interface: a point that is pushed, and ends beyond 1 or after 6 steps."""
    jax = pytest.importorskip("jax")
    base = pytest.importorskip("brax.envs.base")
    training = pytest.importorskip("brax.envs.wrappers.training")

    class Point(base.Env):
        observation_size, action_size, backend = 2, 1, "none"

        def reset(self, rng: Any) -> Any:
            position = jax.random.uniform(rng, (), minval=-0.5, maxval=0.5)
            observation = {"state": position[None], "privileged_state": jax.numpy.stack([position, position])}
            return base.State(position, observation, jax.numpy.zeros(()), jax.numpy.zeros(()), {}, {"rng": rng})

        def step(self, state: Any, action: Any) -> Any:
            position = state.pipeline_state + 0.3 * action[0]
            observation = {"state": position[None], "privileged_state": jax.numpy.stack([position, position])}
            done = (abs(position) > 1.0).astype(float)
            return state.replace(pipeline_state=position, obs=observation, reward=-position, done=done)

    return training.EpisodeWrapper(Point(), episode_length=6, action_repeat=1), training


def test_brax_separates_truncation_from_termination(point: Any) -> None:
    environment = rein.JaxEnvironment(point[0], num_envs=N, seed=0)
    assert set(environment.single_observation_space.spaces) == {"observation", "critic_observation"}
    observation = environment.reset()
    position, steps = observation["observation"][:, 0], torch.zeros(N, dtype=torch.int64)
    action = torch.tensor([[1.0], [-1.0], [0.01], [0.0]])
    for _ in range(15):
        time_step = environment.apply_action(action)
        position, steps = position + 0.3 * action[:, 0], steps + 1
        torch.testing.assert_close(time_step.final_observation["observation"][:, 0], position)
        assert torch.equal(time_step.terminated, time_step.final_observation["observation"][:, 0].abs() > 1.0)
        assert torch.equal(time_step.truncated, (steps == 6) & ~time_step.terminated)
        ended = time_step.terminated | time_step.truncated
        assert (time_step.observation["observation"][ended].abs() <= 0.5).all()
        position, steps = time_step.observation["observation"][:, 0], steps.masked_fill(ended, 0)


def test_brax_with_automatic_reset_is_refused(point: Any) -> None:
    env, training = point
    with pytest.raises(ValueError, match="auto_reset=False"):
        rein.JaxEnvironment(training.AutoResetWrapper(env))


def test_vectorized_brax_is_refused(point: Any) -> None:
    env, training = point
    with pytest.raises(ValueError, match="without batch_size"):
        rein.JaxEnvironment(training.VmapWrapper(env, 3))


@pytest.mark.skipif(importlib.util.find_spec("jax") is not None, reason="jax is installed")
def test_missing_jax_is_explained() -> None:
    with pytest.raises(ImportError, match="JaxEnvironment requires JAX"):
        rein.JaxEnvironment(object())
