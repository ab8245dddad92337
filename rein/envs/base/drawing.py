"""Drawing functions for frames: boards of coloured cells, and shapes on a canvas.

Frames are (height, width, 3) uint8. Their height and width are even, because video codecs require it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Frame = np.ndarray[Any, np.dtype[np.uint8]]
Colour = tuple[int, int, int]
Point = tuple[float, float]

WHITE, LINE, GREY, DARK = (255, 255, 255), (205, 205, 210), (225, 225, 230), (20, 40, 90)
BLUE, PALE, GREEN, RED, YELLOW = (45, 90, 190), (150, 180, 230), (88, 175, 98), (208, 84, 78), (240, 200, 70)
_CELL = 48  # pixels


def board(cells: Sequence[Sequence[Colour]], disc: Point | None = None) -> Frame:
    """Draw rows of coloured cells, the first row on top, and a blue disc at (row, column), which may be fractional."""
    frame = np.array(cells, np.uint8).repeat(_CELL, 0).repeat(_CELL, 1)
    frame[::_CELL] = frame[:, ::_CELL] = frame[-1] = frame[:, -1] = LINE
    if disc is not None:
        row, column = np.ogrid[: frame.shape[0], : frame.shape[1]]
        top, left = ((place + 0.5) * _CELL - 0.5 for place in disc)
        frame[np.hypot(row - top, column - left) < 0.32 * _CELL] = BLUE
    return frame


class Canvas:
    """White canvas with coordinates in user units, y upwards. `frame` is the image.

    Args:
        x: smallest and largest x.
        y: smallest and largest y.
        unit: pixels per unit.
    """

    def __init__(self, x: tuple[float, float], y: tuple[float, float], unit: float) -> None:
        width, height = (2 * round((high - low) * unit / 2) for low, high in (x, y))
        self.frame: Frame = np.full((height, width, 3), WHITE, np.uint8)
        self._x = x[0] + (np.arange(width) + 0.5) / unit  # of the pixel centres
        self._y = y[0] + (height - np.arange(height) - 0.5)[:, None] / unit

    def line(self, start: Point, end: Point, width: float, colour: Colour) -> None:
        """Draw a line from `start` to `end` with round ends."""
        columns = self._near(self._x, start[0], end[0], width)
        rows = self._near(self._y[:, 0], start[1], end[1], width)
        x, y = self._x[columns] - start[0], self._y[rows] - start[1]
        d_x, d_y = end[0] - start[0], end[1] - start[1]
        along = np.clip((x * d_x + y * d_y) / max(d_x**2 + d_y**2, 1e-12), 0.0, 1.0)
        self.frame[rows, columns][np.hypot(x - along * d_x, y - along * d_y) <= width / 2] = colour

    def disc(self, centre: Point, radius: float, colour: Colour) -> None:
        """Draw a filled disc."""
        self.line(centre, centre, 2 * radius, colour)

    def ground(self, height: Callable[[Any], Any], colour: Colour) -> None:
        """Fill the area below y = height(x). `height` takes and returns arrays."""
        self.frame[self._y <= height(self._x)] = colour

    def _near(self, places: Any, start: float, end: float, width: float) -> slice:
        """Return the pixels along one axis that a line can touch."""
        near = np.flatnonzero((places >= min(start, end) - width / 2) & (places <= max(start, end) + width / 2))
        return slice(near[0], near[-1] + 1) if near.size else slice(0, 0)
