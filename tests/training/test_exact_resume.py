"""Exact resume of runs that are interrupted within an evaluation. `tests/faults` resumes all agents."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rein
from rein.agents.q_learning import QLearning
from rein.envs.gridworld import Gridworld
from rein.handlers.checkpoint import checkpoint
from rein.handlers.evaluate_every import evaluate_every
from rein.testing.stateful import copy_state, first_difference


def without_time(state: Any) -> Any:
    """Return the state without wall times. It contains all stored epochs."""
    if isinstance(state, dict):
        return {k: without_time(v) for k, v in state.items() if k not in ("seconds", "epoch_began", "times")}
    return [without_time(value) for value in state] if isinstance(state, list) else state


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
