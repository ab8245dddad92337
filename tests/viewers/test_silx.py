"""Tests of `silx view` without a screen.

Shapes: H rows and W columns of an image.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

os.environ["QT_QPA_PLATFORM"] = "offscreen"  # before Qt is imported

from silx.app.view.Viewer import Viewer
from silx.gui import qt
from silx.gui.hdf5 import Hdf5TreeModel, Hdf5TreeView
from silx.gui.plot import PlotWidget, items


class Silx:
    """Window of silx with one open file."""

    def __init__(self, application: Any, path: Path) -> None:
        self._application = application
        self.window = Viewer()
        self.window.resize(1000, 560)
        self.window.show()
        self.window.appendFile(str(path))

    def click(self, path: str) -> None:
        """Select an object in the tree by its path."""
        tree: Any = self.window.findChild(Hdf5TreeView)
        model = tree.findHdf5TreeModel()
        self._wait(lambda: model.rowCount() and model.data(model.index(0, 0), Hdf5TreeModel.H5PY_OBJECT_ROLE))
        file = model.data(model.index(0, 0), Hdf5TreeModel.H5PY_OBJECT_ROLE)
        tree.setSelectedH5Node(file[path])
        self.window.displaySelectedData()

    def drawn(self, title: str, kind: type) -> tuple[Any, Any]:
        """Wait for a plot with this title and one item of this kind; return both."""
        return self._wait(lambda: next(self._drawn(title, kind), None))

    def _drawn(self, title: str, kind: type) -> Iterator[tuple[Any, Any]]:
        for plot in self._plots():
            found = [item for item in plot.getItems() if isinstance(item, kind) and item.isVisible()]
            if plot.getGraphTitle().strip() == title and len(found) == 1:
                yield plot, found[0]

    def take(self, path: Path) -> None:
        """Save a screenshot of the window."""
        assert self.window.grab().save(str(path))

    def _plots(self) -> list[Any]:
        return [plot for plot in self.window.findChildren(PlotWidget) if plot.isVisible()]

    def _wait(self, find: Callable[[], Any]) -> Any:
        while True:  # pytest's timeout ends the wait
            self._application.processEvents()
            if found := find():
                self._application.processEvents()
                return found
            time.sleep(0.01)


@pytest.fixture
def silx(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Silx]]:
    application = qt.QApplication.instance() or qt.QApplication([])
    opened: list[Silx] = []

    def open_file(path: Path) -> Silx:
        monkeypatch.chdir(path.parents[1])  # for a short file name in the window
        opened.append(Silx(application, path.relative_to(path.parents[1])))
        return opened[-1]

    yield open_file
    for viewer in opened:
        viewer.window.close()


def test_trajectory_file_opens_with_scatter_of_episodes(files, silx, read_view, screenshots):
    view, viewer = read_view(files["trajectories"]), silx(files["trajectories"])
    plot, scatter = viewer.drawn(view.title, items.Scatter)
    assert [plot.getXAxis().getLabel(), plot.getYAxis().getLabel()] == view.axes
    last_step, returns = scatter.getData(copy=False)[:2]
    with h5py.File(files["trajectories"]) as file:
        assert np.array_equal(last_step, file["entry/episodes/last_step"])
        assert np.array_equal(returns, file["entry/episodes/return"])
    viewer.take(screenshots / "silx-trajectories.png")


@pytest.mark.parametrize("name", ["metrics", "checkpoint"])
def test_metrics_and_checkpoints_open_with_learning_curve(name, files, silx, read_view, screenshots):
    view, viewer = read_view(files[name]), silx(files[name])
    plot, curve = viewer.drawn(view.title, items.Curve)
    assert plot.getXAxis().getLabel() == view.axes[0]
    assert np.array_equal(curve.getYData(), view.values)
    viewer.take(screenshots / f"silx-{name}.png")


@pytest.mark.parametrize("name", ["greyscale", "colours"])
def test_image_observations_are_upright_images(name, files, silx, read_view, screenshots):
    view, viewer = read_view(files[name]), silx(files[name])
    plot, image = viewer.drawn(view.title, items.ImageBase)
    assert np.array_equal(image.getData(copy=False), view.picture)
    origin, scale = image.getOrigin(), image.getScale()
    assert scale[1] < 0.0 and not plot.getYAxis().isInverted()  # the first row is drawn at the top
    assert origin[1] + scale[1] * len(view.picture) == pytest.approx(-1.0, abs=1.01)  # the last row at about 0
    assert plot.getYAxis().getLabel() == "row from the bottom"
    viewer.take(screenshots / f"silx-{name}.png")


def test_vector_observations_are_lines_with_sliders(files, silx, read_view):
    name = "/entry/views/observation"
    view, viewer = read_view(files["trajectories"], name), silx(files["trajectories"])
    viewer.click(name)
    _, curve = viewer.drawn(view.title, items.Curve)
    assert np.array_equal(curve.getYData(), view.values[0, 0])


def test_weights_are_heatmaps(files, silx, weights, screenshots):
    viewer = silx(files["checkpoint"])
    viewer.click(weights)
    with h5py.File(files["checkpoint"]) as file:
        matrix: Any = file[weights]
        matrix = matrix[(0,) * (matrix.ndim - 2)]
    _, image = viewer.drawn(f"{weights}[0, :, :]", items.ImageBase)
    assert np.array_equal(image.getData(copy=False), matrix)
    viewer.take(screenshots / "silx-weights.png")
