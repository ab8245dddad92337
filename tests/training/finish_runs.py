"""Finish runs that were saved before their end. test_exact_resume.py runs this program in a new process.

Usage: `python finish_runs.py FOLDER`. Loads each FOLDER/KIND-MODE-*.saved into new objects, runs it to its end, and
writes the final state to *.finished.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import rein
from rein.agents.q_learning import QLearning
from rein.envs.gridworld import Gridworld
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.schedules import linear

EPOCHS, ITERATIONS = 6, 17


def build(kind: str, mode: str) -> rein.Loop:
    """Return the loop of a case, always built in the same way."""
    if kind == "gridworld":
        environment: Any = Gridworld(num_envs=5, possible_targets=[(2, 4), (0, 1)], seed=3, max_episode_steps=11)
    else:
        environment = GymnasiumEnvironment("Taxi-v4", num_envs=3, seed=3, max_episode_steps=13)
    spaces = environment.single_observation_space, environment.single_action_space
    agent = QLearning(*spaces, learning_rate=0.3, gamma=0.9, epsilon=linear(1.0, 0.1, env_steps=200), seed=3)
    loop = rein.training_loop(agent, environment, rein.MemoryStore(), episodic=mode == "episodic")
    loop.metric("td_error", "td_error")
    loop.metric("largest", "td_error", reduce="max")

    @loop.iteration_completed(every=40, unit="env_steps")
    def count(state: rein.State) -> None:
        state.memory["crossings"] = [*state.memory.get("crossings", []), state.clocks.env_steps]

    @loop.episodes_completed
    def remember(state: rein.State) -> None:
        state.memory["ended_at"] = state.clocks.vector_steps

    return loop


def run(loop: rein.Loop) -> dict[str, Any]:
    """Run to the end and return the final state."""
    loop.run(epochs=EPOCHS, iterations=ITERATIONS)
    return loop.state_dict()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for file in sorted(Path(sys.argv[1]).glob("*.saved")):
        loop = build(*file.name.split("-")[:2])
        loop.load_state_dict(torch.load(file, weights_only=True))
        torch.save(run(loop), file.with_suffix(".finished"))
