"""Untrusted run folders: every command that reads one terminates, changes no other files, and executes no code."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import stat
import subprocess
import sys
import types
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rein
import rein.cli.run_folder
from rein.cli import main
from rein.cli.experiment import Experiment
from rein.cli.plans import Recipe
from rein.handlers.checkpoint import checkpoint
from rein.handlers.run_files import describe
from rein.loop import info
from rein.recipes import gridworld

EVIL = "evil\x1b]0;owned\x07\x9b2J"  # sets a terminal's title, and clears its screen
DEADLINE = 300.0  # seconds for all commands together

COMMANDS = [
    ["show", "run"],
    ["plot", "run", "--output", "out/picture.png"],
    ["plot", "run", "--values", "--output", "out/values.png"],
    ["plot", "run", "--paths", "--output", "out/paths.png"],
    ["plot", "run", "--metric", EVIL, "--output", "out/evil.png"],
    ["view", "run"],
    ["verify", "run"],
    ["compact", "run", "out/compacted"],
    ["export", "run", "--to", "minari", "hostile/run-v0"],
    ["evaluate", "run", "--episodes", "2", "--seed", "1"],
    ["evaluate", "run", "--episodes", "2", "--best"],
    ["replay", "run", "--episode", "1"],
    ["resume", "run", "--help"],
    ["resume", "run", "--epochs", "4"],
]

PAYLOAD = "import pathlib\npathlib.Path({marker!r}).touch()\ndef make_loop(*a, **k):\n    raise SystemExit(0)\n"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run of one of rein's recipes, with terminal escapes in the name of a metric."""
    path = tmp_path_factory.mktemp("base") / "run"
    store = rein.HDF5Store(path, max_epochs=1)
    loop = gridworld(store, num_envs=4, iterations=20, epochs=3, stop_when_solved=False)
    loop.own(
        "recipe", Recipe(Experiment("gridworld"), {"num_envs": 4, "iterations": 20, "stop_when_solved": False}, [])
    )
    describe(loop, store)
    checkpoint(loop, store, keep_best=("episode_return", "max"))

    @loop.epoch_ended
    def name_badly(state: rein.State) -> None:
        state.metrics[EVIL] = 1.0

    loop.run()
    store.close()
    return path


def change(run: Path, **parts: Any) -> None:
    """Change the description of parts in `run.json`."""
    about = json.loads((run / "run.json").read_text())
    for name, part in parts.items():
        about["parts"][name] = {**about["parts"][name], **part}
    (run / "run.json").write_text(json.dumps(about))


def set_options(run: Path, /, **options: Any) -> None:
    recipe = json.loads((run / "run.json").read_text())["parts"]["recipe"]["config"]
    change(run, recipe={"config": {**recipe, "options": {**recipe["options"], **options}}})


def name_code(run: Path, outside: Path) -> None:
    (run / "payload.py").write_text(PAYLOAD.format(marker=str(outside.parent / "exploded")))
    change(run, recipe={"config": {"name": "payload:make_loop", "options": {}, "given": []}})
    change(run, environment={"type": "payload.make_loop", "config": {}})


def name_an_environment_with_code(run: Path, outside: Path) -> None:
    adapter = "rein.envs.gymnasium.adapter.GymnasiumEnvironment"
    change(run, environment={"type": adapter, "config": {"id": "payload:Evil-v0", "make_kwargs": {}}})
    change(run, recipe={"config": {"name": "../payload", "options": {}, "given": []}})


def name_paths(run: Path, outside: Path) -> None:
    adapter = "rein.envs.gymnasium.adapter.GymnasiumEnvironment"
    config = {"id": "HalfCheetah-v5", "make_kwargs": {"xml_file": str(outside / "model.xml")}}
    change(run, environment={"type": adapter, "config": config})
    set_options(run, run=str(outside / "run"), device=str(outside))


def name_huge_sizes(run: Path, outside: Path) -> None:
    set_options(run, num_envs=1 << 40, threads=1 << 30, iterations=1 << 40)
    change(run, environment={"config": {"num_envs": 1 << 40, "size": 1 << 40, "possible_targets": [[1, 1]]}})


def link_files(run: Path, outside: Path) -> None:
    for name in ("metrics.csv", "evaluations.csv", "metrics.h5", "checkpoints/latest"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside / Path(name).name)
    for path in [*(run / "trajectories").glob("*.h5"), *(run / "checkpoints").glob("*.h5")][::2]:
        shutil.copy(path, outside / path.name)
        path.unlink()
        path.symlink_to(outside / path.name)


def link_folder(name: str) -> Callable[[Path, Path], None]:
    def link(run: Path, outside: Path) -> None:
        target = outside / name.replace("/", "-")
        if (run / name).exists():
            shutil.move(run / name, target)
        else:
            target.mkdir()
        (target / f"{'0' * 64}.h5").write_bytes(b"rows of another run")
        (target / ".epoch-000001.h5.tmp-999999999").write_bytes(b"of a dead process")
        (target / "000009-000009.h5").write_bytes(b"newer than the checkpoint")
        (target / "epoch-000009.h5").write_bytes(b"newer than the checkpoint")
        (run / name).symlink_to(target)

    link.__name__ = f"link_{name.replace('/', '_')}"
    return link


def put_pipes(run: Path, outside: Path) -> None:
    for name in ("metrics.csv", "evaluations.csv", "metrics.h5", "checkpoints/latest", "trajectories/000009-000009.h5"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    os.mkfifo(run / "checkpoints/epoch-000009.h5")
    os.mkfifo(run / "checkpoints/best/epoch-000009.h5")
    with contextlib.suppress(OSError):  # requires the superuser
        os.mknod(run / "checkpoints/zero.h5", stat.S_IFCHR | 0o666, os.makedev(1, 5))


def put_a_pipe_for_run_json(run: Path, outside: Path) -> None:
    (run / "run.json").unlink()
    os.mkfifo(run / "run.json")


def put_huge_files(run: Path, outside: Path) -> None:
    for name in ("run.json", "metrics.csv", "trajectories/000009-000009.h5", "checkpoints/epoch-000009.h5"):
        with open(run / name, "ab") as file:
            file.truncate(1 << 40)


def nest_deeply(run: Path, outside: Path) -> None:
    (run / "run.json").write_text("[" * 100_000 + "]" * 100_000)


def nest_within_pythons_limit(run: Path, outside: Path) -> None:
    text = json.dumps(json.loads((run / "run.json").read_text()) | {"deep": "HERE"})
    (run / "run.json").write_text(text.replace('"HERE"', "[" * 900 + "]" * 900))


def name_escapes(run: Path, outside: Path) -> None:
    change(run, recipe={"config": {"name": EVIL, "options": {"device": EVIL}, "given": [EVIL]}})
    change(run, environment={"type": EVIL, "config": {EVIL: EVIL}}, agent={"type": EVIL, "config": {EVIL: EVIL}})
    name_escapes_in_files(run, outside)


def name_escapes_in_options(run: Path, outside: Path) -> None:
    set_options(run, device=EVIL, seed=EVIL)


def name_escapes_in_files(run: Path, outside: Path) -> None:
    for name in ("", "trajectories", "checkpoints", "checkpoints/best"):
        (run / name / f"{EVIL}.h5").write_bytes(b"")
    header, *rows = (run / "metrics.csv").read_text().splitlines()
    (run / "metrics.csv").write_text("\n".join([f"{header},{EVIL}2", *(f"{row},{EVIL}" for row in rows), ""]))


FOLDERS = [
    name_code,
    name_an_environment_with_code,
    name_paths,
    name_huge_sizes,
    link_files,
    link_folder("trajectories"),
    link_folder("checkpoints"),
    link_folder("checkpoints/best"),
    link_folder("checkpoints/rows"),
    link_folder("aside"),
    put_pipes,
    put_a_pipe_for_run_json,
    put_huge_files,
    nest_deeply,
    nest_within_pythons_limit,
    name_escapes,
    name_escapes_in_options,
    name_escapes_in_files,
]


def run_commands(folder: Path) -> None:
    """Run every command in `folder` and write output and exit status to `folder`/output. Ends the process."""
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.chdir(folder / "here")
    rein.cli.run_folder.subprocess = types.SimpleNamespace(run=lambda *a, **k: types.SimpleNamespace(returncode=0))  # type: ignore[attr-defined]
    for words in COMMANDS:
        code: Any = 0
        try:
            main(words)
        except SystemExit as ended:
            code = ended.code
        print(f"--- rein {words!r} ended with {code!r}", flush=True)
    os._exit(0)


def snapshot(folder: Path) -> dict[str, Any]:
    """Return mode, size, time and content of everything in a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        found[str(path)] = status.st_mode, status.st_size, status.st_mtime_ns if content is not None else 0, content
    return found


@pytest.mark.default_cases(
    "name_code",
    "name_an_environment_with_code",
    "name_paths",
    "name_huge_sizes",
    "put_a_pipe_for_run_json",
    "put_huge_files",
    "nest_deeply",
    "nest_within_pythons_limit",
    "name_escapes",
    "link_checkpoints",
)
@pytest.mark.skipif(os.name != "posix", reason="needs pipes and fork")
@pytest.mark.parametrize("prepare", FOLDERS, ids=lambda prepare: prepare.__name__)
def test_hostile_run_folder_does_no_harm(tmp_path, base, prepare, monkeypatch):
    here, outside = tmp_path / "here", tmp_path / "outside"
    (here / "out").mkdir(parents=True)
    outside.mkdir()
    shutil.copytree(base, here / "run")
    (here / "payload.py").write_text(PAYLOAD.format(marker=str(tmp_path / "exploded")))
    for name in ("metrics.csv", "evaluations.csv", "metrics.h5", "latest", "model.xml"):
        (outside / name).write_bytes(b"epoch,status\n1,completed\na line that is not finished")
    prepare(here / "run", outside)
    before, around = snapshot(outside), {path.name for path in here.iterdir()}
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    monkeypatch.delenv("DISPLAY", raising=False)
    child = multiprocessing.get_context("fork").Process(target=run_commands, args=(tmp_path,))
    child.start()
    child.join(DEADLINE)
    hangs = child.is_alive()
    child.kill()
    child.join()
    output = (tmp_path / "output").read_bytes().decode()
    assert not hangs, output[-2000:]
    assert child.exitcode == 0, output[-2000:]
    assert output.count(" ended with ") == len(COMMANDS), output
    print(output)
    assert not (tmp_path / "exploded").exists()
    assert snapshot(outside) == before
    assert {path.name for path in here.iterdir()} - {"__pycache__"} == around
    assert [c for c in output if unicodedata.category(c) == "Cc" and c not in "\n\t"] == []
    assert "Traceback" not in output and "RecursionError" not in output


@pytest.mark.default_cases("words0")
@pytest.mark.parametrize(
    "words", [["resume", "run", "--epochs", "4", "--quiet"], ["evaluate", "run", "--episodes", "1"]]
)
def test_files_in_the_working_directory_do_not_shadow_modules(tmp_path, base, words):
    shutil.copytree(base, tmp_path / "run")
    names = [
        "__future__",
        "torch",
        "numpy",
        "h5py",
        "rich",
        "tyro",
        "typing",
        "json",
        "gymnasium",
        "attrs",
        "traceback",
    ]
    for name in names:
        (tmp_path / f"{name}.py").write_text(PAYLOAD.format(marker=str(tmp_path / "exploded")))
    plugin = tmp_path / "plugin-1.0.dist-info"  # torch imports such plugins
    plugin.mkdir()
    (plugin / "METADATA").write_text("Name: plugin\nVersion: 1.0\n")
    (plugin / "entry_points.txt").write_text("[torch.backends]\npayload = payload:make_loop\n")
    (tmp_path / "payload.py").write_text(PAYLOAD.format(marker=str(tmp_path / "exploded")))
    path = {**os.environ, "PYTHONPATH": str(Path(rein.__file__).parents[1])}
    path.pop("PYTHONSAFEPATH", None)
    command = [sys.executable, "-m", "rein", *words]
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "exploded").exists()


@pytest.mark.skipif(os.name != "posix" or not shutil.which("git"), reason="needs git and a shell")
@pytest.mark.parametrize("way", ["fsmonitor", "hook", "filter"])
def test_git_configuration_around_a_run_executes_no_program(tmp_path, monkeypatch, way):
    """`run.json` records the commit of the working directory, whose configuration may name programs."""

    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    script, exploded = tmp_path / ".git" / "payload", tmp_path / "exploded"
    git("init")
    (tmp_path / "file").write_text("one\n")
    (tmp_path / ".gitattributes").write_text("file filter=payload\n")
    git("add", ".")
    git("commit", "-m", "all")
    script.write_text(f"#!/bin/sh\ntouch '{exploded}'\ncat\n")
    script.chmod(0o755)
    if way == "fsmonitor":
        git("config", "core.fsmonitor", str(script))
    elif way == "filter":
        git("config", "filter.payload.clean", str(script))
    else:
        (tmp_path / ".git/hooks").mkdir(exist_ok=True)
        shutil.copy(script, tmp_path / ".git/hooks/post-index-change")
    (tmp_path / "file").write_text("two\n")
    monkeypatch.chdir(tmp_path)
    info._git_state()
    assert not exploded.exists()


def test_custom_recipe_is_resumed_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = "from rein.recipes import gridworld\ndef make_loop(store, *, num_envs: int = 4, epochs: int = 2):\n"
    module += "    return gridworld(store, num_envs=num_envs, iterations=10, epochs=epochs, stop_when_solved=False)\n"
    Path("custom_recipe.py").write_text(module)
    main(["train", "custom_recipe:make_loop", "--run", "run", "--num-envs", "8", "--quiet"])
    with pytest.raises(SystemExit):
        main(["resume", "run", "--epochs", "3"])
    assert "rein resume run custom_recipe:make_loop" in capsys.readouterr().err
    main(["resume", "run", "custom_recipe:make_loop", "--epochs", "3", "--quiet"])
    assert rein.open_run("run").epochs["number"].tolist() == [1, 2, 3]
    assert sys.path[-1] == str(tmp_path)  # searched last
