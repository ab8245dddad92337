"""Checks of environment results. Errors name the field and the row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rein.envs.base.contract import check_action, check_observation, check_range, check_rows, check_time_step, restored
from rein.errors import EnvironmentContractError
from rein.spaces.conversion import tensor_dtype
from rein.types import TimeStep

N = 3
BOX = spaces.Box(-1.0, 1.0, (2,))
NESTED = spaces.Dict({"camera": spaces.Box(0, 255, (4, 4), "uint8"), "arm": spaces.Tuple([BOX, spaces.Discrete(3)])})


def time_step(**changes: Any) -> TimeStep:
    """Return a valid time step of three environments, of which the last ended an episode, with changes."""
    sound = TimeStep(
        observation=torch.tensor([[0.0, 0.1], [0.2, 0.3], [0.4, 0.5]]),
        reward=torch.ones(N),
        terminated=torch.tensor([False, False, True]),
        truncated=torch.zeros(N, dtype=torch.bool),
        final_observation=torch.tensor([[0.0, 0.1], [0.2, 0.3], [0.9, 0.9]]),
        valid=torch.ones(N, dtype=torch.bool),
        info={"success": torch.tensor([False, False, True])},
    )
    return sound._replace(**changes)


def nested() -> dict[str, Any]:
    """Return an observation of three environments in the nested space."""
    arm = {"0": torch.zeros(N, 2), "1": torch.tensor([0, 1, 2])}
    return {"camera": torch.zeros(N, 4, 4, dtype=torch.uint8), "arm": arm}


def test_valid_time_step_passes() -> None:
    check_time_step(time_step(), N, BOX)
    check_rows(time_step(), N)
    check_observation(nested(), N, NESTED)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"reward": torch.ones(N).double()}, r"reward: expected float32 of shape \(3,\), got torch.float64"),
        (
            {"reward": torch.ones(N, 1)},
            r"reward: expected float32 of shape \(3,\), got torch.float32 of shape \(3, 1\)",
        ),
        ({"terminated": torch.zeros(N)}, "terminated: expected bool"),
        ({"truncated": torch.zeros(N - 1, dtype=torch.bool)}, r"truncated: .* got torch.bool of shape \(2,\)"),
        ({"valid": torch.ones(N, dtype=torch.int64)}, "valid: expected bool"),
        ({"observation": torch.zeros(N + 1, 2)}, "observation: expected a tensor of 3 rows"),
        ({"final_observation": torch.zeros(2)}, "final_observation: expected a tensor of 3 rows"),
        ({"observation": {"camera": torch.zeros(1)}}, r"observation.camera: expected a tensor of 3 rows"),
    ],
)
def test_wrong_shapes_and_dtypes_raise_in_every_step(changes: dict[str, Any], text: str) -> None:
    for check in (lambda step: check_rows(step, N), lambda step: check_time_step(step, N, BOX)):
        with pytest.raises(EnvironmentContractError, match=text):
            check(time_step(**changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"reward": torch.tensor([0.0, float("nan"), 0.0])}, "reward, row 1: expected a finite number, got nan"),
        ({"reward": None}, r"reward: expected float32 of shape \(3,\), got NoneType"),
        ({"observation": torch.zeros(N, 2).double()}, "observation: expected torch.float32"),
        ({"observation": torch.zeros(N, 3)}, r"observation: expected a tensor of shape \(3, 2\)"),
        ({"observation": torch.full((N, 2), float("inf"))}, r"observation, row 0 at \[0\]: expected finite"),
        ({"final_observation": torch.zeros(N, 2)}, r"final_observation, row 0 at \[1\]: expected the observation"),
        ({"info": {"success": torch.zeros(N + 1)}}, "info.success: expected a tensor of 3 rows"),
        ({"info": {"success": True}}, "info.success: expected a tensor of 3 rows, got bool True"),
    ],
)
def test_wrong_values_raise_in_the_first_step(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(EnvironmentContractError, match=text):
        check_time_step(time_step(**changes), N, BOX)


def test_wrong_type_of_time_step_is_named() -> None:
    with pytest.raises(EnvironmentContractError, match=r"expected a rein\.TimeStep, got tuple"):
        check_time_step(tuple(time_step()), N, BOX)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda x: x.pop("arm"), r"observation: expected a dictionary with the keys \['arm', 'camera'\]"),
        (lambda x: x["arm"].update(extra=1), r"observation.arm: expected a dictionary"),
        (lambda x: x.update(camera=x["camera"].float()), "observation.camera: expected torch.uint8"),
        (lambda x: x["arm"]["1"].fill_(3), "observation.arm.1, environment 0: expected a value of Discrete"),
    ],
)
def test_errors_in_nested_observations_name_the_path(spoil: Callable[[Any], Any], text: str) -> None:
    observation = nested()
    spoil(observation)
    with pytest.raises(EnvironmentContractError, match=text):
        check_observation(observation, N, NESTED)


@pytest.mark.parametrize(
    ("space", "good", "bad"),
    [
        (spaces.Discrete(2, start=5), [5, 6, 5], [5, 7, 5]),
        (spaces.Discrete(2, start=-1), [-1, 0, 0], [-2, 0, 0]),
        (spaces.MultiDiscrete([2, 3]), [[1, 2]] * N, [[0, 0], [2, 2], [0, 0]]),
        (spaces.MultiDiscrete([2, 3], start=[1, 0]), [[2, 2]] * N, [[0, 0]] * N),
        (spaces.MultiBinary(2), [[0, 1]] * N, [[0, 2]] * N),
    ],
)
def test_index_outside_the_space_raises(space: spaces.Space[Any], good: Any, bad: Any) -> None:
    check_action(torch.tensor(good), N, space)
    with pytest.raises(EnvironmentContractError, match="action, environment"):
        check_action(torch.tensor(bad), N, space)


def test_action_can_have_any_dtype_of_its_kind() -> None:
    check_action(torch.zeros(N, dtype=torch.int32), N, spaces.Discrete(2))
    check_action(torch.zeros(N, 2).double(), N, BOX)
    with pytest.raises(EnvironmentContractError, match="action: expected integers"):
        check_action(torch.zeros(N), N, spaces.Discrete(2))
    with pytest.raises(EnvironmentContractError, match="action: expected floating-point numbers"):
        check_action(torch.zeros(N, 2, dtype=torch.int64), N, BOX)


def test_restoring_a_tensor_of_another_shape_raises() -> None:
    like = torch.zeros(3, dtype=torch.int64)
    copy = restored({"steps": like}, "steps", like)
    assert copy.data_ptr() != like.data_ptr()
    with pytest.raises(ValueError, match=r"steps: the state has shape \(4,\), this object \(3,\)"):
        restored({"steps": torch.zeros(4)}, "steps", like)


RANGES: list[tuple[spaces.Space[Any], Any, Any, list[str]]] = [
    (BOX, [[0.0, -1.0]] * N, [[0.0, 0.0], [0.0, 1.5], [2.0, 0.0]], ["environment 1 at [1]: 1.5", "Box(-1.0, 1.0"]),
    (spaces.Box(-1, 1, (), np.int8), [1] * N, [0, 0, 2], ["environment 2: 2", "Box(-1, 1"]),
    (spaces.Box(0.0, 0.1, (1,), np.float64), [[0.1]] * N, [[0.1], [0.2], [0.1]], ["environment 1 at [0]: 0.2"]),
]


@pytest.mark.parametrize(("space", "good", "bad", "words"), RANGES)
def test_value_outside_of_a_box_is_logged_once(
    space: spaces.Space[Any], good: Any, bad: Any, words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    space, dtype = spaces.Dict({"arm": space}), tensor_dtype(space)
    check_range({"arm": torch.tensor(good, dtype=dtype)}, space)
    assert not caplog.records
    check_range({"arm": torch.tensor(bad, dtype=dtype)}, space, step=2)  # only some steps are checked
    assert not caplog.records
    for step in range(3, 80):
        check_range({"arm": torch.tensor(bad, dtype=dtype)}, space, step=step)
    (record,) = caplog.records
    assert all(word in record.getMessage() for word in ["observation.arm", *words])
