"""Names that `rein.agents` exports."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys

import pytest

import rein.agents
from rein.training.saved_agents import own_agents

NAMES = sorted(rein.agents.MODULES)


@pytest.mark.parametrize("name", NAMES)
def test_an_exported_name_is_the_object_of_its_module(name: str) -> None:
    module = importlib.import_module(rein.agents.MODULES[name])
    assert getattr(rein.agents, name) is getattr(module, name)
    assert not inspect.ismodule(getattr(rein.agents, name))


def test_every_agent_is_exported() -> None:
    assert {kind.__name__ for kind in own_agents().values()} <= set(NAMES)


def test_exports_are_the_same_for_type_checkers() -> None:
    tree = ast.parse(inspect.getsource(rein.agents))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    declared = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert declared == rein.agents.MODULES
    assert sorted(rein.agents.__all__) == NAMES


def test_an_unknown_name_suggests_a_similar_one() -> None:
    with pytest.raises(AttributeError, match=r"'rein.agents' has no attribute 'PP0'; did you mean PPO\?"):
        rein.agents.PP0  # type: ignore[attr-defined]  # noqa: B018


def test_importing_the_package_loads_no_agent() -> None:
    program = "import sys, rein.agents; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not [name for name in result.stdout.split() if name == "torch" or name.startswith("rein.agents.")]
