"""Tests of Gridworld: rules of the original implementation, and contracts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rein.envs.gridworld import Gridworld
from rein.errors import EnvironmentContractError
from rein.testing import EnvironmentContract, StatefulContract

UP, DOWN, RIGHT, LEFT = range(4)
TARGETS = [(2, 4), (0, 1), (4, 4), (3, 2)]


class TestCellGridworld(EnvironmentContract):
    num_envs = 8
    different_starts = 4

    def make(self, num_envs: int, seed: int | None) -> Gridworld:
        return Gridworld(num_envs, TARGETS, seed=seed, max_episode_steps=20)


class TestVectorGridworld(EnvironmentContract):
    def make(self, num_envs: int, seed: int | None) -> Gridworld:
        return Gridworld(num_envs, TARGETS, seed=seed, observation="vector")


class TestGridworldState(StatefulContract):
    def make(self) -> Gridworld:
        return Gridworld(8, TARGETS, seed=3, max_episode_steps=9)

    def step(self, part: Any) -> Any:
        if int(part.episode_seeds[0]) < 0:
            part.reset()
        return part.apply_action((part.episode_seeds + part.state_dict()["steps"]) % 4)


def _at(environment: Gridworld, x: int, y: int, target: tuple[int, int] = (2, 4)) -> Gridworld:
    """Set all environments to one position."""
    environment.reset()
    cell = torch.tensor([[x, y, *target]]).expand(environment.num_envs, 4)
    environment.load_state_dict(environment.state_dict() | {"cell": cell})
    return environment


def test_actions_move_by_one_cell() -> None:
    time_step = _at(Gridworld(4), 1, 1).apply_action(torch.tensor([UP, DOWN, RIGHT, LEFT]))
    assert time_step.observation[:, :2].tolist() == [[1, 2], [1, 0], [2, 1], [0, 1]]


def test_moves_off_the_board_are_clipped() -> None:
    for (x, y), into_the_wall in {(0, 0): [LEFT, DOWN], (4, 4): [RIGHT, UP]}.items():
        time_step = _at(Gridworld(2, [(2, 2)]), x, y, (2, 2)).apply_action(torch.tensor(into_the_wall))
        assert time_step.observation[:, :2].tolist() == [[x, y]] * 2
        assert not time_step.terminated.any()


def test_reward_is_negative_manhattan_distance_after_the_move() -> None:
    environment = Gridworld(64, TARGETS, seed=1)
    environment.reset()
    for k in range(30):
        time_step = environment.apply_action(torch.arange(64).add(k) % 4)
        x, y, target_x, target_y = time_step.final_observation.unbind(1)
        assert torch.equal(time_step.reward, -((target_x - x).abs() + (target_y - y).abs()).float())


def test_only_the_exact_target_terminates() -> None:
    for x, y, action, reached in [(2, 3, UP, True), (1, 4, RIGHT, True), (3, 4, LEFT, True), (2, 2, UP, False)]:
        time_step = _at(Gridworld(1), x, y).apply_action(torch.tensor([action]))
        assert time_step.terminated.tolist() == [reached]
        assert (time_step.reward == 0).tolist() == [reached]


def test_autoreset_after_the_target_starts_in_the_bottom_row() -> None:
    time_step = _at(Gridworld(16, seed=0), 2, 3).apply_action(torch.full((16,), UP))
    assert time_step.final_observation[:, :2].tolist() == [[2, 4]] * 16
    assert (time_step.observation[:, 1] == 0).all()


def test_start_columns_include_the_last_column_by_default() -> None:
    columns = Gridworld(512, seed=0).reset()[:, 0]
    assert columns.unique().tolist() == [0, 1, 2, 3, 4]
    ancestors = Gridworld(512, seed=0, start_columns=4).reset()[:, 0]
    assert ancestors.unique().tolist() == [0, 1, 2, 3]


def test_start_columns_and_targets_are_uniform_and_independent() -> None:
    start = Gridworld(20_000, TARGETS, seed=5).reset()
    target = sum((start[:, 2:] == torch.tensor(cell)).all(1) * index for index, cell in enumerate(TARGETS))
    counts = torch.bincount(start[:, 0] * len(TARGETS) + target, minlength=20).double()
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 43.8  # 19 degrees of freedom: exceeded by one seed in a thousand


def test_autoreset_episode_equals_reset_to_with_its_seed() -> None:
    environment, fresh = (Gridworld(32, TARGETS, seed=seed, max_episode_steps=1) for seed in (2, 99))
    environment.reset()
    for _ in range(200):  # more than the precomputed episodes
        time_step = environment.apply_action(torch.full((32,), UP))
        assert torch.equal(fresh.reset_to(environment.episode_seeds), time_step.observation)


def test_number_of_precomputed_episodes_does_not_change_starts() -> None:
    starts = {}
    for num_envs in (2, 8192):  # precompute 64 and 16 episodes
        environment = Gridworld(num_envs, TARGETS, seed=4)
        starts[num_envs] = torch.stack([environment.reset()[:2] for _ in range(150)])
    assert torch.equal(starts[2], starts[8192])


def test_episode_is_truncated_after_max_episode_steps() -> None:
    environment = Gridworld(8, [(4, 4)], seed=0, max_episode_steps=3)
    environment.reset()
    flags = [environment.apply_action(torch.full((8,), DOWN)) for _ in range(7)]
    assert [bool(step.truncated.all()) for step in flags] == [False, False, True, False, False, True, False]
    assert not any(step.terminated.any() for step in flags)


def test_no_limit_means_no_truncation() -> None:
    environment = Gridworld(8, [(4, 4)], seed=0)
    environment.reset()
    assert not any(environment.apply_action(torch.full((8,), DOWN)).truncated.any() for _ in range(300))


def test_vector_observation_matches_the_cell_observation() -> None:
    cells, vectors = (Gridworld(64, TARGETS, seed=3, observation=kind) for kind in ("cell", "vector"))
    assert cells.reset().dtype is torch.int64
    vectors.reset()
    for k in range(20):
        action = torch.arange(64).add(k) % 4
        cell, vector = (e.apply_action(action).final_observation for e in (cells, vectors))
        assert torch.equal(vector[:, :4], cell / 4)
        assert torch.equal(vector[:, 4], (cell[:, :2] == cell[:, 2:]).all(1).float())
        distance = torch.linalg.vector_norm(vector[:, :2] - vector[:, 2:4], dim=1) / 2**0.5
        torch.testing.assert_close(vector[:, 5], distance)


@pytest.mark.parametrize("size", [2, 5, 21])
def test_other_board_sizes_follow_the_same_rules(size: int) -> None:
    last = size - 1
    cells, vectors = (
        Gridworld(512, [(last, last)], seed=0, size=size, observation=kind) for kind in ("cell", "vector")
    )
    assert cells.single_observation_space == spaces.MultiDiscrete([size] * 4)
    assert cells.bounding_box == (0, last, 0, last)
    assert cells.reset()[:, 0].unique().tolist() == list(range(size))
    time_step = _at(Gridworld(2, [(0, 0)], size=size), last, last, (0, 0)).apply_action(torch.tensor([UP, RIGHT]))
    assert time_step.observation[:, :2].tolist() == [[last, last]] * 2
    assert time_step.reward.tolist() == [-2.0 * last] * 2
    assert vectors.encode(x=0, y=0, target=(last, last)).tolist() == [[0, 0, 1, 1, 0, 1]]
    assert vectors.encode(x=last, y=1, target=(last, 1))[0].tolist() == [1, pytest.approx(1 / last)] * 2 + [1, 0]
    assert cells.render().shape[0] == size * Gridworld(1, seed=0).render().shape[0] // 5


def test_config_contains_size_only_if_not_five() -> None:
    assert "size" not in Gridworld(1).config
    assert torch.equal(Gridworld(4, seed=1, size=5).reset(), Gridworld(4, seed=1).reset())
    large = Gridworld(1, [(9, 9)], size=21, seed=3)
    again = Gridworld(**large.config)
    assert (again.config, again.reset().tolist()) == (large.config, large.reset().tolist())


def test_encode_returns_a_batch_of_one_observation() -> None:
    assert Gridworld(3).encode(x=2, y=3, target=(2, 4)).tolist() == [[2, 3, 2, 4]]
    corner = Gridworld(3, observation="vector").encode(x=0, y=0, target=(4, 4))
    assert corner.tolist() == [[0, 0, 1, 1, 0, 1]]
    reached = Gridworld(3, observation="vector").encode(x=4, y=0, target=(4, 0))
    assert reached.tolist() == [[1, 0, 1, 0, 1, 0]]


def test_frame_shows_agent_and_target_at_their_cells() -> None:
    environment = _at(Gridworld(2, [(2, 4)]), 0, 1)
    frame = environment.render(1)
    assert frame.dtype == np.uint8
    assert frame.shape[2] == 3
    cell = frame.shape[0] // 5

    def colour(x: int, y: int) -> list[int]:
        return frame[(4 - y) * cell + cell // 2, x * cell + cell // 2].tolist()

    walker, target, empty = colour(0, 1), colour(2, 4), colour(3, 0)
    assert len({tuple(walker), tuple(target), tuple(empty)}) == 3
    assert colour(4, 4) == empty


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_envs": 0}, "num_envs=0"),
        ({"possible_targets": []}, "at least one"),
        ({"possible_targets": [(2, 5)]}, r"\(2, 5\) is off the board"),
        ({"start_columns": 6}, "give 1 to 5"),
        ({"size": 1}, r"size=1\): give a whole number, 2 or more"),
        ({"size": 6.5}, r"size=6.5\): give a whole number"),
        ({"size": 7, "start_columns": 8}, "give 1 to 7"),
        ({"size": 3}, r"\(2, 4\) is off the board, which has x and y from 0 to 2"),
        ({"observation": "pixels"}, "'cell' or 'vector'"),
        ({"max_episode_steps": 0}, "give 1 or more"),
    ],
)
def test_options_out_of_range_raise(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Gridworld(**options)


@pytest.mark.parametrize("wrong", [-1, 4])
def test_action_out_of_range_raises_in_later_steps(wrong: int) -> None:
    environment = Gridworld(3)
    environment.reset()
    environment.apply_action(torch.tensor([0, 3, 0]))
    with pytest.raises(
        EnvironmentContractError, match=rf"environment 1: expected a value of Discrete\(4\), got {wrong}"
    ):
        environment.apply_action(torch.tensor([0, wrong, 0]))


def test_non_integer_seed_raises() -> None:
    with pytest.raises(TypeError, match="seed='0'"):
        Gridworld(3, seed="0")  # type: ignore[arg-type]  # wrong on purpose


def test_invalid_mask_raises() -> None:
    environment = Gridworld(2, seed=0)
    environment.reset()
    with pytest.raises(ValueError, match=r"apply_action_where: expected torch.bool of shape \(2,\), got "):
        environment.apply_action_where(torch.zeros(2, dtype=torch.int64), torch.tensor([True]))
