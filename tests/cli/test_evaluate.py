"""`rein evaluate`: the agent of a run plays new episodes, by whatever its files say of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest

import rein
from rein.agents.ppo import PPO
from rein.cli import main
from rein.envs.cartpole import CartPole
from rein.envs.gymnasium import GymnasiumVectorEnvironment
from rein.handlers.checkpoint import checkpoint
from rein.store.checkpoint_file import read_checkpoint, write_checkpoint


class Mine(PPO):
    """Of a class that is not rein's."""


def make_loop(kind: type[PPO] = Mine, store: rein.HDF5Store | None = None) -> rein.Loop:
    environment = CartPole(4, seed=0, max_episode_steps=20)
    agent = kind(environment.single_observation_space, environment.single_action_space, hidden=(8,), seed=0)
    return rein.training_loop(agent, environment, store, epochs=3, iterations=32)


def make_environment() -> CartPole:
    return CartPole(2, max_episode_steps=5)


class Foreign(gymnasium.Env):
    """Of Gymnasium, and not wrapped."""


def make_number() -> int:
    return 3


def make_loop_without() -> rein.Loop:
    return rein.Loop(lambda state: None)


def train(path: Path, kind: type[PPO]) -> Path:
    """A run of three epochs of a Python program, whose best one is the first."""
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
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "mine", sys.modules[__name__])
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    main(["evaluate", *map(str, words)])
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *map(str, words)])
    assert ended.value.code == 1
    return capsys.readouterr().err


def test_the_newest_checkpoint_of_a_python_program_plays(run, capsys):
    shown = said(capsys, run, "--episodes", 20, "--seed", 5).splitlines()
    newest = f"{run}/checkpoints/epoch-000003.h5"
    assert shown[0] == f"{newest}, after 384 env steps, plays without exploring; seed 5"
    assert shown[1].startswith("episodes  20, ")
    policy = rein.load_agent(run).policy()
    result = rein.evaluate(policy, CartPole(16, seed=5, max_episode_steps=20), episodes=20)
    value = result.episode_return
    mean, spread = f"{float(value.mean()):.6g}", f"{float(value.std(correction=0)):.6g}"
    told = f"return    mean {mean}, standard deviation {spread}, from {float(value.min()):g} to {float(value.max()):g}"
    assert shown[2].rstrip() == told
    assert shown[3].startswith(f"length    mean {mean}, ")


def test_the_best_one_plays_and_any_other_that_is_named(run, capsys):
    for words in (["--best"], ["--best", "score"]):
        assert "best/epoch-000001.h5, after 128 env steps" in said(capsys, run, *words, "--episodes", 1)
    assert "score (max): epoch-000001.h5" in refused(capsys, run, "--best", "loss")
    second = run / "checkpoints/epoch-000002.h5"
    assert f"{second}, after 256 env steps" in said(capsys, run, "--checkpoint", second, "--episodes", 1)
    rein.save(rein.load_agent(run), "agent.h5")
    assert "agent.h5, after 384 env steps" in said(capsys, run, "--checkpoint", "agent.h5", "--episodes", 1)
    assert "not both" in refused(capsys, run, "--best", "--checkpoint", second)


def test_it_is_the_same_under_a_seed_and_explores_if_told(run, capsys):
    words = [run, "--episodes", 8, "--seed", 3]
    greedy, again = said(capsys, *words), said(capsys, *words)
    assert greedy == again
    explores = said(capsys, *words, "--no-deterministic")
    assert "plays as it explores; seed 3" in explores
    assert explores.splitlines()[1:] != greedy.splitlines()[1:]
    drawn = {said(capsys, run, "--episodes", 1).splitlines()[0].rpartition(" ")[2] for _ in range(2)}
    assert len(drawn) == 2


def test_what_is_not_there_is_told(run, capsys):
    assert "run.json cannot be read" in refused(capsys, "none")
    missing = run / "checkpoints/epoch-000009.h5"
    assert f"no checkpoint; {run}/checkpoints has " in refused(capsys, run, "--checkpoint", missing)
    assert "--episodes 0: give 1 or more" in refused(capsys, run, "--episodes", 0)


def test_an_agent_of_ones_own_is_built_by_the_function_that_is_named(here, capsys):
    path = train(here / "mine", Mine)
    told = refused(capsys, path)
    assert (
        "not one of rein's own agents. Build the agent as it was, and use rein.load(agent, path) and rein.eva" in told
    )
    assert "--environment my_module:make_loop" in told
    shown = said(capsys, path, "--environment", "mine:make_loop", "--episodes", 4)
    assert "epoch-000003.h5, after 384 env steps" in shown


def test_another_environment_may_be_named(run, capsys):
    shown = said(capsys, run, "--environment", "mine:make_environment", "--episodes", 4)
    assert "episodes  4, 4 of them truncated" in shown
    assert "length    mean 5, standard deviation 0, from 5 to 5" in shown


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Foreign", "made Foreign, which is no environment of rein's (it has no num_envs, episode_seeds, reseed,"),
        ("Foreign", "name a function that wraps it: rein.envs.gymnasium.GymnasiumEnvironment(Foreign,"),
        ("make_number", "made int, which is no environment of rein's (it has no num_envs,"),
        ("make_loop_without", "made a loop whose environment is None, which is no environment of rein's (it has"),
    ],
)
def test_what_is_no_environment_is_told(run, capsys, name, text):
    said = refused(capsys, run, "--environment", f"mine:{name}")
    assert said.startswith(f"rein: --environment mine:{name}: made ")
    assert text in said


def test_a_run_without_a_checkpoint_is_told_how_to_have_one(here, capsys):
    store = rein.HDF5Store("new")
    make_loop(PPO, store).run()
    store.close()
    for words in ([], ["--best"]):
        assert "the run has not saved any yet; call `checkpoint(loop, store)` before" in refused(capsys, "new", *words)


def test_a_run_of_a_recipe_plays_even_where_its_files_do_not_say_what_its_agent_was_built_for(here, capsys):
    main(["train", "gridworld", "--quiet", "--no-stop-when-solved", "--run", "grid", "--epochs", "2"])
    newest = Path("grid/checkpoints/epoch-000002.h5")
    _, state, about = read_checkpoint(newest)
    del about["builds"]
    write_checkpoint(newest, state, about)
    capsys.readouterr()
    assert said(capsys, "grid", "--episodes", 3).startswith("grid/checkpoints/epoch-000002.h5, after ")


def test_a_film_of_every_episode(run, here, capsys):
    pytest.importorskip("imageio_ffmpeg")
    assert f"filmed: {here}/films\n" in said(capsys, run, "--episodes", 2, "--video", here / "films")
    assert sorted(film.name for film in (here / "films").iterdir()) == ["episode-000001.mp4", "episode-000002.mp4"]


def test_the_videos_have_the_frame_rate_that_is_given(run, here, capsys):
    ffmpeg = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
    said(capsys, run, "--episodes", 1, "--video", here / "videos", "--fps", 12)
    told = subprocess.run([ffmpeg, "-i", here / "videos/episode-000001.mp4"], capture_output=True, text=True).stderr
    assert " 12 fps" in told
    assert "--video" in refused(capsys, run, "--fps", 12)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_run_in_processes_is_evaluated(here, capsys):
    environment = GymnasiumVectorEnvironment.in_processes("CartPole-v1", 2, 0, max_episode_steps=9)
    agent = PPO(environment.single_observation_space, environment.single_action_space, hidden=(8,), seed=0)
    store = rein.HDF5Store("run")
    loop = rein.training_loop(agent, environment, store, epochs=1, iterations=8)
    checkpoint(loop, store, every=1)
    loop.run()
    store.close()
    environment.close()
    assert "episodes  3, 3 of them truncated" in said(capsys, "run", "--episodes", 3)
