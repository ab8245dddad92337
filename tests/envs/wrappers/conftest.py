"""Deterministic environments for tests of wrappers.

Shapes: N environments, 2 numbers per action.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.contract import check_action, restored
from rein.envs.base.seeding import EpisodeSeeds, ReplayableEnvironment
from rein.ops.random import integers, uniform
from rein.types import TimeStep, Tree


class Clockwork(ReplayableEnvironment):
    """The seed of an episode determines its length, 3 to 7 steps, and whether it is terminated or truncated.

    The reward of step k is 1.5 * k - 4 plus the sum of the action. An observation contains a number of the episode,
    the step and the sum of all actions, in the form `observation`.
    """

    replayable = True
    device = torch.device("cpu")

    def __init__(self, num_envs: int, seed: int | None = 0, observation: str = "vector") -> None:
        self.num_envs, self._kind = num_envs, observation
        self.single_observation_space = _SPACES[observation]
        self.single_action_space = spaces.Box(np.float32([-2, 0]), np.float32([2, 5]))
        self._start_N3, self._total_N = torch.zeros(num_envs, 3), torch.zeros(num_envs)
        self._steps_N = torch.zeros(num_envs, dtype=torch.int64)
        self._seeds = EpisodeSeeds(num_envs, seed, "cpu", _start)

    @property
    def config(self) -> dict[str, Any]:
        return {"num_envs": self.num_envs, "seed": self.seed, "observation": self._kind}

    def apply_action(self, action: Tensor) -> TimeStep:
        return self._move(action, torch.ones(self.num_envs, dtype=torch.bool))

    def render(self, index: int = 0) -> np.ndarray[Any, Any]:
        return np.full((32, 48, 3), 30 * int(self._steps_N[index]), np.uint8)

    def state_dict(self) -> dict[str, Any]:
        return {
            "seeds": self._seeds.state_dict(), "start": self._start_N3, "steps": self._steps_N, "total": self._total_N
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start_N3, self._total_N = (
            restored(state, "start", self._start_N3),
            restored(state, "total", self._total_N),
        )
        self._steps_N = restored(state, "steps", self._steps_N)
        self._seeds.load_state_dict(state["seeds"])

    def _begin(self, start_N3: Tensor, /, mask_N: Tensor | None = None) -> Tree:
        mask_N = torch.ones(self.num_envs, dtype=torch.bool) if mask_N is None else mask_N
        self._start_N3 = torch.where(mask_N[:, None], start_N3, self._start_N3)
        self._steps_N = self._steps_N.masked_fill(mask_N, 0)
        self._total_N = self._total_N.masked_fill(mask_N, 0)
        return self._observe()

    def _move(self, action: Tensor, mask_N: Tensor) -> TimeStep:
        if not self._seeds.started:
            raise RuntimeError("call reset() first")
        check_action(action, self.num_envs, self.single_action_space)
        pushed_N = torch.where(mask_N, action.sum(1), 0)
        self._steps_N, self._total_N = self._steps_N + mask_N, self._total_N + pushed_N
        reward_N, steps_N = torch.where(mask_N, 1.5 * self._steps_N - 4 + pushed_N, 0), self._steps_N
        _, length_N, truncates_N = self._start_N3.unbind(1)
        ended_N = mask_N & (steps_N == length_N)
        truncated_N = ended_N & truncates_N.bool()
        final_observation = self._observe()
        observation = self._begin(self._seeds.advance(ended_N), ended_N)
        return TimeStep(
            observation, reward_N, ended_N & ~truncated_N, truncated_N, final_observation, mask_N, {"step": steps_N}
        )

    def _observe(self) -> Tree:
        vector_N3 = torch.stack([self._start_N3[:, 0], self._steps_N.float(), self._total_N], 1)
        if self._kind == "vector":
            return vector_N3
        image_N = (255 * self._start_N3[:, 0]).to(torch.uint8) + 10 * self._steps_N.to(torch.uint8)
        image = image_N[:, None, None] + torch.arange(6, dtype=torch.uint8).reshape(2, 3)
        if self._kind == "image":
            return image
        places = torch.stack([self._steps_N % 2, self._steps_N], 1)
        return {"image": image, "inner": {"0": self._steps_N + 5, "1": places}, "vector": vector_N3}


def _start(seeds: Tensor) -> Tensor:
    return torch.stack([uniform(seeds, 0), 3.0 + integers(seeds, 1, 5), 1.0 * integers(seeds, 2, 2)], -1)


class PartialClockwork(Clockwork):
    """Clockwork with partial steps and resets."""

    def reset_where(self, mask: Tensor) -> Tree:
        return self._begin(self._seeds.advance(mask), mask)

    def apply_action_where(self, action: Tensor, mask: Tensor) -> TimeStep:
        return self._move(action, mask)


_IMAGE, _VECTOR = spaces.Box(0, 255, (2, 3), np.uint8), spaces.Box(-np.inf, np.inf, (3,))
_INNER = spaces.Tuple([spaces.Discrete(8, start=5), spaces.MultiDiscrete([2, 8])])
_SPACES = {
    "vector": _VECTOR,
    "image": _IMAGE,
    "tree": spaces.Dict({"image": _IMAGE, "inner": _INNER, "vector": _VECTOR}),
}


@pytest.fixture
def clockwork() -> type[PartialClockwork]:
    """Class of deterministic environments with partial steps and resets."""
    return PartialClockwork


@pytest.fixture
def whole_clockwork() -> type[Clockwork]:
    """Class of deterministic environments without partial steps and resets."""
    return Clockwork
