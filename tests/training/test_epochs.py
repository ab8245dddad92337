"""Tests of open episodes and metrics at the end of an epoch."""

from __future__ import annotations

import pytest

import rein


def test_open_episode_of_halted_epoch_does_not_continue(scripted, listening):
    environment, store = scripted([4, 9]), rein.MemoryStore()
    loop = rein.training_loop(listening(environment), environment, store, episodic=True)
    loop.iteration_completed(once=3)(lambda state: state.halt_epoch())
    state = loop.run(epochs=2, iterations=20)
    assert [record.iterations for record in state.history] == [3, 9]
    episodes = store.trajectories[1].episodes
    assert episodes.episode_return.tolist() == [10, 45]
    assert episodes.length.tolist() == [4, 9]
    assert state.metrics["episode_return"] == (10 + 45) / 2
    assert state.metrics["episode_length"] == (4 + 9) / 2
    assert len(store.trajectories[0].episodes.id) == 0


def test_stored_epoch_has_metrics(scripted, listening):
    environment, store = scripted([2, 3]), rein.MemoryStore()
    loop = rein.training_loop(listening(environment), environment, store)
    loop.metric("loss", "loss")
    state = loop.run(epochs=3, iterations=6)
    for trajectory, record in zip(store.trajectories, state.history, strict=True):
        assert {"loss", "episode_return", "episode_length"} <= set(trajectory.metrics)
        assert dict(trajectory.metrics) == pytest.approx(dict(record.metrics), nan_ok=True)
    losses = [trajectory.metrics["loss"] for trajectory in store.trajectories]
    assert losses == pytest.approx([3.5, 9.5, 15.5])  # the loss is the number of the update
