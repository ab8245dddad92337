"""Fixtures of tests that open files of runs in real viewers, and the documentation site in Chromium.

Only `make test-viewers` runs these tests. It builds H5Web and the site, and sets REIN_VIEWERS.

Shapes: H rows and W columns of an image.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest

import rein
from rein.agents.ppo import PPO
from rein.envs.gymnasium import GymnasiumEnvironment

BUILT = os.environ.get("REIN_VIEWERS", "")  # folder of H5Web and of the screenshots
collect_ignore_glob = [] if BUILT else ["test_*.py"]

# No network requests, and WebGL without a GPU for three.js.
OPTIONS = [
    "--no-sandbox",
    "--use-gl=angle",
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

VECTORS = ("cartpole", "--epochs", "12", "--checkpoint-every", "12")
GREYSCALE = ("pong", "--num-envs", "2", "--iterations", "16", "--epochs", "2", "--checkpoint-every", "0")


class View(NamedTuple):
    """Contents of a view according to its file."""

    name: str
    title: str
    signal: str
    values: np.ndarray
    axes: list[str]

    @property
    def sliders(self) -> tuple[int, ...]:
        """Lengths of the dimensions before the dimensions of an image."""
        return self.values.shape[: -3 if self.values.shape[-1] == 3 else -2]

    @property
    def picture(self) -> np.ndarray:
        """The first image: that of the first step and environment."""
        return self.values[(0,) * len(self.sliders)]


@pytest.fixture(scope="session")
def built() -> Path:
    """Return the folder of H5Web."""
    return Path(BUILT).resolve()


@pytest.fixture
def browser() -> Iterator[Any]:
    """Start a new Chromium for each test, because WebGL may hang after hundreds of drawings."""
    from playwright.sync_api import sync_playwright

    executable = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, headless=True, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def screenshots(built: Path) -> Path:
    """Return the folder of the screenshots."""
    folder = built / "screenshots"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three runs, named after their observations: `vectors`, `greyscale` and `colours`."""
    folder = tmp_path_factory.mktemp("runs")
    for name, options in (("vectors", VECTORS), ("greyscale", GREYSCALE)):
        command = [sys.executable, "-m", "rein", "train", *options, "--run", str(folder / name), "--quiet"]
        subprocess.run(command, check=True)
    environment = GymnasiumEnvironment("ALE/Breakout-v5", num_envs=2, seed=0)
    agent = PPO(
        environment.single_observation_space, environment.single_action_space, rollout_steps=16, update_epochs=1
    )
    store = rein.HDF5Store(folder / "colours")
    rein.train(agent, environment, store, epochs=2, iterations=16, seed=0)
    store.close()
    return folder


@pytest.fixture(scope="session")
def files(runs: Path) -> dict[str, Path]:
    """Return one file of each kind, by the name of its screenshot."""

    def newest(pattern: str) -> Path:
        return max(runs.glob(pattern))

    return {
        "trajectories": newest("vectors/trajectories/*.h5"),
        "metrics": runs / "vectors/metrics.h5",
        "checkpoint": newest("vectors/checkpoints/*.h5"),
        "greyscale": newest("greyscale/trajectories/*.h5"),
        "colours": newest("colours/trajectories/*.h5"),
    }


@pytest.fixture(scope="session")
def read_view() -> Callable[..., View]:
    """Return the function `read_view(path, name)`, which reads a view of a file, by default its default view."""

    def read(path: Path, name: str = "") -> View:
        with h5py.File(path) as file:
            entry = file[file.attrs["default"]]
            view = file[name] if name else entry[entry.attrs["default"]]
            signal = view[view.attrs["signal"]]
            axes = ["" if axis == "." else view[axis].attrs["long_name"] for axis in view.attrs["axes"]]
            title = view["title"].asstr()[()]
            return View(view.name, title, signal.attrs.get("long_name", view.attrs["signal"]), signal[()], axes)

    return read


@pytest.fixture(scope="session")
def weights(files: dict[str, Path]) -> str:
    """Return the path of the largest weight matrix in the checkpoint."""
    found: dict[str, int] = {}

    def visit(name: str, node: object) -> None:
        if isinstance(node, h5py.Dataset) and "/networks/" in name and node.ndim > 1:
            found[f"/{name}"] = node.size

    with h5py.File(files["checkpoint"]) as file:
        file.visititems(visit)
    return max(found, key=found.__getitem__)


@pytest.fixture(scope="session")
def is_upright() -> Callable[[np.ndarray, np.ndarray], bool]:
    """Return `is_upright(shown_HW, picture_HW)`: whether the shown image is the picture, and not upside down."""

    def likeness(shown_HW: np.ndarray, picture_HW: np.ndarray) -> float:
        rows = np.linspace(0, len(picture_HW) - 1, len(shown_HW)).round().astype(int)
        columns = np.linspace(0, picture_HW.shape[1] - 1, shown_HW.shape[1]).round().astype(int)
        return float(np.corrcoef(shown_HW.ravel(), picture_HW[rows][:, columns].ravel())[0, 1])

    def judge(shown_HW: np.ndarray, picture_HW: np.ndarray) -> bool:
        upright, upside_down = likeness(shown_HW, picture_HW), likeness(shown_HW, picture_HW[::-1])
        return upright > 0.5 and upright > upside_down + 0.1

    return judge
