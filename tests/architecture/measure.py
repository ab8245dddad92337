"""Measure the size of the code: `python tests/architecture/measure.py [CHECKOUT]...` prints a table.

Lines of code contain code: blank lines, comments and docstrings do not count.
"""

from __future__ import annotations

import ast
import collections
import functools
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CLASSES = {  # examples of a custom algorithm and a custom environment
    "custom algorithm with a rollout": ("examples/reinforce.py", "examples/own_agent.py"),
    "custom algorithm with a replay": ("examples/own_replay.py",),
    "custom environment": ("examples/own_environment.py",),
}

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


def imported_by_ppo(root: Path) -> list[str]:
    """Return the modules of rein that importing PPO imports."""
    program = (
        "import sys; from rein.agents.ppo import PPO; print(*(name for name in sys.modules if name[:4] == 'rein'))"
    )
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split()


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


def measure(root: Path) -> dict[str, str]:
    """Return each measure of a checkout."""
    modules = sources(root)
    lines = {name: len(code_lines(source)) for name, source in modules.items()}
    ppo = [name for name in imported_by_ppo(root) if name in lines]
    once = [name for name, importing in importers(modules).items() if len(importing) == 1]
    readme = (root / "README.md").read_text(encoding="utf-8")
    script = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)[0]
    imports = [line for line in script.splitlines() if re.match(r"(import|from) ", line)]
    options = declarations(modules)
    table = {
        "package, files / lines of code": f"{len(modules)} / {sum(lines.values()):,}",
        "imported by PPO, files / lines of code": f"{len(ppo)} / {sum(lines[name] for name in ppo):,}",
        "import lines in the first script": str(len(imports)),
        "modules imported by one other module": str(len(once)),
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
