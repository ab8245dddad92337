"""Tests of H5Web in a headless Chromium.

Shapes: H rows and W columns of a screenshot, three colors.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, Route

ADDRESS = "http://localhost/"
SLIDERS = "[role=slider][aria-orientation=vertical]"  # sliders of dimensions; the horizontal ones limit colors


class H5Web:
    """Viewer with one open file."""

    def __init__(self, page: Page, path: Path) -> None:
        self.page = page
        page.goto(f"{ADDRESS}index.html")
        page.set_input_files("input[type=file]", path)
        page.locator("[role=tree]").wait_for()

    def click(self, path: str) -> None:
        """Select an object in the tree by its path."""
        parts = path.strip("/").split("/")
        for depth in range(1, len(parts) + 1):
            item = self.page.locator(f'[role=treeitem][data-path="/{"/".join(parts[:depth])}"]')
            if depth == len(parts) or item.get_attribute("aria-expanded") == "false":
                item.click()

    def wait_for(self, title: str) -> None:
        """Wait for a figure with this title."""
        self.page.get_by_role("figure", name=title, exact=True).locator("canvas").wait_for()

    def selected(self) -> str | None:
        return self.page.locator("[role=treeitem][aria-selected=true]").get_attribute("data-path")

    def kind(self) -> str:
        """Return the selected kind of visualization."""
        return self.page.locator("[role=tablist] [role=tab][aria-selected=true]").last.inner_text()

    def label(self, side: str) -> str:
        """Return the label of the `abscissa` or the `ordinate`."""
        return self.page.locator(f'figure svg[data-type="{side}"] .visx-axis-label').text_content() or ""

    def sliders(self) -> list[int]:
        """Return the last position of each slider."""
        found = self.page.locator(SLIDERS).all()
        return [int(slider.get_attribute("aria-valuemax") or -1) for slider in found]

    def flip_y(self) -> None:
        """Flip the y axis, as the documentation advises for greyscale images."""
        menu = self.page.get_by_role("button", name="More controls")
        menu.click()
        self.page.locator("button:visible").filter(has_text=re.compile("^Y$")).click(timeout=5000)
        menu.click()
        self.page.wait_for_timeout(500)

    def canvas(self) -> np.ndarray:
        """Return a screenshot of the canvas when something is drawn."""
        deadline = time.monotonic() + 10.0
        while True:
            box = self.page.locator("figure canvas").bounding_box()  # Locator.screenshot would wait for a stable canvas
            png = self.page.screenshot(clip=box)
            screen_HW3 = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
            if coloured(screen_HW3) > 100 or time.monotonic() > deadline:
                return screen_HW3
            self.page.wait_for_timeout(100)


def coloured(screen_HW3: np.ndarray) -> int:
    """Return the number of pixels that are not black, white or gray."""
    return int((np.ptp(screen_HW3.astype(int), axis=2) > 60).sum())


def crop(screen_HW3: np.ndarray) -> np.ndarray:
    """Remove the white margin and the grid around an image."""
    there_HW = screen_HW3.min(axis=2) < 180
    rows, columns = (np.flatnonzero(there_HW.mean(axis=axis) > 0.3) for axis in (1, 0))
    return screen_HW3[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


@pytest.fixture
def h5web(built: Path, browser: Browser) -> Callable[[Path], H5Web]:
    def answer(route: Route) -> None:
        route.fulfill(path=built / route.request.url.removeprefix(ADDRESS))

    page = browser.new_page(viewport={"width": 1000, "height": 560})
    page.route("**/*", answer)
    return lambda path: H5Web(page, path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("trajectories", "NX Scatter"),
        ("metrics", "NX Line"),
        ("checkpoint", "NX Line"),
        ("greyscale", "NX Heatmap"),
        ("colours", "NX RGB"),
    ],
)
def test_file_opens_with_default_plot(name, kind, files, h5web, read_view, screenshots):
    view, viewer = read_view(files[name]), h5web(files[name])
    viewer.wait_for(view.title)
    assert viewer.selected() == "/"  # nothing was clicked
    assert viewer.kind() == kind
    assert coloured(viewer.canvas()) > 200
    if kind in ("NX Scatter", "NX Line"):
        labels = view.axes if kind == "NX Scatter" else [*view.axes, view.signal]
        assert [viewer.label("abscissa"), viewer.label("ordinate")] == labels
    viewer.page.screenshot(path=screenshots / f"h5web-{name}.png")


def test_vector_observations_are_lines_with_sliders(files, h5web, read_view, screenshots):
    name = "/entry/views/observation"
    view, viewer = read_view(files["trajectories"], name), h5web(files["trajectories"])
    viewer.click(name)
    viewer.wait_for(view.title)
    assert viewer.kind() == "NX Line"
    assert [viewer.label("abscissa"), viewer.label("ordinate")] == ["vector step", "observation"]
    assert viewer.sliders() == [size - 1 for size in view.values.shape[1:]]
    before_HW3 = viewer.canvas()
    assert coloured(before_HW3) > 200
    viewer.page.screenshot(path=screenshots / "h5web-vectors.png")
    viewer.page.locator(SLIDERS).last.press("ArrowUp")
    viewer.page.wait_for_timeout(500)
    assert (viewer.canvas() != before_HW3).any()  # shows another element of the vector


def test_image_observations_are_images_with_sliders(files, h5web, read_view, is_upright):
    name = "/entry/views/observation"
    for kind in ("greyscale", "colours"):
        view, viewer = read_view(files[kind], name), h5web(files[kind])
        viewer.click(name)
        viewer.wait_for(view.title)
        assert viewer.sliders() == [size - 1 for size in view.sliders]
        if kind == "greyscale":  # H5Web draws the first row at the bottom and ignores the axis
            assert is_upright(crop(viewer.canvas()).mean(axis=2), view.picture[::-1])
            viewer.flip_y()
        grey = view.picture.mean(axis=2) if kind == "colours" else view.picture
        assert is_upright(crop(viewer.canvas()).mean(axis=2), grey)


def test_weights_are_heatmaps(files, h5web, weights, screenshots):
    viewer = h5web(files["checkpoint"])
    viewer.click(weights)
    viewer.wait_for(weights.rsplit("/", 1)[-1])
    assert viewer.kind() == "Heatmap"
    assert len(np.unique(viewer.canvas().reshape(-1, 3), axis=0)) > 50
    viewer.page.screenshot(path=screenshots / "h5web-weights.png")


@pytest.mark.parametrize("name", ["trajectories", "metrics", "checkpoint"])
def test_every_view_draws_something(name, files, h5web, read_view):
    views: list[str] = []

    def visit(path: str, node: object) -> None:
        if isinstance(node, h5py.Group) and node.attrs.get("NX_class") == "NXdata":
            views.append(f"/{path}")

    with h5py.File(files[name]) as file:
        file.visititems(visit)
    assert len(views) > 8
    viewer = h5web(files[name])
    for view in views:
        viewer.click(view)
        viewer.wait_for(read_view(files[name], view).title)
        assert coloured(viewer.canvas()) > 100, view
