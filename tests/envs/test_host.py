"""The contract of environments for every simulator and every transport, and an adapter for another interface."""

from __future__ import annotations

import itertools
import os
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.envs import GymnasiumEnvironment
from rein.testing import EnvironmentContract
from tests.envs.toy_machines import MachineEnvironment
from tests.integrations.test_pettingzoo import Climbers

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")

TRANSPORTS: dict[str, dict[str, Any]] = {
    "InThisProcess": {},
    "InThreads": {"workers": 2, "mode": "threads"},
    "InProcesses": {"workers": 2, "mode": "processes"},
}


def separate(make: Any, source: Any, transport: str) -> Any:
    def build(num_envs: int, seed: int | None) -> Any:
        workers = {**TRANSPORTS[transport]}
        if workers:
            workers["workers"] = min(2, num_envs)
        return make(source, num_envs, seed, **workers) if source else make(num_envs, seed, **workers)

    return build


SIMULATORS: dict[str, tuple[Any, Any]] = {
    "Worlds": (rein.PettingZooEnvironment, Climbers),
    "Machines": (MachineEnvironment, None),
}
BUILDS = {  # `tests/integrations` has those of environments of Gymnasium and games
    f"{simulator}{transport}": separate(*SIMULATORS[simulator], transport)
    for simulator in SIMULATORS
    for transport in TRANSPORTS
}
DEFAULT = ("MachinesInThisProcess", "WorldsInThreads")  # the others are slow


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


class FailsTwice(gymnasium.Env[Any, Any]):
    """Environment that raises in its first step, and in the next reset."""

    observation_space, action_space = spaces.Box(0.0, 1.0, (1,)), spaces.Discrete(2)
    faults: ClassVar[list[str]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._fail("reset")
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self._fail("step")
        return np.ones(1, np.float32), 1.0, False, False, {}

    def _fail(self, method: str) -> None:
        if self.faults and self.faults[0] == method:
            raise LookupError(self.faults.pop(0))


def test_lost_episode_ends_once_if_the_new_worker_fails_as_well() -> None:
    environment = GymnasiumEnvironment(FailsTwice, 2, 0, workers=1, mode="threads", on_failure="restart")
    environment.reset()
    FailsTwice.faults += ["step", "reset"]
    time_step = environment.apply_action(torch.zeros(2, dtype=torch.int64))
    assert environment.restarts == 2
    assert (time_step.truncated.tolist(), time_step.valid.tolist()) == ([True, True], [False, False])
    assert environment.apply_action(torch.zeros(2, dtype=torch.int64)).valid.all()
    environment.close()


@pytest.mark.parametrize("workers", [None, 2])
def test_worlds_with_different_agents_are_refused(workers: int | None) -> None:
    made = itertools.count()

    class Differs(Climbers):
        def __init__(self) -> None:
            super().__init__()
            if next(made):
                self.possible_agents = ("guide_0", "climber_1", "climber_0")

    with pytest.raises(ValueError, match="equal agents"):
        rein.PettingZooEnvironment(Differs, 2, workers=workers, mode=workers and "threads")


def test_actions_that_are_sent_are_copied_and_checked() -> None:
    environment = GymnasiumEnvironment("CartPole-v1", 2, 0)
    environment.reset()
    action = torch.ones(1, dtype=torch.int64)
    environment.send(action, [1])
    action.zero_()
    with pytest.raises(rein.errors.EnvironmentContractError, match="shape"):
        environment.send(torch.ones(2, 1, dtype=torch.int64), [0])
    _, time_step = environment.receive()
    other = GymnasiumEnvironment("CartPole-v1", 2, 0)
    other.reset()
    assert torch.equal(time_step.observation[0], other.apply_action(torch.ones(2, dtype=torch.int64)).observation[1])


def test_flags_of_a_step_share_no_memory() -> None:
    environment = GymnasiumEnvironment("CartPole-v1", 2, 0)
    environment.reset()
    time_step = environment.apply_action(torch.zeros(2, dtype=torch.int64))
    time_step.truncated[0] = True
    assert not time_step.terminated.any()


def test_actions_are_checked_for_agents_that_have_not_left() -> None:
    environment = rein.PettingZooEnvironment(Climbers, 1, 0, top=1.05)
    environment.reset()
    with pytest.raises(rein.errors.EnvironmentContractError, match="guide_0"):
        environment.apply_action(torch.tensor([2, 0, 0]))
    while not environment.apply_action(torch.tensor([1, 0, 0])).terminated[0]:
        pass
    assert not environment.apply_action(torch.tensor([2, 0, 0])).valid[0]


def test_options_of_workers_are_options_of_the_environment_without_workers() -> None:
    class Modal(Climbers):
        def __init__(self, mode: int) -> None:
            super().__init__(top=float(mode))

    environment = rein.PettingZooEnvironment(Modal, 1, mode=3)  # type: ignore[arg-type]
    assert environment.config["make_kwargs"] == {"mode": 3}
