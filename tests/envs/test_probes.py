"""Tests of the probes: optimal returns and values, rules, and contracts."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs import probes
from rein.envs.cartpole import CartPole
from rein.envs.gridworld import Gridworld
from rein.envs.probes import (
    Bandit,
    BitFlip,
    ConstantReward,
    Corridor,
    DelayedReward,
    Fork,
    Memory,
    ObservedReward,
    Reach,
)
from rein.envs.probes.reach import gain
from rein.errors import EnvironmentContractError
from rein.ops.random import integers, uniform
from rein.ops.values import share_of_duplicates, step_toward_, td_target
from rein.testing import EnvironmentContract

PAGE = (Path(__file__).parents[2] / "docs/reference/environments.md").read_text(encoding="utf-8")
GAMMA = 0.9
PROBES: dict[str, Callable[..., Any]] = {
    "bandit": partial(Bandit, arms=3),
    "stateless bandit": partial(Bandit, contextual=False),
    "continuous bandit": partial(Bandit, arms=3, continuous=True),
    "corridor": Corridor,
    "continuous corridor": partial(Corridor, continuous=True),
    "fork": Fork,
    "continuous fork": partial(Fork, continuous=True),
    "memory": Memory,
    "continuous memory": partial(Memory, cues=3, delay=0, continuous=True),
    "reach": Reach,
    "reach on a plane": partial(Reach, dimensions=2),
    "constant reward": ConstantReward,
    "observed reward": ObservedReward,
    "delayed reward": partial(DelayedReward, continuous=True),
}
WITH_GOALS: dict[str, Callable[..., Any]] = {**PROBES, "bit flip": partial(BitFlip, bits=4)}
VALUES = ("constant reward", "observed reward", "delayed reward")  # actions have no effect
every_probe = pytest.mark.parametrize("make", PROBES.values(), ids=PROBES)
every_choice = pytest.mark.parametrize("name", [name for name in PROBES if name not in VALUES])


def random_action(environment: Any, key_N: Tensor, counter: int) -> Tensor:
    space = environment.single_action_space
    if isinstance(space, spaces.Discrete):
        return integers(key_N, counter, int(space.n))
    columns = [2.0 * uniform(key_N, 2 * counter + place) - 1.0 for place in range(space.shape[0])]
    return torch.stack(columns, 1)


def choose(environment: Any, index_N: Tensor, count: int) -> Tensor:
    """Return the discrete or continuous action for choice `index_N` among `count`."""
    if isinstance(environment.single_action_space, spaces.Discrete):
        return index_N
    return ((index_N + 0.5) * 2.0 / count - 1.0)[:, None]


class Optimal:
    """Optimal policy of every probe, which remembers the cue of `Memory`."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.cue_N = torch.zeros(environment.num_envs, dtype=torch.int64)

    def __call__(self, observation: Tensor) -> Tensor:
        environment, ones_N = self.environment, torch.ones(len(observation), dtype=torch.int64)
        if isinstance(environment, Bandit):
            best_N = observation.argmax(1) if environment.contextual else ones_N * (environment.arms - 1)
            return choose(environment, best_N, environment.arms)
        if isinstance(environment, Memory):
            shown_N = observation[:, :-1].sum(1) > 0
            self.cue_N = torch.where(shown_N, observation[:, :-1].argmax(1), self.cue_N)
            return choose(environment, self.cue_N, environment.cues)
        if isinstance(environment, Reach):
            return -gain() * observation
        if isinstance(environment, Corridor) and not isinstance(environment.single_action_space, spaces.Discrete):
            return torch.ones(len(observation), 1)
        return choose(environment, ones_N, 2)


def returns(environment: Any, act: Callable[[Tensor], Tensor], steps: int) -> Tensor:
    """Return the undiscounted returns of the episodes that end within `steps` steps."""
    observation, total_N, ended = environment.reset(), torch.zeros(environment.num_envs, dtype=torch.float64), []
    for _ in range(steps):
        time_step = environment.apply_action(act(observation))
        total_N = total_N + time_step.reward
        ended_N = time_step.terminated | time_step.truncated
        ended.append(total_N[ended_N])
        total_N = total_N.masked_fill(ended_N, 0.0)
        observation = time_step.observation
    return torch.cat(ended)


def randomly(environment: Any) -> Callable[[Tensor], Tensor]:
    counter, key_N = iter(range(10**6)), torch.arange(environment.num_envs)
    return lambda _: random_action(environment, key_N, next(counter))


@pytest.mark.default_cases(every=3)
class TestProbeContract(EnvironmentContract):
    steps = 30
    different_starts = 1

    @pytest.fixture(autouse=True, params=WITH_GOALS.values(), ids=WITH_GOALS)
    def _probe(self, request: pytest.FixtureRequest) -> None:
        self.probe = request.param

    def make(self, num_envs: int, seed: int | None) -> Any:
        return self.probe(num_envs=num_envs, seed=seed)


@every_probe
def test_best_policy_gets_the_optimal_return(make: Callable[..., Any]) -> None:
    environment = make(num_envs=4096, seed=1)
    got = returns(environment, Optimal(environment), 20)
    assert len(got) >= 4096
    random_starts = isinstance(environment, Reach | ObservedReward)
    allowed = 4 * float(got.std()) / len(got) ** 0.5 if random_starts else 1e-6
    assert float(got.mean()) == pytest.approx(environment.optimal_return, abs=allowed)


@every_choice
def test_random_actions_get_lower_returns(name: str) -> None:
    environment = PROBES[name](num_envs=1024, seed=2)
    got = returns(environment, randomly(environment), 60)
    assert float(got.mean()) < environment.optimal_return - 0.2


@pytest.mark.parametrize("name", VALUES)
def test_value_probes_ignore_actions(name: str) -> None:
    environments = [PROBES[name](num_envs=256, seed=2) for _ in range(2)]
    first, second = environments
    assert torch.equal(returns(first, randomly(first), 20), returns(second, Optimal(second), 20))


@pytest.mark.parametrize("name", [name for name in PROBES if "memory" not in name])
def test_optimal_value_solves_the_bellman_equation(name: str) -> None:
    """v(s) >= r + gamma v(s') for all actions, with equality for the best one. Truncated episodes bootstrap."""
    environment = PROBES[name](num_envs=512, seed=3)
    best, wild = Optimal(environment), randomly(environment)
    if isinstance(environment, Reach):
        best = lambda observation: -gain(GAMMA) * observation  # noqa: E731  # short
    observation = environment.reset()
    for k in range(40):
        action = best(observation) if k % 2 else wild(observation)
        time_step = environment.apply_action(action)
        value_N, next_N = (
            environment.optimal_value(seen, GAMMA) for seen in (observation, time_step.final_observation)
        )
        backup_N = time_step.reward + GAMMA * next_N.masked_fill(time_step.terminated, 0.0)
        assert (backup_N <= value_N + 1e-5).all()
        if k % 2:
            torch.testing.assert_close(backup_N, value_N, atol=1e-5, rtol=1e-5)
        observation = time_step.observation


@every_probe
def test_different_observations_have_different_frames(make: Callable[..., Any]) -> None:
    environment = make(num_envs=6, seed=5)
    observation = environment.reset()
    for k in range(12):
        frames = [environment.render(index) for index in range(6)]
        for frame in frames:
            assert frame.dtype == np.uint8
            assert frame.ndim == 3
            assert frame.shape[2] == 3
            assert frame.shape[0] % 2 == frame.shape[1] % 2 == 0  # required by video codecs
        for one in range(6):
            for other in range(one):
                if float((observation[one] - observation[other]).abs().max()) > 0.05:  # more than one pixel
                    assert not np.array_equal(frames[one], frames[other])
        observation = environment.apply_action(random_action(environment, torch.arange(6), k)).observation


@pytest.mark.parametrize("name", [name for name in PROBES if "continuous" in name or "reach" in name])
def test_actions_out_of_bounds_are_clipped(name: str) -> None:
    for sign in (-1.0, 1.0):
        beyond, bound = (PROBES[name](num_envs=16, seed=6) for _ in range(2))
        action = torch.full((16, *beyond.single_action_space.shape), sign)
        beyond.reset(), bound.reset()
        for _ in range(8):
            one, other = beyond.apply_action(5.0 * action), bound.apply_action(action)
            assert torch.equal(one.reward, other.reward)
            assert torch.equal(one.observation, other.observation)


@every_probe
def test_config_rebuilds_the_environment(make: Callable[..., Any]) -> None:
    environment = make(num_envs=4, seed=9)
    again = type(environment)(**environment.config)
    assert again.config == environment.config
    assert torch.equal(again.reset(), environment.reset())


def test_arms_are_equally_likely_and_observed() -> None:
    environment = Bandit(20_000, arms=5, seed=1)
    shown = environment.reset()
    assert torch.equal(shown.sum(1), torch.ones(20_000))
    counts = shown.sum(0).double()
    assert ((counts - 4000) ** 2 / 4000).sum() < 18.5  # 4 degrees of freedom: exceeded by one seed in a thousand
    time_step = environment.apply_action(torch.full((20_000,), 2))
    assert torch.equal(time_step.reward, shown[:, 2])
    assert time_step.terminated.all()
    assert not time_step.truncated.any()


def test_non_contextual_bandit_observes_zeros_and_rewards_the_last_arm() -> None:
    environment = Bandit(4, arms=4, contextual=False, seed=1)
    assert not environment.reset().any()
    assert environment.apply_action(torch.arange(4)).reward.tolist() == [0, 0, 0, 1]


def test_continuous_actions_are_divided_into_equal_intervals() -> None:
    environment = Bandit(6, arms=3, contextual=False, continuous=True, seed=1)
    environment.reset()
    action = torch.tensor([-1.0, -0.4, 0.0, 0.32, 0.34, 1.0])[:, None]
    assert environment.apply_action(action).reward.tolist() == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("continuous", [False, True])
def test_corridor_takes_length_steps(continuous: bool) -> None:
    environment = Corridor(3, length=7, continuous=continuous, seed=1)
    right = Optimal(environment)
    environment.reset()
    for k in range(1, 8):
        time_step = environment.apply_action(right(torch.zeros(3, 1)))
        assert time_step.terminated.tolist() == [k == 7] * 3
        assert time_step.reward.tolist() == [float(k == 7)] * 3
        torch.testing.assert_close(time_step.final_observation, torch.full((3, 1), k / 7))
    assert not time_step.observation.any()


def test_corridor_position_is_clipped_at_zero() -> None:
    environment = Corridor(2, length=2, seed=1)
    environment.reset()
    actions = torch.tensor([[0, 1], [0, 0], [1, 1], [1, 1]])
    steps = [environment.apply_action(action) for action in actions]
    assert [step.final_observation[:, 0].tolist() for step in steps] == [[0.0, 0.5], [0.0, 0.0], [0.5, 0.5], [1, 1]]


def test_continuous_corridor_moves_by_the_action() -> None:
    environment = Corridor(3, length=4, continuous=True, seed=1)
    environment.reset()
    seen = environment.apply_action(torch.tensor([[0.25], [0.5], [-0.5]])).observation
    seen = environment.apply_action(torch.tensor([[0.25], [-0.25], [1.0]])).observation
    assert (4 * seen[:, 0]).tolist() == [0.5, 0.25, 1.0]


def test_walking_left_is_truncated_not_terminated() -> None:
    environment = Corridor(2, max_episode_steps=6, seed=1)
    environment.reset()
    steps = [environment.apply_action(torch.zeros(2, dtype=torch.int64)) for _ in range(12)]
    assert [bool(step.truncated.all()) for step in steps] == [k % 6 == 5 for k in range(12)]
    assert not any(step.terminated.any() for step in steps)


@pytest.mark.parametrize(("cues", "delay"), [(2, 4), (3, 0), (5, 7)])
def test_later_observations_do_not_depend_on_the_cue(cues: int, delay: int) -> None:
    """Later observations are equal in all rows, so they and stacks of them are independent of the cue."""
    environment = Memory(4096, cues, delay, seed=1)
    cue_N = environment.reset()[:, :cues].argmax(1)
    assert len(cue_N.unique()) == cues
    for k in range(1, delay + 3):
        action = random_action(environment, torch.arange(4096), k)
        time_step = environment.apply_action(action)
        seen = time_step.final_observation
        assert torch.equal(seen, seen[:1].expand_as(seen))
        expected = torch.zeros(cues + 1)
        expected[-1] = float(k == delay + 1)
        assert torch.equal(seen[0], expected)
        assert time_step.terminated.tolist() == [k == delay + 2] * 4096
        if k < delay + 2:
            assert not time_step.reward.any()
    assert torch.equal(time_step.reward, (action == cue_N).float())


def test_cues_are_uniform_and_independent() -> None:
    environment = Memory(20_000, cues=3, delay=0, seed=2)
    cue_N = environment.reset()[:, :3].argmax(1)
    for _ in range(2):
        following = environment.apply_action(torch.zeros(20_000, dtype=torch.int64)).observation
    pairs = torch.bincount(3 * cue_N + following[:, :3].argmax(1), minlength=9).double()
    expected = 20_000 / 9
    assert ((pairs - expected) ** 2 / expected).sum() < 26.2  # 8 degrees of freedom: one seed in a thousand


@pytest.mark.parametrize("cues", [2, 3])
def test_constant_answers_get_the_chance_return(cues: int) -> None:
    """The last observation is always the same, so a policy without memory gives a constant answer."""
    for answer in range(cues):
        environment = Memory(20_000, cues, delay=1, seed=3)
        got = returns(environment, lambda _, answer=answer: torch.full((20_000,), answer), 3)
        assert float(got.mean()) == pytest.approx(environment.chance, abs=4 * 0.5 / 20_000**0.5)


def test_optimal_return_with_a_short_time_limit() -> None:
    """The gain with n steps left is the result of n Riccati steps from 0: 1/2, 3/5, 8/13."""
    environment = Reach(20_000, seed=4, max_episode_steps=3)
    to_go = iter((8 / 13, 3 / 5, 1 / 2))
    got = returns(environment, lambda x: -next(to_go) * x, 3)
    assert environment.optimal_return == pytest.approx(-8 / 13 / 3)
    assert float(got.mean()) == pytest.approx(environment.optimal_return, abs=4 * float(got.std()) / 20_000**0.5)
    assert Reach(1).optimal_return == pytest.approx(-gain() / 3, rel=1e-12)


def test_reach_starts_uniformly_and_never_terminates() -> None:
    environment = Reach(20_000, seed=5, max_episode_steps=4)
    start = environment.reset()[:, 0]
    counts = torch.histc(start, 10, -1.0, 1.0).double()
    assert ((counts - 2000) ** 2 / 2000).sum() < 27.9  # 9 degrees of freedom: one seed in a thousand
    steps = [environment.apply_action(torch.zeros(20_000, 1)) for _ in range(8)]
    assert [bool(step.truncated.all()) for step in steps] == [False, False, False, True] * 2
    assert not any(step.terminated.any() for step in steps)


def learned(truncation_ends: bool) -> Tensor:
    """Return Q (state, action) of the fork, learned by tabular Q-learning from random actions."""
    environment, q_22, count_4 = Fork(64, seed=1), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int64)
    share, valid_N = share_of_duplicates(0.01, 64, "cpu"), torch.ones(64, dtype=torch.bool)
    observation = environment.reset()
    for k in range(600):
        action_N = random_action(environment, torch.arange(64), k)
        time_step = environment.apply_action(action_N)
        end_N = time_step.terminated | (time_step.truncated & truncation_ends)
        next_N = q_22[time_step.final_observation.argmax(1)].amax(1)
        target_N = td_target(time_step.reward, end_N, next_N, GAMMA)
        step_toward_(q_22.view(-1), 2 * observation.argmax(1) + action_N, target_N, valid_N, share, count_4)
        observation = time_step.observation
    return q_22


def test_treating_truncation_as_termination_learns_the_prize() -> None:
    right, mistaken = learned(truncation_ends=False), learned(truncation_ends=True)
    assert right[0].argmax() == 1
    assert mistaken[0].argmax() == 0
    values = Fork(2).optimal_value(torch.eye(2), GAMMA)
    torch.testing.assert_close(right.max(1).values, values, atol=0.2, rtol=0)
    assert mistaken[0, 1] < (GAMMA - GAMMA**10) / (1 - GAMMA) < Fork(2).prize


def test_road_is_truncated_and_prize_terminates() -> None:
    environment = Fork(2, max_episode_steps=4, prize=2.5, seed=1)
    environment.reset()
    steps = [environment.apply_action(torch.tensor([0, 1])) for _ in range(4)]
    assert [step.reward.tolist() for step in steps] == [[2.5, 0.0], [2.5, 1.0], [2.5, 1.0], [2.5, 1.0]]
    assert [step.terminated.tolist() for step in steps] == [[True, False]] * 4
    assert [step.truncated.tolist() for step in steps] == [[False, False]] * 3 + [[False, True]]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (partial(Bandit, num_envs=0), r"Bandit\(num_envs=0\)"),
        (partial(Bandit, arms=1), "arms=1"),
        (partial(BitFlip, bits=1), "bits=1"),
        (partial(Corridor, length=0), "length=0"),
        (partial(Corridor, length=30), "give at least 30 steps"),
        (partial(Corridor, max_episode_steps=0), r"Corridor\(max_episode_steps=0\)"),
        (partial(Memory, cues=1), "cues=1"),
        (partial(Memory, delay=-1), "delay=-1"),
        (partial(Reach, dimensions=3), "give 1 or 2"),
        (partial(Reach, max_episode_steps=0), r"Reach\(max_episode_steps=0\)"),
        (partial(Fork, max_episode_steps=0), r"Fork\(max_episode_steps=0\)"),
    ],
)
def test_options_out_of_range_raise(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_action_of_the_other_kind_raises() -> None:
    for continuous in (False, True):
        environment = Bandit(3, continuous=continuous)
        environment.reset()
        action = torch.zeros(3, dtype=torch.int64) if continuous else torch.zeros(3, 1)
        with pytest.raises(EnvironmentContractError, match="action"):
            environment.apply_action(action)


def test_bits_are_flipped_until_they_equal_the_goal() -> None:
    environment = BitFlip(500, bits=4, seed=0)
    observation, return_N, open_N = environment.reset(), torch.zeros(500), torch.ones(500, dtype=torch.bool)
    assert (observation["achieved_goal"] != observation["desired_goal"]).any(1).all()
    for _ in range(4):
        assert torch.equal(observation["observation"], observation["achieved_goal"])
        differs_NK = observation["achieved_goal"] != observation["desired_goal"]
        step = environment.apply_action(differs_NK.long().argmax(1))
        final = step.final_observation
        goals = final["achieved_goal"], final["desired_goal"], {}
        assert torch.equal(environment.compute_reward(*goals), step.reward)
        assert torch.equal(environment.compute_terminated(*goals), step.terminated)
        assert torch.equal(step.info["is_success"], step.terminated)
        return_N += torch.where(open_N, step.reward, 0.0)
        open_N &= ~step.terminated
        observation = step.observation
    assert not open_N.any()
    assert abs(float(return_N.mean()) - environment.optimal_return) < 0.15


def test_documentation_lists_every_probe() -> None:
    rows = set(re.findall(r"^\| `(\w+)", PAGE, re.MULTILINE))
    assert set(probes.__all__) <= rows
    assert {type(make()).__name__ for make in WITH_GOALS.values()} == set(probes.__all__)


@pytest.mark.parametrize("make", [Bandit, CartPole, Gridworld], ids=lambda make: make.__name__)
def test_num_envs_accepts_numpy_integers_only(make: Callable[..., Any]) -> None:
    environment = make(np.int64(3))
    assert type(environment.num_envs) is type(environment.config["num_envs"]) is int
    for wrong in (2.0, "2", None):
        with pytest.raises(TypeError, match=rf"{make.__name__}\(num_envs={wrong!r}\): give an integer, 1 or more"):
            make(wrong)
