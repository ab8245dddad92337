"""Tests of the rollout buffer: recorded rows, resets and next values.

Shapes: T vector steps, N environments, B = T * N rows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rein.ops.trees import map_tree
from rein.replay.rollout import Rollout
from rein.testing import StatefulContract
from rein.types import Transition

T, N = 4, 3


def flags(*where: int) -> Tensor:
    return torch.tensor([i in where for i in range(N)])


def transition(
    t: int, terminated: tuple[int, ...] = (), truncated: tuple[int, ...] = (), invalid: tuple[int, ...] = ()
):
    """Return step t. Its next observation is 1,000 more than the observation of step t + 1."""
    observation = {"x": 10.0 * t + torch.arange(N, dtype=torch.float32)}
    after = {"x": observation["x"] + 1010.0}
    ends = flags(*terminated), flags(*truncated)
    return Transition(observation, torch.zeros(N), torch.full((N,), float(t)), *ends, after, ~flags(*invalid), {})


def filled(**changes: dict[int, tuple[int, ...]]) -> Rollout:
    rollout = Rollout(T)
    for t in range(T):
        rollout.append(transition(t, **{name: rows.get(t, ()) for name, rows in changes.items()}))
    return rollout


def values(rollout: Rollout) -> tuple[Tensor, list[Tensor]]:
    """Return next values, with value(x) = x, and the observations for which values were computed."""
    evaluated: list[Tensor] = []

    def value_of(observation: Any) -> Tensor:
        evaluated.append(observation["x"])
        return evaluated[-1].clone()

    return rollout.next_values(rollout["observation"]["x"].clone(), value_of), evaluated


class _Filled(StatefulContract):
    """Saves while the rollout is filled for the second time."""

    def make(self):
        return Rollout(5)

    def step(self, part):
        if part.full:
            part.clear()
        part.append(transition(len(part)), carry=torch.full((N, 2), float(len(part))))
        return {name: part[name] for name in ("observation", "reward", "carry")}


def test_state_round_trip_is_exact() -> None:
    contract = _Filled()
    contract.test_loaded_part_continues_bit_for_bit()
    contract.test_state_needs_no_pickle()
    contract.test_loading_copies_state()
    contract.test_incomplete_state_raises()


def test_rollout_is_full_after_its_steps_and_empty_when_cleared() -> None:
    rollout = Rollout(T)
    for t in range(T):
        assert not rollout.full and len(rollout) == t
        rollout.append(transition(t))
    assert rollout.full
    rollout.clear()
    assert not rollout.full and len(rollout) == 0


def test_flat_rows_are_time_major() -> None:
    rollout = filled()
    x_B = rollout.flat("observation")["x"]
    assert all(x_B[t * N + n] == rollout["observation"]["x"][t, n] for t in range(T) for n in range(N))


def test_next_value_is_of_next_row_or_last_next_observation() -> None:
    value_TN, evaluated = values(filled())
    x_TN = filled()["observation"]["x"]
    assert torch.equal(value_TN[:-1], x_TN[1:])
    assert torch.equal(value_TN[-1], x_TN[-1] + 1010.0)
    assert sum(map(len, evaluated)) == N


def test_next_value_of_truncated_row_is_of_final_observation() -> None:
    value_TN, evaluated = values(filled(truncated={1: (0, 2)}))
    x_TN = filled()["observation"]["x"]
    assert torch.equal(value_TN[1], torch.where(flags(0, 2), x_TN[1] + 1010.0, x_TN[2]))
    assert sum(map(len, evaluated)) == N + 2


@pytest.mark.parametrize("changes", [{"terminated": {1: (1,)}}, {"invalid": {1: (1,)}}])
def test_terminated_or_invalid_rows_need_no_final_value(changes: dict[str, Any]) -> None:
    _, evaluated = values(filled(truncated={1: (1,)}, **changes))
    assert sum(map(len, evaluated)) == N


def test_next_values_leaves_given_values_unchanged() -> None:
    rollout = filled(truncated={0: (0,)})
    value_TN = rollout["observation"]["x"].clone()
    kept = value_TN.clone()
    rollout.next_values(value_TN, lambda observation: observation["x"])
    assert torch.equal(value_TN, kept)


def test_other_devices_evaluate_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results equal those on the CPU."""
    rollout = filled(truncated={1: (0, 2), 2: (1,)}, terminated={2: (1,)}, invalid={0: (1,)})
    expected, _ = values(rollout)

    class Elsewhere(Tensor):
        device = torch.device("meta")  # type: ignore[assignment]  # another device for the test

    value_TN = rollout["observation"]["x"].clone().as_subclass(Elsewhere)
    evaluated: list[Tensor] = []

    def value_of(observation: Any) -> Tensor:
        evaluated.append(observation["x"])
        return evaluated[-1].clone()

    found = rollout.next_values(value_TN, value_of).as_subclass(Tensor)
    assert len(evaluated[0]) == T * N
    assert torch.equal(found, expected)


def test_reset_truncates_only_last_row() -> None:
    rollout = Rollout(T)
    rollout.append(transition(0))
    rollout.append(transition(1, terminated=(1,)))
    rollout.observe_reset(flags(0, 1))
    rollout.append(transition(2))
    expected = torch.stack([flags(), flags(0), flags()])
    assert torch.equal(rollout["truncated"], expected)  # a terminated row stays terminated


def test_reset_before_first_row_truncates_nothing() -> None:
    rollout = Rollout(T)
    rollout.observe_reset(flags(0, 1, 2))
    rollout.append(transition(0))
    assert not rollout["truncated"].any()


def test_append_copies_tensors() -> None:
    rollout, row = Rollout(T), transition(0)
    rollout.append(row)
    map_tree(lambda tensor: tensor.zero_() if tensor.dtype == torch.float32 else None, row.observation)
    assert torch.equal(rollout["observation"]["x"][0], torch.arange(N, dtype=torch.float32))
