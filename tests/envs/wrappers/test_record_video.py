"""Films show what the actions were selected from: one frame for each step of the episodes that were chosen."""

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

from rein.envs.cartpole import CartPole
from rein.envs.gridworld import Gridworld
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.envs.wrappers.record_video import RecordVideo
from rein.envs.wrappers.time import TimeLimit
from rein.episodes import evaluate
from rein.errors import EnvironmentContractError


def film(path: Path, height: int = 32, width: int = 48) -> np.ndarray[Any, Any]:
    """Every frame that the file holds (imageio's own reader leaves its pipes open)."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", path, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    frames = subprocess.run(command, capture_output=True, check=True).stdout
    return np.frombuffer(frames, np.uint8).reshape(-1, height, width, 3)


def greys(path: Path) -> list[int]:
    """What a film of Clockwork shows: the step, drawn as a shade of grey, as near as a film keeps it."""
    return [round(float(frame.mean()) / 30) for frame in film(path)]


def play(environment: Any, steps: int) -> list[int]:
    """The lengths of the episodes of environment 0 that end within so many steps."""
    lengths = []
    for _ in range(steps):
        step = environment.apply_action(torch.zeros(environment.num_envs, 2))
        if step.terminated[0] or step.truncated[0]:
            lengths.append(int(step.final_observation[0, 1]))
    return lengths


def test_a_film_has_a_frame_for_each_step_and_shows_what_was_acted_on(clockwork: Any, tmp_path: Path) -> None:
    environment = RecordVideo(clockwork(3), tmp_path / "videos", fps=5)
    environment.reset()
    lengths = play(environment, 20)
    films = sorted((tmp_path / "videos").glob("*[0-9].mp4"))
    assert [path.name for path in films] == [f"episode-{k + 1:06d}.mp4" for k in range(len(lengths))]
    assert [greys(path) for path in films] == [list(range(length)) for length in lengths]
    environment.close()


def test_every_third_episode_is_filmed_and_no_other(clockwork: Any, tmp_path: Path) -> None:
    environment = RecordVideo(clockwork(1), tmp_path, every=3)
    environment.reset()
    lengths = play(environment, 35)
    environment.close()
    films = {int(path.stem.split("-")[1]): len(film(path)) for path in tmp_path.iterdir()}
    assert len(lengths) >= 6
    assert {k: frames for k, frames in films.items() if k <= len(lengths)} == {
        k: lengths[k - 1] for k in range(3, len(lengths) + 1, 3)
    }


def test_an_episode_that_is_cut_short_is_filmed_as_far_as_it_went(clockwork: Any, tmp_path: Path) -> None:
    environment = RecordVideo(clockwork(2), tmp_path)
    environment.reset()
    for end in (environment.reset, lambda: environment.reset_where(torch.tensor([True, False])), environment.close):
        environment.apply_action(torch.zeros(2, 2))
        environment.apply_action(torch.zeros(2, 2))
        environment.reset_where(torch.tensor([False, True]))  # which is no matter of environment 0
        films = sum(1 for _ in tmp_path.glob("*[0-9].mp4"))
        end()
        assert sum(1 for _ in tmp_path.glob("*[0-9].mp4")) == films + 1
    environment.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"episode-00000{k}.mp4" for k in (1, 2, 3)]
    assert [len(film(path)) for path in tmp_path.iterdir()] == [2, 2, 2]


def test_evaluation_films_each_episode_that_it_plays(tmp_path: Path) -> None:
    """The episode that begins by itself when one ends, and that the next reset throws away, was never played."""
    environment = RecordVideo(Gridworld(1, seed=0, max_episode_steps=4), tmp_path)

    class Waits:
        def select_action(self, observation: Any) -> tuple[Any, dict[str, Any]]:
            return torch.ones(1, dtype=torch.int64), {}

        def reset(self, mask: Any = None) -> None: ...

    result = evaluate(Waits(), environment, 3)
    environment.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"episode-00000{k}.mp4" for k in (1, 2, 3)]
    assert [len(film(path, 240, 240)) for path in sorted(tmp_path.iterdir())] == result.episode_length.tolist()


def test_a_film_looks_like_what_was_rendered(tmp_path: Path) -> None:
    environment = RecordVideo(Gridworld(2, [(4, 4)], seed=0, max_episode_steps=3), tmp_path)
    environment.reset()
    frames = []
    for action in (0, 2, 0):
        frames.append(environment.render(0))
        environment.apply_action(torch.tensor([action, 1]))
    seen = film(tmp_path / "episode-000001.mp4", *frames[0].shape[:2])
    assert len(seen) == 3
    assert np.abs(seen - np.stack(frames).astype(float)).mean() < 6  # a film is not exact


def test_a_film_is_never_written_over(clockwork: Any, tmp_path: Path) -> None:
    for _ in range(3):
        environment = RecordVideo(clockwork(1), tmp_path)
        environment.reset()
        environment.apply_action(torch.zeros(1, 2))
        environment.close()
    assert sorted(path.stem for path in tmp_path.iterdir()) == [
        "episode-000001", "episode-000001-2", "episode-000001-3"
    ]  # fmt: skip


def test_after_loading_filming_waits_for_the_next_episode(clockwork: Any, tmp_path: Path) -> None:
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


def test_filming_changes_nothing(clockwork: Any, tmp_path: Path) -> None:
    plain, filmed = clockwork(3), RecordVideo(clockwork(3), tmp_path)
    assert torch.equal(plain.reset(), filmed.reset())
    for _ in range(10):
        one, other = (environment.apply_action(torch.ones(3, 2)) for environment in (plain, filmed))
        assert all(torch.equal(a, b) for a, b in zip(one[:6], other[:6], strict=True))
    filmed.close()


@pytest.mark.parametrize("missing", ["imageio", "imageio_ffmpeg"])
def test_without_the_extra_the_error_names_it(
    clockwork: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "imageio.v2", raising=False)
    with pytest.raises(
        ImportError, match=r"^RecordVideo needs imageio with ffmpeg: pip install imageio imageio-ffmpeg$"
    ):
        RecordVideo(clockwork(1), tmp_path)


def test_environments_that_do_not_render_and_numbers_out_of_range_are_refused(
    scripted: Any, clockwork: Any, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=r"RecordVideo: Scripted has no render\(\); it cannot be recorded"):
        RecordVideo(scripted([3]), tmp_path)
    wrong: tuple[dict[str, Any], ...] = ({"every": 0}, {"fps": 0}, {"fps": float("nan")}, {"fps": float("inf")})
    for options in wrong:
        with pytest.raises(ValueError, match="give 1"):
            RecordVideo(clockwork(1), tmp_path, **options)


def rate(path: Path) -> float:
    """Frames per second, as ffmpeg tells."""
    told = subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-i", path], capture_output=True, text=True).stderr
    found = re.search(r"([\d.]+) fps", told)
    assert found is not None, told
    return float(found[1])


def a_video_of(environment: Any, folder: Path, **options: Any) -> Path:
    """The video of the first two steps."""
    recorded = RecordVideo(environment, folder, **options)
    recorded.reset()
    for _ in range(2):
        recorded.apply_action(torch.zeros(recorded.num_envs, dtype=torch.int64))
    recorded.close()
    return folder / "episode-000001.mp4"


def test_videos_have_the_frame_rate_that_the_environment_declares(tmp_path: Path) -> None:
    gym = GymnasiumEnvironment("CartPole-v1", 1, 0, render_mode="rgb_array")
    assert rate(a_video_of(gym, tmp_path / "gymnasium")) == 50
    assert rate(a_video_of(TimeLimit(CartPole(2, seed=0), 9), tmp_path / "native")) == 50
    assert rate(a_video_of(Gridworld(1, seed=0), tmp_path / "none")) == 30
    assert rate(a_video_of(CartPole(2, seed=0), tmp_path / "given", fps=7)) == 7


class Renders(CartPole):
    """Renders whatever it is told."""

    rendered: Any

    def render(self, index: int = 0) -> Any:
        return self.rendered


GREY = np.full((32, 48, 3), 128, np.uint8)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rendered", [GREY / 255, (GREY / 255).astype(np.float32), GREY.astype(np.int64), GREY])
def test_frames_of_floats_and_of_integers_are_recorded_without_a_warning(rendered: Any, tmp_path: Path) -> None:
    environment = Renders(1, seed=0)
    environment.rendered = rendered
    seen = film(a_video_of(environment, tmp_path))
    assert len(seen) == 2 and np.abs(seen.astype(float) - 128).max() < 6  # encoding loses a little


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
def test_what_is_not_a_frame_is_named_before_the_step(rendered: Any, keyword: str, tmp_path: Path) -> None:
    environment = Renders(1, seed=0)
    environment.rendered = rendered
    recorded = RecordVideo(environment, tmp_path)
    recorded.reset()
    with pytest.raises(EnvironmentContractError, match=rf"render\(\) of Renders: .*{re.escape(keyword)}"):
        recorded.apply_action(torch.zeros(1, dtype=torch.int64))
    recorded.close()
    assert list(tmp_path.iterdir()) == []


def test_a_frame_of_another_shape_than_the_first_is_named(tmp_path: Path) -> None:
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
