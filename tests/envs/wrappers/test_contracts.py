"""Contract tests of every wrapper around several environments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gymnasium import spaces

from rein.envs.cartpole import CartPole
from rein.envs.gridworld import Gridworld
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.envs.wrappers.actions import ClipAction, RescaleAction
from rein.envs.wrappers.observations import FlattenObservation, FrameStack, observation_history
from rein.envs.wrappers.record_video import RecordVideo
from rein.envs.wrappers.rewards import SignReward
from rein.envs.wrappers.time import FrameSkip, TimeLimit
from rein.ops.random import integers, uniform
from rein.testing import EnvironmentContract, StatefulContract

TARGETS = [(2, 4), (0, 1), (4, 4), (3, 2)]
Make = Callable[[int, int | None], Any]


def gridworld(num_envs: int, seed: int | None, observation: str = "cell") -> Gridworld:
    return Gridworld(num_envs, TARGETS, seed=seed, max_episode_steps=9, observation=observation)


def pendulum(num_envs: int, seed: int | None) -> GymnasiumEnvironment:
    return GymnasiumEnvironment("Pendulum-v1", num_envs, seed, max_episode_steps=12)


def blackjack(num_envs: int, seed: int | None) -> GymnasiumEnvironment:
    return GymnasiumEnvironment("Blackjack-v1", num_envs, seed)


WRAPPED: dict[str, Callable[[SimpleNamespace], Make]] = {
    "clip_action of clockwork": lambda made: lambda n, seed: ClipAction(made.clockwork(n, seed)),
    "rescale_action of clockwork": lambda made: lambda n, seed: RescaleAction(made.clockwork(n, seed)),
    "rescale_action of pendulum": lambda made: lambda n, seed: RescaleAction(pendulum(n, seed)),
    "frame_stack of trees": lambda made: lambda n, seed: FrameStack(made.clockwork(n, seed, "tree"), 2),
    "observation_history of vectors": lambda made: lambda n, seed: observation_history(gridworld(n, seed, "vector"), 3),
    "frame_skip of cartpole": lambda made: lambda n, seed: FrameSkip(CartPole(n, seed=seed), 2),
    "frame_skip of clockwork": lambda made: lambda n, seed: FrameSkip(made.clockwork(n, seed), 2),
    "time_limit of pendulum": lambda made: lambda n, seed: TimeLimit(pendulum(n, seed), 5),
    "time_limit of clockwork": lambda made: lambda n, seed: TimeLimit(made.clockwork(n, seed), 4),
    "sign_reward of gridworld": lambda made: lambda n, seed: SignReward(gridworld(n, seed)),
    "flatten_observation of blackjack": lambda made: lambda n, seed: FlattenObservation(blackjack(n, seed)),
    "record_video of gridworld": lambda made: lambda n, seed: RecordVideo(gridworld(n, seed), made.folder, every=9),
    "all of them, the usual order": lambda made: (
        lambda n, seed: FrameStack(
            SignReward(TimeLimit(FrameSkip(RescaleAction(made.clockwork(n, seed, "image")), 2), 3))
        )
    ),
    "all of them, another order": lambda made: (
        lambda n, seed: TimeLimit(
            FrameSkip(FrameStack(FlattenObservation(ClipAction(made.clockwork(n, seed, "tree"))), 2), 2), 2
        )
    ),
}


@pytest.fixture(params=WRAPPED.values(), ids=[name.replace(" ", "-") for name in WRAPPED])
def wrapped(request: pytest.FixtureRequest, clockwork: Any, tmp_path: Path) -> Make:
    return request.param(SimpleNamespace(clockwork=clockwork, folder=tmp_path))


@pytest.mark.default_cases(every=2)
class TestWrappers(EnvironmentContract):
    steps = 30

    @pytest.fixture(autouse=True)
    def _wrapped(self, wrapped: Make) -> None:
        self.make = wrapped  # type: ignore[method-assign]  # for this instance


@pytest.mark.default_cases(every=2)
class TestWrappersState(StatefulContract):
    @pytest.fixture(autouse=True)
    def _wrapped(self, wrapped: Make) -> None:
        self._make = wrapped

    def make(self) -> Any:
        return self._make(4, 3)

    def step(self, part: Any) -> Any:
        if int(part.episode_seeds[0]) < 0:
            return part.reset()
        space = part.single_action_space
        if isinstance(space, spaces.Discrete):
            return part.apply_action(integers(part.episode_seeds, 7, int(space.n)))
        size = space.shape[0]
        action = [2 * uniform(part.episode_seeds, counter) - 1 for counter in range(size)]
        return part.apply_action(torch.stack(action, 1))
