"""Tests of Turtleworld: a float64 reference implementation, rules, rendering, and contracts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rein.envs.turtleworld import Turtleworld
from rein.errors import EnvironmentContractError
from rein.ops.random import uniform
from rein.testing import EnvironmentContract

TARGETS = [(2.0, 4.0), (0.5, 1.5), (4.5, 4.5)]


class TestTurtleworldContract(EnvironmentContract):
    num_envs = 8
    different_starts = 8

    def make(self, num_envs: int, seed: int | None) -> Turtleworld:
        return Turtleworld(num_envs, TARGETS, seed=seed, max_episode_steps=30)


def random_action(key_N: Tensor, counter: int) -> Tensor:
    """Return random actions (N, 1), some of them outside of [-1, 1]."""
    return 2.4 * uniform(key_N, counter)[:, None] - 1.2


def at(environment: Turtleworld, x: float, y: float, heading: float = 0.0) -> Turtleworld:
    """Set all turtles to one position and to the first target."""
    environment.reset()
    state = torch.tensor([x, y, heading, 0.0])[:, None].expand(4, environment.num_envs)
    environment.load_state_dict(environment.state_dict() | {"state": state})
    return environment


def walked(x: float, y: float, heading: float, action: float) -> tuple[float, float, float]:
    """Compute one step of the default turtle in float64."""
    heading += math.pi * min(max(action, -1.0), 1.0)
    x, y = x + 0.1 * math.cos(heading), y + 0.1 * math.sin(heading)
    return min(max(x, 0.0), 5.0), min(max(y, 0.0), 5.0), heading


def vector(x: float, y: float, heading: float, target: tuple[float, float]) -> list[float]:
    distance = math.dist((x, y), target) / math.dist((0, 0), (5, 5))
    return [x / 5, y / 5, target[0] / 5, target[1] / 5, math.cos(heading), math.sin(heading), distance]


def test_steps_match_a_float64_reference() -> None:
    environment = Turtleworld(32, TARGETS, seed=1, max_episode_steps=40)
    observation, key = environment.reset(), torch.arange(32)
    for k in range(120):
        action = random_action(key, k)
        time_step = environment.apply_action(action)
        for row, (x, y, target_x, target_y, cos, sin, _) in enumerate(observation.tolist()):
            target = (5 * target_x, 5 * target_y)
            x, y, heading = walked(5 * x, 5 * y, math.atan2(sin, cos), float(action[row]))
            expected = torch.tensor(vector(x, y, heading, target))
            torch.testing.assert_close(time_step.final_observation[row], expected, atol=1e-6, rtol=0)
            reward = -abs(target[0] - x) - abs(target[1] - y)
            assert float(time_step.reward[row]) == pytest.approx(reward, abs=1e-5)
            distance = math.dist((x, y), target)
            assert abs(distance - 1) < 1e-5 or bool(time_step.terminated[row]) == (distance <= 1)
        observation = time_step.observation


def test_positions_are_clipped_to_the_box() -> None:
    for x, y, heading in [(0.0, 2.0, math.pi), (5.0, 2.0, 0.0), (2.0, 0.0, -math.pi / 2), (2.0, 5.0, math.pi / 2)]:
        environment = at(Turtleworld(1, [(4.9, 0.1)], radius=0.1), x, y, heading)
        seen = environment.apply_action(torch.zeros(1, 1)).observation
        torch.testing.assert_close(5 * seen[0, :2], torch.tensor([x, y]))


def test_step_length_is_speed_times_dt() -> None:
    seen = [
        at(Turtleworld(1, **o), 2.0, 2.0).apply_action(torch.zeros(1, 1)).observation
        for o in ({"speed": 0.5}, {"dt": 5.0})
    ]
    assert torch.equal(*seen)
    assert float(5 * seen[0][0, 0]) == pytest.approx(2.5)


def test_radius_is_a_euclidean_distance() -> None:
    inside, outside = (4.0 - 0.6, 4.0 - 0.8), (4.0 - 0.8, 4.0 - 0.8)
    for (x, y), reached in {inside: True, outside: False}.items():
        environment = at(Turtleworld(1, [(4.0, 4.0)], radius=1.01, speed=1e-3), x, y)
        assert environment.apply_action(torch.zeros(1, 1)).terminated.tolist() == [reached]


def test_initial_states_are_uniform_and_independent() -> None:
    start = Turtleworld(20_000, TARGETS, seed=7).reset()
    assert (start[:, 1] == 0).all()
    heading = torch.remainder(torch.atan2(start[:, 5], start[:, 4]), 2 * math.pi) / (2 * math.pi)
    target = sum((5 * start[:, 2:4] == torch.tensor(place)).all(1) * k for k, place in enumerate(TARGETS))
    bins = (start[:, 0] * 4).long() * 12 + (heading * 4).long() * 3 + target
    counts = torch.bincount(bins, minlength=48).double()
    assert len(counts) == 48
    chi_square = ((counts - 20_000 / 48) ** 2 / (20_000 / 48)).sum()
    assert chi_square < 82.7  # 47 degrees of freedom: exceeded by one seed in a thousand


def test_encode_returns_a_batch_of_one_observation() -> None:
    environment = Turtleworld(3)
    seen = environment.encode(x=1.0, y=2.5, heading=0.3, target=(4.0, 4.5))
    torch.testing.assert_close(seen, torch.tensor([vector(1.0, 2.5, 0.3, (4.0, 4.5))]))
    start = environment.reset()
    x, y, target_x, target_y, cos, sin, _ = (float(number) for number in start[0])
    again = environment.encode(x=5 * x, y=5 * y, heading=math.atan2(sin, cos), target=(5 * target_x, 5 * target_y))
    torch.testing.assert_close(again, start[:1])


def test_episodes_do_not_depend_on_num_envs() -> None:
    """Episodes are equal bit for bit, although 67 rows fill vector registers and 3 do not."""
    few, many = Turtleworld(3, TARGETS, seed=8), Turtleworld(67, TARGETS, seed=8)
    assert torch.equal(few.reset(), many.reset()[:3])
    for k in range(250):
        action = random_action(torch.arange(67), k)
        one, other = few.apply_action(action[:3]), many.apply_action(action)
        for name in ("observation", "final_observation", "reward", "terminated", "truncated"):
            assert torch.equal(getattr(one, name), getattr(other, name)[:3]), name


def colour(frame: np.ndarray, x: float, y: float) -> tuple[int, ...]:
    """Return the colour at a position of the box, in a frame with a margin."""
    unit = 48
    margin = (len(frame) - 5 * unit) // 2
    return tuple(frame[len(frame) - 1 - margin - round(y * unit), margin + round(x * unit)].tolist())


def test_frame_shows_turtle_heading_target_and_path() -> None:
    environment = Turtleworld(2, [(4.0, 4.0)], seed=0)
    environment.reset()
    empty, target = (colour(environment.render(1), *place) for place in ((4.5, 0.5), (4.0, 4.0)))
    at(environment, 1.5, 1.6, heading=math.pi / 2)
    assert colour(environment.render(1), 1.5, 2.6) == empty
    for _ in range(10):
        environment.apply_action(torch.zeros(2, 1))
    frame = environment.render(1)
    assert frame.dtype == np.uint8
    assert frame.shape[0] % 2 == frame.shape[1] % 2 == 0  # required by video codecs
    turtle, nose, path = (colour(frame, 1.5, y) for y in (2.6, 2.85, 2.2))
    assert len({turtle, nose, path, target, empty}) == 5
    assert colour(frame, 1.5, 3.2) == empty


def test_path_contains_only_the_current_episode() -> None:
    environment = Turtleworld(2, [(4.0, 4.0)], seed=0, max_episode_steps=12)

    def colours() -> int:
        return len(np.unique(environment.render().reshape(-1, 3), axis=0))

    def walk(steps: int) -> None:
        for _ in range(steps):
            environment.apply_action(torch.full((2, 1), 0.1))

    environment.reset()
    without = colours()
    walk(11)
    assert colours() == without + 1
    walk(1)
    assert colours() == without  # a new episode has begun
    walk(11)
    assert colours() == without + 1
    environment.load_state_dict(environment.state_dict())
    assert colours() == without  # the path is not part of the state
    environment.reset()
    walk(11)
    environment.reset()
    assert colours() == without


def test_path_ignores_steps_and_resets_of_other_environments() -> None:
    """The test compares the frames of the second turtle."""
    alone, among = (Turtleworld(2, [(4.0, 4.0)], seed=0, max_episode_steps=12) for _ in range(2))
    first, second = torch.tensor([True, False]), torch.tensor([False, True])
    alone.reset()
    among.reset()
    for k in range(11):
        action = torch.full((2, 1), 0.1)
        alone.apply_action(action)
        among.apply_action_where(action, second)
        among.reset_where(first)
        among.apply_action_where(action, first)
        assert np.array_equal(among.render(1), alone.render(1)), f"after {k + 1} steps"


def test_turtle_without_recorded_path_is_drawn() -> None:
    environment = Turtleworld(40, seed=0)
    environment.reset()
    for _ in range(5):
        environment.apply_action(torch.zeros(40, 1))
    assert environment.render(39).shape == environment.render(0).shape
    assert np.array_equal(environment.render(-1), environment.render(39))
    with pytest.raises(IndexError):
        environment.render(40)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_envs": 0}, r"Turtleworld\(num_envs=0\)"),
        ({"possible_targets": []}, "at least one"),
        ({"possible_targets": [(2, 5.5)]}, r"\(2, 5.5\) is outside the box"),
        ({"speed": 0.0}, "speed=0.0"),
        ({"dt": -1.0}, "dt=-1.0"),
        ({"radius": float("nan")}, "radius=nan"),
        ({"max_episode_steps": 0}, "give 1 or more"),
    ],
)
def test_options_out_of_range_raise(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Turtleworld(**options)


def test_integer_action_raises() -> None:
    environment = Turtleworld(3)
    environment.reset()
    with pytest.raises(EnvironmentContractError, match="action: expected floating-point numbers"):
        environment.apply_action(torch.zeros(3, 1, dtype=torch.int64))


def test_config_rebuilds_the_environment() -> None:
    environment = Turtleworld(4, TARGETS, seed=9, speed=0.2, dt=0.5, radius=0.7, max_episode_steps=50)
    again = Turtleworld(**environment.config)
    assert again.config == environment.config
    assert torch.equal(again.reset(), environment.reset())
