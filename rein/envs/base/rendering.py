"""Rendered frames: boards of coloured cells, shapes on a canvas, and video files.

Frames are (height, width, 3) uint8. Their height and width are even, because video codecs require it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rein.errors import EnvironmentContractError

Frame = np.ndarray[Any, np.dtype[np.uint8]]
Colour = tuple[int, int, int]
Point = tuple[float, float]

WHITE, LINE, GREY, DARK = (255, 255, 255), (205, 205, 210), (225, 225, 230), (20, 40, 90)
BLUE, PALE, GREEN, RED, YELLOW = (45, 90, 190), (150, 180, 230), (88, 175, 98), (208, 84, 78), (240, 200, 70)
_CELL = 48  # pixels
DEFAULT_FPS = 30.0
_SUFFIXES = (".mp4", ".mkv", ".mov", ".avi", ".gif")


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


def frames_per_second(environment: Any, fps: float | None, option: str = "fps=") -> float:
    """Return `fps` if it is given, otherwise the environment's `render_fps`, otherwise 30.

    Raises ValueError if `fps` is below 1 or infinite. The message begins with `option`.
    """
    if fps is None:
        declared = getattr(environment, "render_fps", None)
        return float(declared) if isinstance(declared, int | float) and 0 < declared < math.inf else DEFAULT_FPS
    if not 1 <= fps < math.inf:
        raise ValueError(f"{option}{fps}: give 1 frame per second or more")
    return fps


def as_frame(rendered: Any, environment: Any) -> Frame:
    """Convert the result of `environment.render` to uint8. Shapes other than (height, width, 3) are kept.

    Arrays (height, width), (height, width, 1) and (height, width, 4) are accepted as well. Floats from 0 to 1 are
    scaled to 0..255, and integers from 0 to 255 are cast. Raises EnvironmentContractError for anything else.
    """
    who = f"render() of {type(environment).__name__}"
    if isinstance(rendered, list | tuple):
        got, remedy = f"a list of {len(rendered)} frames", 'build the environment with render_mode="rgb_array"'
        raise EnvironmentContractError(f"{who}: expected one frame, got {got}; {remedy}")
    frame = np.asarray(rendered)
    if frame.ndim != 2 and not (frame.ndim == 3 and frame.shape[2] in (1, 3, 4)):
        got = f"an array of shape {frame.shape}" if frame.shape else repr(rendered)
        remedy = "; move the channels to the end" if frame.ndim == 3 and frame.shape[0] in (1, 3, 4) else ""
        raise EnvironmentContractError(f"{who}: expected a frame of shape (height, width, 3), got {got}{remedy}")
    if frame.dtype == np.uint8:
        return frame
    top = 1 if frame.dtype.kind == "f" else 255
    if frame.dtype.kind not in "fiu" or not ((frame >= 0) & (frame <= top)).all():
        got = f"{frame.dtype} beyond 0..{top}" if frame.dtype.kind in "fiu" else frame.dtype
        raise EnvironmentContractError(f"{who}: expected a frame of uint8, or of floats from 0 to 1, got {got}")
    return (frame * 255 + 0.5).astype(np.uint8) if top == 1 else frame.astype(np.uint8)


class Video:
    """Video file, written under a temporary name until it is finished.

    A .gif file repeats endlessly, and its frames are kept in memory until it is finished.

    Raises ImportError without imageio and ffmpeg, and ValueError if the suffix is not .mp4, .mkv, .mov, .avi or .gif.
    The message begins with `option`.
    """

    def __init__(self, path: Path, fps: float, option: str = "") -> None:
        if path.suffix.lower() not in _SUFFIXES:
            raise ValueError(f"{option}{path}: give a file name that ends with {', '.join(_SUFFIXES)}")
        self.path, self._part = path, path.with_name(f"{path.stem}.part{path.suffix}")
        encoding = {"format": "FFMPEG", "fps": fps, "macro_block_size": 2}
        if path.suffix.lower() == ".gif":
            encoding = {"format": "GIF", "duration": 1000 / fps, "loop": 0}
        self._writer = imageio(option.strip() or "a video").get_writer(self._part, **encoding)
        self._shape: tuple[int, ...] | None = None

    def add(self, frame: Frame) -> None:
        """Append a frame. Raises EnvironmentContractError if its shape differs from the first frame."""
        self._shape = self._shape or frame.shape
        if frame.shape != self._shape:
            raise EnvironmentContractError(
                f"{self.path}: all frames of a video must have the shape of the first, {self._shape}; got {frame.shape}"
            )
        self._writer.append_data(frame[..., 0] if frame.shape[2:] == (1,) else frame)

    def finish(self, path: Path | None = None) -> None:
        """Close the file and move it to `path`, by default the path of the constructor."""
        self._writer.close()
        self._part.replace(path or self.path)

    def discard(self) -> None:
        """Delete the file unless it is finished."""
        self._writer.close()
        self._part.unlink(missing_ok=True)


def imageio(who: str) -> Any:
    """Import imageio. Raises ImportError with installation instructions that name `who`."""
    try:
        import imageio.v2
        import imageio_ffmpeg  # noqa: F401  # imageio writes videos with it
    except ImportError as error:
        raise ImportError(f"{who} needs imageio with ffmpeg: pip install imageio imageio-ffmpeg") from error
    return imageio.v2
