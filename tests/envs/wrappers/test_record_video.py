"""Tests of RecordVideo."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from PIL import Image

from rein.envs.base.rendering import Video
from rein.envs.cartpole import CartPole
from rein.envs.gridworld import Gridworld
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.envs.wrappers.record_video import RecordVideo
from rein.envs.wrappers.time import TimeLimit
from rein.episodes import evaluate
from rein.errors import EnvironmentContractError


def film(path: Path, height: int = 32, width: int = 48) -> np.ndarray[Any, Any]:
    """Read all frames of a file. imageio's reader is not used, because it leaves its pipes open."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", path, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    frames = subprocess.run(command, capture_output=True, check=True).stdout
    return np.frombuffer(frames, np.uint8).reshape(-1, height, width, 3)


def greys(path: Path) -> list[int]:
    """Return the steps in a video of Clockwork, which draws the step as a shade of grey."""
    return [round(float(frame.mean()) / 30) for frame in film(path)]


def play(environment: Any, steps: int) -> list[int]:
    """Return the lengths of the episodes of environment 0 that end within `steps` steps."""
    lengths = []
    for _ in range(steps):
        step = environment.apply_action(torch.zeros(environment.num_envs, 2))
        if step.terminated[0] or step.truncated[0]:
            lengths.append(int(step.final_observation[0, 1]))
    return lengths


def test_video_has_one_frame_per_step_before_its_action(clockwork: Any, tmp_path: Path) -> None:
    environment = RecordVideo(clockwork(3), tmp_path / "videos", fps=5)
    environment.reset()
    lengths = play(environment, 20)
    films = sorted((tmp_path / "videos").glob("*[0-9].mp4"))
    assert [path.name for path in films] == [f"episode-{k + 1:06d}.mp4" for k in range(len(lengths))]
    assert [greys(path) for path in films] == [list(range(length)) for length in lengths]
    environment.close()


def test_only_every_third_episode_is_recorded(clockwork: Any, tmp_path: Path) -> None:
    environment = RecordVideo(clockwork(1), tmp_path, every=3)
    environment.reset()
    lengths = play(environment, 35)
    environment.close()
    films = {int(path.stem.split("-")[1]): len(film(path)) for path in tmp_path.iterdir()}
    assert len(lengths) >= 6
    assert {k: frames for k, frames in films.items() if k <= len(lengths)} == {
        k: lengths[k - 1] for k in range(3, len(lengths) + 1, 3)
    }


def test_interrupted_episode_is_recorded_up_to_the_interruption(clockwork: Any, tmp_path: Path) -> None:
    environment = RecordVideo(clockwork(2), tmp_path)
    environment.reset()
    for end in (environment.reset, lambda: environment.reset_where(torch.tensor([True, False])), environment.close):
        environment.apply_action(torch.zeros(2, 2))
        environment.apply_action(torch.zeros(2, 2))
        environment.reset_where(torch.tensor([False, True]))  # does not affect environment 0
        films = sum(1 for _ in tmp_path.glob("*[0-9].mp4"))
        end()
        assert sum(1 for _ in tmp_path.glob("*[0-9].mp4")) == films + 1
    environment.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"episode-00000{k}.mp4" for k in (1, 2, 3)]
    assert [len(film(path)) for path in tmp_path.iterdir()] == [2, 2, 2]


def test_evaluation_records_only_its_episodes(tmp_path: Path) -> None:
    """The episode that autoreset begins, and that the next reset discards, is not recorded."""
    environment = RecordVideo(Gridworld(1, seed=0, max_episode_steps=4), tmp_path)

    class Waits:
        def select_action(self, observation: Any) -> tuple[Any, dict[str, Any]]:
            return torch.ones(1, dtype=torch.int64), {}

        def reset(self, mask: Any = None) -> None: ...

    result = evaluate(Waits(), environment, 3)
    environment.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"episode-00000{k}.mp4" for k in (1, 2, 3)]
    assert [len(film(path, 240, 240)) for path in sorted(tmp_path.iterdir())] == result.episode_length.tolist()


def test_existing_video_is_not_overwritten(clockwork: Any, tmp_path: Path) -> None:
    for _ in range(3):
        environment = RecordVideo(clockwork(1), tmp_path)
        environment.reset()
        environment.apply_action(torch.zeros(1, 2))
        environment.close()
    assert sorted(path.stem for path in tmp_path.iterdir()) == [
        "episode-000001", "episode-000001-2", "episode-000001-3"
    ]  # fmt: skip


def test_recording_waits_for_the_next_episode_after_loading(clockwork: Any, tmp_path: Path) -> None:
    saved, loaded = (RecordVideo(clockwork(1), tmp_path / name) for name in ("saved", "loaded"))
    saved.reset()
    before = len(play(saved, 9))
    saved.apply_action(torch.zeros(1, 2))
    loaded.load_state_dict(saved.state_dict())
    lengths = play(loaded, 12)
    loaded.close()
    films = sorted((tmp_path / "loaded").iterdir())
    assert films[0].name == f"episode-{before + 2:06d}.mp4"
    assert len(film(films[0])) == lengths[1]


def test_recording_does_not_change_steps(clockwork: Any, tmp_path: Path) -> None:
    plain, filmed = clockwork(3), RecordVideo(clockwork(3), tmp_path)
    assert torch.equal(plain.reset(), filmed.reset())
    for _ in range(10):
        one, other = (environment.apply_action(torch.ones(3, 2)) for environment in (plain, filmed))
        assert all(torch.equal(a, b) for a, b in zip(one[:6], other[:6], strict=True))
    filmed.close()


@pytest.mark.parametrize("missing", ["imageio", "imageio_ffmpeg"])
def test_missing_extra_raises_with_install_instructions(
    clockwork: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "imageio.v2", raising=False)
    with pytest.raises(
        ImportError, match=r"^RecordVideo needs imageio with ffmpeg: pip install imageio imageio-ffmpeg$"
    ):
        RecordVideo(clockwork(1), tmp_path)


def test_non_rendering_environment_and_invalid_options_raise(scripted: Any, clockwork: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"RecordVideo: Scripted has no render\(\); it cannot be recorded"):
        RecordVideo(scripted([3]), tmp_path)
    wrong: tuple[dict[str, Any], ...] = ({"every": 0}, {"fps": 0}, {"fps": float("nan")}, {"fps": float("inf")})
    for options in wrong:
        with pytest.raises(ValueError, match="give 1"):
            RecordVideo(clockwork(1), tmp_path, **options)


def rate(path: Path) -> float:
    """Return the frames per second that ffmpeg reports."""
    report = subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-i", path], capture_output=True, text=True).stderr
    found = re.search(r"([\d.]+) fps", report)
    assert found is not None, report
    return float(found[1])


def a_video_of(environment: Any, folder: Path, **options: Any) -> Path:
    """Record the first two steps and return the file."""
    recorded = RecordVideo(environment, folder, **options)
    recorded.reset()
    for _ in range(2):
        recorded.apply_action(torch.zeros(recorded.num_envs, dtype=torch.int64))
    recorded.close()
    return folder / "episode-000001.mp4"


def test_video_has_the_frame_rate_of_the_environment(tmp_path: Path) -> None:
    gym = GymnasiumEnvironment("CartPole-v1", 1, 0, render_mode="rgb_array")
    assert rate(a_video_of(gym, tmp_path / "gymnasium")) == 50
    assert rate(a_video_of(TimeLimit(CartPole(2, seed=0), 9), tmp_path / "native")) == 50
    assert rate(a_video_of(Gridworld(1, seed=0), tmp_path / "none")) == 30
    assert rate(a_video_of(CartPole(2, seed=0), tmp_path / "given", fps=7)) == 7


class Renders(CartPole):
    """Renders the attribute `rendered`."""

    rendered: Any

    def render(self, index: int = 0) -> Any:
        return self.rendered


GREY = np.full((32, 48, 3), 128, np.uint8)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rendered", [GREY / 255, (GREY / 255).astype(np.float32), GREY.astype(np.int64), GREY])
def test_float_and_integer_frames_are_recorded_without_warnings(rendered: Any, tmp_path: Path) -> None:
    environment = Renders(1, seed=0)
    environment.rendered = rendered
    seen = film(a_video_of(environment, tmp_path))
    assert len(seen) == 2 and np.abs(seen.astype(float) - 128).max() < 6  # video encoding is lossy


@pytest.mark.parametrize(
    ("rendered", "keyword"),
    [
        ([GREY, GREY], "a list of 2 frames"),
        (GREY.transpose(2, 0, 1), "move the channels to the end"),
        (None, "got None"),
        (GREY[0, 0], "height, width"),
        (GREY.astype(np.float32), "float32 beyond 0..1"),
        (GREY / 255 * np.nan, "float64 beyond 0..1"),
        (GREY.astype(np.int64) * 2, "int64 beyond 0..255"),
        (GREY.astype(str), "uint8"),
    ],
)
def test_invalid_frame_raises_before_the_step(rendered: Any, keyword: str, tmp_path: Path) -> None:
    environment = Renders(1, seed=0)
    environment.rendered = rendered
    recorded = RecordVideo(environment, tmp_path)
    recorded.reset()
    with pytest.raises(EnvironmentContractError, match=rf"render\(\) of Renders: .*{re.escape(keyword)}"):
        recorded.apply_action(torch.zeros(1, dtype=torch.int64))
    recorded.close()
    assert list(tmp_path.iterdir()) == []


def test_frame_with_changed_shape_raises(tmp_path: Path) -> None:
    environment = Renders(1, seed=0)
    recorded = RecordVideo(environment, tmp_path)
    recorded.reset()
    environment.rendered = GREY
    recorded.apply_action(torch.zeros(1, dtype=torch.int64))
    environment.rendered = GREY[:16]
    with pytest.raises(EnvironmentContractError, match="shape of the first"):
        recorded.apply_action(torch.zeros(1, dtype=torch.int64))
    recorded.close()
    assert len(film(tmp_path / "episode-000001.mp4")) == 1


@pytest.mark.parametrize("shape", [(31, 47), (31, 47, 1), (31, 47, 3)])
def test_gif_has_all_frames_at_their_rate(shape: tuple[int, ...], tmp_path: Path) -> None:
    video = Video(tmp_path / "film.gif", fps=20)
    for step in range(3):
        video.add(np.full(shape, 60 * step, np.uint8))
    assert not (tmp_path / "film.gif").exists()
    video.finish()
    frames = film(tmp_path / "film.gif", 31, 47)
    assert [round(float(frame.mean()) / 60) for frame in frames] == [0, 1, 2]
    with Image.open(tmp_path / "film.gif") as gif:
        assert (gif.info["duration"], gif.info["loop"]) == (50, 0)
