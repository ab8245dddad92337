"""kill -9 at random moments: the run resumes without losing acknowledged data, and ends bit for bit equal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rein
from rein.store.checkpoint_file import read_checkpoint
from rein.testing.stateful import first_difference
from tests import programs

KILLED = Path(__file__).with_name("killed.py")
CASES = (
    "q_learning-gridworld-continuing",
    "population_frozen-cartpole-continuing",
    "population_dqn-cartpole-continuing",
    "ppo-cartpole-continuing",
    "q_learning-taxi-episodic",
    "population_ppo-cartpole-episodic",
)


def attempts(folder: Path, case: str, kills: int, seed: int) -> list[dict[str, Any]]:
    done = programs.run(KILLED, folder, case, kills, seed)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert reports[-1]["status"] == 0, f"{case}: an attempt failed:\n{done.stderr}"
    return reports


def trajectories(folder: Path) -> dict[str, bytes]:
    run = rein.open_run(folder)
    found = {name: run.field(name).tobytes() for name in run.fields}
    return found | {name: run.epochs[name].tobytes() for name in ("number", "length", "first_step")}


def test_killed_run_resumes_and_equals_an_uninterrupted_run(tmp_path: Path, scale: Callable[[int, int], int]) -> None:
    wanted, at_once, kills, inside, resumed, runs = scale(120, 4), scale(10, 4), 0, 0, 0, 0
    wholes: dict[str, tuple[Any, Any]] = {}
    while kills < wanted:
        case = CASES[runs % len(CASES)]
        if case not in wholes:
            attempts(tmp_path / f"whole-{case}", case, 0, 0)
            wholes[case] = (
                read_checkpoint(tmp_path / f"whole-{case}/end.h5").state,
                trajectories(tmp_path / f"whole-{case}"),
            )
        folder = tmp_path / str(runs)
        reports = attempts(folder, case, min(at_once, wanted - kills), runs)
        for one in reports:  # no acknowledged data is lost
            assert min(one["saved"], one["stored"]) >= one["acknowledged"], f"{case}, run {runs}: {one}"
        kills += sum(one["killed"] for one in reports)
        inside += sum(one["killed"] and one["torn"] > 0 for one in reports)
        resumed += sum(one["killed"] for one in reports)
        state, stored = wholes[case]
        difference = first_difference(state, read_checkpoint(folder / "end.h5").state)
        assert difference is None, f"{case}, run {runs}: {difference}"
        assert trajectories(folder) == stored, f"{case}, run {runs}: its trajectories differ"
        assert not list(folder.rglob(".*.tmp-*")), "the next start must remove temporary files of killed processes"
        runs += 1
    print(f"kill -9: {kills} kills, {inside} of them inside a write; {resumed} of {kills} resumed, {runs} runs equal")
    assert inside >= wanted // 10
