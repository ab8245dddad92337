"""Observations and rewards in units of their own spread. What is stored stays raw: an agent normalizes what it learns.

`valid` is boolean; None means that all rows count. What stands in rows that are not valid may be anything, even NaN.
In a process group (`rein.agents.base.data_parallel`), statistics are computed over the rows of all processes.

Shapes: B rows (any number of dimensions), F features of an observation, T steps in time, N environments, P processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rein.ops.parallel import gather_from_processes, processes
from rein.ops.statistics import Moments, deviation, empty_moments, update_moments


class ObservationNormalizer(nn.Module):
    """(x - mean) / sqrt(variance + epsilon) of each feature, kept within [-clip, clip].

    Mean and variance are those of all rows given to `update`, in float64, and change in nothing else. They are buffers:
    saved with the module that holds them, loaded with it, and no parameters. Before the first row x is only clipped.
    """

    rows: Tensor  # () how many
    mean: Tensor  # (F,)
    m2: Tensor  # (F,) sum of squared deviations from the mean
    shift: Tensor  # (F,) float32: what is subtracted
    divisor: Tensor  # (F,) float32: what is divided by

    def __init__(self, features: int, device: torch.device | str, clip: float = 10.0) -> None:
        super().__init__()
        self.clip = clip
        moments = empty_moments((features,), device)
        for name, value in moments._asdict().items():
            self.register_buffer(name, value)
        self.register_buffer("shift", moments.mean.float(), persistent=False)
        self.register_buffer("divisor", deviation(moments), persistent=False)
        self.register_load_state_dict_post_hook(_prepare)

    @property
    def moments(self) -> Moments:
        """Of all rows so far."""
        return Moments(self.rows, self.mean, self.m2)

    def forward(self, x_BF: Tensor) -> Tensor:
        """(B, F) float32: `rein.ops.statistics.normalize`, whose square roots were taken at the last update."""
        return (x_BF - self.shift).div_(self.divisor).clamp_(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, x_BF: Tensor, valid_B: Tensor | None = None) -> None:
        """Take in rows, but for those with a NaN or an infinity, which would stay for ever.

        Raises ValueError where they are not F features each.
        """
        finite_B = x_BF.isfinite().all(-1)
        valid_B = finite_B if valid_B is None else valid_B & finite_B
        for mine, value in zip(self.moments, _take_in(self.moments, x_BF, valid_B), strict=True):
            mine.copy_(value)  # in place: whoever shares the buffers sees it
        _prepare(self)


def _prepare(normalizer: ObservationNormalizer, incompatible_keys: Any = None) -> None:
    """Derive what `forward` uses from the moments, when they have changed or come from a state."""
    normalizer.shift.copy_(normalizer.mean)
    normalizer.divisor.copy_(deviation(normalizer.moments))


class RewardNormalizer:
    """Rewards divided by the deviation of the discounted return, and kept within [-clip, clip]; they are never shifted.

        R_t = r_t + gamma * R_t-1      running in each environment, beginning at 0 with each episode
        r_t / sqrt(variance of all R so far + epsilon)

    It lives where the rewards do, and learns from the first of them how many environments there are. Sums are float64.

    Source: Engstrom et al. 2020, section 3 ("reward scaling").
    """

    def __init__(self, gamma: float, clip: float = 10.0) -> None:
        self.gamma, self.clip = gamma, clip
        self._moments = empty_moments()
        self._return_N: Tensor | None = None

    @torch.no_grad()
    def scale(self, reward_TN: Tensor, ended_TN: Tensor, valid_TN: Tensor | None = None) -> Tensor:
        """Take in the rewards that came next, and divide them by the deviation that they lead to; (T, N).

        `ended_TN` is where an episode was over after its reward, terminated or truncated. Rows that are not valid
        change nothing, and their results are 0; a NaN or an infinity is not taken in either, and stays what it is.
        Raises ValueError for another number of environments than before.
        """
        return_N = self._running(reward_TN)
        if valid_TN is None:
            valid_TN = torch.ones_like(ended_TN)
        counted_TN = valid_TN & reward_TN.isfinite()  # one NaN would stay in the statistics for ever
        return_TN, self._return_N = _running_returns(reward_TN, ended_TN, counted_TN, return_N, self.gamma)
        moments = Moments(*(value.to(reward_TN.device) for value in self._moments))
        self._moments = _take_in(moments, return_TN, counted_TN)
        scaled_TN = (reward_TN / deviation(self._moments)).clamp_(-self.clip, self.clip)
        return torch.where(valid_TN, scaled_TN, 0.0)

    def _running(self, reward_TN: Tensor) -> Tensor:
        """The returns (N,) that go on in the next row."""
        running_N = self._return_N
        if reward_TN.ndim != 2 or (running_N is not None and len(running_N) != reward_TN.shape[1]):
            before = "" if running_N is None else f" after those of {len(running_N)} environments"
            raise ValueError(f"RewardNormalizer: rewards of (T, N) are expected, not {tuple(reward_TN.shape)}{before}")
        if running_N is None:
            return reward_TN.new_zeros(reward_TN.shape[1], dtype=torch.float64)
        return running_N.to(reward_TN.device)

    def observe_reset(self, mask_N: Tensor) -> None:
        """The next reward of the environments in `mask_N` (N,) begins an episode.

        For resets between two calls of `scale`, such as those before its first row; one that came after a row which has
        yet to be scaled is an end in that row.
        """
        if self._return_N is not None:
            self._return_N = torch.where(mask_N.to(self._return_N.device), 0.0, self._return_N)

    def state_dict(self) -> dict[str, Any]:
        """The moments, and the returns that are running; None before the first rewards."""
        return {**self._moments._asdict(), "running_return": self._return_N}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; ValueError for that of another number of environments."""
        moments = Moments(*(_restored(state, name, mine) for name, mine in self._moments._asdict().items()))
        saved_N = state["running_return"]
        like_N = saved_N if self._return_N is None else self._return_N
        self._return_N = None if saved_N is None else _restored(state, "running_return", like_N)
        self._moments = moments


def _take_in(moments: Moments, x_BO: Tensor, valid_B: Tensor) -> Moments:
    """The moments of all rows so far and of these, and of those that the other processes take in now.

    Source: Chan, Golub & LeVeque 1979, of P + 1 samples at once.
    """
    if processes() == 1:
        return update_moments(moments, x_BO, valid_B)
    new = update_moments(empty_moments(moments.mean.shape, x_BO.device), x_BO, valid_B)
    own, new = (torch.cat([value.reshape(-1) for value in of]) for of in (moments, new))
    every = torch.cat((own.unsqueeze(0), gather_from_processes(new)))  # (1 + P, 1 + 2 F)
    rows, mean, m2 = every.split([1, moments.mean.numel(), moments.m2.numel()], 1)
    all_rows = rows.sum(0)
    all_mean = (rows * mean).sum(0) / all_rows.clamp(min=1.0)
    all_m2 = (m2 + rows * (mean - all_mean).square()).sum(0)
    return Moments(*(value.view_as(like) for value, like in zip((all_rows, all_mean, all_m2), moments, strict=True)))


def _running_returns(
    reward_TN: Tensor, ended_TN: Tensor, valid_TN: Tensor, return_N: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """R_t (T, N), and what goes on after the last row (N,); float64. A row that is not valid hands on what it got."""
    over_TN = ended_TN & valid_TN
    return_TN = torch.where(valid_TN, reward_TN, 0.0).double()
    discount_TN = torch.ones_like(return_TN).masked_fill_(valid_TN, gamma)
    discount_TN[1:].masked_fill_(over_TN[:-1], 0.0)
    for return_t, discount_t in zip(return_TN.unbind(), discount_TN.unbind(), strict=True):
        return_N = return_t.addcmul_(discount_t, return_N)
    return return_TN, torch.where(over_TN[-1], 0.0, return_N)


def _restored(state: Mapping[str, Any], name: str, like: Tensor) -> Tensor:
    """A copy of the tensor `state[name]`, where and as `like` is."""
    if state[name].shape != like.shape:
        raise ValueError(f"{name}: the state has {tuple(state[name].shape)}, this normalizer {tuple(like.shape)}")
    return state[name].to(like, copy=True)
