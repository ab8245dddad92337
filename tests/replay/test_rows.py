"""Tests of RowBuffer, which records the rows of an epoch."""

from __future__ import annotations

import copy

import pytest
import torch

from rein.replay.rollout import RowBuffer


def row(number: int, **more):
    return {
        "reward": torch.tensor([number, 10.0 * number]),
        "observation": {"place": torch.full((2, 3), number), "held": torch.tensor([number % 2 == 0, True])},
    } | more


def filled(count: int, capacity: int | None = None) -> RowBuffer:
    rows = RowBuffer(capacity)
    for number in range(count):
        rows.append(row(number))
    return rows


def check(rows: RowBuffer, count: int) -> None:
    assert rows.length == count
    for number in range(count):
        expected = row(number)
        assert torch.equal(rows["reward"][number], expected["reward"])
        for part, value in expected["observation"].items():
            assert torch.equal(rows["observation"][part][number], value)
    assert rows["reward"].shape == (count, 2)


@pytest.mark.parametrize("capacity", [1, 2, 5, 9, None])
def test_buffer_grows_beyond_its_capacity(capacity):
    check(filled(9, capacity), 9)


def test_long_epochs_reuse_buffer():
    rows = filled(2100)  # more than two blocks of views
    check(rows, 2100)
    for count in (1025, 3, 2049):
        rows.clear()
        for number in range(count):
            rows.append(row(number))
        check(rows, count)


def test_rejected_row_changes_nothing():
    rows = filled(2)
    wrong = {"place": torch.full((2, 3), 5), "held": torch.ones(2)}
    with pytest.raises(ValueError, match=r"observation.held is torch.float32 \(2,\), but was torch.bool \(2,\)"):
        rows.append({"reward": torch.tensor([5.0, 50.0]), "observation": wrong})
    with pytest.raises(ValueError, match=r"reward is torch.float32 \(1,\), but was torch.float32 \(2,\)"):
        rows.append(row(2) | {"reward": torch.ones(1)})  # not broadcast to both environments
    check(rows, 2)


def test_append_detaches_tensors():
    rows = RowBuffer(2)
    rows.append({"value": torch.tensor([1.0, 2.0], requires_grad=True) * 2})
    rows.append({"value": torch.nn.Parameter(torch.tensor([3.0, 4.0]))})
    assert rows["value"].tolist() == [[2, 4], [3, 4]]
    assert not rows["value"].requires_grad


def test_field_added_or_removed_within_epoch_raises_with_name():
    rows = filled(2)
    with pytest.raises(ValueError, match=r"other fields .*: \['extra'\]"):
        rows.append(row(2, extra=torch.zeros(2)))
    with pytest.raises(ValueError, match=r"other fields .*: \['observation'\]"):
        rows.append({"reward": torch.zeros(2)})
    check(rows, 2)


def test_fields_may_change_in_next_epoch():
    rows = RowBuffer(4)
    rows.append(row(7, old=torch.zeros(2)))
    rows.clear()
    assert rows.length == 0
    rows.append({"reward": torch.tensor([1.0, 2.0]), "new": torch.tensor([3, 4])})
    assert set(rows.fields()) == {"reward", "new"}
    assert "old" not in rows
    assert rows["reward"].tolist() == [[1.0, 2.0]]
    assert rows["new"].tolist() == [[3, 4]]


def test_added_copy_of_field_is_independent():
    rows = filled(3, capacity=5)
    rows.add_copy("raw_reward", of="reward")
    rows.append(row(3, raw_reward=torch.tensor([-1.0, -2.0])))
    assert rows["raw_reward"].tolist() == [[0, 0], [1, 10], [2, 20], [-1, -2]]
    check(rows, 4)
    rows.add_copy("raw_reward", of="reward")  # has no effect the second time
    assert rows["raw_reward"][3].tolist() == [-1, -2]


@pytest.mark.parametrize("capacity", [1, 3, 5])
def test_loaded_rows_equal_saved_rows_and_grow(capacity):
    loaded = filled(2, capacity)
    loaded.append(row(99))
    state = filled(4, 5).state_dict()
    loaded.load_state_dict(state)
    check(loaded, 4)
    for number in range(4, 7):
        loaded.append(row(number))
    check(loaded, 7)


def test_loading_replaces_fields():
    loaded = RowBuffer(4)
    loaded.append(row(0, stale=torch.zeros(2)))
    loaded.load_state_dict(filled(1).state_dict())
    assert "stale" not in loaded
    check(loaded, 1)


def test_loaded_rows_share_no_memory_with_state():
    source, loaded = filled(3), RowBuffer(4)
    state = source.state_dict()
    loaded.load_state_dict(state)
    before = copy.deepcopy(loaded.state_dict())
    source["reward"].zero_()
    source["observation"]["place"].zero_()
    assert torch.equal(loaded["reward"], before["fields"]["reward"])
    check(loaded, 3)


def test_loading_empty_state_empties_buffer():
    rows, loaded = filled(3), filled(2)
    rows.clear()
    loaded.load_state_dict(rows.state_dict())
    assert loaded.length == 0
    loaded.append({"other": torch.ones(2)})
    assert set(loaded.fields()) == {"other"}
