"""Normalizers of observations and rewards. Stored data stay raw: an agent normalizes while it learns.

`valid` is boolean; None means that all rows are valid. Invalid rows may contain anything, even NaN.
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
    """Normalizes features: (x - mean) / sqrt(variance + epsilon), clipped to [-clip, clip].

    Mean and variance are computed over all rows passed to `update`, in float64. They are buffers, saved and loaded with
    the module, and not parameters. Before the first row, x is only clipped.
    """

    rows: Tensor  # () number of rows
    mean: Tensor  # (F,)
    m2: Tensor  # (F,) sum of squared deviations from the mean
    shift: Tensor  # (F,) float32, subtracted
    divisor: Tensor  # (F,) float32, divided by

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
        """Moments of all rows so far."""
        return Moments(self.rows, self.mean, self.m2)

    def forward(self, x_BF: Tensor) -> Tensor:
        """Return normalized features (B, F) float32, like `rein.ops.statistics.normalize` with cached square roots."""
        return (x_BF - self.shift).div_(self.divisor).clamp_(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, x_BF: Tensor, valid_B: Tensor | None = None) -> None:
        """Update the statistics.

        Rows with NaN or infinity are skipped, since they would stay in the statistics forever. Raises ValueError unless
        the rows have F features.
        """
        finite_B = x_BF.isfinite().all(-1)
        valid_B = finite_B if valid_B is None else valid_B & finite_B
        for buffer, value in zip(self.moments, _updated(self.moments, x_BF, valid_B), strict=True):
            buffer.copy_(value)  # in place, because policies share the buffers
        _prepare(self)


def _prepare(normalizer: ObservationNormalizer, incompatible_keys: Any = None) -> None:
    """Recompute `shift` and `divisor` from the moments, after an update or after loading."""
    normalizer.shift.copy_(normalizer.mean)
    normalizer.divisor.copy_(deviation(normalizer.moments))


class RewardNormalizer:
    """Divides rewards by the standard deviation of the discounted return, clipped to [-clip, clip], without a shift.

    The return runs in each environment and restarts at 0 with each episode::

        R_t = r_t + gamma * R_t-1
        scaled_t = r_t / sqrt(variance of all R so far + epsilon)

    The first rewards determine the device and the number of environments. Sums are in float64.

    Source: Engstrom et al. 2020, section 3 ("reward scaling").
    """

    def __init__(self, gamma: float, clip: float = 10.0) -> None:
        self.gamma, self.clip = gamma, clip
        self._moments = empty_moments()
        self._return_N: Tensor | None = None

    @torch.no_grad()
    def scale(self, reward_TN: Tensor, ended_TN: Tensor, valid_TN: Tensor | None = None) -> Tensor:
        """Update the statistics with these rewards and return the scaled rewards, (T, N).

        `ended_TN` is True if the episode ended after the reward, terminated or truncated. Invalid rows change nothing,
        and their results are 0. NaN and infinities do not enter the statistics; NaN stays NaN. Raises ValueError if the
        number of environments changes.
        """
        return_N = self._running(reward_TN)
        if valid_TN is None:
            valid_TN = torch.ones_like(ended_TN)
        counted_TN = valid_TN & reward_TN.isfinite()  # one NaN would stay in the statistics forever
        return_TN, self._return_N = _running_returns(reward_TN, ended_TN, counted_TN, return_N, self.gamma)
        moments = Moments(*(value.to(reward_TN.device) for value in self._moments))
        self._moments = _updated(moments, return_TN, counted_TN)
        scaled_TN = (reward_TN / deviation(self._moments)).clamp_(-self.clip, self.clip)
        return torch.where(valid_TN, scaled_TN, 0.0)

    def _running(self, reward_TN: Tensor) -> Tensor:
        """Return the running returns (N,)."""
        running_N = self._return_N
        if reward_TN.ndim != 2 or (running_N is not None and len(running_N) != reward_TN.shape[1]):
            before = "" if running_N is None else f" after rewards of {len(running_N)} environments"
            raise ValueError(f"RewardNormalizer: expected rewards (T, N), got {tuple(reward_TN.shape)}{before}")
        if running_N is None:
            return reward_TN.new_zeros(reward_TN.shape[1], dtype=torch.float64)
        return running_N.to(reward_TN.device)

    def observe_reset(self, mask_N: Tensor) -> None:
        """Start a new episode in the environments of `mask_N` (N,).

        Call this for resets between two calls of `scale`, such as those before its first row. A reset after a row that
        is not scaled yet belongs in `ended_TN` of that row.
        """
        if self._return_N is not None:
            self._return_N = torch.where(mask_N.to(self._return_N.device), 0.0, self._return_N)

    def state_dict(self) -> dict[str, Any]:
        """Return the moments and the running returns, which are None before the first rewards."""
        return {**self._moments._asdict(), "running_return": self._return_N}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. Raises ValueError if the number of environments differs."""
        moments = Moments(*(_restored(state, name, like) for name, like in self._moments._asdict().items()))
        saved_N = state["running_return"]
        like_N = saved_N if self._return_N is None else self._return_N
        self._return_N = None if saved_N is None else _restored(state, "running_return", like_N)
        self._moments = moments


def _updated(moments: Moments, x_BO: Tensor, valid_B: Tensor) -> Moments:
    """Return the moments of all rows so far and of these rows, including those of the other processes.

    Source: Chan, Golub & LeVeque 1979, applied to P + 1 samples at once.
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
    """Return R_t (T, N) and the running returns after the last row (N,), in float64. Invalid rows change nothing."""
    over_TN = ended_TN & valid_TN
    return_TN = torch.where(valid_TN, reward_TN, 0.0).double()
    discount_TN = torch.ones_like(return_TN).masked_fill_(valid_TN, gamma)
    discount_TN[1:].masked_fill_(over_TN[:-1], 0.0)
    for return_t, discount_t in zip(return_TN.unbind(), discount_TN.unbind(), strict=True):
        return_N = return_t.addcmul_(discount_t, return_N)
    return return_TN, torch.where(over_TN[-1], 0.0, return_N)


def _restored(state: Mapping[str, Any], name: str, like: Tensor) -> Tensor:
    """Return a copy of the tensor `state[name]` with the device and dtype of `like`."""
    if state[name].shape != like.shape:
        raise ValueError(f"{name}: expected shape {tuple(like.shape)}, got {tuple(state[name].shape)} in the state")
    return state[name].to(like, copy=True)
