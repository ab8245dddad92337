"""The floors of the house: who may import whom, how long a function may be, where a tensor may leave its device.

Every import counts: relative ones, those inside functions, those under TYPE_CHECKING (a type that is named is a
dependency too; `rein.protocols` is the way out) and `importlib.import_module` of a literal name. `rein/__init__.py`
alone may re-export from any floor; inside `rein` nothing but `__version__` is imported through it.
"""

from __future__ import annotations

import ast
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import rein

ROOT = Path(__file__).parents[1] / "rein"
SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}

FLOORS = """
    __main__
    cli
    recipes testing supervised
    offline saved
    training
    agents envs stores handlers loggers integrations
    rollout
    loop
    events data
    filters metrics improvement safe
    learning
    buffers schedules
    protocols
    types
    networks
    ops errors functions clocks foreign_names paths
"""
DEPTH = {name: depth for depth, line in enumerate(FLOORS.strip().splitlines()) for name in line.split()}
INDEPENDENT = {"agents", "envs", "handlers", "loggers", "integrations"}  # each of their modules stands alone
COMPUTED = "a computed name"
MAY_COMPUTE = {"__init__", "cli", "saved"}  # lazy re-exports; `rein train my_module:make_loop`; all of rein.agents

ONLY_IN = {  # who may import what is not ours; the longest name decides, and what is not named here is free
    "blinker": {"events"},
    "h5py": {"stores", "cli"},
    "gymnasium": {"integrations", "testing", "recipes"},
    "gymnasium.spaces": DEPTH.keys() - {"ops", "errors"},
    **dict.fromkeys(("pickle", "_pickle", "dill", "marshal", "shelve"), frozenset()),  # a file must not run code
}

ON_THE_DEVICE = {"ops", "networks", "buffers", "learning", "rollout", "agents", "envs"}
FETCHING = {"item", "cpu"}
RESUMING = {"state_dict", "load_state_dict"}  # not on the hot path, and generators keep their state on the host
MAY_FETCH: dict[str, str] = {}  # module -> why it has to

BODY_LINES = 50


def unit(path: str) -> str:
    """The name that a module has in the table of floors."""
    return path.split("/")[0].removesuffix(".py")


def package(path: str) -> list[str]:
    """What a relative import in the module starts from."""
    return ["rein", *path.split("/")[:-1]]


def imports(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every import as (line, absolute dotted name); `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package(path)[: len(package(path)) - node.level + 1] if node.level else []
            origin = above + ([node.module] if node.module else [])
            yield from ((node.lineno, ".".join([*origin, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in {"import_module", "__import__"}:
            argument = node.args[0] if node.args else None
            name = argument.value if isinstance(argument, ast.Constant) else None
            yield node.lineno, name if isinstance(name, str) and not name.startswith(".") else COMPUTED


def called(call: ast.Call) -> str | None:
    """The last name of what is called: `item` in `loss.item()`."""
    return getattr(call.func, "attr", getattr(call.func, "id", None))


def refuse_ours(path: str, name: str) -> str | None:
    """Why `path` may not import `name`, a part of rein; None if it may."""
    importer, imported = unit(path), [*name.split("."), ""][1]
    if name == "rein.__version__":
        return None
    if imported not in DEPTH:
        return "import it from the module that defines it, and give that a floor"
    if importer == "__init__" or DEPTH[importer] < DEPTH[imported]:
        return None
    if importer != imported:
        return f"{imported} is not below {importer}"
    if importer in INDEPENDENT and [*package(path), Path(path).stem][:3] != name.split(".")[:3]:
        return "siblings never import each other"
    return None


def refuse_others(path: str, name: str) -> str | None:
    """Why `path` may not import `name`, which is not ours; None if it may."""
    if unit(path) == "ops" and name.split(".")[0] not in {"torch", *sys.stdlib_module_names}:
        return "ops imports torch and the standard library only"
    rules = [rule for rule in ONLY_IN if f"{name}.".startswith(f"{rule}.")]
    if rules and unit(path) not in ONLY_IN[max(rules, key=len)]:
        return f"only {', '.join(sorted(ONLY_IN[max(rules, key=len)])) or 'nobody'} may"
    return None


def broken_floors(path: str, source: str) -> list[str]:
    """One line for each import of the module that the house does not allow."""
    if unit(path) not in DEPTH and path != "__init__.py":
        return [f"{path}: has no floor; put {unit(path)} into the table of DESIGN 1 and of this test"]
    found = []
    for line, name in imports(path, ast.parse(source)):
        if name == COMPUTED:
            why = None if unit(path) in MAY_COMPUTE else "write the name out"
        else:
            why = (refuse_ours if name.split(".")[0] == "rein" else refuse_others)(path, name)
        if why:
            found.append(f"{path}:{line}: must not import {name}: {why}")
    return found


def oversized(path: str, source: str) -> list[str]:
    """List each function whose body, without its docstring, is too long."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[1] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body[0]
            lines = (node.end_lineno or 0) - first.lineno + 1
            found += [f"{path}:{node.lineno}: {node.name} has {lines} lines"] * (lines > BODY_LINES)
    return found


def fetches(path: str, source: str) -> list[str]:
    """Each call that waits for the device, in the modules whose tensors stay there."""
    tree = ast.parse(source)
    resuming = [node for node in ast.walk(tree) if getattr(node, "name", None) in RESUMING]
    free = {inner for function in resuming for inner in ast.walk(function)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node not in free]
    found = [f"{path}:{call.lineno}: .{called(call)}()" for call in calls if called(call) in FETCHING]
    return found if unit(path) in ON_THE_DEVICE else []


def test_every_import_goes_down_a_floor() -> None:
    assert [line for path, source in SOURCES.items() for line in broken_floors(path, source)] == []


def test_functions_are_short() -> None:
    assert [line for path, source in SOURCES.items() for line in oversized(path, source)] == []


def test_tensors_stay_on_their_device() -> None:
    found = {path: lines for path, source in SOURCES.items() if (lines := fetches(path, source))}
    assert [line for path, lines in found.items() if path not in MAY_FETCH for line in lines] == []
    assert MAY_FETCH.keys() <= found.keys(), "a module that is allowed to fetch no longer does: take it off the list"


def test_the_public_names_are_those_in_all() -> None:
    names = {name: getattr(rein, name) for name in {*dir(rein), *rein.__all__} if not name.startswith("_")}
    public = {name for name, value in names.items() if not isinstance(value, ModuleType)}
    tools = {name for name in public if name == "annotations" or hasattr(typing, name)}  # to write re-exports with
    modules = names.keys() - public
    assert sorted(set(rein.__all__) - modules) == sorted(public - tools)
    assert len(rein.__all__) == len(set(rein.__all__))


FORBIDDEN = [
    ("loop.py", "from rein.agents import ppo"),
    ("loop.py", "from rein.agents.ppo import PPO"),
    ("loop.py", "import rein.agents.ppo as ppo"),
    ("loop.py", "import torch, rein.training"),
    ("loop.py", "from rein import agents"),
    ("loop.py", "from . import agents"),
    ("loop.py", "from .agents.ppo import PPO"),
    ("loop/engine.py", "from ..rollout import batch_step"),
    ("loop/engine.py", "from .. import rollout"),
    ("loop.py", "def run():\n    from rein.rollout import batch_step"),
    ("loop.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rein.training import train"),
    ("loop.py", "import importlib\nimportlib.import_module('rein.rollout')"),
    ("loop.py", "__import__('rein.rollout')"),
    ("loop.py", "from importlib import import_module\nimport_module('.rollout', 'rein')"),
    ("loop.py", "import importlib\nimportlib.import_module('rein.' + 'rollout')"),
    ("loop.py", "import rein"),
    ("loop.py", "from rein import Loop"),
    ("loop.py", "from rein import *"),
    ("loop.py", "from rein.unheard_of import thing"),
    ("unheard_of.py", "x = 1"),
    ("unheard_of/part.py", "x = 1"),
    ("errors.py", "from rein.ops import trees"),
    ("metrics.py", "from rein.filters import Filter"),
    ("testing/contracts.py", "from rein.recipes import taxi"),
    ("agents/ppo.py", "from rein.envs.cartpole import CartPole"),
    ("agents/ppo.py", "from rein.agents.dqn import DQN"),
    ("agents/ppo.py", "from rein.agents import dqn"),
    ("agents/ppo.py", "from .dqn import DQN"),
    ("agents/ppo.py", "from . import dqn"),
    ("agents/__init__.py", "from rein.agents.ppo import PPO"),
    ("ops/returns.py", "import numpy as np"),
    ("ops/returns.py", "from gymnasium import spaces"),
    ("ops/returns.py", "from rein.types import State"),
    ("loop.py", "import blinker"),
    ("loop.py", "from blinker import Signal"),
    ("__init__.py", "import blinker"),
    ("envs/cartpole.py", "import gymnasium as gym"),
    ("envs/cartpole.py", "import gymnasium.vector"),
    ("envs/cartpole.py", "from gymnasium import Env, spaces"),
    ("envs/cartpole.py", "from gymnasium.spaces.utils import flatten\nfrom gymnasium.wrappers import RecordVideo"),
    ("rollout.py", "import h5py"),
    ("handlers/checkpoint.py", "def save():\n    import h5py"),
    ("stores/hdf5.py", "import pickle"),
    ("cli/__init__.py", "from pickle import loads"),
]

ALLOWED = [
    ("__init__.py", "from rein.loop import Loop\nfrom rein import types\nfrom .training import train"),
    ("__main__.py", "from rein.cli import main"),
    ("loop/engine.py", "from rein.loop.loop import Loop\nfrom . import resume\nfrom ..events import Event"),
    ("agents/ppo.py", "from rein.ops import returns\nfrom ..networks.mlp import MLP\nfrom rein.loop import Loop"),
    ("envs/workers/pool.py", "from rein.envs.workers.pipe import Pipe\nfrom .pipe import Pipe\nfrom . import pipe"),
    ("envs/cartpole.py", "import attrs\nfrom gymnasium import spaces\nfrom gymnasium.spaces import Box\nimport torch"),
    ("integrations/gymnasium.py", "import gymnasium\nfrom gymnasium.vector import SyncVectorEnv"),
    ("ops/returns.py", "import math\nimport torch.nn.functional as F\nfrom rein.ops.trees import map_tree"),
    ("stores/hdf5.py", "import h5py\nfrom rein.stores.layout import write"),
    ("events.py", "import blinker"),
    ("cli/__init__.py", "import importlib\nfrom rein import __version__\nimportlib.import_module(name)"),
]


@pytest.mark.parametrize(("path", "source"), FORBIDDEN)
def test_a_forbidden_import_is_found(path: str, source: str) -> None:
    found = broken_floors(path, source)
    assert len(found) == 1
    assert found[0].startswith(path)


@pytest.mark.parametrize(("path", "source"), ALLOWED)
def test_an_allowed_import_is_left_alone(path: str, source: str) -> None:
    assert broken_floors(path, source) == []


def test_a_forbidden_import_is_found_in_every_module_that_there_is() -> None:
    """Proves on the real files that none is exempt, whatever else stands in them."""
    below_cli = [path for path in SOURCES if unit(path) not in {"__init__", "__main__", "cli"}]
    assert below_cli
    for path in below_cli:
        with_import = SOURCES[path] + "\n\ndef later():\n    from rein.cli import main\n"
        assert len(broken_floors(path, with_import)) == len(broken_floors(path, SOURCES[path])) + 1


def test_a_long_function_is_found() -> None:
    body = "\n".join(["    x = 1"] * (BODY_LINES + 1))
    docstring = '    """First.\n' + "\n" * BODY_LINES + '    """\n'
    assert len(oversized("loop.py", f"def f():\n{body}\n")) == 1
    assert len(oversized("loop.py", f"class C:\n  def f(self):\n   def g():\n{body}\n")) == 2
    assert oversized("loop.py", f"def f():\n{docstring}    x = 1\n") == []


def test_a_tensor_that_leaves_its_device_is_found() -> None:
    source = "def f(x):\n    return {k: v.item() for k, v in x.items()}, x[0].detach().cpu()\n"
    assert {line.rpartition(" ")[2] for line in fetches("agents/ppo.py", source)} == {".item()", ".cpu()"}
    assert fetches("loggers/csv.py", source) == []
    assert fetches("agents/ppo.py", source.replace("def f", "def state_dict")) == []


MAKES_FLOATS = {"zeros", "ones", "empty", "full", "tensor", "as_tensor", "rand", "randn", "eye", "linspace"}
MAKES_INTEGERS = {"arange", "randint", "randperm"}  # whatever torch's default dtype is


def implicit(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every call that makes a tensor by torch's defaults, as (line, what it leaves out)."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
            continue
        given = {keyword.arg for keyword in node.keywords}
        wanted = {"dtype", "device"} if node.func.attr in MAKES_FLOATS else {"device"}
        if node.func.attr in MAKES_FLOATS | MAKES_INTEGERS and None not in given and not wanted <= given:
            yield node.lineno, f"torch.{node.func.attr} without {', '.join(sorted(wanted - given))}"


@pytest.mark.parametrize("path", [path for path in SOURCES if unit(path) != "testing"])
def test_tensors_are_made_with_an_explicit_dtype_and_device(path: str) -> None:
    """torch.set_default_dtype and torch.set_default_device belong to the user."""
    assert list(implicit(ast.parse(SOURCES[path]))) == []


def test_implicit_dtypes_and_devices_are_found() -> None:
    found = [
        line for line, _ in implicit(ast.parse("torch.zeros(3)\ntorch.arange(3, device=d)\ntorch.rand(2, device=d)"))
    ]
    assert found == [1, 3]
