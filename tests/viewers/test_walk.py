"""h5ls, h5dump and PyTables, which includes its own HDF5, read every file of the runs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tables


@pytest.fixture
def paths(runs: Path) -> list[Path]:
    found = sorted(runs.rglob("*.h5"))
    assert {path.parent.name for path in found} >= {"vectors", "trajectories", "checkpoints"}
    return found


@pytest.mark.parametrize("command", [["h5ls", "-r", "-v"], ["h5dump"]])
def test_hdf5_tools_read_every_file_without_error(command, paths):
    for path in paths:
        done = subprocess.run([*command, path], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (0, ""), path


def test_pytables_reads_every_dataset_of_every_file(paths):
    for path in paths:
        with h5py.File(path) as expected, tables.open_file(path) as file:
            leaves = list(file.walk_nodes("/", "Leaf"))
            assert len(leaves) > 10
            for leaf in leaves:
                dataset: Any = expected[leaf._v_pathname]
                np.testing.assert_array_equal(leaf.read(), dataset[()], f"{path}: {dataset.name}")
