"""Tests of Navigation: dynamics, rewards, leaving agents, rendering, and contracts."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rein.envs.navigation import Navigation
from rein.ops.random import uniform
from rein.testing import EnvironmentContract


class TestNavigationContract(EnvironmentContract):
    different_starts = 12
    steps = 100

    @pytest.fixture(autouse=True, params=[False, True])
    def _variant(self, request: pytest.FixtureRequest) -> None:
        self.early_leave = request.param

    def make(self, num_envs: int, seed: int | None) -> Navigation:
        return Navigation(num_envs, 3, early_leave=self.early_leave, seed=seed, max_episode_steps=45)


def random_action(rows: int, counter: int) -> Tensor:
    """Return random actions (N, 2), some of them outside of [-1, 1]. Row i does not depend on N."""
    key_N = torch.arange(rows)
    return torch.stack([2.4 * uniform(key_N, 2 * counter + k) - 1.2 for k in range(2)], 1)


def placed(environment: Navigation, places: list[tuple[float, float]], targets: list[tuple[float, float]]) -> Tensor:
    """Set all worlds to resting discs at these places. Returns the state (7, W, A)."""
    environment.reset()
    state = torch.zeros(7, environment.worlds, environment.agents)
    state[:2], state[4:6] = (torch.tensor(x).T[:, None] for x in (places, targets))
    environment.load_state_dict(environment.state_dict() | {"state": state.flatten(1)})
    return state


def test_agent_accelerates_toward_the_wanted_velocity() -> None:
    environment = Navigation(2, 1, neighbours=0, seed=0)
    placed(environment, [(1.0, 1.0)], [(1.0, 1.8)])
    x, v, distance = 1.0, 0.0, 0.8
    for _ in range(5):
        time_step = environment.apply_action(torch.tensor([[9.0, 0.0]] * 2))
        v += 0.3 * (1.0 - v)
        x += 0.1 * v
        x = min(x, 2.0 - 0.2)
        before, distance = distance, math.dist((x, 1.0), (1.0, 1.8))
        expected = torch.tensor([[v, 0.0, 1.0 - x, 0.8]] * 2)
        torch.testing.assert_close(time_step.observation, expected, atol=1e-6, rtol=0)
        assert time_step.reward.tolist() == pytest.approx([before - distance - 0.01] * 2, abs=1e-6)


def test_discs_that_overlap_are_pushed_apart_and_penalized() -> None:
    environment = Navigation(1, 3, seed=0)
    placed(environment, [(1.0, 1.0), (1.3, 1.0), (2.5, 2.5)], [(1.0, 2.5), (1.3, 2.5), (0.5, 0.5)])
    time_step = environment.apply_action(torch.zeros(3, 2))
    x = environment.state_dict()["state"][0]
    torch.testing.assert_close(x, torch.tensor([0.95, 1.35, 2.5]))
    assert time_step.reward.tolist() == pytest.approx([-0.51, -0.51, -0.01], abs=2e-3)


def test_neighbours_are_sorted_by_distance() -> None:
    environment = Navigation(1, 4, neighbours=2, seed=0)
    placed(environment, [(1.0, 1.0), (3.0, 1.0), (1.0, 2.0), (3.0, 3.0)], [(0.5, 0.5)] * 4)
    seen = environment.apply_action(torch.zeros(4, 2)).observation
    torch.testing.assert_close(seen[0], torch.tensor([0.0, 0, -0.5, -0.5, 0, 1, 0, 0, 2, 0, 0, 0]))


def test_all_agents_terminate_when_all_are_at_their_targets() -> None:
    environment = Navigation(1, 2, seed=0)
    placed(environment, [(0.5, 0.5), (2.0, 2.0)], [(0.5, 0.6), (2.0, 1.7)])
    action, rewards, ends = torch.tensor([[0.0, 0.0], [0.0, -1.0]]), [], []
    for _ in range(9):
        time_step = environment.apply_action(action)
        rewards.append(time_step.reward)
        ends.append(time_step.terminated.tolist())
        if any(ends[-1]):
            break
    assert ends == [[False, False]] * (len(ends) - 1) + [[True, True]]
    assert float(rewards[0][0]) == pytest.approx(0.99)  # the first arrival
    assert float(rewards[1][0]) == pytest.approx(-0.01)
    assert rewards[-1][1] > 1.0


def test_agent_leaves_when_it_arrives() -> None:
    environment = Navigation(1, 3, early_leave=True, neighbours=2, seed=0, max_episode_steps=20)
    placed(environment, [(0.5, 0.5), (2.0, 2.0), (2.0, 0.5)], [(0.5, 0.6), (2.0, 1.0), (0.5, 2.5)])
    action = torch.tensor([[1.0, 1.0], [0.0, -1.0], [0.0, 0.0]])
    steps = [environment.apply_action(action) for _ in range(20)]
    assert steps[0].terminated.tolist() == [True, False, False]
    assert steps[0].valid.all()
    assert steps[1].valid.tolist() == [False, True, True]
    assert torch.equal(steps[5].observation[0], steps[0].final_observation[0])
    assert not steps[1].observation[1][8:].any()  # only one other agent is left
    assert not steps[-2].truncated.any()
    assert steps[-1].truncated.tolist() == [False, False, True]
    assert torch.equal(steps[-1].final_observation[0], steps[-1].observation[0])


def test_worlds_do_not_depend_on_their_number() -> None:
    """Episodes are equal bit for bit, although 67 worlds fill vector registers and 3 do not."""
    few, many = (Navigation(worlds, 5, neighbours=3, seed=8, max_episode_steps=60) for worlds in (3, 67))
    assert torch.equal(few.reset(), many.reset()[:15])
    for k in range(130):
        action = random_action(67 * 5, k)
        one, other = few.apply_action(action[:15]), many.apply_action(action)
        for name in ("observation", "final_observation", "reward", "terminated", "truncated", "valid"):
            assert torch.equal(getattr(one, name), getattr(other, name)[:15]), name


def test_starts_and_targets_do_not_overlap() -> None:
    environment = Navigation(500, 6, seed=1)
    environment.reset()
    state = environment.state_dict()["state"].view(7, 500, 6)
    places = torch.cat([state[:2], state[4:6]], 2).permute(1, 2, 0)  # (W, 2 A, 2)
    gap = torch.cdist(places, places) + 9.0 * torch.eye(12)
    assert gap.min() >= 0.5 - 1e-5
    assert places.min() >= 0.25
    assert places.max() <= 5 - 0.25


def test_frame_shows_the_world_of_a_row() -> None:
    environment = Navigation(2, 3, early_leave=True, seed=0)
    environment.reset()
    frames = [environment.render(row) for row in range(6)]
    assert frames[0].dtype == np.uint8
    assert frames[0].shape[0] % 2 == frames[0].shape[1] % 2 == 0
    assert np.array_equal(frames[0], frames[2])
    assert np.array_equal(frames[3], frames[5])
    assert not np.array_equal(frames[2], frames[3])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"worlds": 0}, r"Navigation\(worlds=0\)"),
        ({"agents": 0}, "agents=0"),
        ({"neighbours": -1}, "neighbours=-1"),
        ({"max_episode_steps": 0}, "give 1 or more"),
    ],
)
def test_options_out_of_range_raise(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Navigation(**options)


def test_seeds_of_a_world_must_be_equal() -> None:
    environment = Navigation(2, 2, seed=0)
    with pytest.raises(ValueError, match="one seed for all 2 rows of a world"):
        environment.reset_to(torch.tensor([1, 1, 2, 3]))


@pytest.mark.slow
def test_example_solves_navigation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = runpy.run_path(str(Path(__file__).parents[2] / "examples/navigation.py"))
    assert run["result"].terminated.double().mean() > 0.9
    assert [*(tmp_path / "videos").glob("*.mp4")]
