"""Exact resume: a state saved within an epoch and loaded in a new process gives the same final state, bit for bit."""

from __future__ import annotations

import csv
import random
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rein
from rein.agents.q_learning import QLearning
from rein.envs.gridworld import Gridworld
from rein.handlers.checkpoint import checkpoint
from rein.handlers.evaluate_every import evaluate_every
from rein.testing.stateful import copy_state, first_difference
from tests import programs

FINISH = Path(__file__).with_name("finish_runs.py")
POINTS = 6  # random iterations per case at which the state is saved


def without_time(state: Any) -> Any:
    """Return the state without wall times. It contains all stored epochs."""
    if isinstance(state, dict):
        return {k: without_time(v) for k, v in state.items() if k not in ("seconds", "epoch_began", "times")}
    return [without_time(value) for value in state] if isinstance(state, list) else state


def run_and_save(tools: dict[str, Any], kind: str, mode: str, folder: Path) -> dict[str, Any]:
    """Run without interruption, save states on the way, and return the final state."""
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
    """Return, for each case, the final state of the uninterrupted run and the files of resumed final states."""
    folder, tools = tmp_path_factory.mktemp("runs"), runpy.run_path(str(FINISH))
    cases = [(kind, mode) for kind in ("gridworld", "taxi") for mode in ("continuing", "episodic")]
    ends = {case: run_and_save(tools, *case, folder) for case in cases}
    programs.run(FINISH, folder)
    return {case: (ends[case], sorted(folder.glob(f"{'-'.join(case)}-*.finished"))) for case in cases}


@pytest.mark.parametrize("mode", ["continuing", "episodic"])
@pytest.mark.parametrize("kind", ["gridworld", "taxi"])
def test_run_resumed_in_new_process_ends_equal_bit_for_bit(runs, kind, mode):
    uninterrupted, finished = runs[kind, mode]
    assert len(finished) == POINTS
    for file in finished:
        resumed = torch.load(file, weights_only=True)
        difference = first_difference(without_time(uninterrupted), without_time(resumed))
        assert difference is None, f"{file.name}: {difference}"


class Asking(Gridworld):
    """Gridworld that calls a function before a given step."""

    left, ask = 0, staticmethod(lambda: None)

    def apply_action(self, action: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            self.ask()
        return super().apply_action(action)


@pytest.mark.default_cases("epoch_started-False", "epoch_ended-True")
@pytest.mark.parametrize("episodic", [False, True])
@pytest.mark.parametrize("event", ["epoch_started", "iteration_completed", "epoch_ended"])
def test_run_interrupted_in_evaluation_resumes_exactly(tmp_path: Path, episodic: bool, event: str) -> None:
    def make(name: str, exist: str) -> tuple[rein.Loop, Asking]:
        environment, other = Gridworld(num_envs=3, seed=0), Asking(num_envs=2, seed=1)
        agent = QLearning(environment.single_observation_space, environment.single_action_space, seed=0)
        store = rein.HDF5Store(tmp_path / name, exist=exist)
        loop = rein.training_loop(agent, environment, store, episodic=episodic, epochs=5, iterations=8, seed=0)
        seen = loop.event(event)
        seen(lambda state: state.memory.update(before=state.memory.get("before", 0) + 1))
        evaluate_every(
            loop, agent.policy(deterministic=False), other, episodes=5, max_episode_steps=12, event=event, every=2
        )
        seen(lambda state: state.memory.update(after=state.memory.get("after", 0) + 1))
        checkpoint(loop, store, every=2)
        return loop, other

    whole, _ = make("whole", "error")
    whole.run()
    loop, environment = make("broken", "error")
    environment.left, environment.ask = 30, lambda: loop.interrupt("enough")
    assert loop.run().reason == "enough"
    assert environment.left == 0
    resumed, _ = make("broken", "resume")
    rein.resume(resumed, tmp_path / "broken")
    resumed.run()
    ends = [without_time(copy_state(loop.state_dict())) for loop in (whole, resumed)]
    for end in ends:  # the interrupted run was halted once and has more files
        del end["parts"]["store"]
        end["counts"].pop("halted", None)
    assert first_difference(*ends) is None
    for file in ("metrics.csv", "evaluations.csv"):
        texts = [(tmp_path / name / file).read_text().splitlines() for name in ("whole", "broken")]
        rows = [[without_time(row) for row in csv.DictReader(text)] for text in texts]
        assert rows[0] == rows[1], file
    runs = [rein.open_run(tmp_path / name) for name in ("whole", "broken")]
    for field in ("observation", "action", "reward", "valid"):
        np.testing.assert_array_equal(*(run.field(field) for run in runs), field)
    assert runs[0].epochs["number"].tolist() == runs[1].epochs["number"].tolist()
