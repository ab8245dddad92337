"""`rein evaluate` with agents of recipes, Python programs and custom classes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

import rein
from rein.agents.ppo import PPO
from rein.cli import main
from rein.envs.cartpole import CartPole
from rein.handlers.checkpoint import checkpoint
from rein.store.checkpoint_file import read_checkpoint, write_checkpoint


class Mine(PPO):
    """Custom agent class."""


def make_loop(kind: type[PPO] = Mine, store: rein.HDF5Store | None = None) -> rein.Loop:
    environment = CartPole(4, seed=0, max_episode_steps=20)
    agent = kind(environment.single_observation_space, environment.single_action_space, hidden=(8,), seed=0)
    return rein.training_loop(agent, environment, store, epochs=3, iterations=32)


def make_environment() -> CartPole:
    return CartPole(2, max_episode_steps=5)


def make_number() -> int:
    return 3


def make_loop_without() -> rein.Loop:
    return rein.Loop(lambda state: None)


def train(path: Path, kind: type[PPO]) -> Path:
    """Return a run of three epochs of a Python program. The first epoch is the best."""
    store = rein.HDF5Store(path)
    loop = make_loop(kind, store)

    @loop.epoch_ended
    def score(state: rein.State) -> None:
        state.metrics["score"] = -float(state.epoch)

    checkpoint(loop, store, every=1, keep_best=("score", "max"))
    loop.run()
    store.close()
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "ours", PPO)


@pytest.fixture(autouse=True)
def work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "mine", sys.modules[__name__])
    return tmp_path


def output_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    main(["evaluate", *map(str, words)])
    return capsys.readouterr().out


def error_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *map(str, words)])
    assert ended.value.code == 1
    return capsys.readouterr().err


def test_newest_checkpoint_is_evaluated(run, capsys):
    shown = output_of(capsys, run, "--episodes", 20, "--seed", 5).splitlines()
    newest = f"{run}/checkpoints/epoch-000003.h5"
    assert shown[0] == f"{newest}: 384 env steps, deterministic, seed 5"
    assert shown[1].startswith("episodes  20, ")
    policy = rein.load_agent(run).policy()
    result = rein.evaluate(policy, CartPole(16, seed=5, max_episode_steps=20), episodes=20)
    value = result.episode_return
    mean, spread = f"{float(value.mean()):.6g}", f"{float(value.std(correction=0)):.6g}"
    expected = (
        f"return    mean {mean}, standard deviation {spread}, from {float(value.min()):g} to {float(value.max()):g}"
    )
    assert shown[2].rstrip() == expected
    assert shown[3].strip() == f"median {result.median_return:.6g}, interquartile mean {result.iqm_return:.6g}"
    assert shown[4].startswith(f"length    mean {mean}, ")


def test_best_and_checkpoint_options_select_the_file(run, capsys):
    for words in (["--best"], ["--best", "score"]):
        assert "best/epoch-000001.h5: 128 env steps" in output_of(capsys, run, *words, "--episodes", 1)
    assert "score (max): epoch-000001.h5" in error_of(capsys, run, "--best", "loss")
    second = run / "checkpoints/epoch-000002.h5"
    assert f"{second}: 256 env steps" in output_of(capsys, run, "--checkpoint", second, "--episodes", 1)
    rein.save(rein.load_agent(run), "agent.h5")
    assert "agent.h5: 384 env steps" in output_of(capsys, run, "--checkpoint", "agent.h5", "--episodes", 1)


def test_seed_and_deterministic_options_determine_the_results(run, capsys):
    words = [run, "--episodes", 8, "--seed", 3]
    greedy, again = output_of(capsys, *words), output_of(capsys, *words)
    assert greedy == again
    explores = output_of(capsys, *words, "--no-deterministic")
    assert "with exploration, seed 3" in explores
    assert explores.splitlines()[1:] != greedy.splitlines()[1:]
    drawn = {output_of(capsys, run, "--episodes", 1).splitlines()[0].rpartition(" ")[2] for _ in range(2)}
    assert len(drawn) == 2


def test_render_human_opens_a_window(work_folder, capsys, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    environment = rein.envs.wrappers.TimeLimit(rein.make("CartPole-v1", num_envs=2, seed=0), 20)
    store = rein.HDF5Store(work_folder / "gymnasium")
    agent = PPO(environment, hidden=(8,), rollout_steps=16, minibatches=1, seed=0)
    loop = rein.training_loop(agent, environment, store, iterations=16)
    checkpoint(loop)
    loop.run(epochs=1)
    store.close()
    shown = []
    original = CartPoleEnv.render
    monkeypatch.setattr(CartPoleEnv, "render", lambda self: shown.append(self.render_mode) or original(self))
    assert "episodes  1, " in output_of(capsys, work_folder / "gymnasium", "--episodes", 1, "--render", "human")
    assert len(shown) > 5 and {*shown} == {"human"}


def test_environment_option_builds_a_custom_agent(work_folder, capsys):
    path = train(work_folder / "mine", Mine)
    error = error_of(capsys, path)
    assert "is not an agent of rein. Build the agent as before, and use rein.load(agent, path) and rein.eva" in error
    assert "--env my_module:make_loop" in error
    shown = output_of(capsys, path, "--env", "mine:make_loop", "--episodes", 4)
    assert "epoch-000003.h5: 384 env steps" in shown


def test_environment_option_replaces_the_environment(run, capsys):
    shown = output_of(capsys, run, "--env", "mine:make_environment", "--episodes", 4)
    assert "episodes  4, 4 of them truncated" in shown
    assert "length    mean 5, standard deviation 0, from 5 to 5" in shown


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("make_number", "returned int, which is not an environment (it lacks num_envs,"),
        ("make_loop_without", "returned a loop whose environment is None, which is not an environment (it lacks"),
    ],
)
def test_environment_option_of_wrong_type_raises(run, capsys, name, text):
    error = error_of(capsys, run, "--env", f"mine:{name}")
    assert error.startswith(f"rein: --env mine:{name}: returned ")
    assert text in error


def test_recipe_rebuilds_an_agent_without_saved_spaces(work_folder, capsys):
    main(["train", "gridworld", "--quiet", "--no-stop-when-solved", "--run", "grid", "--epochs", "2"])
    newest = Path("grid/checkpoints/epoch-000002.h5")
    _, state, about = read_checkpoint(newest)
    del about["builds"]
    write_checkpoint(newest, state, about)
    capsys.readouterr()
    assert output_of(capsys, "grid", "--episodes", 3).startswith("grid/checkpoints/epoch-000002.h5: ")


def test_video_option_records_every_episode(run, work_folder, capsys):
    pytest.importorskip("imageio_ffmpeg")
    assert f"videos: {work_folder}/films\n" in output_of(capsys, run, "--episodes", 2, "--video", work_folder / "films")
    assert sorted(film.name for film in (work_folder / "films").iterdir()) == [
        "episode-000001.mp4",
        "episode-000002.mp4",
    ]


def test_fps_option_sets_the_frame_rate(run, work_folder, capsys):
    ffmpeg = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
    output_of(capsys, run, "--episodes", 1, "--video", work_folder / "videos", "--fps", 12)
    text = subprocess.run(
        [ffmpeg, "-i", work_folder / "videos/episode-000001.mp4"], capture_output=True, text=True
    ).stderr
    assert " 12 fps" in text
