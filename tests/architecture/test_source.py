"""Rules of the source: short functions, no hidden transfers from a device, explicit dtypes, public names."""

# pyright: reportAttributeAccessIssue=false
# Public names are lazy, so that pyright does not know `__all__`.

from __future__ import annotations

import ast
import collections
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import rein
from tests.architecture.measure import parse

ROOT = Path(__file__).parents[2] / "rein"
SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}

ON_THE_DEVICE = {"ops", "networks", "replay", "episodes", "agents", "envs"}
FETCHING = {"item", "cpu"}
RESUMING = {"state_dict", "load_state_dict"}  # not performance-critical; generator states are CPU tensors
MAY_FETCH = {"ops/trees.py": "read_together copies all values in one transfer"}  # module -> reason

BODY_LINES = 50


def unit(path: str) -> str:
    """Return the subpackage of a module."""
    return path.split("/")[0].removesuffix(".py")


def called(call: ast.Call) -> str | None:
    """Return the name of the called function or method, such as `item` for `loss.item()`."""
    return getattr(call.func, "attr", getattr(call.func, "id", None))


def oversized(path: str, source: str) -> list[str]:
    """Return a line for each function whose body, without its docstring, is longer than BODY_LINES."""
    found: list[str] = []
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[1] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body[0]
            lines = (node.end_lineno or 0) - first.lineno + 1
            found += [f"{path}:{node.lineno}: {node.name} has {lines} lines"] * (lines > BODY_LINES)
    return found


def fetches(path: str, source: str) -> list[str]:
    """Return a line for each call that waits for the device, in modules whose tensors must stay on the device."""
    tree = parse(source)
    resuming = [node for node in ast.walk(tree) if getattr(node, "name", None) in RESUMING]
    free = {inner for function in resuming for inner in ast.walk(function)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node not in free]
    found = [f"{path}:{call.lineno}: .{called(call)}()" for call in calls if called(call) in FETCHING]
    return found if unit(path) in ON_THE_DEVICE else []


def test_functions_are_short() -> None:
    assert [line for path, source in SOURCES.items() for line in oversized(path, source)] == []


def test_tensors_stay_on_their_device() -> None:
    found = {path: lines for path, source in SOURCES.items() if (lines := fetches(path, source))}
    assert [line for path, lines in found.items() if path not in MAY_FETCH for line in lines] == []
    assert MAY_FETCH.keys() <= found.keys(), "remove modules without such calls from MAY_FETCH"


@pytest.mark.parametrize("package", [rein, rein.agents, rein.envs, rein.handlers])
def test_every_exported_name_exists(package: ModuleType) -> None:
    for name in package.__all__:
        value = getattr(package, name)
        assert isinstance(value, ModuleType) or value.__name__ == name


def test_importing_module_does_not_replace_function_of_same_name() -> None:
    importlib.import_module("rein.handlers.checkpoint")
    from rein.handlers import checkpoint

    assert callable(checkpoint)
    assert rein.checkpoint is rein.handlers.checkpoint is checkpoint


def test_all_agents_are_exported() -> None:
    assert {*rein.agents.__all__} <= {*rein.__all__}


def test_rein_exports_at_most_fifty_names_besides_agents() -> None:
    assert len({*rein.__all__} - {*rein.agents.__all__}) <= 50


def test_file_names_are_unique() -> None:
    names = collections.Counter(Path(path).name for path in SOURCES)
    assert [name for name, count in names.items() if count > 1 and not name.startswith("__")] == []


def test_star_import_does_not_import_subpackages() -> None:
    assert {"types", "testing", "agents"}.isdisjoint(rein.__all__)
    assert {"types", "testing", "agents"} <= {*dir(rein)}
    assert {"lazy", "files"}.isdisjoint(dir(rein))


def test_unknown_name_suggests_the_closest_name() -> None:
    with pytest.raises(AttributeError, match="PPO"):
        _ = rein.PP0
    with pytest.raises(AttributeError, match=r"rein.handlers.watchdog"):
        _ = rein.watchdog


def test_long_function_is_found() -> None:
    body = "\n".join(["    x = 1"] * (BODY_LINES + 1))
    docstring = '    """First.\n' + "\n" * BODY_LINES + '    """\n'
    assert len(oversized("loop/loop.py", f"def f():\n{body}\n")) == 1
    assert len(oversized("loop/loop.py", f"class C:\n  def f(self):\n   def g():\n{body}\n")) == 2
    assert oversized("loop/loop.py", f"def f():\n{docstring}    x = 1\n") == []


def test_transfer_from_the_device_is_found() -> None:
    source = "def f(x):\n    return {k: v.item() for k, v in x.items()}, x[0].detach().cpu()\n"
    assert {line.rpartition(" ")[2] for line in fetches("agents/ppo.py", source)} == {".item()", ".cpu()"}
    assert fetches("handlers/loggers/csv.py", source) == []
    assert fetches("agents/ppo.py", source.replace("def f", "def state_dict")) == []


MAKES_FLOATS = {"zeros", "ones", "empty", "full", "tensor", "as_tensor", "rand", "randn", "eye", "linspace"}
MAKES_INTEGERS = {"arange", "randint", "randperm"}  # independent of torch's default dtype


def implicit(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Return (line, missing argument) for each call that creates a tensor with the default dtype or device."""
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
def test_tensors_have_explicit_dtype_and_device(path: str) -> None:
    """Results must not depend on torch.set_default_dtype and torch.set_default_device."""
    assert list(implicit(parse(SOURCES[path]))) == []


def test_implicit_dtypes_and_devices_are_found() -> None:
    found = [line for line, _ in implicit(parse("torch.zeros(3)\ntorch.arange(3, device=d)\ntorch.rand(2, device=d)"))]
    assert found == [1, 3]
