"""A rollout: what is kept, where it is cut, and what comes after each row.

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
    """Row t, whose next observation is 1,000 more than an observation that the next row would have."""
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
    """The next values, where that of an observation is itself; and which next observations were looked at."""
    asked: list[Tensor] = []

    def value_of(observation: Any) -> Tensor:
        asked.append(observation["x"])
        return asked[-1].clone()

    return rollout.next_values(rollout["observation"]["x"].clone(), value_of), asked


class _Filled(StatefulContract):
    """Saved in the middle of its second filling."""

    def make(self):
        return Rollout(5)

    def step(self, part):
        if part.full:
            part.clear()
        part.append(transition(len(part)), carry=torch.full((N, 2), float(len(part))))
        return {name: part[name] for name in ("observation", "reward", "carry")}


def test_its_state_comes_back_exactly() -> None:
    contract = _Filled()
    contract.test_a_loaded_part_goes_on_bit_for_bit()
    contract.test_its_state_needs_no_pickle()
    contract.test_loading_shares_no_memory_with_the_source()
    contract.test_a_state_that_lacks_something_is_refused()


def test_it_is_full_after_its_steps_and_empty_when_cleared() -> None:
    rollout = Rollout(T)
    for t in range(T):
        assert not rollout.full and len(rollout) == t
        rollout.append(transition(t))
    assert rollout.full
    rollout.clear()
    assert not rollout.full and len(rollout) == 0


def test_rows_are_laid_out_time_by_time() -> None:
    rollout = filled()
    x_B = rollout.flat("observation")["x"]
    assert all(x_B[t * N + n] == rollout["observation"]["x"][t, n] for t in range(T) for n in range(N))


def test_the_next_value_is_that_of_the_next_row_and_of_the_next_observation_in_the_last() -> None:
    value_TN, asked = values(filled())
    x_TN = filled()["observation"]["x"]
    assert torch.equal(value_TN[:-1], x_TN[1:])
    assert torch.equal(value_TN[-1], x_TN[-1] + 1010.0)
    assert sum(map(len, asked)) == N


def test_where_an_episode_was_cut_it_is_that_of_the_final_observation() -> None:
    value_TN, asked = values(filled(truncated={1: (0, 2)}))
    x_TN = filled()["observation"]["x"]
    assert torch.equal(value_TN[1], torch.where(flags(0, 2), x_TN[1] + 1010.0, x_TN[2]))
    assert sum(map(len, asked)) == N + 2


@pytest.mark.parametrize("changes", [{"terminated": {1: (1,)}}, {"invalid": {1: (1,)}}])
def test_where_it_was_cut_and_terminated_or_is_no_data_nobody_is_asked(changes: dict[str, Any]) -> None:
    _, asked = values(filled(truncated={1: (1,)}, **changes))
    assert sum(map(len, asked)) == N


def test_the_values_handed_in_stay_as_they_are() -> None:
    rollout = filled(truncated={0: (0,)})
    value_TN = rollout["observation"]["x"].clone()
    kept = value_TN.clone()
    rollout.next_values(value_TN, lambda observation: observation["x"])
    assert torch.equal(value_TN, kept)


def test_where_waiting_for_the_device_would_cost_more_all_rows_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the results are the same."""
    rollout = filled(truncated={1: (0, 2), 2: (1,)}, terminated={2: (1,)}, invalid={0: (1,)})
    expected, _ = values(rollout)

    class Elsewhere(Tensor):
        device = torch.device("meta")  # type: ignore[assignment]  # another device for the test

    value_TN = rollout["observation"]["x"].clone().as_subclass(Elsewhere)
    asked: list[Tensor] = []

    def value_of(observation: Any) -> Tensor:
        asked.append(observation["x"])
        return asked[-1].clone()

    found = rollout.next_values(value_TN, value_of).as_subclass(Tensor)
    assert len(asked[0]) == T * N
    assert torch.equal(found, expected)


def test_a_reset_cuts_the_last_row_and_no_other() -> None:
    rollout = Rollout(T)
    rollout.append(transition(0))
    rollout.append(transition(1, terminated=(1,)))
    rollout.observe_reset(flags(0, 1))
    rollout.append(transition(2))
    expected = torch.stack([flags(), flags(0), flags()])
    assert torch.equal(rollout["truncated"], expected)  # what terminated before stays terminated


def test_a_reset_before_the_first_row_cuts_nothing() -> None:
    rollout = Rollout(T)
    rollout.observe_reset(flags(0, 1, 2))
    rollout.append(transition(0))
    assert not rollout["truncated"].any()


def test_what_was_handed_in_is_copied() -> None:
    rollout, row = Rollout(T), transition(0)
    rollout.append(row)
    map_tree(lambda tensor: tensor.zero_() if tensor.dtype == torch.float32 else None, row.observation)
    assert torch.equal(rollout["observation"]["x"][0], torch.arange(N, dtype=torch.float32))
