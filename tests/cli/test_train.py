"""`rein train`: runs, output and error messages."""

from __future__ import annotations

import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.file_proxy import FileProxy

import rein
from rein.cli import main
from rein.cli.arguments import parse_options
from rein.cli.catalog import describe, find, recipe_names

MODULE = """
import rein

def make_loop(store=None, *, steps: int = 3):
    '''Counts.

    Args:
        steps: how many steps an epoch has.
    '''
    return rein.Loop(lambda state: (state.step_state or 0) + 1, epochs=2, iterations=steps)

def broken():
    raise RuntimeError("the module is broken")

def nothing():
    return 3
"""


@pytest.fixture
def work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_module", raising=False)
    return tmp_path


def test_train_prints_the_folder_of_trajectories(work_folder, capsys):
    main(["train", "gridworld", "--quiet"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("solved: evaluation_return") for line in lines)
    assert "runs/gridworld/trajectories" in "".join(lines)
    run = rein.open_run("runs/gridworld")
    assert len(run.epochs) > 0


def test_existing_run_folder_raises_and_is_not_changed(work_folder, capsys):
    main(["train", "gridworld", "--quiet", "--epochs", "1", "--run", "mine"])
    before = sorted(str(path) for path in (work_folder / "mine").rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main(["train", "gridworld", "--run", "mine"])
    assert ended.value.code == 1
    assert "mine" in capsys.readouterr().err
    assert sorted(str(path) for path in (work_folder / "mine").rglob("*")) == before


def test_parameters_of_a_custom_function_are_flags(work_folder, capsys):
    main(["train", "my_module:make_loop", "--steps", "5", "--quiet", "--epochs", "4"])
    assert "completed" in capsys.readouterr().out
    assert parse_options(find("my_module:make_loop"), "x", ["--steps", "7"])["steps"] == 7


def test_help_lists_custom_and_common_options(work_folder, capsys):
    with pytest.raises(SystemExit):
        main(["train", "my_module:make_loop", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "how many steps an epoch has" in text
    assert "folder of the run" in text
    assert "--env-steps" in text


@pytest.mark.parametrize(
    ("name", "text"),
    [("broken", "RuntimeError('the module is broken')"), ("nothing", "returned int, not a rein.Loop")],
)
def test_error_of_a_module_is_one_readable_line(work_folder, capsys, name, text):
    with pytest.raises(SystemExit, match="1"):
        main(["train", f"my_module:{name}"])
    error = capsys.readouterr().err
    assert (text in error, error[:6], error.count("\n")) == (True, "rein: ", 1)


def test_debug_shows_the_traceback(work_folder):
    with pytest.raises(RuntimeError, match="the module is broken"):
        main(["train", "my_module:broken", "--debug"])


def test_list_names_every_recipe(capsys):
    main(["list"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in recipe_names())
    assert {"cartpole", "gridworld", "taxi"} <= set(recipe_names())


def test_descriptions_in_the_list_are_those_of_the_recipes():
    assert {name: describe(name) for name in recipe_names()} == {
        name: inspect.getdoc(find(name)).partition("\n")[0] for name in recipe_names()
    }


def test_every_module_with_a_recipe_is_in_the_list():
    modules = {module.name for module in pkgutil.iter_modules(rein.recipes.__path__)}
    assert {find(name).__module__.rpartition(".")[2] for name in recipe_names()} == modules - {"recipe", "tasks"}


def test_usage_and_version_are_printed(capsys):
    main([])
    main(["--version"])
    shown = capsys.readouterr().out
    assert "rein train RECIPE" in shown
    assert rein.__version__ in shown


@pytest.mark.default_cases("--version", "show")
@pytest.mark.parametrize(
    "words", [["list"], ["--version"], ["show", "run"], ["train", "gridworld", "--epochs", "1"]], ids=lambda w: w[0]
)
def test_closed_pipe_ends_silently_with_status_141(words, tmp_path):
    main(["train", "gridworld", "--quiet", "--epochs", "1", "--run", str(tmp_path / "run")])
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rein", *words]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    result = subprocess.run(command, cwd=tmp_path, env=environment, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")


def test_printed_commands_quote_paths(work_folder, capsys):
    main(["train", "gridworld", "--quiet", "--epochs", "1", "--run", "a b"])
    assert "summary: rein show 'a b'" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["train", "gridworld", "--run", "a b"])
    assert "a b exists; continue it with `rein resume 'a b'` or --resume" in capsys.readouterr().err


def test_env_steps_replace_the_epochs_of_the_recipe(work_folder, capsys):
    main(["train", "gridworld", "--quiet", "--env-steps", "200000", "--iterations", "40", "--no-stop-when-solved"])
    assert "completed (env_steps has reached 200,000): 200," in capsys.readouterr().out


def test_run_folder_for_a_function_without_store_raises(work_folder, capsys):
    (work_folder / "bare.py").write_text(
        "import rein\n\ndef make():\n    return rein.Loop(lambda state: None, iterations=2)\n"
    )
    with pytest.raises(SystemExit):
        main(["train", "bare:make", "--run", "x"])
    assert "make has no parameter `store`" in capsys.readouterr().err
    main(["train", "bare:make", "--quiet"])
    assert not (work_folder / "runs").exists()


def test_threads_option_sets_torch_threads(work_folder):
    before = torch.get_num_threads()
    try:
        main(["train", "gridworld", "--quiet", "--epochs", "1", "--threads", "2"])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("signal", "status", "error"),
    [(KeyboardInterrupt(), 130, "rein: interrupted\n"), (SystemExit(143), 143, "")],
    ids=["SIGINT", "SIGTERM"],
)
@pytest.mark.parametrize("terminal", [True, False])
def test_second_signal_restores_the_terminal(monkeypatch, capsys, terminal, signal, status, error):
    """The signal has interrupted the console of the progress bar, which replaces sys.stdout and writes nothing more."""

    def interrupted(*words: object) -> None:
        console = Console()
        console._enter_buffer()
        sys.stdout, sys.stderr = FileProxy(console, sys.stdout), FileProxy(console, sys.stderr)
        raise signal

    monkeypatch.setattr("rein.cli._run", interrupted)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    with pytest.raises(SystemExit, match=str(status)):
        main(["train", "gridworld"])
    assert capsys.readouterr() == ("\x1b[?25h" if terminal else "", error)
