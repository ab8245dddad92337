from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from rein.networks.normalizers import ObservationNormalizer, RewardNormalizer
from rein.ops.random import generator
from rein.ops.statistics import empty_moments, normalize, update_moments
from rein.testing import StatefulContract

B, FEATURES = 200, 3
T, N, GAMMA = 40, 6, 0.9


def rows(seed: int = 0, count: int = B) -> tuple[Tensor, Tensor]:
    stream = generator(seed, "rows")
    x = torch.randn(count, FEATURES, generator=stream) * torch.tensor([1.0, 0.01, 50.0]) + torch.tensor(
        [0.0, 3.0, -9.0]
    )
    return x, torch.rand(count, generator=stream) < 0.7


def observed(seed: int = 0) -> ObservationNormalizer:
    it = ObservationNormalizer(FEATURES, "cpu")
    it.update(*rows(seed))
    return it


def test_observations_match_the_pure_function_exactly() -> None:
    it, moments = ObservationNormalizer(FEATURES, "cpu", clip=1.5), empty_moments((FEATURES,))
    for seed in range(4):
        x, valid = rows(seed)
        assert torch.equal(it(x), normalize(x, moments, clip=1.5))
        it.update(x, valid)
        moments = update_moments(moments, x, valid)
        assert all(torch.equal(value, other) for value, other in zip(it.moments, moments, strict=True))
    assert (it(rows()[0]).abs() == 1.5).any()


def test_before_the_first_update_observations_are_only_clipped() -> None:
    x = torch.tensor([[-2.0, 0.1, 9.9], [1e9, -11.0, 0.0]])
    it = ObservationNormalizer(FEATURES, "cpu")
    assert torch.equal(it(x), x.clamp(-10.0, 10.0))
    it.update(x, torch.zeros(2, dtype=torch.bool))  # no valid rows
    assert torch.equal(it(x), x.clamp(-10.0, 10.0))


def test_normalizing_changes_neither_statistics_nor_input() -> None:
    it, (x, _) = observed(), rows(1)
    before, given = copy.deepcopy(it.state_dict()), x.clone()
    it.train()
    it(x)
    assert torch.equal(x, given)
    assert all(torch.equal(value, before[name]) for name, value in it.state_dict().items())


def test_gradient_flows_where_nothing_is_clipped() -> None:
    it, x = ObservationNormalizer(1, "cpu", clip=1.0), torch.tensor([[0.5], [1.0], [50.0]], requires_grad=True)
    it.update(torch.tensor([[-2.0], [2.0]]))
    it(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([[0.5], [0.5], [0.0]]))


def test_statistics_are_float64_buffers_and_not_parameters() -> None:
    it = observed()
    assert list(it.state_dict()) == ["rows", "mean", "m2"]
    assert {value.dtype for value in it.state_dict().values()} == {torch.float64}
    assert list(it.parameters()) == []


@pytest.mark.parametrize("inside", [False, True])
def test_loaded_state_normalizes_like_the_saved_one(inside: bool) -> None:
    source, loaded = observed(), observed(seed=1)
    other = copy.deepcopy(loaded)
    pair = (nn.Sequential(source), nn.Sequential(loaded)) if inside else (source, loaded)
    pair[1].load_state_dict(copy.deepcopy(pair[0].state_dict()))
    x, valid = rows(2)
    assert torch.equal(loaded(x), source(x))
    assert not torch.equal(other(x), source(x))
    source.update(x, valid)
    loaded.update(x, valid)
    assert torch.equal(loaded(x), source(x))


def test_copy_has_separate_statistics_also_after_loading() -> None:
    it, other = observed(), observed(seed=1)
    (x, _), copied = rows(2), copy.deepcopy(it)
    before = it(x)
    copied.load_state_dict(other.state_dict())
    assert torch.equal(copied(x), other(x))
    copied.update(x)
    assert torch.equal(it(x), before)


def test_update_is_visible_through_shared_buffers() -> None:
    it = observed()
    memo = {id(buffer): buffer for buffer in it.buffers()}
    shared = copy.deepcopy(it, memo)
    it.update(*rows(1))
    assert torch.equal(shared(rows(2)[0]), it(rows(2)[0]))


def rollout(seed: int = 0, steps: int = T) -> tuple[Tensor, Tensor, Tensor]:
    """Return rewards far from zero, ends of episodes, and valid rows. Invalid rows contain NaN."""
    stream = generator(seed, "rollout")
    reward = torch.randn(steps, N, generator=stream) * 3.0 + 1.0
    ended = torch.rand(steps, N, generator=stream) < 0.15
    valid = torch.rand(steps, N, generator=stream) > 0.2
    return reward.masked_fill(~valid, torch.nan), ended, valid


def episodes(reward: Tensor, ended: Tensor, valid: Tensor, running: list[float] | None = None) -> list[float]:
    """Return the running returns of all environments, computed row by row."""
    found = []
    for n in range(reward.shape[1]):
        total = 0.0 if running is None else running[n]
        for t in range(len(reward)):
            if valid[t, n]:
                total = GAMMA * total + float(reward[t, n])
                found.append(total)
                total = 0.0 if ended[t, n] else total
        if running is not None:
            running[n] = total
    return found


def scaled(
    *calls: tuple[Tensor, Tensor, Tensor | None], clip: float = math.inf
) -> tuple[RewardNormalizer, list[Tensor]]:
    it = RewardNormalizer(GAMMA, clip)
    return it, [it.scale(*call) for call in calls]


def test_rewards_are_divided_by_the_deviation_of_running_returns() -> None:
    reward, ended, valid = rollout()
    _, (result,) = scaled((reward, ended, valid))
    returns = torch.tensor(episodes(reward, ended, valid), dtype=torch.float64)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result[valid], (reward[valid] / returns.std(correction=0)).float())


def test_returns_continue_between_calls_and_restart_after_an_end() -> None:
    running = [0.0] * N
    first, second = rollout(0), rollout(1)
    both = [*episodes(*first, running), *episodes(*second, running)]
    it, results = scaled(first, second)
    returns = torch.tensor(both, dtype=torch.float64)
    reward, _, valid = second
    torch.testing.assert_close(results[1][valid], (reward[valid] / returns.std(correction=0)).float())
    torch.testing.assert_close(it.state_dict()["running_return"], torch.tensor(running, dtype=torch.float64))


def test_scaled_rewards_are_clipped() -> None:
    call = rollout()
    _, (free,) = scaled(call)
    _, (clipped,) = scaled(call, clip=0.5)
    assert torch.equal(clipped, free.clamp(-0.5, 0.5))
    assert (clipped == 0.5).any() and (clipped == -0.5).any()


def test_invalid_rows_change_nothing_and_become_zero() -> None:
    reward, ended, valid = rollout()
    whatever = torch.where(valid, reward, 7.0), ended ^ ~valid, valid
    (one, (result,)), (other, (same,)) = scaled((reward, ended, valid)), scaled(whatever)
    assert torch.equal(result, same)
    assert (result[~valid] == 0.0).all() and result.isfinite().all()
    assert torch.equal(one.state_dict()["running_return"], other.state_dict()["running_return"])
    assert torch.equal(one.state_dict()["m2"], other.state_dict()["m2"])


def test_without_a_mask_all_rewards_count() -> None:
    reward, ended, _ = rollout()
    reward = reward.nan_to_num(2.0)
    (one, (result,)), (other, (same,)) = scaled((reward, ended, None)), scaled((reward, ended, torch.ones_like(ended)))
    assert torch.equal(result, same)
    assert one.state_dict()["rows"] == other.state_dict()["rows"] == T * N


def test_reset_restarts_returns_only_in_its_environments() -> None:
    first, second = rollout(0), rollout(1)
    mask = torch.arange(N) % 2 == 0
    it, _ = scaled(first)
    before = it.state_dict()["running_return"].clone()
    assert (before[mask] != 0.0).any() and (before[~mask] != 0.0).any()
    it.observe_reset(mask)
    after = it.state_dict()["running_return"]
    assert (after[mask] == 0.0).all() and torch.equal(after[~mask], before[~mask])
    reward, ended, valid = first
    cut, (_, expected) = scaled((reward, ended | _last_valid(valid, mask), valid), second)
    torch.testing.assert_close(it.scale(*second), expected)
    torch.testing.assert_close(it.state_dict()["running_return"], cut.state_dict()["running_return"])


def _last_valid(valid: Tensor, mask: Tensor) -> Tensor:
    """Return the last valid row of each environment in the mask."""
    left = valid.flip(0).cumsum(0).flip(0)
    return valid & (left == 1) & mask


def test_reset_before_the_first_reward_changes_nothing() -> None:
    it = RewardNormalizer(GAMMA)
    it.observe_reset(torch.ones(N, dtype=torch.bool))
    assert torch.equal(it.scale(*rollout()), RewardNormalizer(GAMMA).scale(*rollout()))


def test_zero_rewards_stay_zero() -> None:
    nothing = torch.zeros(T, N)
    _, (result,) = scaled((nothing, torch.zeros_like(nothing, dtype=torch.bool), None))
    assert (result == 0.0).all()


def test_divisor_is_one_before_a_valid_reward() -> None:
    reward, ended, valid = rollout()
    it, (result,) = scaled((reward, ended, torch.zeros_like(valid)))
    assert (result == 0.0).all()
    assert torch.equal(it.scale(*rollout()), RewardNormalizer(GAMMA, math.inf).scale(*rollout()))


def test_discount_is_not_rounded() -> None:
    """In float32, 0.9 is off by 3e-8, which changes the eighth digit of a running return."""
    it, _ = scaled((torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.bool), None))
    expected = torch.tensor([1.9], dtype=torch.float64)
    torch.testing.assert_close(it.state_dict()["running_return"], expected, rtol=1e-15, atol=0.0)


def test_input_rewards_are_not_modified() -> None:
    given = rollout()
    kept = [x.clone() for x in given]
    scaled(given, clip=0.1)
    for after, before in zip(given, kept, strict=True):
        torch.testing.assert_close(after, before, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("shape", [(T, N + 1), (N,), (T, N, 1)])
def test_rewards_of_another_number_of_environments_raise(shape: tuple[int, ...]) -> None:
    it, _ = scaled(rollout())
    with pytest.raises(ValueError, match=rf"expected rewards \(T, N\), .* after rewards of {N} environments"):
        it.scale(torch.zeros(shape), torch.zeros(shape, dtype=torch.bool))


def test_state_of_another_number_of_environments_raises() -> None:
    it, _ = scaled(rollout())
    fewer = {**it.state_dict(), "running_return": torch.zeros(N - 1, dtype=torch.float64)}
    with pytest.raises(ValueError, match=rf"running_return: expected .* got \({N - 1},\)"):
        it.load_state_dict(fewer)


def test_state_from_before_the_first_reward_resets() -> None:
    it, _ = scaled(rollout(), clip=10.0)
    it.load_state_dict(RewardNormalizer(GAMMA).state_dict())
    assert torch.equal(it.scale(*rollout(2)), RewardNormalizer(GAMMA).scale(*rollout(2)))


class TestStateOfRewards(StatefulContract):
    steps_before = 2

    def make(self):
        part = RewardNormalizer(GAMMA)
        part.scale(*rollout(99, steps=4))
        return part

    def step(self, part):
        return part.scale(*rollout(int(part.state_dict()["rows"]), steps=4))


class TestStateOfRewardsInANewNormalizer(TestStateOfRewards):
    """A new normalizer does not know the number of environments, so any number fits."""

    def make(self):
        return RewardNormalizer(GAMMA)

    def step(self, part):
        if part.state_dict()["running_return"] is None:
            return part.scale(*rollout(99, steps=4))
        return super().step(part)

    def test_state_of_wrong_shape_raises(self):
        state = super()._stepped().state_dict()
        with pytest.raises(ValueError, match=r"mean: expected .* got \(1,\)"):
            self.make().load_state_dict({**state, "mean": state["mean"][None]})


def test_nan_does_not_stay_in_the_statistics_of_observations() -> None:
    clean, dirty = (ObservationNormalizer(2, "cpu") for _ in range(2))
    rows = torch.tensor([[1.0, 2.0], [3.0, 5.0], [2.0, 0.0]])
    clean.update(rows)
    dirty.update(torch.cat([rows, torch.tensor([[float("nan"), 1.0], [1.0, float("inf")]])]))
    assert all(torch.equal(one, other) for one, other in zip(clean.moments, dirty.moments, strict=True))


def test_nan_does_not_stay_in_the_statistics_of_rewards() -> None:
    normalizer, ended = RewardNormalizer(0.9), torch.zeros(3, 2, dtype=torch.bool)
    reward = torch.tensor([[1.0, 2.0], [float("nan"), 3.0], [2.0, float("inf")]])
    scaled = normalizer.scale(reward, ended)
    assert scaled[1, 0].isnan()
    assert normalizer.scale(torch.ones(3, 2), ended).isfinite().all()
