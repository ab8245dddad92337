"""`rein.list_runs` and `rein runs`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rein
from rein.cli import main
from rein.envs.cartpole import CartPole
from rein.store.runs import RunList, RunSummary
from tests import programs


def train(
    path: Path, attach: Callable[[rein.Loop], Any] = lambda loop: None, *, seed: int = 0, epochs: int = 3
) -> None:
    """Train PPO for some epochs. `attach` adds handlers to the loop."""
    environment = CartPole(num_envs=4, seed=seed)
    agent = rein.PPO(environment, hidden=(8,), rollout_steps=8, minibatches=1, seed=seed)
    store = rein.HDF5Store(path, every=0)
    loop = rein.training_loop(agent, environment, store, iterations=40)
    attach(loop)
    try:
        loop.run(epochs=epochs)
    finally:
        store.close()


def fail(state: rein.State) -> None:
    raise RuntimeError("out of order")


def status_of(path: Path) -> tuple[str, str | None]:
    (run,) = rein.list_runs(path)
    return run.status, run.note


@pytest.mark.parametrize(
    ("attach", "expected"),
    [
        (lambda loop: None, ("completed", None)),
        (lambda loop: loop.epoch_ended(once=2)(lambda state: state.halt_loop("enough")), ("halted", "enough")),
        (lambda loop: loop.epoch_ended(once=2)(lambda state: loop.interrupt("SIGTERM")), ("interrupted", "SIGTERM")),
        (lambda loop: rein.record_solved(loop, "episode_return", at_least=1.0), ("solved", None)),
        (lambda loop: rein.stop_at(loop, env_steps=200), ("completed", None)),
    ],
    ids=["completed", "halted", "interrupted", "solved", "limit"],
)
def test_status_and_reason_of_a_run_that_ended(tmp_path: Path, attach: Any, expected: Any) -> None:
    train(tmp_path, attach)
    assert status_of(tmp_path) == expected


def test_runs_whose_metric_is_nan_are_sorted_last(tmp_path: Path) -> None:
    losses = (1.0, math.nan, 3.0, math.nan, 2.0)
    runs = [RunSummary(tmp_path / str(loss), "completed", metrics={"loss": loss}) for loss in losses]
    names = [run.path.name for run in RunList(runs, tmp_path).sorted_by("loss")]
    assert names == ["3.0", "2.0", "1.0", "nan", "nan"]


def test_folders_with_unusual_digits_are_listed(tmp_path: Path) -> None:
    for name in ("10", "²", "2", "٣", "a²"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    names = [run.path.name for run in rein.list_runs(tmp_path)]
    assert sorted(names) == sorted(["2", "10", "²", "٣", "a²"])
    assert names.index("2") < names.index("10")


def test_failed_run_has_its_exception(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        train(tmp_path, lambda loop: loop.epoch_ended(once=2)(fail))
    assert status_of(tmp_path) == ("failed", "RuntimeError: out of order")


def test_run_is_running_until_it_ends_or_is_killed(tmp_path: Path) -> None:
    statuses = []

    def look(loop: rein.Loop) -> None:
        loop.epoch_ended(lambda state: statuses.append(status_of(tmp_path)[0]))

    train(tmp_path, look, epochs=2)
    assert statuses == ["running", "running"]
    path = tmp_path / "run.json"
    info = json.loads(path.read_text())
    del info["ended"]  # as after SIGKILL
    path.write_text(json.dumps(info))
    assert status_of(tmp_path) == ("killed", None)


@pytest.mark.slow
def test_killed_process_leaves_a_killed_run(tmp_path: Path) -> None:
    program = f"""
import os, sys
from pathlib import Path
from tests.store.test_runs import train
train(Path({str(tmp_path)!r}), lambda loop: loop.epoch_ended(once=2)(lambda state: os.kill(os.getpid(), 9)))
"""
    programs.run("-c", program, cwd=Path(__file__).parents[2], check=False)
    (run,) = rein.list_runs(tmp_path)
    assert (run.status, run.env_steps) == ("killed", 160)


def test_summary_has_return_steps_duration_and_options(tmp_path: Path) -> None:
    train(tmp_path / "ppo")
    (run,) = rein.list_runs(tmp_path)
    assert run.path == tmp_path / "ppo"
    assert run.name == "PPO in CartPole"
    assert run.env_steps == 480 and run.seconds > 0.0
    assert run.options["agent.rollout_steps"] == 8
    assert 8.0 < run.mean_return < 500.0


def test_run_without_an_epoch_has_no_return(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        train(tmp_path, lambda loop: loop.epoch_started(fail))
    (run,) = rein.list_runs(tmp_path)
    assert math.isnan(run.mean_return) and run.env_steps == 0


def test_runs_are_found_in_subfolders_in_natural_order(tmp_path: Path) -> None:
    for name in ("a/seed-10", "a/seed-2", "b"):
        train(tmp_path / name, epochs=1)
    train(tmp_path / "b" / "evaluation", epochs=1)  # belongs to the run b
    train(tmp_path / ".hidden", epochs=1)
    assert [str(run.path.relative_to(tmp_path)) for run in rein.list_runs(tmp_path)] == ["a/seed-2", "a/seed-10", "b"]


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"parts": 3}', '{"parts": {"recipe": null}}', '{"parts": {"agent": 1}}', "\0", None]
)
def test_damaged_run_does_not_end_the_listing(
    tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    train(tmp_path / "good", epochs=1)
    (tmp_path / "bad" / "trajectories").mkdir(parents=True)
    if content is not None:
        (tmp_path / "bad" / "run.json").write_text(content)
    bad, good = rein.list_runs(tmp_path)
    assert (bad.status, good.status) == ("damaged", "completed")
    assert bad.note
    main(["runs", str(tmp_path)])
    assert "1 damaged, 1 completed" in capsys.readouterr().out


def test_unknown_status_in_the_file_is_not_shown(tmp_path: Path) -> None:
    train(tmp_path, epochs=1)
    info = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**info, "ended": {"status": "\x1b[31mred"}}))
    assert status_of(tmp_path)[0] == "killed"


def test_list_of_runs_is_a_table_with_the_options_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for seed in (0, 1):
        train(tmp_path / f"seed-{seed}", seed=seed, epochs=1)
    main(["runs", str(tmp_path)])
    for lines in (capsys.readouterr().out.splitlines(), str(rein.list_runs(tmp_path)).splitlines()):
        header, first, second, *_ = lines
        assert header.split() == ["run", "status", "return", "env", "steps", "time", "seed"]
        assert (first.split()[:2], first.split()[-1]) == (["seed-0", "completed"], "0")
        assert second.split()[-1] == "1"
    path = tmp_path / "seed-1" / "run.json"
    path.write_text(path.read_text().replace('"seed": 1', '"seed": "\\u001b[31m"'))
    assert str(rein.list_runs(tmp_path)).endswith("?[31m")


def test_folder_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rein.list_runs(tmp_path) == []
    main(["runs", str(tmp_path)])
    assert "no runs" in capsys.readouterr().out
    with pytest.raises(rein.errors.StoreError, match="does not exist"):
        rein.list_runs(tmp_path / "none")
    (tmp_path / "script.py").touch()
    with pytest.raises(rein.errors.StoreError, match="not a folder"):
        rein.list_runs(tmp_path / "script.py")


def test_resumed_run_has_the_status_of_its_last_end(tmp_path: Path) -> None:
    def loop_of(exist: Any) -> rein.Loop:
        environment = CartPole(num_envs=4, seed=0)
        agent = rein.PPO(environment, hidden=(8,), rollout_steps=8, minibatches=1, seed=0)
        loop = rein.training_loop(agent, environment, rein.HDF5Store(tmp_path, exist=exist), iterations=8)
        rein.checkpoint(loop)
        return loop

    first = loop_of("error")
    first.epoch_ended(once=1)(lambda state: first.interrupt("enough"))
    first.run(epochs=2)
    first.parts["store"].close()
    assert status_of(tmp_path) == ("interrupted", "enough")
    second = loop_of("resume")
    rein.resume(second)
    second.run(epochs=2)
    second.parts["store"].close()
    assert status_of(tmp_path) == ("completed", None)


def test_evaluation_after_the_last_epoch_is_the_return_of_the_run(tmp_path: Path) -> None:
    found: list[float] = []

    def evaluate_at_end(loop: rein.Loop) -> None:
        rein.evaluate_every(loop, loop.parts["agent"].policy(), CartPole(2, seed=5), episodes=2, every=2, at_end=True)
        loop.event("evaluation_completed")(lambda state: found.append(state.evaluation.result.mean_return))

    train(tmp_path, evaluate_at_end)
    (run,) = rein.list_runs(tmp_path)
    assert len(found) == 2
    assert run.metrics["evaluation_return"] == pytest.approx(found[-1])


def test_links_to_run_folders_are_listed(tmp_path: Path) -> None:
    train(tmp_path / "scratch/run", epochs=1)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/linked").symlink_to(tmp_path / "scratch/run")
    (tmp_path / "runs/loop").symlink_to(tmp_path / "runs")
    (run,) = rein.list_runs(tmp_path / "runs")
    assert (run.path.name, run.status) == ("linked", "completed")
