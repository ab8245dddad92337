"""Defaults of `TimeStep`."""

from __future__ import annotations

import pytest
import torch

from rein import TimeStep
from rein.errors import EnvironmentContractError
from rein.ops.trees import map_tree, pack, unpack
from rein.types import NAMED_TUPLES

NO = torch.zeros(3, dtype=torch.bool)


def time_step(truncated: torch.Tensor = NO) -> TimeStep:
    return TimeStep(torch.arange(3.0)[:, None], torch.ones(3), NO, truncated)


def test_optional_fields_have_defaults() -> None:
    step = time_step()
    assert step.valid.tolist() == [True, True, True]
    assert step.final_observation is step.observation
    assert step.info == {}


def test_given_fields_are_kept() -> None:
    final, info = torch.zeros(3, 1), {"success": NO}
    step = TimeStep(torch.ones(3, 1), torch.ones(3), NO, ~NO, final, NO, info)
    assert step.final_observation is final
    assert step.valid is NO
    assert step.info is info


def test_truncated_row_without_final_observation_raises() -> None:
    with pytest.raises(EnvironmentContractError, match=r"environments \[1\] were truncated, but final_observation"):
        time_step(truncated=torch.tensor([False, True, False]))


def test_time_step_keeps_its_type() -> None:
    step = time_step()
    assert type(step._replace(reward=torch.zeros(3))) is TimeStep
    assert type(map_tree(torch.clone, step)) is TimeStep
    assert type(unpack(pack(step), NAMED_TUPLES)) is TimeStep
