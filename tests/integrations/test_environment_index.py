"""Factories that get the index of their environment."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rein
from rein.envs import GymnasiumEnvironment
from tests.integrations.faulty import Faulty, exits
from tests.workers import in_workers

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")

N = 5
WORKERS: dict[str, dict[str, Any]] = {
    "in turn": {},
    "sync": {"workers": 2, "mode": "sync"},
    "threads": {"workers": 2, "mode": "threads"},
    "processes": {"workers": 2, "mode": "processes"},
}


class Numbered(Faulty):
    """Environment that observes its index instead of its steps."""

    def __init__(self, *fault: Any, index: int) -> None:
        self.index = index
        super().__init__(*fault)

    def observe(self) -> Any:
        return np.array([self.index, self.drawn], np.float32)


@pytest.mark.parametrize("options", WORKERS.values(), ids=WORKERS.keys())
def test_factory_gets_the_index_of_its_environment(options: dict[str, Any]) -> None:
    environment = rein.make(lambda index: Numbered(index=index), N, 7, **options)
    observation = environment.reset()
    assert observation[:, 0].tolist() == [*range(N)]
    assert torch.equal(observation[:, 1], rein.make(Faulty, N, 7).reset()[:, 1])  # the seeds are those without an index
    environment.close()


def test_index_is_the_same_after_a_restart_and_a_resume(tmp_path: Path) -> None:
    factory = functools.partial(Numbered, exits, "step", 1, tmp_path / "once")
    environment = in_workers(factory, N, 7, workers=2, on_failure="restart")
    observation = environment.reset()
    for _ in range(3):
        observation = environment.apply_action(torch.ones(N, dtype=torch.int64)).observation
    assert environment.restarts == 1
    assert observation[:, 0].tolist() == [*range(N)]
    resumed = rein.make(factory, N, 7, workers=3)
    resumed.load_state_dict(environment.state_dict())
    assert resumed.reset()[:, 0].tolist() == [*range(N)]
    for each in (environment, resumed):
        each.close()


def test_part_of_the_environments_keeps_their_indices() -> None:
    environment = GymnasiumEnvironment(Numbered, N, 7)
    assert environment.part(range(2, 4))().reset()[:, 0].tolist() == [2, 3]


def test_factory_without_a_required_index_does_not_get_it() -> None:
    environment = rein.make(lambda index=9: Numbered(index=index), 2, 7)
    assert environment.reset()[:, 0].tolist() == [9, 9]


def test_index_that_was_given_is_passed_on() -> None:
    assert rein.make(Numbered, 2, 7, index=3).reset()[:, 0].tolist() == [3, 3]
