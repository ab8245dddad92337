"""The contract of environments for every simulator and every transport, and an adapter for another interface."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import rein
from rein.envs import GymnasiumEnvironment, GymnasiumVectorEnvironment, PettingZooGame
from rein.testing import EnvironmentContract
from tests.envs.toy_machines import MachineEnvironment
from tests.integrations.test_pettingzoo import Climbers
from tests.integrations.test_pettingzoo_game import Nim

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")

TRANSPORTS: dict[str, dict[str, Any]] = {
    "InThisProcess": {},
    "InThreads": {"workers": 2, "mode": "threads"},
    "InProcesses": {"workers": 2, "mode": "processes"},
}


def vector(num_envs: int, seed: int | None) -> Any:
    return GymnasiumVectorEnvironment(
        "CartPole-v1", num_envs, seed, autoreset_mode="DISABLED", vectorization_mode="sync"
    )


def self_play(num_envs: int, seed: int | None) -> Any:
    return rein.SelfPlay(PettingZooGame(Nim), num_envs, seed=seed)


def separate(make: Any, source: Any, transport: str) -> Any:
    def build(num_envs: int, seed: int | None) -> Any:
        workers = {**TRANSPORTS[transport]}
        if workers:
            workers["workers"] = min(2, num_envs)
        return make(source, num_envs, seed, **workers) if source else make(num_envs, seed, **workers)

    return build


SIMULATORS: dict[str, tuple[Any, Any]] = {
    "Gymnasium": (GymnasiumEnvironment, "CartPole-v1"),
    "Worlds": (rein.PettingZooEnvironment, Climbers),
    "Machines": (MachineEnvironment, None),
}
BUILDS = {
    f"{simulator}{transport}": separate(*SIMULATORS[simulator], transport)
    for simulator in SIMULATORS
    for transport in TRANSPORTS
} | {"VectorInThisProcess": vector, "GamesInThisProcess": self_play}
DEFAULT = ("MachinesInThisProcess", "WorldsInThreads")  # the others are slow, or tested elsewhere


def contract(name: str, build: Any) -> type:
    """Return a class of tests."""
    marks = [] if name in DEFAULT else [pytest.mark.slow]
    methods = {"make": lambda self, num_envs, seed: build(num_envs, seed), "steps": 60, "pytestmark": marks}
    return type(f"Test{name}", (EnvironmentContract,), methods)


globals().update({f"Test{name}": contract(name, build) for name, build in BUILDS.items()})


def test_machines_render_no_frames_and_name_their_options() -> None:
    environment = MachineEnvironment(3, 1, length=5.0)
    assert (environment.config["id"], environment.config["length"]) == ("Machine", 5.0)
    with pytest.raises(ValueError, match="render_mode"):
        environment.render()


class Falls(Climbers):
    """World 1 of 2 ends its process in its fourth step, in its first episode."""

    def step(self, actions: dict[str, int]) -> Any:
        if self.steps == 3 and self.seed == SECOND:
            os._exit(3)
        return super().step(actions)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.seed = seed
        return super().reset(seed, options)


def second_seed() -> int:
    environment = rein.PettingZooEnvironment(Climbers, 2, 7)
    environment.reset()
    return int(environment.episode_seeds[-1])


SECOND = second_seed()


def test_restarted_worlds_lose_the_episodes_of_agents_that_are_left() -> None:
    environment = rein.PettingZooEnvironment(Falls, 2, 7, workers=2, on_failure="restart", top=1.05)
    observation = environment.reset()
    alive_N = torch.ones(6, dtype=torch.bool)
    for _ in range(4):
        last, action = observation, torch.tensor([0, 2, 0, 0, 2, 0])
        time_step = environment.apply_action(action)
        observation = time_step.observation
        if environment.restarts:
            break
        assert torch.equal(time_step.valid, alive_N)
        alive_N &= ~(time_step.terminated | time_step.truncated)
    assert environment.restarts == 1
    lost_N = torch.arange(6) >= 3
    assert not alive_N[lost_N].all()  # one agent of the lost world had left before
    assert not time_step.valid[lost_N].any()
    assert torch.equal(time_step.truncated[lost_N], alive_N[lost_N])
    assert not time_step.terminated[lost_N].any()
    for key in observation:
        assert torch.equal(time_step.final_observation[key][lost_N], last[key][lost_N])
    again = environment.apply_action(torch.zeros(6, dtype=torch.int64))
    assert again.valid[lost_N].all()
    environment.close()


def test_worlds_are_collected_as_soon_as_each_is_ready() -> None:
    environment = rein.PettingZooEnvironment(Climbers, 4, 7, workers=2)
    agent, memory = rein.PPO(environment, rollout_steps=16, hidden=(8,), seed=0), rein.MemoryStore()
    rein.training_loop(agent, environment, memory, collection=rein.FirstCome()).run(epochs=2, iterations=32)
    environment.close()
    assert sum(len(trajectory.episodes.seed) for trajectory in memory.trajectories) > 12


def test_parts_of_worlds_cannot_be_sent() -> None:
    environment = rein.PettingZooEnvironment(Climbers, 2, 7)
    environment.reset()
    with pytest.raises(ValueError, match="all 3 rows of a world"):
        environment.send(torch.zeros(2, dtype=torch.int64), [0, 1])
