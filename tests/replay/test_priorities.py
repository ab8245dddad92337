"""Tests of priorities: sampling frequencies, importance weights, updates and states."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import Tensor

from rein.accelerate import sum_tree
from rein.ops.random import generator
from rein.replay.prioritized import TOP, WIDTH, Priorities, draw, levels_of, padded
from rein.testing import StatefulContract

TWO_LEVELS = TOP + 1
THREE_LEVELS = TOP * WIDTH + 1


def disable_numba(patch: pytest.MonkeyPatch) -> None:
    """Behave as without numba."""
    patch.setattr("rein.accelerators.PLAIN", True)


@pytest.fixture(autouse=True, params=["torch", "numba"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test with torch and with numba."""
    if request.param == "torch":
        disable_numba(monkeypatch)
    else:
        assert Priorities(1)._compiled is not None, "these tests need numba"
    return request.param


def filled(capacity: int, priority: Tensor | None = None, **options) -> Priorities:
    """Return priorities with all rows appended. By default alpha 1 and a tiny epsilon make errors priorities."""
    priorities = Priorities(capacity, **{"alpha": 1.0, "epsilon": 1e-300} | options)
    priorities.append(torch.arange(capacity))
    if priority is not None:
        priorities.update(torch.arange(capacity), priority)
    return priorities


def chi_square(count: Tensor, probability: Tensor, draws: int) -> float:
    """Return the chi-square statistic of counts as a standard normal score (Wilson & Hilferty 1931)."""
    expected, seen = probability * draws, probability > 0
    assert count[~seen].sum() == 0
    statistic = ((count - expected)[seen].square() / expected[seen]).sum().item()
    freedom = int(seen.sum()) - 1
    spread = 2.0 / (9.0 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1.0 - spread)) / spread**0.5


def tree(priority: Tensor) -> list[Tensor]:
    leaf = torch.zeros(padded(len(priority)), dtype=torch.float64)
    leaf[: len(priority)] = priority
    return levels_of(leaf)


def slow_draw(levels: list[Tensor], uniform: Tensor) -> int:
    """Reference implementation that adds one number at a time."""
    row = 0
    for place, level in enumerate(reversed(levels)):
        block = level if place == 0 else level[row * WIDTH : (row + 1) * WIDTH]
        mass, running, child = uniform[place] * block.cumsum(0)[-1], 0.0, 0
        for child, number in enumerate(block.tolist()):  # noqa: B007  # used after the loop
            running += number
            if running > mass:
                break
        row = row * WIDTH + child
    return row


@pytest.mark.parametrize("capacity", [1, 7, TOP, TWO_LEVELS, TOP + 10 * WIDTH, THREE_LEVELS])
def test_draw_equals_slow_reference(capacity: int) -> None:
    stream = generator(0, "draw")
    priority = torch.rand(capacity, generator=stream, dtype=torch.float64)
    priority[torch.rand(capacity, generator=stream) < 0.3] = 0.0
    priority[-1] = 1.0
    levels = tree(priority)
    assert len(levels) == 1 + (capacity > TOP) + (capacity > TOP * WIDTH)
    uniform_LB = torch.rand((len(levels), 10), generator=stream, dtype=torch.float64)
    row_B, _ = draw(levels, uniform_LB.unbind())
    assert row_B.tolist() == [slow_draw(levels, uniform_L) for uniform_L in uniform_LB.T]
    assert (priority[row_B] > 0).all()


@pytest.mark.parametrize("capacity", [3, 100, TWO_LEVELS, THREE_LEVELS])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 3.0, 1e30])
def test_rounding_never_selects_row_of_priority_zero(capacity: int, scale: float) -> None:
    priority = torch.zeros(capacity, dtype=torch.float64)
    held = torch.tensor([1, capacity // 2])  # neither the first nor the last row
    priority[held] = torch.tensor([0.1, 0.7], dtype=torch.float64) * scale
    levels = tree(priority)
    edge = torch.tensor([0.0, 2.0**-53, 0.125, 0.5, 1.0 - 2.0**-53], dtype=torch.float64)
    parts = torch.cartesian_prod(*[edge] * len(levels)).view(-1, len(levels)).T
    row_B, _ = draw(levels, list(parts))
    assert set(row_B.tolist()) == set(held.tolist())


@pytest.mark.parametrize("capacity", [50, TOP + 50])
def test_rows_are_sampled_in_proportion_to_priorities(capacity: int) -> None:
    stream, draws = generator(0, "draw"), 400_000
    priority = torch.rand(capacity, generator=stream, dtype=torch.float64) + 0.1
    priorities = filled(capacity, priority)
    index_B, probability_B = priorities.sample(draws, stream)
    probability = priority / priority.sum()
    assert torch.allclose(probability_B, probability[index_B], rtol=1e-12)
    assert abs(chi_square(index_B.bincount(minlength=capacity), probability, draws)) < 4.0


def test_alpha_zero_samples_uniformly() -> None:
    stream, capacity, draws = generator(0, "draw"), 100, 100_000
    priorities = filled(capacity, torch.rand(capacity, generator=stream) * 1e6, alpha=0.0, epsilon=1e-6)
    index_B, probability_B = priorities.sample(draws, stream)
    assert (probability_B == 1.0 / capacity).all()
    assert abs(chi_square(index_B.bincount(minlength=capacity), torch.full((capacity,), 0.01), draws)) < 4.0


def test_each_part_of_batch_has_same_distribution() -> None:
    stream, capacity = generator(0, "draw"), 20
    priority = torch.arange(1.0, capacity + 1)
    index_B, _ = filled(capacity, priority).sample(80_000, stream)
    for part_B in index_B.view(4, -1):
        assert abs(chi_square(part_B.bincount(minlength=capacity), priority / priority.sum(), 20_000)) < 4.0


def test_priority_is_power_of_absolute_error() -> None:
    priorities = filled(4, torch.tensor([-2.0, 2.0, 0.0, 5.0]), alpha=0.5, epsilon=0.25)
    expected = torch.tensor([2.25, 2.25, 0.25, 5.25], dtype=torch.float64).sqrt()
    assert torch.allclose(priorities[torch.arange(4)], expected, rtol=1e-12)


def test_duplicate_row_takes_larger_error() -> None:
    priorities = filled(3)
    priorities.update(torch.tensor([1, 2, 1, 1]), torch.tensor([3.0, 7.0, -5.0, 4.0]))
    assert priorities[torch.arange(3)].tolist() == [1.0, 5.0, 7.0]


def test_new_row_gets_largest_priority_so_far() -> None:
    priorities = Priorities(4, alpha=1.0)
    priorities.append(torch.tensor([0, 1]))
    assert priorities[torch.arange(4)].tolist() == [1.0, 1.0, 0.0, 0.0]
    priorities.update(torch.tensor([0]), torch.tensor([8.0]))
    priorities.update(torch.tensor([0]), torch.tensor([0.5]))
    priorities.append(torch.tensor([2, 0]))  # row 0 is overwritten, as in a ring
    assert torch.allclose(priorities[torch.arange(4)], torch.tensor([8.0, 1.0, 8.0, 0.0], dtype=torch.float64))


def test_removed_or_invalid_row_is_not_sampled_until_appended() -> None:
    priorities, stream = filled(TWO_LEVELS), generator(0, "draw")
    priorities.remove(torch.arange(10, TWO_LEVELS))
    assert set(priorities.sample(1000, stream)[0].tolist()) == set(range(10))
    priorities.append(torch.tensor([10, 11, 0]), torch.tensor([True, False, False]))
    assert set(priorities.sample(1000, stream)[0].tolist()) == set(range(1, 11))


def test_update_does_not_restore_removed_row() -> None:
    priorities = filled(3)
    priorities.remove(torch.tensor([1]))
    priorities.update(torch.arange(3), torch.tensor([2.0, 9.0, 3.0]))
    assert priorities[torch.arange(3)].tolist() == [2.0, 0.0, 3.0]
    priorities.append(torch.tensor([1]))
    assert priorities[torch.tensor([1])].item() == 3.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_error_leaves_priority_unchanged(bad: float) -> None:
    priorities = filled(3, torch.tensor([2.0, 3.0, 4.0]))
    priorities.update(torch.arange(3), torch.tensor([bad, 5.0, bad]))
    priorities.append(torch.tensor([1]))
    assert priorities[torch.arange(3)].tolist() == [2.0, 5.0, 4.0]


@pytest.mark.parametrize("capacity", [5, TWO_LEVELS])
def test_sampling_without_rows_raises(capacity: int) -> None:
    priorities = Priorities(capacity)
    with pytest.raises(ValueError, match="no row can be sampled"):
        priorities.sample(2, generator(0, "draw"))
    priorities.append(torch.arange(5))
    priorities.remove(torch.arange(5))
    with pytest.raises(ValueError, match="no row can be sampled"):
        priorities.sample(2, generator(0, "draw"))


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("capacity", [30, TWO_LEVELS])
def test_weights_equal_formula(beta: float, capacity: int) -> None:
    stream = generator(0, "draw")
    priority = torch.rand(capacity, generator=stream, dtype=torch.float64) + 0.01
    priorities = filled(capacity, priority)
    index_B, probability_B = priorities.sample(64, stream)
    weight_B = priorities.weights(probability_B, beta)
    of_all = (capacity * priority / priority.sum()) ** -beta
    assert weight_B.dtype == torch.float32
    assert torch.allclose(weight_B.double(), of_all[index_B] / of_all[index_B].max(), rtol=1e-6)
    assert weight_B.max() <= 1.0


def test_sums_stay_exact_after_many_changes() -> None:
    """Append, update and remove more than 100,000 rows with priorities of all magnitudes."""
    capacity, stream = THREE_LEVELS, generator(0, "changes")
    priorities = Priorities(capacity, alpha=1.0)
    for turn in range(400):
        priorities.append(torch.arange(turn * 1000, turn * 1000 + 1000) % capacity)
        index_B, _ = priorities.sample(256, stream)
        priorities.update(index_B, 10.0 ** (20.0 * torch.rand(256, generator=stream) - 10.0))
        priorities.remove(torch.randint(capacity, (20,), generator=stream))
    index_B, probability_B = priorities.sample(1000, stream)
    priority = priorities[torch.arange(capacity)]
    assert torch.allclose(probability_B, priority[index_B] / priority.sum(), rtol=1e-12)
    sums = priorities.state_dict()["sums"]
    for fresh, kept in zip(levels_of(priorities.state_dict()["priority"])[1:], sums, strict=True):
        assert torch.allclose(fresh, kept, rtol=1e-13, atol=0.0)


def test_stale_blocks_stay_bounded_without_sampling() -> None:
    priorities = Priorities(TWO_LEVELS)
    for turn in range(2 * TWO_LEVELS // 100):
        priorities.append(torch.arange(100 * turn, 100 * turn + 100) % TWO_LEVELS)
        assert len(priorities.state_dict()["stale"]) <= TWO_LEVELS // WIDTH
    _, probability_B = priorities.sample(5, generator(0, "draw"))
    assert torch.allclose(probability_B, torch.tensor(1.0 / TWO_LEVELS, dtype=torch.float64))


def test_caller_may_change_index_afterwards() -> None:
    priorities, index_B = filled(THREE_LEVELS), torch.tensor([0])
    priorities.sample(1, generator(0, "draw"))
    priorities.remove(torch.arange(1, THREE_LEVELS))
    priorities.sample(1, generator(0, "draw"))
    priorities.append(index_B.fill_(THREE_LEVELS - 1))
    priorities.remove(index_B.fill_(0))
    index_B.fill_(THREE_LEVELS // 2)
    assert set(priorities.sample(10, generator(0, "draw"))[0].tolist()) == {THREE_LEVELS - 1}


def story(capacity: int) -> tuple[Priorities, list[Tensor]]:
    """Append, sample, update and remove rows; return samples, weights and priorities of each round."""
    one, seen = Priorities(capacity), []
    stream, changes = generator(0, "draw"), generator(1, "changes")
    for turn in range(60):
        new_R = torch.randint(capacity, (30,), generator=changes).unique()
        valid_R = torch.rand(len(new_R), generator=changes) < 0.9
        gone_R = torch.randint(capacity, (3,), generator=changes)
        error_B = 10.0 ** (12.0 * torch.rand(64, generator=changes) - 6.0)
        error_B[torch.randint(64, (3,), generator=changes)] = torch.tensor([float("nan"), float("inf"), 0.0])
        one.append(new_R if turn else torch.arange(min(capacity, 3000)), valid_R if turn else None)
        index_B, probability_B = one.sample(64, stream)
        seen += [index_B, probability_B, one.weights(probability_B, 0.4)]
        one.remove(gone_R)
        one.update(index_B, error_B)
        seen.append(one[torch.arange(capacity)])
    return one, seen


@pytest.mark.parametrize("implementation", ["numba"], indirect=True)
@pytest.mark.parametrize("capacity", [5, 1000, TWO_LEVELS, THREE_LEVELS])
def test_numba_equals_torch_bit_for_bit(monkeypatch, capacity: int) -> None:
    by_numba, found = story(capacity)
    with monkeypatch.context() as patch:
        disable_numba(patch)
        by_torch, expected = story(capacity)
        last = by_torch.sample(64, generator(2, "draw"))
    assert len(found) == len(expected) == 4 * 60
    assert all(map(torch.equal, found, expected))
    for state in (by_torch.state_dict(), by_numba.state_dict()):  # of either implementation
        other = Priorities(capacity)
        other.load_state_dict(state)
        assert all(map(torch.equal, other.sample(64, generator(2, "draw")), last))


@pytest.mark.parametrize("implementation", ["numba"], indirect=True)
def test_warning_and_torch_fallback_if_numba_fails_to_import(monkeypatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, "rein.accelerate.compiled_tree", None)  # makes its import fail
    sum_tree.cache_clear()
    try:
        drawn, _ = filled(TWO_LEVELS).sample(100, generator(3, "draw"))
    finally:
        sum_tree.cache_clear()
    assert "installed numba cannot be imported" in caplog.text
    monkeypatch.undo()
    assert torch.equal(drawn, filled(TWO_LEVELS).sample(100, generator(3, "draw"))[0])


def test_default_device_does_not_affect_priorities() -> None:
    priorities = filled(5, torch.ones(5))
    torch.set_default_device("meta")
    try:
        index_B, probability_B = priorities.sample(3, generator(0, "draw"))
        weight_B = priorities.weights(probability_B, 0.4)
        priorities.update(index_B, weight_B)
    finally:
        torch.set_default_device(None)
    assert index_B.device.type == weight_B.device.type == "cpu"


@pytest.mark.filterwarnings("error")
def test_beta_may_be_tensor_and_zero_probability_gives_infinite_weight() -> None:
    priorities = filled(5, torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]))
    _, probability_B = priorities.sample(3, generator(0, "draw"))
    assert torch.equal(priorities.weights(probability_B, torch.tensor(1.0)), priorities.weights(probability_B, 1))
    assert not priorities.weights(torch.zeros(2, dtype=torch.float64), 0.4).isfinite().any()


@pytest.mark.parametrize("block", [-1, 10**12])
def test_state_with_blocks_out_of_range_raises(block: int) -> None:
    state = filled(TWO_LEVELS).state_dict() | {"stale": torch.tensor([0, block])}
    with pytest.raises(ValueError, match=f"stale has blocks from .*{block}"):
        Priorities(TWO_LEVELS).load_state_dict(state)


def test_update_leaves_given_errors_unchanged() -> None:
    error_B = torch.tensor([-3.0, 2.0], dtype=torch.float64)
    filled(5, torch.ones(5)).update(torch.tensor([0, 1]), error_B)
    assert error_B.tolist() == [-3.0, 2.0]


def test_deep_copy_is_independent() -> None:
    priorities = filled(THREE_LEVELS)
    copied = copy.deepcopy(priorities)
    copied.update(torch.tensor([3]), torch.tensor([1e9]))
    assert (copied.sample(100, generator(0, "draw"))[0] == 3).sum() > 90
    assert (priorities.sample(100, generator(0, "draw"))[0] == 3).sum() < 10


@pytest.mark.parametrize("row", [-1, 5, 10**12])
def test_row_out_of_range_raises_and_changes_nothing(row: int) -> None:
    priorities = filled(5, torch.ones(5))
    with pytest.raises(IndexError):
        priorities.update(torch.tensor([0, row]), torch.tensor([3.0, 2.0]))
    assert priorities[torch.arange(5)].tolist() == [1.0] * 5


def test_empty_batch_is_accepted() -> None:
    priorities = filled(5, torch.ones(5))
    index_B, probability_B = priorities.sample(0, generator(0, "draw"))
    weight_B = priorities.weights(probability_B, 0.4)
    assert weight_B.shape == (0,) and weight_B.dtype == torch.float32
    priorities.update(index_B, weight_B)
    assert priorities[torch.arange(5)].tolist() == [1.0] * 5


def test_rows_and_errors_of_different_shapes_raise() -> None:
    priorities = filled(5, torch.ones(5))
    with pytest.raises(ValueError, match=r"rows \(2,\), and errors \(3,\)"):
        priorities.update(torch.tensor([0, 1]), torch.tensor([3.0, 2.0, 1.0]))
    with pytest.raises(ValueError, match=r"errors \(2, 1\); give one error for each row"):
        priorities.update(torch.tensor([0, 1]), torch.tensor([[3.0], [2.0]]))
    assert priorities[torch.arange(5)].tolist() == [1.0] * 5


@pytest.mark.parametrize(
    "invalid",
    [
        {"capacity": 0},
        {"alpha": -0.1},
        {"alpha": 1.1},
        {"alpha": float("nan")},
        {"epsilon": 0.0},
        {"epsilon": float("inf")},
    ],
)
def test_invalid_arguments_raise_with_name(invalid: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(invalid))):
        Priorities(**{"capacity": 5} | invalid)


def test_state_of_other_capacity_raises() -> None:
    with pytest.raises(ValueError, match="of 6 rows"):
        Priorities(6).load_state_dict(Priorities(5).state_dict())


class TestStateOfOneLevel(StatefulContract):
    capacity = 40

    def make(self):
        return Priorities(self.capacity)

    def step(self, priorities):
        """Leave some sums stale. Samples depend on the state only."""
        state = priorities.state_dict()
        turn = int(state["priority"].count_nonzero())
        stream = generator(turn, "draw", int(state["priority"].sum() * 1e6) % 2**31)
        priorities.append((torch.arange(3) * (self.capacity // 3) + turn * (WIDTH + 1)) % self.capacity)
        index_B, probability_B = priorities.sample(8, stream)
        weight_B = priorities.weights(probability_B, 0.4)
        priorities.update(index_B, torch.randn(8, generator=stream))
        return index_B, probability_B, weight_B


class TestStateOfManyLevels(TestStateOfOneLevel):
    capacity = THREE_LEVELS
