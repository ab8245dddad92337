"""Configuration files of `rein train`: written to each run, accepted by `--config`, and `--like`."""

from __future__ import annotations

import json
import math
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rein.cli import main
from rein.cli.arguments import parse_options
from rein.cli.catalog import find, recipe_names
from rein.cli.experiment import Experiment
from rein.cli.plans import Recipe, read_config

TRAIN = ["train", "gridworld", "--quiet", "--epochs", "1", "--num-envs", "4"]
CUSTOM = """
import rein
from rein.recipes import recipe

@recipe(rein.envs.CartPole, rein.PPO, num_envs=2, epochs=1, iterations=4, minibatches=1)
def mine(build, trials: int = 3):
    '''A recipe with an option that is also one of `rein sweep`.'''
    environment = build.environment()
    return build.loop(build.agent(environment), environment)
"""


@pytest.fixture(autouse=True)
def work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_recipes", raising=False)
    (tmp_path / "my_recipes.py").write_text(CUSTOM)
    return tmp_path


def options_of(run: str) -> dict[str, Any]:
    return json.loads(Path(run, "run.json").read_text())["parts"]["recipe"]["config"]["options"]


def error_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (1, 1)
    return error


def test_config_of_a_run_gives_the_same_options():
    main([*TRAIN, "--run", "first", "--learning-rate", "0.25", "--threads", "1"])
    main(["train", "--config", "first/config.toml", "--quiet", "--run", "second"])
    assert options_of("second") == options_of("first")
    assert Path("second/config.toml").read_bytes() == Path("first/config.toml").read_bytes()
    assert options_of("second")["learning_rate"] == 0.25


def test_like_uses_the_options_of_a_run():
    main([*TRAIN, "--run", "first", "--gamma", "0.9"])
    main(["train", "--like", "first", "--quiet", "--run", "second", "--seed", "3"])
    assert options_of("second") == {**options_of("first"), "seed": 3}


def test_resumed_run_updates_its_config():
    main([*TRAIN, "--run", "first"])
    main(["resume", "first", "--quiet", "--epochs", "2"])
    assert tomllib.loads(Path("first/config.toml").read_text())["training"]["epochs"] == 2


def test_command_line_overrides_the_file():
    Path("mine.toml").write_text(
        'recipe = "gridworld"\nenvironment.num-envs = 2\n[agent]\nlearning_rate = 0.125\n[training]\nepochs = 1\n'
    )
    main(["train", "--config", "mine.toml", "--num-envs", "4", "--quiet"])
    found = options_of("runs/gridworld")
    assert (found["learning_rate"], found["num_envs"], found["epochs"]) == (0.125, 4, 1)


def test_limit_on_the_command_line_replaces_the_limit_of_the_file(capsys):
    Path("mine.toml").write_text("training.epochs = 1\nenvironment.num_envs = 4\n")
    words = ["--config=mine.toml", "--env-steps", "200", "--no-stop-when-solved", "--quiet"]
    main(["train", "gridworld", *words])
    assert "env_steps has reached 200" in capsys.readouterr().out


def test_limit_that_was_not_given_is_not_in_the_file():
    recipe = Recipe(Experiment("pong"), {"env_steps": 10, "epochs": 3, "gamma": 0.5}, ["--epochs"])
    assert tomllib.loads(recipe.toml.decode()) == {
        "recipe": "pong",
        "agent": {"gamma": 0.5},
        "training": {"epochs": 3},
    }


@pytest.mark.parametrize("name", recipe_names())
def test_config_of_each_recipe_is_accepted(name):
    options = parse_options(find(name), f"rein train {name}", [])
    Path("mine.toml").write_bytes(
        Recipe(Experiment(name), {**options, "quiet": None, "debug": None, "resume": None}).toml
    )
    text = Path("mine.toml").read_text()
    Path("mine.toml").write_text("".join(f"{line}\n" for line in text.splitlines() if '= "None"' not in line))
    before = read_config(Path("mine.toml"))
    assert parse_options(find(name), f"rein train {name}", [], before.options) == options


def test_values_survive_the_file():
    values = {"a": 1, "b": 1e-05, "c": 1e20, "d": True, "e": 'a "b"\\\n\x7fü', "f": [], "g": [1, [2.5]], "h": -math.inf}
    found = tomllib.loads(Recipe(Experiment("my_recipes:mine"), values).toml.decode())
    assert found == {"recipe": "my_recipes:mine", "training": values}


def test_none_replaces_a_default_that_is_a_number():
    main(["train", "cartpole", "--max-grad-norm", "None", "--num-envs", "4", "--epochs", "1", "--quiet", "--run", "a"])
    main(["train", "--config", "a/config.toml", "--quiet", "--run", "b"])
    assert options_of("b")["max_grad_norm"] is None


@pytest.mark.parametrize(
    ("text", "keyword"),  # a text without a table is in [agent]
    [
        ("learning_rat = 1.0", "did you mean learning_rate?"),
        ("lr = 1.0", "use learning_rate"),
        ("zzzzz = 1.0", "Its options are"),
        ('run = "elsewhere"', "--run"),
        ('learning_rate = "fast"', "learning_rate='fast'"),
        ("learning_rate = [1.0]", "not accepted"),
        ("[environment]\nnum_envs = 100000000", "more than"),
        ('[training]\ndevice = "/dev/sda"', "paths"),
        ("[agents]\ngamma = 1.0", "tables of options"),
        ("num_envs = 4", "belongs in [environment]"),
        ("[training]\ngamma = 0.5", "belongs in [agent]"),
        ("gamma = ", "TOML"),
        ("gamma = " + "[" * 5_000, "TOML"),
        ("gamma = 5.0", "from 0 to 1"),
        ("a" + ".a" * 30_000 + " = 1", "256 dots"),
        ("gamma = " + "{a = " * 20 + "1" + "}" * 20, "16 levels"),
        ("[environment]\nnum_envs = 0x" + "f" * 20_000, "80,000 bits"),
        ("# comment\n" * 7_000, "at most 65,536 are read"),
        ("learning_rate = 0.1\nlearning-rate = 0.2", "learning_rate is given twice"),
        ("learning-rate = 0.1\nlearning_rate = 0.2", "learning_rate is given twice"),
    ],
)
def test_invalid_file_is_refused_in_one_line(text, keyword, capsys):
    table = "" if text.startswith("[") else "[agent]\n"
    Path("mine.toml").write_text(f'recipe = "gridworld"\n{table}{text}\n')
    assert keyword in error_of(["train", "--config", "mine.toml"], capsys)
    assert not Path("runs/gridworld").exists()


@pytest.mark.skipif(os.name != "posix", reason="needs pipes")
def test_config_is_a_file_or_a_link_to_one(work_folder, capsys):
    Path("mine.toml").write_text('recipe = "gridworld"\nagent.gamma = 0.5\n')
    Path("link.toml").symlink_to("mine.toml")
    assert read_config(Path("link.toml")).options == {"gamma": 0.5}
    os.mkfifo("pipe.toml")
    Path("device.toml").symlink_to("/dev/zero")
    for name in ("pipe.toml", "device.toml"):
        assert f"{name}: is " in error_of(["train", "--config", name], capsys)


@pytest.mark.parametrize(("text", "keyword"), [("", "add a line"), ('recipe = "os:system"', "not part of rein")])
def test_file_must_name_a_recipe_of_rein(text, keyword, capsys):
    Path("odd.toml").write_text(f"{text}\n")
    assert keyword in error_of(["train", "--config", "odd.toml"], capsys)


def test_recipe_of_the_user_must_be_named_on_the_command_line(capsys):
    main(["train", "my_recipes:mine", "--quiet", "--run", "first", "--gamma", "0.5"])
    assert "rein train my_recipes:mine --like first" in error_of(["train", "--like", "first"], capsys)
    assert "not part of rein" in error_of(["train", "--config", "first/config.toml"], capsys)
    main(["train", "my_recipes:mine", "--like", "first", "--quiet", "--run", "second"])
    main(["train", "my_recipes:mine", "--config", "first/config.toml", "--quiet", "--run", "third"])
    assert options_of("second") == options_of("first") == options_of("third")
    assert (options_of("first")["gamma"], options_of("first")["trials"]) == (0.5, 3)


def test_resume_does_not_accept_a_config(capsys):
    main([*TRAIN, "--run", "first"])
    assert "--config" in error_of(["resume", "first", "--config", "first/config.toml"], capsys)
