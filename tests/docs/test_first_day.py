"""Common first tasks with rein: a page has short code for each, and the code runs."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
import torch

import rein
from tests import programs
from tests.docs.pages import DOCS

HOW_TO, TUTORIALS, REFERENCE = DOCS / "how_to", DOCS / "tutorials", DOCS / "reference"
BLOCK = re.compile(r"^```(?:python|\{code-block\} python|\{code-cell\} ipython3)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ENVIRONMENT = {**os.environ, "SDL_VIDEODRIVER": "dummy", "MPLBACKEND": "agg"}


def block(page: str, contains: str, folder: Path = HOW_TO) -> str:
    """Return the only Python block of a page that contains a text."""
    found = [text for text in BLOCK.findall((folder / page).read_text(encoding="utf-8")) if contains in text]
    assert len(found) == 1, f"{page}: {len(found)} blocks contain {contains!r}"
    return found[0]


def code_lines(program: str) -> int:
    """Count the lines that are neither blank nor a comment."""
    lines = [line.strip() for line in program.splitlines()]
    return sum(bool(line) and not line.startswith("#") for line in lines)


def start(program: str, folder: Path) -> programs.Program:
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(program, encoding="utf-8")
    return programs.Program("script.py", cwd=folder, env=ENVIRONMENT)


def run(program: str, folder: Path) -> str:
    done = start(program, folder).wait()
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(*words: str, folder: Path) -> None:
    """Run `rein train` in a folder."""
    done = programs.Program("-m", "rein", "train", *words, cwd=folder, env=ENVIRONMENT).wait()
    assert done.returncode == 0, done.stderr


def test_resume_after_kill_9_in_8_lines(tmp_path: Path) -> None:
    program = block("resume.md", "rein.resume(loop)")
    assert code_lines(program) <= 8
    run(program, tmp_path / "whole")
    killed = start(program, tmp_path / "killed")
    checkpoints = tmp_path / "killed/runs/cartpole/checkpoints"
    while not list(checkpoints.glob("*.h5")):
        assert killed.poll() is None
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    assert not (checkpoints / "epoch-000020.h5").exists()
    run(program, tmp_path / "killed")
    one, other = (rein.load_agent(tmp_path / name / "runs/cartpole").networks for name in ("whole", "killed"))
    assert (checkpoints / "epoch-000020.h5").exists()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.slow
def test_evaluate_and_film_in_6_lines(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    run(block("evaluate_and_film.md", 'store="runs/film"'), tmp_path)
    program = block("evaluate_and_film.md", "RecordVideo(")
    assert code_lines(program) <= 6
    run(program, tmp_path)
    assert len(list((tmp_path / "videos").glob("*.mp4"))) == 3


@pytest.mark.default_cases("class Residual", "WandbLogger(", "class JSONLogger", "class NumpyStore")
@pytest.mark.parametrize(
    ("page", "contains", "lines", "needs", "made"),
    [
        ("custom_networks.md", "class Residual", 20, [], ""),
        ("custom_networks.md", "def pixels", 20, ["cv2", "pygame"], ""),
        ("dict_observations.md", "class Corners", 25, [], ""),
        ("log_metrics.md", "WandbLogger(", 6, ["wandb"], "wandb/offline-run-*"),
        ("own_store_or_logger.md", "class JSONLogger", 20, [], "metrics.jsonl"),
        ("own_store_or_logger.md", "class NumpyStore", 20, [], ""),
    ],
    ids=["class Residual", "def pixels", "class Corners", "WandbLogger(", "class JSONLogger", "class NumpyStore"],
)
def test_block_is_short_and_runs(
    page: str, contains: str, lines: int, needs: list[str], made: str, tmp_path: Path
) -> None:
    for package in needs:
        pytest.importorskip(package)
    program = block(page, contains)
    assert code_lines(program) <= lines
    output = run(program, tmp_path)
    assert not made or list(tmp_path.glob(made))
    if contains == "class Corners":
        assert float(output) > 0.9


def test_trajectories_with_h5py_and_pandas_in_12_lines(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    run(block("read_trajectories.md", "rein.train("), tmp_path)
    program = block("read_trajectories.md", "import pandas")
    assert code_lines(program) <= 12
    assert "import rein" not in program
    assert "return" in run(program, tmp_path)


@pytest.mark.slow
def test_best_3_trajectories_in_10_lines(tmp_path: Path) -> None:
    setup, program = (block("handlers.md", text, REFERENCE) for text in ("loop = rein.training_loop(", "def keep_best"))
    assert code_lines(program) <= 10
    output = run(
        setup + program + "state = loop.run(epochs=5)\nprint(*(episode.episode_return for episode in best))", tmp_path
    )
    returns = [float(word) for word in output.split()]
    assert len(returns) == 3
    assert returns == sorted(returns, reverse=True)


def test_reinforce_in_50_lines(tmp_path: Path) -> None:
    program = block("algorithm.md", "class Reinforce", TUTORIALS)
    assert code_lines(program) <= 50
    run(program + block("algorithm.md", "reinforce = ", TUTORIALS).replace("80_000", "4_000"), tmp_path)


@pytest.mark.slow
def test_torch_environment_checked_by_the_contract_in_40_lines(tmp_path: Path) -> None:
    program = block("environment.md", "class Lander", TUTORIALS) + block("environment.md", "seed=seed))", TUTORIALS)
    assert code_lines(program) <= 40
    run(program, tmp_path)


@pytest.mark.slow
def test_supervised_with_early_stopping_in_20_lines(tmp_path: Path) -> None:
    data, program = (block("supervised.md", text, TUTORIALS) for text in ("def rings", "rein.early_stop("))
    assert code_lines(program) <= 20
    assert run(data + program + "print(state.status)", tmp_path) == "halted\n"


@pytest.mark.slow
def test_curves_of_3_seeds_in_4_lines(tmp_path: Path) -> None:
    training = block("seeds_and_sweeps.md", "def train", TUTORIALS).replace("30_000", "2_000")
    program = block("seeds_and_sweeps.md", "range(3)", TUTORIALS).replace("[3e-3] * 3", "[0.003] * 3")
    plot = block("seeds_and_sweeps.md", 'iterdir()), "episode_return"', TUTORIALS)
    assert code_lines(plot) <= 4
    run(training + program + plot + "import matplotlib.pyplot as plt\nplt.savefig('seeds.png')", tmp_path)
    assert (tmp_path / "seeds.png").stat().st_size > 10_000


@pytest.mark.slow
def test_sac_on_halfcheetah_with_tensorboard_in_8_lines(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    pytest.importorskip("tensorboard")
    program = block("log_metrics.md", 'TensorBoardLogger("runs/halfcheetah/tensorboard")')
    assert code_lines(program) <= 8
    run(program.replace("1_000_000", "1_200"), tmp_path)
    assert list((tmp_path / "runs/halfcheetah/tensorboard").glob("events.*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "contains", "lines"),
    [
        ("action_masks.md", "action_mask=True", 6),
        ("adaptive_learning_rate.md", "def adapt", 16),
        ("custom_losses.md", "class LogCoshDQN", 20),
        ("custom_replay.md", "class DistinctSAC", 15),
        ("populations.md", "best = agent.agent(2)", 12),
        ("shape_rewards.md", "def shape", 16),
    ],
    ids=["masks", "learning rate from KL", "loss", "without replacement", "population", "shaped reward"],
)
def test_program_of_a_page_is_short_and_runs(page: str, contains: str, lines: int, tmp_path: Path) -> None:
    program = block(page, contains)
    assert code_lines(program) <= lines
    run(program, tmp_path)


@pytest.mark.slow
def test_curiosity_in_25_lines(tmp_path: Path) -> None:
    program = block("shape_rewards.md", "def curiosity")
    assert code_lines(program) <= 25
    run("import rein\n" + program, tmp_path)


@pytest.mark.slow
def test_asynchronous_run_in_6_lines(tmp_path: Path) -> None:
    program = block("collection.md", "rein.Asynchronous(ahead=16")
    assert code_lines(program) <= 6
    assert float(run("import rein\n" + program, tmp_path)) >= 0.0


@pytest.mark.slow
def test_student_learns_from_a_teacher_in_12_lines(tmp_path: Path) -> None:
    teacher, program = block("imitate.md", "teacher = rein.PPO"), block("imitate.md", "def ask_teacher")
    assert code_lines(program) <= 12
    assert float(run(teacher + program, tmp_path).split()[-1]) > 400.0


@pytest.mark.slow
def test_parallel_environment_of_pettingzoo_in_35_lines(tmp_path: Path) -> None:
    program = block("multi_agent.md", "class Meet")
    assert code_lines(program) <= 35
    assert float(run("import rein\n" + program, tmp_path)) > -10.0


@pytest.mark.slow
def test_sweep_over_learning_rates_in_8_lines(tmp_path: Path) -> None:
    training = block("seeds_and_sweeps.md", "def train", TUTORIALS).replace("30_000", "2_000")
    program = block("seeds_and_sweeps.md", "product(rates", TUTORIALS)
    assert code_lines(program) <= 8
    output = run(training + program + 'print(rein.list_runs("runs"))', tmp_path)
    assert output.count("learning rate 0.0003, seed") == 2
    assert output.count("completed") == 4


@pytest.mark.slow
def test_onnx_without_rein_in_8_lines_each(tmp_path: Path) -> None:
    for package in ("onnx", "onnxruntime", "onnxscript", "safetensors"):
        pytest.importorskip(package)
    parts = [
        block("export.md", text) for text in ('rein.export(policy, "policy.onnx")', 'InferenceSession("policy.onnx")')
    ]
    assert all(code_lines(program) <= 8 for program in parts)
    run(parts[0], tmp_path)
    assert "import rein" not in parts[1]
    assert run(parts[1], tmp_path).startswith("[")


@pytest.mark.slow
def test_options_from_a_file_in_5_lines(tmp_path: Path) -> None:
    page = (HOW_TO / "config_files.md").read_text(encoding="utf-8")
    (options,) = re.findall(r"^```\{code-block\} toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "lander.toml").write_text(options, encoding="utf-8")
    assert "rein train --config lander.toml --env CartPole-v1 " in page
    train("--config", "lander.toml", "--env", "CartPole-v1", "--env-steps", "2_048", "--quiet", folder=tmp_path)
    (info,) = (tmp_path / "runs").glob("*/run.json")
    config = json.loads(info.read_text(encoding="utf-8"))["parts"]["agent"]["config"]
    assert (config["learning_rate"], config["hidden"]) == (0.001, [64, 64])


@pytest.mark.slow
def test_any_environment_from_the_command_line(tmp_path: Path) -> None:
    page = (DOCS / "get_started/first_run.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^rein train (--env .*)$", page, re.MULTILINE)
    train(*command.split(), folder=tmp_path)
    assert rein.load_agent(tmp_path / "runs/CartPole-v1-ppo").env_steps == 20_000


@pytest.mark.slow
def test_policy_in_a_program_and_in_a_web_service(tmp_path: Path) -> None:
    texts = ("rein.load_policy(", "gymnasium.make(", "import numpy", "class PolicyHandler", "def ask(observation)")
    training, loop, batch, service, clients = (block("use_a_policy.md", text) for text in texts)
    assert (code_lines(loop) <= 12, code_lines(service + clients) <= 40) == (True, True)
    run(training + loop + batch + service + clients, tmp_path)


@pytest.mark.slow
def test_live_plot_in_20_lines(tmp_path: Path) -> None:
    setup, program = (
        block("handlers.md", text, REFERENCE) for text in ("loop = rein.training_loop(", "live_plot(loop")
    )
    program = setup + program + "loop.run(epochs=5)\nfigure.savefig('curves.png')\n"
    assert code_lines(program) <= 20
    run(program, tmp_path)
    assert (tmp_path / "curves.png").stat().st_size > 5_000


@pytest.mark.slow
def test_custom_minari_dataset_in_8_lines_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("minari")
    monkeypatch.setitem(ENVIRONMENT, "MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    record = block("evaluate_and_film.md", 'store="runs/film"').replace("runs/film", "runs/cartpole")
    export, learn = block("export.md", "export_minari(run"), block("offline.md", "MinariData(", TUTORIALS)
    assert max(code_lines(export), code_lines(learn)) <= 8
    learn = learn.replace("mujoco/halfcheetah/medium-v0", "cartpole/ppo-v0").replace("rein.IQL", "rein.BC")
    run(record, tmp_path)
    run(export, tmp_path)
    run("import rein\n" + learn.replace("epochs=100", "epochs=1, iterations=10"), tmp_path)
