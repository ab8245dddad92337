"""`rein replay`: replay stored episodes from their seeds and actions, compare them bit by bit, and record videos."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from rein.cli.options import arguments_of
from rein.cli.output import say
from rein.cli.rebuild import environment_of
from rein.envs.base.rendering import Video, as_frame, frames_per_second
from rein.envs.wrappers.wrapper import unwrapped
from rein.episodes.episode_replay import Difference, Replay, replay
from rein.files import absolute, short
from rein.store.reader import open_run

_WORDS = {"observation": "observations", "reward": "rewards", "raw_reward": "rewards"}


def main(arguments: Sequence[str]) -> None:
    """Run `rein replay RUN --episode N`. Exits with status 1 if an episode differs."""
    results = _options(**arguments_of(_options, "rein replay", arguments))
    raise SystemExit(0 if all(result.difference is None for result in results) else 1)


def _options(
    run: Annotated[Path, tyro.conf.Positional],
    *,
    episode: tuple[int, ...],
    video: Path | None = None,
    fps: float | None = None,
    environment: str | None = None,
) -> list[Replay]:
    """Replay stored episodes of a run, and print whether observations and rewards agree bit by bit.

    Args:
        run: folder of the run.
        episode: numbers of the episodes.
        video: video file of the episode, with one frame per step: .mp4, .mkv, .mov or .avi.
        fps: frames per second of the video. Default: the frame rate of the environment, or 30.
        environment: my_module:make, a function that returns environments or a loop that has them. Needed only if
            run.json cannot describe the environment; environments of rein, Gymnasium and recipes do not need it.
    """
    if not episode:
        raise ValueError("--episode: give the numbers of one or more episodes")
    if fps is not None and video is None:
        raise ValueError(f"--fps {fps:g}: needs --video")
    if video is not None and len(episode) > 1:
        raise ValueError(f"--video {video}: a video shows one episode, but --episode gives {len(episode)}")
    if video is not None and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # otherwise MuJoCo fails without a screen
    stored, target = open_run(run), None if video is None else absolute(video)
    episodes = [stored.episode(number) for number in episode]
    built = environment_of(stored, environment, render_mode=None if video is None else "rgb_array")
    with contextlib.closing(built):
        if target is None:
            results = replay(built, episodes, run=stored)
        else:
            with film(target, built, fps) as add:
                results = replay(built, episodes, film=add, run=stored)
    for result in results:
        say(_result_line(result))
    if video is not None:
        say(f"video: {video}")
    return results


def _result_line(result: Replay) -> str:
    """Return a line that describes the result of a replay."""
    what = " and ".join(dict.fromkeys(_WORDS[name] for name in result.compared if name in _WORDS)) or "ends"
    steps = f"{result.length:,} step{'s' * (result.length != 1)}"
    if result.difference is None:
        return f"episode {result.id}: {steps} replayed; {what} agree bit by bit"
    return f"episode {result.id}: differs from the stored episode at step {_difference_text(result.difference, steps)}"


def _difference_text(difference: Difference, steps: str) -> str:
    amount = "only in bits" if difference.amount == 0.0 else f"by {difference.amount:.3g}"
    amount = "because one value is NaN" if math.isnan(difference.amount) else amount
    return f"{difference.step} (of {steps}, from 0): {difference.field} {amount}"


@contextlib.contextmanager
def film(path: Path, environment: Any, fps: float | None = None) -> Iterator[Callable[[Any], None]]:
    """Yield a function that adds frames to a video. The file appears at `path` when it is finished."""
    if not path.parent.is_dir():
        raise ValueError(f"--video {short(path)}: the folder {short(path.parent)} does not exist")
    inside = unwrapped(environment)
    video = Video(path, frames_per_second(inside, fps, "--fps "), "--video ")
    try:
        yield lambda rendered: video.add(as_frame(rendered, inside))
        video.finish()
    finally:
        video.discard()
