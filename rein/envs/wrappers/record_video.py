"""Wrapper that records videos of episodes.

Shapes: N environments.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rein.envs.base.contract import agents_per_world
from rein.envs.base.rendering import Video, as_frame, frames_per_second, imageio
from rein.envs.wrappers.wrapper import Wrapper, require, unwrapped, where_inside
from rein.files import absolute, make_folder
from rein.protocols import Environment
from rein.types import TimeStep, Tree


class RecordVideo(Wrapper):
    """Record every `every`-th episode of environment 0 as `folder`/episode-000100.mp4, with one frame per step.

    A frame shows the state in which the action was selected. The state after the last action is not shown, because the
    next episode has begun when the step returns. If a reset or `close` cuts an episode short, the video ends there. A
    video appears in the folder when it is finished. If the file exists, the video gets the next free name. After
    `load_state_dict`, recording waits for the next episode. Every step waits for the device. The videos of a
    multi-agent environment show the episodes of world 0.

    Args:
        inner: environment that renders.
        folder: folder for the videos.
        every: number of episodes from one video to the next.
        fps: frames per second; by default the environment's `render_fps`, or 30 if it declares none.

    Raises:
        EnvironmentContractError: by `apply_action`, for a frame that is not (height, width, 3) of uint8, or of floats
            from 0 to 1.
        ImportError: without the extra `video`.
        TypeError: if the environment does not render.
        ValueError: if `every` or `fps` is below 1.
    """

    def __init__(
        self, inner: Environment, folder: str | os.PathLike[str], *, every: int = 1, fps: float | None = None
    ) -> None:
        if every < 1:
            raise ValueError(f"RecordVideo(every={every}): give 1 or more")
        require("RecordVideo", inner, "render", "it cannot be recorded")
        imageio("RecordVideo")
        self.inner = inner
        self._given = str(folder)
        self.folder = absolute(folder)
        self.every, self.fps = every, frames_per_second(unwrapped(inner), fps, "RecordVideo: fps=")
        self._episodes, self._steps = 0, 0  # of environment 0: ended episodes, and steps since the last end
        self._video: Video | None = None

    @property
    def config(self) -> dict[str, Any]:
        """Constructor options, as JSON values."""
        return self._config(folder=self._given, every=self.every, fps=self.fps)

    def close(self) -> None:
        """Finish the open video and close the inner environment."""
        self._end_episode()
        self.inner.close()

    @where_inside
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner environment, and the counts of episodes and steps."""
        return {"inner": self.inner.state_dict(), "episodes": self._episodes, "steps": self._steps}

    @where_inside
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        episodes, steps = int(state["episodes"]), int(state["steps"])
        self.inner.load_state_dict(state["inner"])
        self._end_episode()
        self._episodes, self._steps = episodes, steps

    def _begin(self, observation: Tree, mask: Tensor | None) -> Tree:
        if mask is None or bool(mask[: agents_per_world(self)].any()):
            self._end_episode()
        return observation

    def _step(self, action: Tree, mask: Tensor | None) -> TimeStep:
        begins_video = self._steps == 0 and (self._episodes + 1) % self.every == 0
        frame = None
        if begins_video or self._video is not None:
            frame = as_frame(self.inner.render(0), self.unwrapped)
        seed_1 = self.episode_seeds[:1] if hasattr(self, "worlds") else None
        time_step = self._step_inner(action, mask)
        ended, valid = torch.stack([(time_step.terminated | time_step.truncated)[0], time_step.valid[0]]).tolist()
        if seed_1 is not None:  # an agent may leave before the episode of its world ends
            valid = bool(time_step.valid[: agents_per_world(self)].any())
            ended = bool(self.episode_seeds[0] != seed_1)
        if valid:
            self._steps += 1
            if frame is not None:
                self._video = self._video or self._opened()
                self._video.add(frame)
        if ended:
            self._end_episode()
        return time_step

    def _end_episode(self) -> None:
        self._episodes += self._steps > 0
        self._steps = 0
        video, self._video = self._video, None
        if video is not None:
            video.finish(_free(video.path))

    def _opened(self) -> Video:
        make_folder(self.folder)
        return Video(self.folder / f"episode-{self._episodes + 1:06d}.mp4", self.fps)


def _free(path: Path) -> Path:
    """Return `path`, or the next free name if it exists: `episode-000100-2.mp4`."""
    others = (path.with_stem(f"{path.stem}-{k}") for k in itertools.count(2))
    return next(path for path in itertools.chain([path], others) if not path.exists())
