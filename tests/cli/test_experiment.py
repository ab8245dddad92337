"""`rein train --env ID --agent NAME`, its configuration files, and the commands for such runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

import rein
from rein.cli import main
from rein.cli.experiment import agent_names
from rein.handlers.loggers import MlflowLogger, TensorBoardLogger, WandbLogger

CARTPOLE = ["--env", "CartPole-v1", "--agent", "ppo", "--num-envs", "2", "--iterations", "16", "--quiet"]
MINE = ["--env", "walks:Walk", "--agent", "walkers:Walker"]
WALK = """
import gymnasium
import numpy as np

class Walk(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action):
        self.steps += 1
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), float(action), self.steps == 8, False, {}
"""
WALKER = """
import rein

class Walker(rein.PPO):
    pass
"""


@pytest.fixture(autouse=True)
def work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, text in {"walks": WALK, "walkers": WALKER}.items():
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def recorded(run: str) -> dict[str, Any]:
    return json.loads(Path(run, "run.json").read_text())["parts"]["recipe"]["config"]


def error_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 1
    return capsys.readouterr().err


def test_names_of_agents_are_those_of_classes():
    assert {"ppo", "discretesac"} < {*agent_names()}
    assert "option" not in agent_names()


def test_agent_is_trained_in_an_environment_with_options_of_both():
    main(["train", *CARTPOLE, "--env-steps", "1_00", "--learning-rate", "1e-3", "--action-mask", "False"])
    run = rein.open_run("runs/CartPole-v1-ppo")
    agent, environment = (run.info["parts"][name]["config"] for name in ("agent", "environment"))
    assert (agent["learning_rate"], environment["id"], environment["num_envs"]) == (1e-3, "CartPole-v1", 2)
    assert rein.load_agent(run.path).env_steps == 100


def test_config_of_a_run_has_tables_and_repeats_the_run():
    main(["train", *CARTPOLE, "--env-steps", "64", "--gamma", "0.5"])
    tables = tomllib.loads(Path("runs/CartPole-v1-ppo/config.toml").read_text())
    chosen = (tables["environment"]["id"], tables["agent"]["name"], tables["agent"]["gamma"])
    assert chosen == ("CartPole-v1", "ppo", 0.5)
    assert tables["training"]["env_steps"] == 64
    main(["train", "--config", "runs/CartPole-v1-ppo/config.toml", "--run", "again", "--quiet"])
    assert recorded("again")["options"] == recorded("runs/CartPole-v1-ppo")["options"]


def test_flags_replace_the_names_in_a_file():
    text = '[environment]\nid = "CartPole-v1"\n[agent]\nname = "ppo"\n[training]\nenv_steps = 32\n'
    Path("mine.toml").write_text(text)
    main(["train", "--config", "mine.toml", "--agent", "A2C", "--run", "first", "--quiet"])
    assert (recorded("first")["env"], recorded("first")["agent"]) == ("CartPole-v1", "A2C")


def test_custom_environment_and_agent_must_be_named_again(capsys):
    main(["train", *MINE, "--env-steps", "256", "--run", "mine", "--quiet"])
    named = "--env walks:Walk --agent walkers:Walker"
    for words, command in {
        ("train", "--config", "mine/config.toml"): f"rein train {named} --config mine/config.toml",
        ("train", "--like", "mine"): f"rein train {named} --like mine",
        ("resume", "mine"): f"rein resume mine {named}",
        ("evaluate", "mine"): f"rein evaluate mine {named}",
        ("replay", "mine", "--episode", "0"): "rein replay mine --env walks:Walk",
    }.items():
        sys.modules.pop("walks")
        assert error_of([*words], capsys).rstrip().endswith(f"on the command line: {command}")
        assert "walks" not in sys.modules  # a file never chooses code
        sys.modules["walks"] = walks = type(sys)("walks")
        exec(WALK, walks.__dict__)  # the same class for all commands
    main(["resume", "mine", *MINE, "--env-steps", "512", "--quiet"])
    main(["train", "--like", "mine", *MINE, "--run", "second", "--quiet"])
    assert recorded("second")["options"] == recorded("mine")["options"]
    capsys.readouterr()
    main(["evaluate", "mine", *MINE, "--episodes", "2"])
    assert "512 env steps" in (shown := capsys.readouterr().out)
    assert "length    mean 8" in shown
    with pytest.raises(SystemExit) as ended:
        main(["replay", "mine", "--episode", "0", "--env", "walks:Walk"])
    assert ended.value.code == 0


def test_environment_of_rein_is_named_by_its_class(capsys):
    words = ["--env", "rein.envs:Gridworld", "--agent", "q-learning", "--num-envs", "4"]
    main(["train", *words, "--env-steps", "64", "--quiet"])
    main(["evaluate", "runs/rein.envs-Gridworld-q-learning", "--episodes", "2"])
    assert "episodes  2" in capsys.readouterr().out


def test_learners_and_seeds_are_trained(capfd):
    main(["train", *CARTPOLE, "--env-steps", "32", "--learners", "2", "--param", "gamma=0.5..0.9", "--run", "two"])
    assert rein.open_run("two").info["parts"]["agent"]["config"]["gamma"] == [0.5, 0.9]
    main(["train", *MINE, "--env-steps", "32", "--seeds", "3,5", "--jobs", "1", "--run", "seeds", "--quiet"])
    assert [recorded(f"seeds/seed-{seed}")["options"]["seed"] for seed in (3, 5)] == [3, 5]
    capfd.readouterr()
    main(["runs", "seeds", "--json"])
    runs = json.loads(capfd.readouterr().out)
    assert [(Path(run["path"]).name, run["status"]) for run in runs] == [
        ("seed-3", "completed"),
        ("seed-5", "completed"),
    ]


@pytest.mark.slow
def test_sweep_writes_a_configuration_that_train_accepts(capfd):
    pytest.importorskip("optuna")
    words = ["--param", "gamma=0.5|0.9", "--trials", "2", "--jobs", "1", "--run", "sweep", "--quiet"]
    words += ["--metric", "episode_return"]
    main(["sweep", *MINE, "--env-steps", "256", *words])
    assert "rein train --env walks:Walk --agent walkers:Walker --config sweep/best.toml" in capfd.readouterr().out
    main(["train", *MINE, "--config", "sweep/best.toml", "--run", "best", "--quiet"])
    assert recorded("best")["options"]["gamma"] in (0.5, 0.9)


@pytest.mark.slow
def test_killed_run_is_resumed_exactly():
    """The killed run has the weights of one that was not killed."""
    words = [*CARTPOLE, "--env-steps", "640", "--checkpoint-every", "4"]
    command = [sys.executable, "-m", "rein", "train", *words, "--run", "killed"]
    process = subprocess.Popen(command)
    while not any(Path("killed/checkpoints").glob("epoch-*.h5")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    main(["resume", "killed", "--quiet"])
    main(["train", *words, "--run", "whole"])
    first, second = (rein.load_agent(run).networks.state_dict() for run in ("killed", "whole"))
    assert all((first[name] == second[name]).all() for name in first)


@pytest.mark.parametrize(
    ("name", "kind"), [("tensorboard", TensorBoardLogger), ("wandb", WandbLogger), ("mlflow", MlflowLogger)]
)
def test_log_option_attaches_a_logger(name, kind, monkeypatch):
    created: list[Any] = []
    monkeypatch.setattr(kind, "__init__", lambda self, *values, **options: created.append((values, options)))
    monkeypatch.setattr("rein.cli.train.attach", lambda loop, logger: created.append(type(logger)))
    main(["train", *CARTPOLE, "--env-steps", "32", "--log", name, "csv", "--run", "logged"])
    assert created[1] is kind
    assert recorded("logged")["options"]["log"] == [name, "csv"]
