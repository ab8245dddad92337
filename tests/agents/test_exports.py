"""Names that `rein.agents` exports."""

from __future__ import annotations

import subprocess
import sys

import rein.agents
from rein.training.saved_agents import own_agents


def test_every_agent_is_exported() -> None:
    assert {kind.__name__ for kind in own_agents().values()} <= {*rein.agents.__all__}


def test_importing_the_package_loads_no_agent() -> None:
    program = "import sys, rein.agents; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not [name for name in result.stdout.split() if name == "torch" or name.startswith("rein.agents.")]
