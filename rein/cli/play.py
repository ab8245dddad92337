"""`rein evaluate` and `rein replay`: play new episodes with the agent of a run, or stored episodes again."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.table import Table
from torch import Tensor

from rein.cli.arguments import parse_arguments
from rein.cli.experiment import Experiment
from rein.cli.rebuild import Described, agent_of, environment_of, made_by
from rein.cli.run_folder import plain
from rein.cli.terminal import say
from rein.envs.base.rendering import Video, as_frame, frames_per_second
from rein.envs.wrappers.record_video import RecordVideo
from rein.envs.wrappers.wrapper import unwrapped
from rein.episodes import Evaluation
from rein.episodes import evaluate as play_episodes
from rein.episodes.episode_replay import Difference, Replay, replay
from rein.files import absolute, inside, short
from rein.integrations.learning_curves import shown_option
from rein.loop import Loop
from rein.ops.random import checked_seed
from rein.store.checkpoint_file import BEST
from rein.store.checkpoint_folder import FOLDER
from rein.store.loading import best_file, part_at
from rein.store.reader import open_run

_TOGETHER = 16  # maximum number of environments; each round waits for its longest episode
_FIELDS = {"observation": "observations", "reward": "rewards", "raw_reward": "rewards"}


def evaluate_command(arguments: Sequence[str]) -> None:
    """Run `rein evaluate RUN`."""
    words = list(arguments)
    if "--best" in words:  # the metric is optional
        after = words.index("--best") + 1
        if after == len(words) or words[after].startswith("-") or Path(words[after]).exists():
            words.insert(after, "")
    evaluate(**parse_arguments(evaluate, "rein evaluate", words))


def evaluate(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
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
    env: str | None = None,
    agent: str | None = None,
    learner: int | None = None,
) -> None:
    """Evaluate the agent of a run on new episodes and print statistics of returns and lengths.

    Rewards are those of the environment with the wrappers of the run. All learners of a population are evaluated on the
    same episodes.

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
        env: Gymnasium id, or my_module:make, a function that returns an environment or the loop of the run. Needed only
            for other environments than those of rein, Gymnasium and recipes.
        agent: my_module:Class. Needed only if the run was started with such an agent.
        learner: number of the learner of a population to evaluate, from 0. Default: all of them.
    """
    if best is not None and checkpoint is not None:
        raise ValueError(f"rein evaluate: --best and --checkpoint {checkpoint} cannot be combined; give one of them")
    _check_video(video, fps)
    if video is not None and render is not None:
        raise ValueError(f"--video {video} and --render {render} cannot be combined; give one of them")
    if episodes < 1:
        raise ValueError(f"--episodes {episodes}: must be 1 or more")
    torch.set_num_threads(1)  # one thread is fastest for small batches
    seed = secrets.randbits(31) if seed is None else checked_seed(seed)
    described = Described.of(run.expanduser())
    folder = inside(run, FOLDER, BEST)
    saved = part_at(checkpoint or (run if best is None else best_file(folder, best or None) or folder))
    typed = Experiment(None, env, agent)

    def make() -> Any:
        count = min(episodes, _TOGETHER) if video is None and render is None else 1  # shows complete episodes
        mode = render if video is None else "rgb_array"
        if env is not None:
            return made_by(described, env, mode, num_envs=count, device=device)
        return environment_of(described, typed, command="evaluate", num_envs=count, device=device, render_mode=mode)

    made = None if env is None else make()
    itself = f"rein.evaluate(agent.policy(), environment, episodes={episodes})"
    trained = agent_of(saved, described, made, device, "evaluate", itself, typed)
    learners = _learners(trained, learner)
    if len(learners) > 1 and (video is not None or render is not None):
        raise ValueError(f"{run}: has {len(learners)} learners; choose one with --learner N")
    results: list[Evaluation] = []
    for each in learners:
        if results or made is None:  # new episodes from the seed need a new environment
            made = make()
        with contextlib.closing(_environment(made, video, render, fps)) as played_in:
            played_in.reseed(seed)
            results.append(play_episodes(each.policy(deterministic=deterministic), played_in, episodes))
    mode = "deterministic" if deterministic else "with exploration"
    say(f"{short(saved.path)}: {getattr(trained, 'env_steps', 0):,} env steps, {mode}, seed {seed}")
    say(_table(results[0]) if len(results) == 1 else _table_of_learners(trained, results))
    if video is not None:
        say(f"videos: {plain(video)}")


def _learners(agent: Any, learner: int | None) -> list[Any]:
    """Return the agents to evaluate: the learners of a population, the chosen one, or the agent itself."""
    count = getattr(agent, "num_learners", 0)
    if learner is not None and not 0 <= learner < count:
        learners = f"the learners are 0 to {count - 1}" if count else "the run has a single agent"
        raise ValueError(f"--learner {learner}: {learners}")
    if not count:
        return [agent]
    return [agent.agent(number) for number in (range(count) if learner is None else [learner])]


def _check_video(video: Path | None, fps: float | None) -> None:
    """Check the options of a video, and let MuJoCo render without a screen."""
    if fps is not None and video is None:
        raise ValueError(f"--fps {fps:g}: needs --video")
    if video is not None and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")


def _environment(made: Any, video: Path | None, render: str | None, fps: float | None) -> Any:
    """Return the environments, which may be those of a loop, with a recorder if there is a folder for videos."""
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


def _table_of_learners(population: Any, results: Sequence[Evaluation]) -> Table:
    """Return a table with a row for each learner, with the options in which they differ. The best row is bold."""
    differ = population.differing_options
    names = [name.replace("_", " ") for name in differ]
    headings = ["learner", *names, "return", "standard deviation", "from", "to", "length"]
    table = Table(*headings, box=None, pad_edge=False, header_style="bold")
    best = max(range(len(results)), key=lambda number: results[number].mean_return)
    for number, result in enumerate(results):
        low, high = (float(value) for value in result.episode_return.aminmax())
        numbers = [result.mean_return, result.std_return, low, high, result.mean_length]
        values = [shown_option(values[number]) for values in differ.values()]
        texts = [plain(value) if isinstance(value, str) else f"{value:.4g}" for value in values]
        cells = [str(number), *texts, *(f"{value:.6g}" for value in numbers)]
        table.add_row(*cells, style="bold" if number == best else None)
    return table


def _statistics(value_E: Tensor) -> str:
    mean, spread, low, high = (float(x) for x in (value_E.mean(), value_E.std(correction=0), *value_E.aminmax()))
    return f"mean {mean:.6g}, standard deviation {spread:.6g}, from {low:.6g} to {high:.6g}"


def replay_episodes(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    *,
    episode: tuple[int, ...],
    video: Path | None = None,
    fps: float | None = None,
    env: str | None = None,
) -> None:
    """Replay stored episodes of a run, and print whether observations and rewards agree bit by bit.

    Exits with status 1 if an episode differs.

    Args:
        run: folder of the run.
        episode: numbers of the episodes.
        video: video file of the episode, with one frame per step: .mp4, .mkv, .mov, .avi or .gif.
        fps: frames per second of the video. Default: the frame rate of the environment, or 30.
        env: Gymnasium id, or my_module:make, a function that returns an environment or the loop of the run. Needed only
            for other environments than those of rein, Gymnasium and recipes.
    """
    if not episode:
        raise ValueError("--episode: give the numbers of one or more episodes")
    _check_video(video, fps)
    if video is not None and len(episode) > 1:
        raise ValueError(f"--video {video}: a video shows one episode, but --episode gives {len(episode)}")
    stored = open_run(run)
    target = None if video is None else absolute(video)
    episodes = [stored.episode(number) for number in episode]
    built = environment_of(stored, Experiment(None, env), render_mode=None if video is None else "rgb_array")
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
    raise SystemExit(int(any(result.difference is not None for result in results)))


def _result_line(result: Replay) -> str:
    """Return a line that describes the result of a replay."""
    fields = " and ".join(dict.fromkeys(_FIELDS[name] for name in result.compared if name in _FIELDS)) or "ends"
    steps = f"{result.length:,} step{'s' * (result.length != 1)}"
    if result.difference is None:
        return f"episode {result.id}: {steps} replayed; {fields} agree bit by bit"
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
    task = unwrapped(environment)
    video = Video(path, frames_per_second(task, fps, "--fps "), "--video ")
    try:
        yield lambda rendered: video.add(as_frame(rendered, task))
        video.finish()
    finally:
        video.discard()
