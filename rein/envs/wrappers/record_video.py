"""Films of episodes.

Shapes: N environments.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rein.envs.wrappers.forwarding import Forwarding, require, where_inside
from rein.protocols import Environment
from rein.types import TimeStep, Tree


class RecordVideo(Forwarding):
    """Films every `every`-th episode of environment 0: `folder`/episode-000100.mp4, one frame for each step.

    A frame shows what the action was selected from; what the last action led to is gone when the step returns, for the
    next episode has begun. An episode that a reset or `close` cuts short is filmed as far as it went. A film appears in
    the folder when it is finished, and is never written over: a second one gets the next free name. After
    `load_state_dict`, filming waits for the next episode. Every step waits for the device, to see whether it ended one.

    Raises ImportError without the extra `video`, TypeError for environments that do not render and ValueError for
    numbers below 1.
    """

    def __init__(self, inner: Environment, folder: str | os.PathLike[str], *, every: int = 1, fps: int = 30) -> None:
        if every < 1 or fps < 1:
            raise ValueError(f"RecordVideo(every={every}, fps={fps}): give 1 or more")
        require("RecordVideo", inner, "render", "there is nothing to film")
        _imageio()
        self.inner = inner
        self.folder = Path(folder)
        self.every, self.fps = every, fps
        self._episodes, self._steps = 0, 0  # of environment 0: ended, and taken since the last end
        self._film: Any = None

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        return self._config(folder=str(self.folder), every=self.every, fps=self.fps)

    def close(self) -> None:
        """Finish the film that is being made, and close the inner environment."""
        self._end_episode()
        self.inner.close()

    @where_inside
    def state_dict(self) -> dict[str, Any]:
        """The inner environment's, and the count of episodes."""
        return {"inner": self.inner.state_dict(), "episodes": self._episodes, "steps": self._steps}

    @where_inside
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        episodes, steps = int(state["episodes"]), int(state["steps"])
        self.inner.load_state_dict(state["inner"])
        self._end_episode()
        self._episodes, self._steps = episodes, steps

    def _begin(self, observation: Tree, mask: Tensor | None) -> Tree:
        if mask is None or bool(mask[0]):
            self._end_episode()
        return observation

    def _step(self, action: Tree, mask: Tensor | None) -> TimeStep:
        begins_film = self._steps == 0 and (self._episodes + 1) % self.every == 0
        frame = self.inner.render(0) if begins_film or self._film is not None else None
        time_step = self._step_inner(action, mask)
        ended, valid = torch.stack([(time_step.terminated | time_step.truncated)[0], time_step.valid[0]]).tolist()
        if valid:
            self._steps += 1
            if frame is not None:
                self._film = self._film or _Film(self.folder / f"episode-{self._episodes + 1:06d}.mp4", self.fps)
                self._film.add(frame)
        if ended:
            self._end_episode()
        return time_step

    def _end_episode(self) -> None:
        self._episodes += self._steps > 0
        self._steps = 0
        film, self._film = self._film, None
        if film is not None:
            film.finish()


class _Film:
    """A film that is being made, under another name until it is finished."""

    def __init__(self, path: Path, fps: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._part = path, path.with_suffix(".part.mp4")
        self._writer = _imageio().get_writer(self._part, format="FFMPEG", fps=fps, macro_block_size=2)

    def add(self, frame: np.ndarray[Any, Any]) -> None:
        self._writer.append_data(frame)

    def finish(self) -> None:
        self._writer.close()
        others = (self._path.with_stem(f"{self._path.stem}-{k}") for k in itertools.count(2))
        self._part.replace(next(path for path in itertools.chain([self._path], others) if not path.exists()))


def _imageio() -> Any:
    try:
        import imageio.v2
        import imageio_ffmpeg  # noqa: F401  # what imageio writes films with
    except ImportError as error:
        raise ImportError("RecordVideo needs imageio with ffmpeg: pip install imageio imageio-ffmpeg") from error
    return imageio.v2
