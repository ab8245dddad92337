"""Long runs and many loops do not leak descriptors, threads, processes, shared memory or memory."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import rein
from rein.agents.q_learning import QLearning
from rein.envs.gridworld import Gridworld
from rein.handlers.checkpoint import checkpoint
from rein.handlers.evaluate_every import evaluate_every
from rein.handlers.guards import guard_data
from rein.handlers.interrupts import interrupts
from rein.handlers.watchdog import watchdog
from tests import programs

LEAKS = Path(__file__).with_name("leaks.py")


def test_long_run_does_not_leak_resources(tmp_path, scale):
    epochs = scale(4_000, 240)
    found = json.loads(programs.run(LEAKS, tmp_path / "run", epochs).stdout)
    grown = (found["end"]["bytes"] - found["warm"]["bytes"]) / 1e6
    for kind in ("descriptors", "threads", "processes", "shared"):
        assert found["end"][kind] == found["warm"][kind], kind
        assert found["after"][kind] <= found["before"][kind], kind
    print(f"leaks: {epochs} epochs, {epochs // 20} evaluations, {epochs // 20} checkpoints: {grown:+.1f} MB")
    assert scale(1, 0) == 0 or grown < 5.0  # in a short run, the history of 1,000 epochs is still growing
    assert grown < 25.0


def run_one(folder: Path) -> list[weakref.ref[Any]]:
    """Run a loop with many handlers for an epoch. Returns weak references to objects that must not outlive it."""
    environment = Gridworld(4, [(2, 4)], seed=0)
    agent = QLearning(environment.single_observation_space, environment.single_action_space, seed=0)
    store = rein.HDF5Store(folder, exist="new")
    loop = rein.training_loop(agent, environment, store, epochs=1, iterations=3)
    evaluate_every(loop, agent.policy(), Gridworld(4, [(2, 4)], seed=1), episodes=4, max_episode_steps=3)
    guard_data(loop)
    watchdog(loop, seconds=60)
    interrupts(loop, checkpoint(loop, store))
    loop.run()
    store.close()
    return [weakref.ref(thing) for thing in (loop, agent, agent.table, environment, store, store.checkpoints)]


def test_dropped_loops_are_garbage_collected(tmp_path, scale):
    kept = [reference for number in range(scale(100, 10)) for reference in run_one(tmp_path / str(number))]
    gc.collect()
    alive = [reference() for reference in kept if reference() is not None]
    assert alive == []
    print(f"leaks: {len(kept) // 6} loops dropped, all objects freed")
