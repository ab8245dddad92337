"""Train for a long time with evaluations and checkpoints, and print the resources of the process as JSON.

Usage: python leaks.py FOLDER EPOCHS. The first measurement is after a third of the epochs, when all code has run.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import threading
from pathlib import Path

import torch

import rein
from rein.agents.q_learning import QLearning
from rein.envs.gridworld import Gridworld
from rein.handlers.checkpoint import checkpoint
from rein.handlers.evaluate_every import evaluate_every
from rein.handlers.guards import guard_data
from rein.handlers.interrupts import interrupts
from rein.handlers.watchdog import guard_resources, resident_bytes


def held() -> dict[str, int]:
    """Return the resources that may leak."""
    gc.collect()
    maps = Path("/proc/self/maps")  # Linux
    shared = maps.read_text().count("/dev/shm/") if maps.exists() else 0
    return {
        "descriptors": len(os.listdir("/dev/fd")),
        "threads": threading.active_count(),
        "processes": len(multiprocessing.active_children()),
        "shared": shared,
        "bytes": resident_bytes(),
    }


def main() -> None:
    """Train for EPOCHS epochs, with an evaluation and a checkpoint every 20 epochs."""
    torch.set_num_threads(1)
    folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
    environment = Gridworld(8, [(2, 4)], seed=0, max_episode_steps=5)
    agent = QLearning(environment.single_observation_space, environment.single_action_space, seed=0)
    before, store = held(), rein.HDF5Store(folder)
    loop = rein.training_loop(agent, environment, store, epochs=epochs, iterations=4)
    evaluate_every(loop, agent.policy(), Gridworld(8, [(2, 4)], seed=1), episodes=8, max_episode_steps=9, every=20)
    guard_data(loop)
    guard_resources(loop, folder, disk=1.0, every=20)
    saver = checkpoint(loop, store, every=20, keep_last=2, keep_best=("evaluation_return", "max"))
    interrupts(loop, saver)
    measured = {}

    def measure(state: rein.State) -> None:
        saver.checkpoints.flush()  # a checkpoint being written has an open file
        store.flush()
        measured["warm" if state.epoch < epochs else "end"] = held()

    for epoch in (epochs // 3, epochs):
        loop.epoch_ended(once=epoch)(measure)
    loop.run()
    store.close()
    after = held()
    print(json.dumps({"before": before, **measured, "after": after}))


if __name__ == "__main__":
    main()
