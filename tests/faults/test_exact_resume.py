"""Interrupt and resume every agent in every kind of environment: the end is bit for bit equal."""

from __future__ import annotations

import random
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rein
from rein.store.checkpoint_file import read_checkpoint
from rein.testing.stateful import first_difference
from tests import programs

CASES = Path(__file__).with_name("cases.py")
TOOLS = runpy.run_path(str(CASES))
FEW = [
    "a2c-taxi-continuing",
    "a2c_lstm-gridworld-episodic",
    "ppo-gymnasium_cartpole-episodic",
    "dqn_prioritized-gymnasium_cartpole-continuing",
    "q_learning-taxi-episodic",
]


def contents(path: Path) -> dict[str, Any]:
    """Return the stored data of a run, joined over its files, without wall-clock times."""
    run = rein.open_run(path)
    fields = {name: (run.field(name).dtype.str, run.field(name).tobytes()) for name in run.fields}
    episodes = {name: column.tobytes() for name, column in run.episodes.items() if name != "final_observation"}
    epochs = {name: run.epochs[name].tobytes() for name in ("number", "first_row", "length", "first_step")}
    metrics = {name: column.tobytes() for name, column in run.epochs["metrics"].items()}
    clocks = {name: column.tobytes() for name, column in run.epochs["clocks"].items() if name != "seconds"}
    return {"fields": fields, "episodes": episodes, "epochs": epochs, "metrics": metrics, "clocks": clocks}


def interrupt(case: str, folder: Path, at: int) -> None:
    loop = TOOLS["build"](case, folder)
    loop.iteration_completed(once=at)(lambda state: loop.interrupt("here"))
    loop.run()
    loop.parts["store"].close()


@pytest.mark.parametrize("selection", ["few", pytest.param("many", marks=pytest.mark.slow)])
def test_resumed_run_equals_an_uninterrupted_run_bit_for_bit(
    tmp_path: Path, scale: Callable[[int, int], int], selection: str
) -> None:
    ends: dict[str, Any] = {}
    cases = FEW if selection == "few" else TOOLS["cases"]()[:: scale(1, 9)]
    total = TOOLS["EPOCHS"] * TOOLS["ITERATIONS"]
    points = 2 if selection == "few" else scale(-(-300 // len(cases)), 1)
    for case in cases:
        ends[case] = TOOLS["end"](TOOLS["build"](case, tmp_path / "whole" / case))
        last = ends[case]["total_iterations"] - 1
        for at in sorted(random.Random(case).sample(range(1, min(last, total)), points)):
            interrupt(case, tmp_path / "broken" / case / f"{at:03d}", at)
    programs.run(CASES, tmp_path / "broken")
    compared = 0
    for case, expected in ends.items():
        whole = contents(tmp_path / "whole" / case)
        for run in sorted((tmp_path / "broken" / case).iterdir()):
            difference = first_difference(expected, read_checkpoint(run / "end.h5").state)
            assert difference is None, f"{case} resumed at {run.name}: {difference}"
            differing = [kind for kind, found in contents(run).items() if found != whole[kind]]
            assert not differing, f"{case} resumed at {run.name}: its {differing} on the disk differ"
            compared += 1
    assert compared == points * len(cases)
    print(f"exact resume: {compared} of {compared}, over {len(cases)} cases")


@pytest.mark.default_cases("episodic")
@pytest.mark.parametrize("mode", ["continuing", "episodic"])
def test_resumed_run_with_evaluations_equals_an_uninterrupted_run(tmp_path: Path, mode: str) -> None:
    case = f"q_learning-gridworld-{mode}"
    expected = TOOLS["end"](TOOLS["build"](case, tmp_path / "whole", evaluated=True))
    loop = TOOLS["build"](case, tmp_path / "broken", evaluated=True)
    loop.iteration_completed(once=17)(lambda state: loop.interrupt("here"))
    loop.run()
    loop.parts["store"].close()
    resumed = TOOLS["build"](case, tmp_path / "broken", evaluated=True)
    rein.resume(resumed, tmp_path / "broken")
    assert first_difference(expected, TOOLS["end"](resumed)) is None
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")
