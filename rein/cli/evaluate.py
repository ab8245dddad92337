"""`rein evaluate`: evaluate the agent of a run on new episodes."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.table import Table
from torch import Tensor

from rein.cli.options import arguments_of
from rein.cli.output import say
from rein.cli.rebuild import Described, agent_of, environment_of, made_by
from rein.cli.run_folder import plain
from rein.envs.wrappers.record_video import RecordVideo
from rein.episodes import Evaluation, evaluate
from rein.files import inside, short
from rein.loop import Loop
from rein.ops.random import checked_seed
from rein.store.checkpoint_folder import FOLDER
from rein.store.loading import best_file, part_at
from rein.store.shards import BEST

_TOGETHER = 16  # maximum number of environments; each round waits for its longest episode


def main(arguments: Sequence[str]) -> None:
    """Run `rein evaluate RUN`."""
    words = list(arguments)
    if "--best" in words:  # the metric is optional
        after = words.index("--best") + 1
        if after == len(words) or words[after].startswith("-") or Path(words[after]).exists():
            words.insert(after, "")
    _options(**arguments_of(_options, "rein evaluate", words))


def _options(
    run: Annotated[Path, tyro.conf.Positional],
    *,
    best: str | None = None,
    checkpoint: Path | None = None,
    episodes: int = 20,
    deterministic: bool = True,
    seed: int | None = None,
    device: str = "cpu",
    video: Path | None = None,
    render: Literal["human"] | None = None,
    fps: float | None = None,
    environment: str | None = None,
) -> None:
    """Evaluate the agent of a run on new episodes and print statistics of returns and lengths.

    Rewards are those of the environment with the wrappers of the run.

    Args:
        run: folder of the run. Its newest checkpoint is used.
        best: use the best checkpoint. If the run keeps several, give the metric: --best METRIC.
        checkpoint: checkpoint, or agent saved with `rein.save`, to use instead.
        episodes: number of episodes.
        deterministic: take the most likely action; otherwise explore as in training.
        seed: seed of the episodes. Random by default, and printed.
        device: device of the agent, and of the environment if it supports it.
        video: folder for videos of all episodes.
        render: show the episodes in a window. Only for environments of Gymnasium, which are built with
            `render_mode="human"`.
        fps: frames per second of the videos. Default: the frame rate of the environment, or 30.
        environment: my_module:make, a function that returns environments or the loop of the run. Needed only if
            run.json cannot describe the environment; environments of rein, Gymnasium and recipes do not need it.
    """
    if best is not None and checkpoint is not None:
        raise ValueError(f"rein evaluate: --best and --checkpoint {checkpoint} cannot be combined; give one of them")
    if fps is not None and video is None:
        raise ValueError(f"--fps {fps:g}: needs --video")
    if video is not None and render is not None:
        raise ValueError(f"--video {video} and --render {render} cannot be combined; give one of them")
    if episodes < 1:
        raise ValueError(f"--episodes {episodes}: must be 1 or more")
    torch.set_num_threads(1)  # one thread is fastest for small batches
    seed = secrets.randbits(31) if seed is None else checked_seed(seed)
    described = Described.of(run.expanduser())
    found = part_at(checkpoint or (run if best is None else _best(inside(run, FOLDER, BEST), best or None)))
    made = None if environment is None else made_by(environment)
    itself = f"rein.evaluate(agent.policy(), environment, episodes={episodes})"
    agent = agent_of(found, described, made, device, "rein evaluate RUN", itself)
    with contextlib.closing(_environment(described, made, episodes, device, video, render, fps)) as played_in:
        played_in.reseed(seed)
        result = evaluate(agent.policy(deterministic=deterministic), played_in, episodes)
    mode = "deterministic" if deterministic else "with exploration"
    say(f"{short(found.path)}: {getattr(agent, 'env_steps', 0):,} env steps, {mode}, seed {seed}")
    say(_table(result))
    if video is not None:
        say(f"videos: {plain(video)}")


def _best(folder: Path, metric: str | None) -> Path:
    """Return the file of the best checkpoint by a metric, or the folder if no metric was recorded."""
    return best_file(folder, metric) or folder


def _environment(
    run: Described, made: Any, episodes: int, device: str, video: Path | None, render: str | None, fps: float | None
) -> Any:
    """Return the environments. A video or a window uses a single environment, so that it shows complete episodes."""
    if video is not None and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # otherwise MuJoCo fails without a screen
    render_mode = render if video is None else "rgb_array"
    if made is None:
        count = min(episodes, _TOGETHER) if render_mode is None else 1
        built = environment_of(run, num_envs=count, device=device, render_mode=render_mode)
    else:
        built = made.parts["environment"] if isinstance(made, Loop) else made
    if render is not None:
        _check_window(built)
    return built if video is None else RecordVideo(built, video, fps=fps)


def _check_window(environment: Any) -> None:
    """Raise ValueError unless the environment shows itself in a window."""
    while hasattr(environment, "inner"):
        environment = environment.inner
    if getattr(environment, "render_mode", None) != "human":
        raise ValueError(
            f"--render human: {type(environment).__name__} was not built with render_mode='human' and opens no window; "
            "record its episodes with --video FOLDER"
        )


def _table(result: Evaluation) -> Table:
    count, truncated = len(result.episode_return), int(result.truncated.sum())
    table = Table.grid(padding=(0, 2))
    table.add_row("episodes", f"{count:,}, {truncated:,} of them truncated")
    table.add_row("return", _statistics(result.episode_return))
    table.add_row("", f"median {result.median_return:.6g}, interquartile mean {result.iqm_return:.6g}")
    table.add_row("length", _statistics(result.episode_length.double()))
    if not math.isnan(result.success_rate):
        table.add_row("success", f"{result.success_rate:.1%} of the episodes")
    return table


def _statistics(value_E: Tensor) -> str:
    mean, spread, low, high = (float(x) for x in (value_E.mean(), value_E.std(correction=0), *value_E.aminmax()))
    return f"mean {mean:.6g}, standard deviation {spread:.6g}, from {low:.6g} to {high:.6g}"
