"""The record of an epoch: what goes in comes out, whatever its size."""

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
def test_rows_that_outgrow_what_was_asked_for_are_all_kept(capacity):
    check(filled(9, capacity), 9)


def test_long_epochs_are_kept_one_after_the_other():
    rows = filled(2100)  # more than are made ready to be written into at once
    check(rows, 2100)
    for count in (1025, 3, 2049):
        rows.clear()
        for number in range(count):
            rows.append(row(number))
        check(rows, count)


def test_a_row_that_is_refused_leaves_no_trace():
    rows = filled(2)
    wrong = {"place": torch.full((2, 3), 5), "held": torch.ones(2)}
    with pytest.raises(ValueError, match=r"observation.held was torch.bool \(2,\) .*, and is torch.float32 \(2,\) now"):
        rows.append({"reward": torch.tensor([5.0, 50.0]), "observation": wrong})
    with pytest.raises(ValueError, match=r"reward was torch.float32 \(2,\) .*, and is torch.float32 \(1,\) now"):
        rows.append(row(2) | {"reward": torch.ones(1)})  # and is not spread over both environments
    check(rows, 2)


def test_what_needs_a_gradient_is_kept_without_it():
    rows = RowBuffer(2)
    rows.append({"value": torch.tensor([1.0, 2.0], requires_grad=True) * 2})
    rows.append({"value": torch.nn.Parameter(torch.tensor([3.0, 4.0]))})
    assert rows["value"].tolist() == [[2, 4], [3, 4]]
    assert not rows["value"].requires_grad


def test_a_field_that_is_new_or_gone_within_an_epoch_is_an_error_that_names_it():
    rows = filled(2)
    with pytest.raises(ValueError, match=r"fields: \['extra'\]"):
        rows.append(row(2, extra=torch.zeros(2)))
    with pytest.raises(ValueError, match=r"fields: \['observation'\]"):
        rows.append({"reward": torch.zeros(2)})
    check(rows, 2)


def test_fields_may_be_others_in_the_next_epoch_and_none_of_the_old_ones_remains():
    rows = RowBuffer(4)
    rows.append(row(7, old=torch.zeros(2)))
    rows.clear()
    assert rows.length == 0
    rows.append({"reward": torch.tensor([1.0, 2.0]), "new": torch.tensor([3, 4])})
    assert set(rows.fields()) == {"reward", "new"}
    assert "old" not in rows
    assert rows["reward"].tolist() == [[1.0, 2.0]]
    assert rows["new"].tolist() == [[3, 4]]


def test_a_field_that_begins_as_a_copy_goes_its_own_way():
    rows = filled(3, capacity=5)
    rows.add_copy("raw_reward", of="reward")
    rows.append(row(3, raw_reward=torch.tensor([-1.0, -2.0])))
    assert rows["raw_reward"].tolist() == [[0, 0], [1, 10], [2, 20], [-1, -2]]
    check(rows, 4)
    rows.add_copy("raw_reward", of="reward")  # it has begun already
    assert rows["raw_reward"][3].tolist() == [-1, -2]


@pytest.mark.parametrize("capacity", [1, 3, 5])
def test_loaded_rows_are_those_saved_and_go_on(capacity):
    loaded = filled(2, capacity)
    loaded.append(row(99))
    state = filled(4, 5).state_dict()
    loaded.load_state_dict(state)
    check(loaded, 4)
    for number in range(4, 7):
        loaded.append(row(number))
    check(loaded, 7)


def test_loading_takes_the_fields_of_the_state_and_no_other():
    loaded = RowBuffer(4)
    loaded.append(row(0, stale=torch.zeros(2)))
    loaded.load_state_dict(filled(1).state_dict())
    assert "stale" not in loaded
    check(loaded, 1)


def test_loaded_rows_share_nothing_with_the_state():
    source, loaded = filled(3), RowBuffer(4)
    state = source.state_dict()
    loaded.load_state_dict(state)
    before = copy.deepcopy(loaded.state_dict())
    source["reward"].zero_()
    source["observation"]["place"].zero_()
    assert torch.equal(loaded["reward"], before["fields"]["reward"])
    check(loaded, 3)


def test_the_state_of_no_rows_empties_what_it_is_loaded_into():
    rows, loaded = filled(3), filled(2)
    rows.clear()
    loaded.load_state_dict(rows.state_dict())
    assert loaded.length == 0
    loaded.append({"other": torch.ones(2)})
    assert set(loaded.fields()) == {"other"}
