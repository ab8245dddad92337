"""Histograms, images and videos that `state.log` passes to loggers."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from torch import Tensor


class Histogram:
    """Histogram of numbers, such as the weights of a layer or the actions of an epoch.

    Args:
        values: Array or tensor of numbers, of any shape. NaN and infinity are left out.
    """

    method = "write_histogram"

    def __init__(self, values: Any) -> None:
        array = _host_copy(values).astype(np.float64).reshape(-1)
        self.values = array[np.isfinite(array)]
        self.nbytes = self.values.nbytes


class Image:
    """Image of 8-bit pixels.

    Args:
        pixels: Array or tensor `(H, W)`, `(H, W, 3)` or `(H, W, 4)`: uint8, or floats from 0 to 1.

    Raises:
        ValueError: If shape or dtype differ.
    """

    method = "write_image"

    def __init__(self, pixels: Any) -> None:
        self.pixels = _pixels("Image", _host_copy(pixels), 2)
        self.nbytes = self.pixels.nbytes

    def png(self) -> bytes:
        """Return the image as a PNG file."""
        from PIL import Image as Pillow

        file = io.BytesIO()
        Pillow.fromarray(self.pixels).save(file, "PNG")
        return file.getvalue()


class Video:
    """Video without sound.

    Args:
        frames: Array, tensor or list of frames `(T, H, W)` or `(T, H, W, 3)`: uint8, or floats from 0 to 1.
        fps: Frames per second.

    Raises:
        ValueError: If shape or dtype differ, if there are no frames, or if `fps` is not above 0.
    """

    method = "write_video"

    def __init__(self, frames: Any, fps: float = 30.0) -> None:
        if not isinstance(frames, np.ndarray | Tensor):
            frames = np.stack([_host_copy(frame) for frame in frames]) if len(frames) else np.empty(0)
        self.frames = _pixels("Video", _host_copy(frames), 3)
        if not fps > 0 or not len(self.frames):
            raise ValueError(
                f"Video(fps={fps}) of {len(self.frames)} frames: expected fps above 0 and at least one frame"
            )
        self.fps = fps
        self.nbytes = self.frames.nbytes

    def gif(self) -> bytes:
        """Return the video as an animated GIF file. A GIF has at most 50 frames per second."""
        from PIL import Image as Pillow

        file = io.BytesIO()
        first, *others = [Pillow.fromarray(frame) for frame in self.frames]
        milliseconds = max(20, round(1000 / self.fps))
        first.save(file, "GIF", save_all=True, append_images=others, duration=milliseconds, loop=0)
        return file.getvalue()


def _host_copy(values: Any) -> np.ndarray[Any, Any]:
    """Return a copy as an array: the loggers write it later, in another thread."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()  # NumPy has no bfloat16
    return np.array(values)


def _pixels(kind: str, array: np.ndarray[Any, Any], dimensions: int) -> np.ndarray[Any, Any]:
    """Return uint8 pixels. Raises ValueError for another shape or dtype."""
    channels = array.shape[dimensions:]
    if array.ndim < dimensions or channels not in ((), (3,), (4,)) or 0 in array.shape[1:]:
        raise ValueError(f"{kind} of shape {array.shape}: expected height, width and, with colors, 3 or 4 channels")
    if array.dtype == np.uint8:
        return array
    if not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"{kind} of dtype {array.dtype}: expected uint8, or floats from 0 to 1")
    return np.rint(np.clip(np.nan_to_num(array), 0.0, 1.0) * 255.0).astype(np.uint8)
