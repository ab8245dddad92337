"""Agents learn the same on another device as on the CPU, and do not mix tensors of both.

The tests simulate the device in a separate process; see stand_in_device.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.architecture.operations import LIMITS, counts

PROGRAM = Path(__file__).with_name("on_a_device.py")
ENVIRONMENTS = ("CartPole", "Pendulum", "Acrobot", "MountainCar", "Gridworld", "Navigation")


def report_of(case: str) -> dict[str, Any]:
    return json.loads(programs.run(PROGRAM, case).stdout.splitlines()[-1])[case]


@pytest.mark.default_cases("a2c")
@pytest.mark.parametrize("case", ["ppo, recurrent", "ppo, torch's AdamW", "ppo, worlds", "a2c", "impala", "pqn"])
def test_rollout_on_device_equals_cpu_and_never_waits(case: str) -> None:
    found = report_of(case)
    assert found["distance"] < 1e-6
    assert found["waited"] == 0
    assert found["between"] == 2  # one transfer after each of two epochs


@pytest.mark.default_cases("td3")
@pytest.mark.parametrize("case", ["iqn", "recurrent dqn", "sac", "discrete sac", "td3", "ddpg", "awac", "iql"])
def test_replay_on_device_equals_cpu_and_waits_once_per_step(case: str) -> None:
    found = report_of(case)
    assert found["distance"] < 1e-6
    assert found["waited"] == 3 * 6  # one check per step for enough rows


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ppo, continuous", "dqn"])
def test_run_on_device_is_stored_and_resumes_exactly(case: str) -> None:
    found = report_of(case)
    assert found["distance"] < 1e-6
    assert found["resumed"] == 0


MIXED_DEVICES = """
import sys
import torch
from stand_in_device import NAME, stand_in, waits

with stand_in():
    here, there = torch.ones(3), torch.ones(3, device=NAME)
    for mix in (
        lambda: here + there,
        lambda: torch.rand(3, generator=torch.Generator(), device=NAME),
        lambda: torch.rand(3, generator=torch.Generator(NAME)),
        lambda: here.add_(there),
        lambda: torch.cat([here, there]),
        lambda: torch._foreach_add([here], [there]),
    ):
        try:
            mix()
        except RuntimeError as error:
            assert "same device" in str(error) or "another device" in str(error), error
        else:
            sys.exit("tensors of two devices were mixed")
    waits.clear()
    there.cpu(), there.sum().item(), there[there > 0], there.nonzero(), torch.equal(there, there), there.tolist()
    assert waits.total() == 6, waits
"""


def test_simulated_device_rejects_mixing_and_counts_waits() -> None:
    programs.run("-c", MIXED_DEVICES, cwd=PROGRAM.parent)


ACTING_ON_CPU = """
import torch
from stand_in_device import NAME, stand_in

import rein


def network(observation_space, action_space, generator):
    return torch.nn.Linear(4, 2)


with stand_in():
    environment = rein.make("CartPole-v1", num_envs=4, seed=0, workers=2, mode="threads")
    agent = rein.DQN(environment, network=network, learning_starts=16, batch_size=8, device=NAME, seed=0)
    loop = rein.training_loop(agent, environment, collection=rein.FirstCome(device="cpu"))
    policy = loop.parts["collection"]._policy
    select_action, devices = policy.select_action, set()

    def select(observation, rows):
        action, extras = select_action(observation, rows)
        devices.add((observation.device.type, action.device.type))
        return action, extras

    policy.select_action = select
    loop.run(epochs=2, iterations=16)
    policy.refresh()
    pairs = zip(policy._copy.networks.parameters(), agent.networks.parameters())
    print(agent.updates, devices, all(torch.equal(copy, own.cpu()) for copy, own in pairs))
    environment.close()
"""


def test_collection_selects_actions_on_its_own_device() -> None:
    output = programs.run("-c", ACTING_ON_CPU, cwd=PROGRAM.parent).stdout
    assert output.split("\n")[0] == "112 {('cpu', 'cpu')} True"


REFUSED = """
import sys
import torch
from stand_in_device import NAME, as_program, stand_in

with stand_in():
    host, there, generator = torch.ones(3), torch.ones(3, device=NAME), torch.Generator(NAME)
    flags = there > 0
    for name, operation in {
        "_local_scalar_dense": lambda: there.sum().item(),
        "bool": lambda: bool(flags.any()),
        "nonzero": lambda: flags.nonzero(),
        "masked_select": lambda: there.masked_select(flags),
        "boolean index in a read": lambda: there[flags],
        "boolean index in index_put_": lambda: there.__setitem__(flags, there[:1]),
        "tolist": lambda: there.tolist(),
        "numpy": lambda: there.numpy(force=True),
        "cpu": lambda: there.cpu(),
        "copy to the host": lambda: host.copy_(there),
        "equal": lambda: torch.equal(there, there),
        "host constant": lambda: torch.tensor([1.0, 2.0, 3.0], device=NAME),
        "scalar of the host": lambda: there + torch.ones(()),
        "copy from the host": lambda: there.copy_(host),
        "rand": lambda: torch.rand(3, device=NAME),
        "randperm": lambda: torch.randperm(3, generator=generator, device=NAME),
        "dropout": lambda: torch.nn.functional.dropout(there),
        "normal_": lambda: there.normal_(generator=generator),
    }.items():
        try:
            with as_program():
                operation()
        except RuntimeError as error:
            assert "program contains" in str(error), (name, error)
        else:
            sys.exit(f"{name} was accepted")
    with as_program():
        there[1:] = 0.0
        there[there.long()] + torch.where(flags, there, 0.0) + torch.zeros(3, device=NAME) + there.new_full((), 2.0)
"""


def test_operations_that_a_program_cannot_contain_are_refused() -> None:
    programs.run("-c", REFUSED, cwd=PROGRAM.parent)


@pytest.mark.default_cases("PPO, CartPole")
@pytest.mark.parametrize("case", [f"{agent}, {env}" for agent in ("PPO", "A2C") for env in ENVIRONMENTS])
def test_programs_contain_no_operation_that_a_capture_refuses(case: str) -> None:
    found = json.loads(programs.run(PROGRAM.with_name("programs_on_a_device.py"), case).stdout.splitlines()[-1])[case]
    assert found["distance"] < 1e-6
    assert found["calls"] > 0
    if case in LIMITS:
        assert all(count <= limit for count, limit in zip(counts(case, found["operations"]), LIMITS[case], strict=True))
