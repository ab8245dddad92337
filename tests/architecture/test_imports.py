"""Dependency rule of the package: the imports that each subpackage may have.

Every import counts, also inside functions and through `importlib.import_module`. Imports under `TYPE_CHECKING` do not,
and neither do the packages in `BY_NAME`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.measure import parse

ROOT = Path(__file__).parents[2] / "rein"
SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}

# Highest first. Subpackages on one level do not import each other.
LEVELS = """
    __main__
    cli
    recipes testing accelerate
    training
    collection
    handlers integrations
    episodes
    agents envs store
    replay
    networks
    spaces
    protocols
    types options
    loop schedules
    ops files
    errors lazy accelerators
    foreign_names
"""
LEVEL = {name: level for level, line in enumerate(LEVELS.strip().splitlines()) for name in line.split()}
LOOP_IMPORTS = {"rein.errors", "rein.ops.trees"}
BY_NAME = {"rein.accelerate", "rein.foreign_names"}  # imported by their literal names, where they are needed

# Subpackages whose modules must not import each other, and the modules for shared code in them.
LEAVES = {
    "agents": {"base"},
    "envs": {"base", "gymnasium", "host", "wrappers", "probes"},
    "envs/probes": {"probe"},
    "handlers": {"output", "loggers"},
    "handlers/loggers": {"attach", "media"},
    "recipes": {"recipe", "tasks"},
}

# Third-party packages that only these subpackages may import. The longest matching name applies.
ONLY_IN = {
    "blinker": {"loop"},
    "h5py": {"store", "cli"},
    "gymnasium": {"envs", "integrations", "testing", "recipes"},
    "gymnasium.spaces": LEVEL.keys() - {"ops", "errors", "loop", "schedules"},
    **dict.fromkeys(("pickle", "_pickle", "dill", "marshal", "shelve"), frozenset()),
}
COMPUTED_IMPORTS = {"lazy", "cli", "training"}
COMPUTED = "a computed name"


def subpackage(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def module_name(path: str) -> str:
    return "rein." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module_name(path): path for path in SOURCES if path != "__init__.py"}


def imports(path: str, source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute name) of every import at run time; `from a import b` gives `a.b`."""
    tree = parse(source)
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and "TYPE_CHECKING" in ast.unparse(node.test)
        and "not" not in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ["rein", *path.split("/")[:-1]]
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = above + ([node.module] if node.module else [])
            yield from ((node.lineno, ".".join([*origin, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in {"import_module", "__import__"}:
            argument = node.args[0] if node.args else None
            name = argument.value if isinstance(argument, ast.Constant) else None
            if name in BY_NAME:
                continue
            yield node.lineno, name if isinstance(name, str) and not name.startswith(".") else COMPUTED


def _called(call: ast.Call) -> str | None:
    return getattr(call.func, "attr", getattr(call.func, "id", None))


def module_of(name: str) -> str | None:
    """Return the module of rein that contains a name: `rein.ops.random` for `rein.ops.random.generator`."""
    parts = name.split(".")
    return next((found for end in range(len(parts), 1, -1) if (found := ".".join(parts[:end])) in MODULES), None)


def violation(path: str, name: str) -> str | None:
    """Return why the module at `path` may not import `name`, or None."""
    importer = subpackage(path)
    if name == COMPUTED:
        return None if importer in COMPUTED_IMPORTS else "write the name of the module out"
    if name.split(".")[0] != "rein":
        return _foreign_violation(importer, name)
    if importer == "__init__" or name == "rein.__version__":
        return None
    imported = [*name.split("."), ""][1]
    if imported not in LEVEL:
        return "import it from the module that defines it"
    if importer == "loop" and imported != "loop" and module_of(name) not in LOOP_IMPORTS:
        return f"loop/ imports {' and '.join(sorted(LOOP_IMPORTS))} only"
    if importer != imported:
        return None if LEVEL[importer] < LEVEL[imported] else f"{imported} is not below {importer}"
    folder, _, file = path.rpartition("/")
    if folder in LEAVES and file != "__init__.py":
        rest = (module_of(name) or name).removeprefix("rein.").removeprefix(folder.replace("/", ".") + ".").split(".")
        other = rest[0]
        inside = (module_of(name) or "").startswith("rein." + folder.replace("/", ".") + ".")
        if inside and other not in LEAVES[folder] and file.removesuffix(".py") not in LEAVES[folder]:
            return (
                f"modules of {folder} do not import each other; share code through {', '.join(sorted(LEAVES[folder]))}"
            )
    return None


def _foreign_violation(importer: str, name: str) -> str | None:
    if importer == "ops" and name.split(".")[0] not in {"torch", *sys.stdlib_module_names}:
        return "ops imports torch and the standard library only"
    rules = [rule for rule in ONLY_IN if f"{name}.".startswith(f"{rule}.")]
    if rules and importer not in ONLY_IN[max(rules, key=len)]:
        return f"only {', '.join(sorted(ONLY_IN[max(rules, key=len)])) or 'no module'} may"
    return None


def violations(path: str, source: str) -> list[str]:
    """Return one line for each import that the rule forbids."""
    if subpackage(path) not in LEVEL and path != "__init__.py":
        return [f"{path}: {subpackage(path)} has no level; add it to LEVELS"]
    return [
        f"{path}:{line}: must not import {name}: {why}"
        for line, name in imports(path, source)
        if (why := violation(path, name))
    ]


def test_imports_follow_the_dependency_rule() -> None:
    assert [line for path, source in SOURCES.items() for line in violations(path, source)] == []


def test_modules_have_no_import_cycles() -> None:
    graph = {
        module: {found for _, name in imports(path, SOURCES[path]) if (found := module_of(name)) and found != module}
        for module, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> list[str]:
        if module in above:
            return [" -> ".join((*above[above.index(module) :], module))]
        if module in done:
            return []
        found = [cycle for other in sorted(graph[module]) for cycle in visit(other, (*above, module))]
        done.add(module)
        return found

    assert [cycle for module in graph for cycle in visit(module, ())] == []


FORBIDDEN = [
    ("loop/engine.py", "from rein.agents.ppo import PPO"),
    ("loop/engine.py", "from rein import agents"),
    ("loop/engine.py", "from ..episodes import batch_step"),
    ("loop/engine.py", "def run():\n    from rein.training.offline import fill_replay"),
    ("loop/engine.py", "import importlib\nimportlib.import_module('rein.episodes')"),
    ("loop/engine.py", "import importlib\nimportlib.import_module('rein.' + 'episodes')"),
    ("loop/engine.py", "from rein.types import Transition"),
    ("loop/engine.py", "from rein.ops.random import generator"),
    ("loop/engine.py", "from rein import Loop"),
    ("agents/ppo.py", "from rein.envs.cartpole import CartPole"),
    ("agents/ppo.py", "from rein.agents.dqn import DQN"),
    ("agents/ppo.py", "from .dqn import DQN"),
    ("agents/base/agent.py", "from rein.store.hdf5 import HDF5Store"),
    ("handlers/solved.py", "from rein.handlers.progress import progress"),
    ("handlers/solved.py", "from rein.integrations.minari import MinariData"),
    ("recipes/taxi.py", "from rein.recipes.pong import pong"),
    ("ops/returns.py", "import numpy as np"),
    ("ops/returns.py", "from rein.types import Transition"),
    ("store/hdf5.py", "import pickle"),
    ("handlers/checkpoint.py", "def save():\n    import h5py"),
    ("agents/ppo.py", "from rein.accelerate.closed_form import policy_gradient"),
    ("unknown.py", "x = 1"),
]
ALLOWED = [
    ("__init__.py", "from rein.loop import Loop"),
    ("agents/ppo.py", "from rein.agents.base.on_policy import OnPolicyAgent\nfrom rein.replay.rollout import Rollout"),
    ("agents/ppo.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rein.store.hdf5 import HDF5Store"),
    ("envs/wrappers/observations.py", "from rein.envs.wrappers.wrapper import Wrapper"),
    ("handlers/loggers/wandb.py", "from rein.handlers.loggers.attach import Axis"),
    ("loop/engine.py", "from rein.loop.events import Event\nfrom rein.errors import StoreError"),
    ("store/hdf5.py", "import h5py\nfrom rein.store.format.trajectory_writer import Part"),
    ("cli/__init__.py", "import importlib\nimportlib.import_module(name)"),
    ("errors.py", "import importlib\nimportlib.import_module('rein.foreign_names')"),
]


@pytest.mark.parametrize(("path", "source"), FORBIDDEN)
def test_forbidden_import_is_found(path: str, source: str) -> None:
    found = violations(path, source)
    assert len(found) == 1
    assert found[0].startswith(path)


@pytest.mark.parametrize(("path", "source"), ALLOWED)
def test_allowed_import_is_accepted(path: str, source: str) -> None:
    assert violations(path, source) == []
