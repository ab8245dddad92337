"""Tests of open episodes and metrics at the end of an epoch."""

from __future__ import annotations

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
