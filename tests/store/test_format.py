"""Compare the files with their specification, `docs/reference/file_format.md`."""

import re
from pathlib import Path

import h5py
import pytest

from rein.store.hdf5 import HDF5Store
from rein.testing.store import make_trajectory

TEXT = (Path(__file__).parents[2] / "docs/reference/file_format.md").read_text()


@pytest.fixture
def path(tmp_path):
    store = HDF5Store(tmp_path / "run")
    store.write_run({"seed": 0})
    for epoch in (1, 2):
        trajectory = make_trajectory(epoch)
        options = [b'{"level": 1}'] * len(trajectory.episodes.id)
        store.append(trajectory._replace(episodes=trajectory.episodes._replace(options=options)))
    store.close()
    return store.path / "trajectories" / "000001-000002.h5"


def documented(heading):
    """Return the first column of the table under a heading, as patterns of paths under /entry."""
    table = TEXT.split(f"{heading}\n", 1)[1].split("|\n\n", 1)[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return {name: re.compile(re.sub(r"<\w+>", "[^/]+", name) + "(/.*)?") for name in names}


def test_datasets_match_the_documentation(path):
    patterns, paths = documented("## A file of trajectories"), []
    with h5py.File(path) as file:
        file["entry"].visititems(lambda name, node: paths.append(name) if isinstance(node, h5py.Dataset) else None)
    paths += [f"views/{name}" for name in ("reward", "episode_return")]  # hard links, visited under their first names
    assert [name for name in paths if not any(pattern.fullmatch(name) for pattern in patterns.values())] == []
    assert [name for name, pattern in patterns.items() if not any(map(pattern.fullmatch, paths))] == []


def test_attributes_match_the_documentation(path):
    lines = [line for line in TEXT.split("Attributes:")[1].splitlines() if line.startswith("| `")]
    rows = [[re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:3]] for line in lines]
    documented_attributes = [
        (re.compile(re.sub(r"<\w+>", "[^/]+", name) + "(/.*)?"), set(attributes))
        for names, attributes in rows
        for name in names
    ]
    found = {}

    def visit(name, node):
        found[name] = set(node.attrs) - ({"NX_class"} if node.attrs.get("NX_class") == "NXcollection" else set())

    with h5py.File(path) as file:
        found["/"], found["/entry"] = set(file.attrs), set(file["entry"].attrs)
        file["entry"].visititems(visit)
    for name, attributes in found.items():
        if attributes - {"NX_class"}:
            allowed = [names for pattern, names in documented_attributes if pattern.fullmatch(name)]
            assert allowed, f"the attributes of {name} are not documented: {attributes}"
            assert attributes <= set.union(*allowed), name


def test_documented_example_of_reading_without_rein_runs(path, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(code, "format.md", "exec"), {"path": path})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["1", "6"], ["2", "6"]]
    assert "rein" not in code.replace("# (T, N)", "")


def test_user_block_matches_the_documentation(path):
    block = path.read_bytes()[:512].rstrip(b"\0").decode()
    shown = TEXT.split("## The user block")[1].split("```")[1].strip()
    numbers = re.compile(r"(?<=length )\d+|[0-9a-f]{64}")
    assert numbers.sub("?", block.strip()) == numbers.sub("?", shown)
