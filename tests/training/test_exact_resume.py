"""Exact resume: saved in mid-epoch, loaded into new objects in a new process, equal to the bit at the end."""

from __future__ import annotations

import random
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rein.testing.stateful import copy_state, first_difference

FINISH = Path(__file__).with_name("finish_runs.py")
POINTS = 6  # random iterations to be saved at, for each case


def without_time(state: Any) -> Any:
    """The state without what a clock on the wall says; what is stored of every epoch is in it."""
    if isinstance(state, dict):
        return {k: without_time(v) for k, v in state.items() if k not in ("seconds", "epoch_began", "times")}
    return [without_time(value) for value in state] if isinstance(state, list) else state


def run_and_save(tools: dict[str, Any], kind: str, mode: str, folder: Path) -> dict[str, Any]:
    """Run without a break, saving on the way; returns the state at the end."""
    total = tools["run"](tools["build"](kind, mode))["total_iterations"]
    points = set(random.Random(f"{kind} {mode}").sample(range(1, total), POINTS))
    loop = tools["build"](kind, mode)

    def save(state: Any) -> None:
        torch.save(copy_state(loop.state_dict()), folder / f"{kind}-{mode}-{state.total_iterations}.saved")

    @loop.iteration_completed(when=lambda state: state.total_iterations in points)
    def ask(state: Any) -> None:
        state.request(save)

    return tools["run"](loop)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[dict[str, Any], list[Path]]]:
    """For each case the end of the run without a break, and the files with the ends of those that were resumed."""
    folder, tools = tmp_path_factory.mktemp("runs"), runpy.run_path(str(FINISH))
    cases = [(kind, mode) for kind in ("gridworld", "taxi") for mode in ("continuing", "episodic")]
    ends = {case: run_and_save(tools, *case, folder) for case in cases}
    subprocess.run([sys.executable, str(FINISH), str(folder)], check=True, timeout=100)
    return {case: (ends[case], sorted(folder.glob(f"{'-'.join(case)}-*.finished"))) for case in cases}


@pytest.mark.parametrize("mode", ["continuing", "episodic"])
@pytest.mark.parametrize("kind", ["gridworld", "taxi"])
def test_a_run_resumed_in_a_new_process_ends_equal_to_the_bit(runs, kind, mode):
    uninterrupted, finished = runs[kind, mode]
    assert len(finished) == POINTS
    for file in finished:
        resumed = torch.load(file, weights_only=True)
        difference = first_difference(without_time(uninterrupted), without_time(resumed))
        assert difference is None, f"{file.name}: {difference}"
