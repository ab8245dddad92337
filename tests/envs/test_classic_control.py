"""Tests of the classic-control environments against Gymnasium: steps, initial states and ends of episodes.

Shapes: N environments, S state variables, O observation variables.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.acrobot import Acrobot
from rein.envs.cartpole import CartPole
from rein.envs.mountain_car import MountainCar, MountainCarContinuous
from rein.envs.pendulum import Pendulum
from rein.ops.random import integers, uniform
from rein.testing import EnvironmentContract, StatefulContract
from tests import programs

PAGE = (Path(__file__).parents[2] / "docs/reference/environments.md").read_text(encoding="utf-8")


class Task(NamedTuple):
    """An environment and its Gymnasium id."""

    make: Any
    id: str
    reach: tuple[float, ...]  # (S,) bounds of the state variables
    angles: tuple[int, ...] = ()  # indices of angles, which are compared modulo 2 pi


TASKS = {
    # half of its top speeds: from faster states a step of 0.2 s amplifies rounding errors by a thousand
    "acrobot": Task(Acrobot, "Acrobot-v1", (math.pi, math.pi, 2 * math.pi, 4.5 * math.pi), (0, 1)),
    "cartpole": Task(CartPole, "CartPole-v1", (2.6, 3.0, 0.25, 3.0)),
    "mountain car": Task(MountainCar, "MountainCar-v0", (1.2, 0.07)),
    "continuous mountain car": Task(MountainCarContinuous, "MountainCarContinuous-v0", (1.2, 0.07)),
    "pendulum": Task(Pendulum, "Pendulum-v1", (math.pi, 8.0), (0,)),
}
every_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


class _Contract(EnvironmentContract):
    task: str
    num_envs = 8
    different_starts = 8

    def make(self, num_envs: int, seed: int | None) -> Any:
        return TASKS[self.task].make(num_envs, seed=seed, max_episode_steps=30)


class TestCartPoleContract(_Contract):
    task = "cartpole"


@pytest.mark.slow
class TestPendulumContract(_Contract):
    task = "pendulum"


class TestCartPoleState(StatefulContract):
    """Environments that are derived from SimulatedEnvironment have equal states."""

    def make(self) -> Any:
        return CartPole(8, seed=3, max_episode_steps=9)

    def step(self, part: Any) -> Any:
        if int(part.episode_seeds[0]) < 0:
            part.reset()
        return part.apply_action(random_action(part, part.episode_seeds, int(part.state_dict()["steps"][0])))


def random_action(environment: Any, key_N: Tensor, counter: int) -> Tensor:
    """Return random actions (N,) or (N, 1). Some continuous actions are out of bounds."""
    space = environment.single_action_space
    if isinstance(space, spaces.Discrete):
        return integers(key_N, counter, int(space.n))
    return float(space.high[0]) * (2.6 * uniform(key_N, counter)[:, None] - 1.3)


def states(environment: Any) -> Tensor:
    """Return a copy of the states (N, S)."""
    return environment.state_dict()["state"].T.clone()


def stepped(twin: Any, state: list[float], action: Any) -> tuple[Any, ...]:
    """Step Gymnasium's environment. Returns the next state, observation, reward, terminated and truncated."""
    twin.unwrapped.state = np.array(state)
    twin.unwrapped.steps_beyond_terminated = None  # CartPole marks the end of an episode here
    observation, reward, terminated, truncated, _ = twin.step(action)
    return np.array(twin.unwrapped.state), observation, reward, terminated, truncated


def assert_close(got: Tensor, expected: Tensor, reach: Any) -> None:
    """Assert a relative error of at most 1e-5, relative to a tenth of `reach` for values close to zero."""
    bound = 1e-5 * torch.maximum(expected.abs(), 0.1 * torch.as_tensor(reach, dtype=torch.float64))
    assert ((got - expected).abs() <= bound).all(), f"{got} is not {expected}"


def compare(task: Task, environment: Any, twins: list[Any], action: Tensor) -> Tensor:
    """Step both from the states of `environment` and compare all results. Returns the ended episodes (N,) bool."""
    before_NS = states(environment)
    time_step = environment.apply_action(action)
    rows = zip(twins, before_NS.tolist(), action.numpy(), strict=True)
    results = zip(*(stepped(*row) for row in rows), strict=True)
    state_NS, observation, reward_N, terminated_N, truncated_N = (torch.from_numpy(np.array(x)) for x in results)
    assert torch.equal(time_step.terminated, terminated_N)
    assert torch.equal(time_step.truncated, truncated_N)
    observable = np.minimum(environment.single_observation_space.high, 10.0)
    assert_close(time_step.final_observation.double(), observation.double(), observable)
    assert_close(time_step.reward.double(), reward_N.double(), 1.0)
    on_N = ~(terminated_N | truncated_N)
    after_NS, state_NS = states(environment)[on_N].double(), state_NS[on_N].double()
    for place in task.angles:
        after_NS[:, place] += math.tau * ((state_NS[:, place] - after_NS[:, place]) / math.tau).round()
    assert_close(after_NS, state_NS, task.reach)
    return ~on_N


@every_task
def test_a_step_from_any_state_matches_gymnasium(task: Task) -> None:
    """This includes states that random actions do not reach."""
    environment, twin = task.make(5000, seed=2), gymnasium.make(task.id, disable_env_checker=True).unwrapped
    environment.reset()
    twin.reset()
    key_N, reach_S1 = torch.arange(5000), torch.tensor(task.reach)[:, None]
    state_SN = reach_S1 * (2.0 * torch.stack([uniform(key_N, 9 + place) for place in range(len(reach_S1))]) - 1.0)
    if "Mountain" in task.id:
        state_SN[0].clamp_(max=0.6)
    environment.load_state_dict(environment.state_dict() | {"state": state_SN})
    ended_N = compare(task, environment, [twin] * 5000, random_action(environment, key_N, 0))
    assert task.id == "Pendulum-v1" or 100 < int(ended_N.sum()) < 4900


@every_task
def test_spaces_and_time_limit_match_gymnasium(task: Task) -> None:
    environment, twin = task.make(2), gymnasium.make(task.id)
    assert environment.single_observation_space == twin.observation_space
    assert environment.single_action_space == twin.action_space
    assert environment.config["max_episode_steps"] == gymnasium.spec(task.id).max_episode_steps
    observation = environment.reset(seed=0)
    assert observation.dtype is torch.float32
    assert all(environment.single_observation_space.contains(row) for row in observation.numpy())


@every_task
def test_initial_observations_have_the_distribution_of_gymnasium(task: Task) -> None:
    """Compare samples of each variable of the first observation with a Kolmogorov-Smirnov test."""
    twin = gymnasium.make(task.id, disable_env_checker=True).unwrapped
    theirs = np.stack([twin.reset(seed=seed)[0] for seed in range(1000)])
    ours = task.make(10_000, seed=3).reset().numpy()
    for got, expected in zip(ours.T, theirs.T, strict=True):
        places = np.sort(np.concatenate([got, expected]))
        shares = (np.searchsorted(np.sort(x), places, side="right") / len(x) for x in (got, expected))
        assert np.abs(np.subtract(*shares)).max() < 2.23 * math.sqrt(1 / 1000 + 1 / 10_000)  # significance level 1e-4


@every_task
def test_initial_state_variables_are_uncorrelated(task: Task) -> None:
    environment = task.make(10_000, seed=4)
    environment.reset()
    state_NS = states(environment)
    moving_NS = state_NS[:, state_NS.std(0) > 0]
    correlation = torch.corrcoef(moving_NS.T).reshape(moving_NS.shape[1], -1)
    assert (correlation - torch.eye(len(correlation))).abs().max() < 0.05


def test_no_limit_means_no_truncation() -> None:
    environment = Pendulum(2, seed=0, max_episode_steps=None)
    environment.reset()
    steps = [environment.apply_action(random_action(environment, torch.arange(2), k)) for k in range(1010)]
    assert not any(step.truncated.any() for step in steps)


def test_angle_of_a_spinning_pendulum_stays_bounded() -> None:
    """Without a time limit, the rounding error of a growing angle would increase."""
    environment = Pendulum(1, max_episode_steps=None)
    environment.reset()
    environment.load_state_dict(environment.state_dict() | {"state": torch.tensor([[3.0], [8.0]])})
    for _ in range(1000):
        environment.apply_action(torch.full((1, 1), 2.0 * float(states(environment)[0, 1].sign())))
        assert float(states(environment)[0, 0].abs()) <= math.pi


@every_task
def test_frame_shows_the_state(task: Task) -> None:
    environment = task.make(3, seed=5)
    environment.reset()
    before = environment.render(1)
    for k in range(20):
        environment.apply_action(random_action(environment, torch.arange(3), k))
    frames = [environment.render(index) for index in range(3)]
    for frame in (before, *frames):
        assert frame.dtype == np.uint8
        assert frame.ndim == 3
        assert frame.shape[2] == 3
        assert frame.shape[0] % 2 == frame.shape[1] % 2 == 0  # required by video codecs
        assert (frame != 255).any()
    assert not any(np.array_equal(frames[1], other) for other in (before, frames[0], frames[2]))
    assert np.array_equal(environment.render(-1), frames[2])
    with pytest.raises(IndexError):
        environment.render(3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # raised by torch's compiler
@every_task
def test_compiled_steps_equal_eager_steps(task: Task) -> None:
    environment, compiled = (task.make(8, seed=6, max_episode_steps=30, compile=compile) for compile in (False, True))
    assert torch.equal(environment.reset(), compiled.reset())
    for k in range(100):
        action = random_action(environment, torch.arange(8), k)
        step, other = environment.apply_action(action), compiled.apply_action(action)
        for name in ("observation", "final_observation", "reward"):
            torch.testing.assert_close(getattr(step, name), getattr(other, name), rtol=1e-5, atol=1e-5)
        assert torch.equal(step.terminated, other.terminated)
        assert torch.equal(step.truncated, other.truncated)
        compiled.load_state_dict(environment.state_dict())


@every_task
def test_documentation_lists_every_task(task: Task) -> None:
    line = next(line for line in PAGE.splitlines() if f"`{task.id}`" in line)
    environment = task.make(1)
    size = environment.single_observation_space.shape[0]
    actions = environment.single_action_space
    kind = f"Discrete({actions.n})" if isinstance(actions, spaces.Discrete) else "Box(1)"
    for words in (f"{task.make.__name__}`", f"Box({size})", kind, f"{environment.config['max_episode_steps']} steps"):
        assert words in line, words


@every_task
def test_invalid_mask_raises_and_changes_nothing(task: Task) -> None:
    environment = task.make(2, seed=0)
    environment.reset()
    action = torch.from_numpy(np.stack([environment.single_action_space.sample() for _ in range(2)]))
    before = environment.state_dict()
    for mask in (torch.tensor([1, 0], dtype=torch.uint8), torch.tensor([True]), torch.tensor(True), [True, False]):
        with pytest.raises(ValueError, match=r"apply_action_where: expected torch.bool of shape \(2,\), got "):
            environment.apply_action_where(action, mask)
    assert torch.equal(environment.state_dict()["state"], before["state"])


def test_earlier_use_with_another_default_dtype_changes_nothing() -> None:
    script = """
import sys, torch
from rein.envs.cartpole import CartPole
def last(steps):
    environment = CartPole(4, seed=0)
    environment.reset()
    return [environment.apply_action(torch.full((4,), t % 2)).observation for t in range(steps)][-1]
torch.set_default_dtype(getattr(torch, sys.argv[1]))
last(1)
torch.set_default_dtype(torch.float32)
print(last(20).tolist())
"""
    ran = [programs.run("-c", script, dtype).stdout for dtype in ("float32", "float64")]
    assert ran[0] == ran[1] != ""
