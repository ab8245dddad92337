"""`rein replay`: stored episodes played again from their seeds and actions, compared to the bit, and filmed."""

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
from rein.envs.base.video import Video, as_frame, frames_per_second
from rein.envs.wrappers.base import unwrapped
from rein.episodes.replay import Difference, Replay, replay
from rein.files import absolute, short
from rein.store.reader import open_run

_WORDS = {"observation": "observations", "reward": "rewards", "raw_reward": "rewards"}


def main(arguments: Sequence[str]) -> None:
    """The command `rein replay RUN --episode N`; exits with 1 where an episode comes out as another one."""
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
    """Play stored episodes of a run again, and say whether observations and rewards agree bit for bit.

    Args:
        run: the folder of a run.
        episode: the numbers of the episodes.
        video: record the episode to this file, one frame for each step: .mp4, .mkv, .mov or .avi.
        fps: frames per second of the video; by default those that the environment declares, or 30.
        environment: what builds the environment, where run.json cannot say: my_module:make, a function that returns
            environments or a loop that has some. rein's own environments, Gymnasium's and recipes need none.
    """
    if not episode:
        raise ValueError("--episode: give the number of an episode, or several")
    if fps is not None and video is None:
        raise ValueError(f"--fps {fps:g}: give --video as well")
    if video is not None and len(episode) > 1:
        raise ValueError(f"--video {video}: a film is of one episode, and --episode gives {len(episode)}")
    if video is not None and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo would look for a screen otherwise, and fail
    stored, target = open_run(run), None if video is None else absolute(video)
    episodes = [stored.episode(number) for number in episode]
    built = environment_of(stored, environment, filming=video is not None)
    with contextlib.closing(built):
        if target is None:
            results = replay(built, episodes)
        else:
            with film(target, built, fps) as add:
                results = replay(built, episodes, film=add)
    for result in results:
        say(_told(result))
    if video is not None:
        say(f"filmed: {video}")
    return results


def _told(result: Replay) -> str:
    """One line that says how a replay went."""
    what = " and ".join(dict.fromkeys(_WORDS[name] for name in result.compared if name in _WORDS)) or "ends"
    steps = f"{result.length:,} step{'s' * (result.length != 1)}"
    if result.difference is None:
        return f"episode {result.id}: {steps} played again; {what} agree bit for bit"
    return f"episode {result.id}: differs from what was stored at step {_where(result.difference, steps)}"


def _where(difference: Difference, steps: str) -> str:
    amount = "in bits alone" if difference.amount == 0.0 else f"by {difference.amount:.3g}"
    amount = "where one is not a number" if math.isnan(difference.amount) else amount
    return f"{difference.step} (of {steps}, from 0): {difference.field} {amount}"


@contextlib.contextmanager
def film(path: Path, environment: Any, fps: float | None = None) -> Iterator[Callable[[Any], None]]:
    """Yield a function that takes the frames of a video, which appears at `path` when it is finished."""
    if not path.parent.is_dir():
        raise ValueError(f"--video {short(path)}: there is no folder {short(path.parent)}")
    inside = unwrapped(environment)
    video = Video(path, frames_per_second(inside, fps, "--fps "), "--video ")
    try:
        yield lambda rendered: video.add(as_frame(rendered, inside))
        video.finish()
    finally:
        video.discard()
