"""Configuration of all tests: one thread, fixed random numbers, and simple environments and agents."""

from __future__ import annotations

import collections
import gc
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; tests run in parallel processes

import hypothesis
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rein.types import TimeStep, Transition
from tests import programs

hypothesis.settings.register_profile("rein", deadline=None, derandomize=True)
hypothesis.settings.load_profile("rein")


@pytest.fixture(autouse=True)
def _global_generator() -> None:
    """Seed torch, so that tests do not depend on earlier tests of their process."""
    torch.manual_seed(0)


class Scripted:
    """Environments with fixed episodes. Episodes of environment i have `lengths[i]` steps and rewards 1, 2, 3, ...

    The observation (N, 1) is the step within the episode. Episodes of environments in `truncates` are truncated, others
    terminate.
    """

    replayable = True
    device = torch.device("cpu")

    def __init__(self, lengths: Sequence[int], truncates: Collection[int] = ()) -> None:
        self.num_envs = len(lengths)
        self.single_observation_space = spaces.Box(0.0, np.inf, (1,))
        self.single_action_space = spaces.Discrete(2)
        self.seed: int | None = 0
        self.config: dict[str, Any] = {}
        self._length_N = torch.tensor(lengths)
        self._truncates_N = torch.tensor([i in truncates for i in range(self.num_envs)])
        self._step_N = torch.zeros(self.num_envs, dtype=torch.int64)
        self._episode_N = -torch.ones(self.num_envs, dtype=torch.int64)
        self.resets = 0
        self.actions: list[torch.Tensor] = []

    @property
    def episode_seeds(self) -> torch.Tensor:
        return 100 * torch.arange(self.num_envs) + self._episode_N

    def reset(self, seed: int | None = None) -> torch.Tensor:
        self.resets += 1
        self._step_N = torch.zeros_like(self._step_N)
        self._episode_N = self._episode_N + 1
        return self._observation()

    def _observation(self) -> torch.Tensor:
        return self._step_N.float()[:, None]

    def apply_action(self, action: torch.Tensor) -> TimeStep:
        self.actions.append(action)
        self._step_N = self._step_N + 1
        reward_N, final, ended_N = self._step_N.float(), self._observation(), self._step_N == self._length_N
        self._step_N = torch.where(ended_N, 0, self._step_N)
        self._episode_N = self._episode_N + ended_N.long()
        truncated_N = ended_N & self._truncates_N
        valid_N = torch.ones_like(ended_N)
        return TimeStep(self._observation(), reward_N, ended_N & ~truncated_N, truncated_N, final, valid_N, {})

    def reseed(self, seed: int) -> None:
        self.seed = seed

    def close(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step_N, "episode": self._episode_N, "resets": self.resets}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step_N, self._episode_N, self.resets = state["step"].clone(), state["episode"].clone(), state["resets"]


class Listening:
    """Agent that does not learn, and records transitions and resets."""

    device = torch.device("cpu")

    def __init__(self, environment: Any, learns_every: int = 1) -> None:
        self.observation_space = environment.single_observation_space
        self.action_space = environment.single_action_space
        self.seed: int | None = 0
        self.env_steps = self.updates = 0
        self.config: dict[str, Any] = {}
        self.transitions: list[Transition] = []
        self.resets: list[torch.Tensor] = []
        self._learns_every = learns_every
        self._num_envs = environment.num_envs

    def select_action(self, observation: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return torch.zeros(self._num_envs, dtype=torch.int64), {"value": observation[:, 0] * 10.0}

    def record_observation(self, transition: Transition) -> str:
        self.transitions.append(transition)
        self.env_steps += self._num_envs
        return "ignored"

    def observe_reset(self, observation: torch.Tensor, mask: torch.Tensor) -> None:
        self.resets.append(mask)

    def optimize_model(self) -> dict[str, torch.Tensor]:
        if len(self.transitions) % self._learns_every:
            return {}
        self.updates += 1
        return {"loss": torch.tensor(float(self.updates))}

    def policy(self, deterministic: bool = True) -> Listening:
        return self

    def reset(self, mask: torch.Tensor | None = None) -> None: ...

    def reseed(self, seed: int) -> None:
        self.seed = seed

    def state_dict(self) -> dict[str, Any]:
        return {"env_steps": self.env_steps, "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.env_steps, self.updates = state["env_steps"], state["updates"]


@pytest.fixture
def scripted() -> type[Scripted]:
    """Return the class of environments with fixed episodes."""
    return Scripted


@pytest.fixture
def listening() -> type[Listening]:
    """Return the class of agents that record transitions and resets."""
    return Listening


def pytest_sessionfinish() -> None:
    """Wait for forked programs, so that their time is counted."""
    programs.stop_server()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases of a test as slow that its mark `default_cases` does not select."""
    cases = collections.defaultdict[tuple[str, tuple[str, ...], int | None], list[pytest.Item]](list)
    for item in items:
        for mark in item.iter_markers("default_cases"):
            cases[item.nodeid.partition("[")[0], mark.args, mark.kwargs.get("every")].append(item)
    for (test, selected, every), found in cases.items():
        names = [item.name.partition("[")[2].removesuffix("]") for item in found]
        if (unknown := {*selected} - {*names}) and not any("::" in argument for argument in config.args):
            raise pytest.UsageError(f"{test}: default_cases names {sorted(unknown)}, but the cases are {names}")
        for number, (name, item) in enumerate(zip(names, found, strict=True)):
            if number % every if every else name not in selected:
                item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Exclude the objects that imports have created from garbage collection, which many tests call."""
    gc.collect()
    gc.freeze()
