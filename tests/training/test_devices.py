"""Agents on a device that is not the host learn the same there, and its tensors meet no others.

There may be no such device here, so one stands in for it, in a process of its own: see stand_in_device.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("on_a_device.py")


def of(case: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, PROGRAM, case], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])[case]


@pytest.mark.parametrize("case", ["ppo, recurrent", "ppo, torch's AdamW", "a2c", "impala", "pqn"])
def test_a_rollout_on_a_device_is_learned_from_as_on_the_host_and_never_waits_for_it(case: str) -> None:
    found = of(case)
    assert found["distance"] < 1e-6
    assert found["waited"] == 0


@pytest.mark.parametrize("case", ["iqn", "recurrent dqn", "sac", "discrete sac", "td3", "ddpg", "awac", "iql"])
def test_a_replay_on_a_device_is_learned_from_as_on_the_host_and_waits_once_a_step(case: str) -> None:
    found = of(case)
    assert found["distance"] < 1e-6
    assert found["waited"] == 3 * 6  # is there enough to draw from?


@pytest.mark.parametrize("case", ["ppo, continuous", "dqn"])
def test_a_run_on_a_device_is_stored_and_goes_on_there_to_the_bit(case: str) -> None:
    found = of(case)
    assert found["distance"] < 1e-6
    assert found["resumed"] == 0


REFUSED = """
import sys
import torch
from stand_in_device import NAME, stand_in, waits

with stand_in():
    here, there = torch.ones(3), torch.ones(3, device=NAME)
    for meet in (
        lambda: here + there,
        lambda: torch.rand(3, generator=torch.Generator(), device=NAME),
        lambda: torch.rand(3, generator=torch.Generator(NAME)),
        lambda: here.add_(there),
        lambda: torch.cat([here, there]),
        lambda: torch._foreach_add([here], [there]),
    ):
        try:
            meet()
        except RuntimeError as error:
            assert "same device" in str(error) or "another device" in str(error), error
        else:
            sys.exit("two devices met")
    waits.clear()
    there.cpu(), there.sum().item(), there[there > 0], there.nonzero(), torch.equal(there, there), there.tolist()
    assert waits.total() == 6, waits
"""


def test_the_stand_in_refuses_what_a_device_refuses_and_counts_what_waits() -> None:
    ran = subprocess.run([sys.executable, "-c", REFUSED], cwd=PROGRAM.parent, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
