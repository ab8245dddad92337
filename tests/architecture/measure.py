"""Measure the size of the code: `python tests/architecture/measure.py [CHECKOUT]...` prints a table.

Lines of code contain code: blank lines, comments and docstrings do not count.
"""

from __future__ import annotations

import ast
import collections
import functools
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2]
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CLASSES = {  # examples of a custom algorithm and a custom environment
    "custom algorithm with a rollout": ("examples/reinforce.py", "examples/own_agent.py"),
    "custom algorithm with a replay": ("examples/own_replay.py",),
    "custom environment": ("examples/own_environment.py",),
}

UNCLEAR = {
    "found",
    "known",
    "given",
    "mine",
    "kept",
    "settle",
    "go_on",
    "lacking",
    "look_at",
}  # names that do not tell what they hold

parse = functools.cache(ast.parse)  # several measures and tests read every module


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines that contain code."""
    docstrings: set[int] = set()
    for node in ast.walk(parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstrings |= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    return lines - docstrings


def sources(root: Path) -> dict[str, str]:
    """Return the source of every module of rein, by its name."""
    paths = sorted((root / "rein").rglob("*.py"))
    names = (".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for path in paths)
    return {name: path.read_text(encoding="utf-8") for name, path in zip(names, paths, strict=True)}


RUN_PARTS = "PPO, CartPole and training_loop"
CLOSURES = {
    "PPO": "from rein.agents.ppo import PPO",
    "SAC": "from rein.agents.sac import SAC",
    "rein.Agent": "import rein; rein.Agent",
    RUN_PARTS: "from rein.agents.ppo import PPO; from rein.envs.cartpole import CartPole; "
    "import rein.training.training_loop",
}
RUN = """
import rein
env = rein.envs.CartPole(4, seed=0)
agent = rein.PPO(env, rollout_steps=8, seed=0)
store = {store}
loop = rein.training_loop(agent, env, store, iterations=8)
"""
RECORDED = """
import sys, tempfile, threading, rein
recording, files = [], set()
def profile(frame, event, argument):
    if event == "call" and recording and recording[0] in (None, threading.get_ident()):
        files.add(frame.f_code.co_filename)
sys.setprofile(profile), threading.setprofile(profile)
"""
STEP = """
loop.iteration_started(once=16)(lambda state: recording.append(threading.get_ident()))
loop.iteration_completed(once=16)(lambda state: recording.clear())
loop.run(epochs=3)
"""
CHECKPOINT = """
saver = rein.checkpoint(loop, every=0)
@loop.epoch_ended(once=2)
def save(state):
    store.flush()  # trajectories are written before the recording begins
    recording.append(None)  # all threads
    saver.checkpoints.take(loop, {})
    saver.checkpoints.flush()
    recording.clear()
loop.run(epochs=2)
"""
NAMES = """
names = {module.__file__: name for name, module in sys.modules.items() if name[:4] == "rein"}
print(*{names[file] for file in files if file in names})
"""


def run(program: str, root: Path, **environment: str) -> list[str]:
    """Return the words that a program prints."""
    settings: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=root, env={**os.environ, **environment}, **settings
    ).stdout.split()


def loaded_by(statements: str, root: Path, **environment: str) -> list[str]:
    """Return the modules of rein that are loaded after these statements."""
    return run(f"{statements}\nimport sys; print(*(n for n in sys.modules if n[:4] == 'rein'))", root, **environment)


def executed_by(work: str, root: Path) -> list[str]:
    """Return the modules of rein with functions that a part of a run calls with REIN_PLAIN=1, in all threads."""
    size = "" if work is STEP else ", max_epochs=1"  # write trajectories neither in the step nor in the checkpoint
    store = f"rein.HDF5Store(tempfile.mkdtemp() + '/run'{size})"
    return run(RECORDED + RUN.format(store=store) + work + NAMES, root, REIN_PLAIN="1")


def importers(modules: dict[str, str]) -> dict[str, set[str]]:
    """Return the modules that import each module of rein."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    for importer, source in modules.items():
        for node in ast.walk(parse(source)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                parts = name.split(".")
                known = (".".join(parts[:end]) for end in range(len(parts), 1, -1))
                if module := next((part for part in known if part in modules), None):
                    found[module].add(importer)
    return found


def largest_class(path: Path) -> int:
    """Return the number of lines of code of the largest class in a file."""
    source = path.read_text(encoding="utf-8")
    lines = code_lines(source)
    classes = [node for node in parse(source).body if isinstance(node, ast.ClassDef)]
    return max(len(lines & {*range(node.lineno, (node.end_lineno or 0) + 1)}) for node in classes)


def declarations(modules: dict[str, str]) -> collections.Counter[str]:
    """Return how often agents and recipes declare each option: as a field, or as a keyword of a function."""
    found: collections.Counter[str] = collections.Counter()
    for name, source in modules.items():
        if name.startswith(("rein.agents.", "rein.recipes.")):
            for node in ast.walk(parse(source)):
                if isinstance(node, ast.FunctionDef):
                    found.update(argument.arg for argument in node.args.kwonlyargs)
                elif isinstance(node, ast.AnnAssign) and "option(" in ast.unparse(node):
                    found[ast.unparse(node.target)] += 1
    return found


def bound_names(tree: ast.Module) -> Iterator[str]:
    """Return each name that a module binds: variables, parameters, attributes, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, DOCUMENTED) and not isinstance(node, ast.Module):
            yield node.name


def measure(root: Path) -> dict[str, str]:
    """Return each measure of a checkout."""
    modules = sources(root)
    lines = {name: len(code_lines(source)) for name, source in modules.items()}

    def size(names: Iterable[str]) -> str:
        known = [name for name in names if name in lines]
        return f"{len(known)} / {sum(lines[name] for name in known):,}"

    once = [name for name, importing in importers(modules).items() if len(importing) == 1]
    readme = (root / "README.md").read_text(encoding="utf-8")
    script = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)[0]
    imports = [line for line in script.splitlines() if re.match(r"(import|from) ", line)]
    options = declarations(modules)
    tests = [len(code_lines(path.read_text(encoding="utf-8"))) for path in (root / "tests").rglob("*.py")]
    table = {
        "package, files / lines of code": f"{len(modules)} / {sum(lines.values()):,}",
        "tests, files / lines of code": f"{len(tests)} / {sum(tests):,}",
        **{
            f"imported by {name}, files / lines of code": size(loaded_by(code, root)) for name, code in CLOSURES.items()
        },
        "loaded after an epoch of PPO with REIN_PLAIN=1": size(
            loaded_by(RUN.format(store=None) + "loop.run(epochs=1)", root, REIN_PLAIN="1")
        ),
        "executed by a step with update and persist, files / lines": size(executed_by(STEP, root)),
        "executed by a checkpoint, files / lines": size(executed_by(CHECKPOINT, root)),
        "import lines in the first script": str(len(imports)),
        "modules imported by one other module": str(len(once)),
        "unclear names": str(
            sum(name.strip("_") in UNCLEAR for source in modules.values() for name in bound_names(parse(source)))
        ),
        "declarations of gamma / clip / tau": " / ".join(str(options[name]) for name in ("gamma", "clip", "tau")),
    }
    for description, examples in CLASSES.items():
        found = [root / example for example in examples if (root / example).exists()]
        table[f"{description}, lines of code"] = str(largest_class(found[0])) if found else "-"
    return table


if __name__ == "__main__":
    tables = [measure(Path(root).resolve()) for root in sys.argv[1:] or [str(PACKAGE)]]
    for name in tables[0]:
        print(f"| {name} | {' | '.join(table[name] for table in tables)} |")
