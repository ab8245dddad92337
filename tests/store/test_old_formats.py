"""Load a stored checkpoint of every format since version 2: data/checkpoint-format-N.h5.

Each was saved in epoch 3, iteration 3, of the loop below, with a string and a tensor in `state.memory`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rein
from rein.agents.q_learning import QLearning
from rein.envs.gridworld import Gridworld
from rein.store.checkpoint_file import FORMAT, read_checkpoint
from rein.store.loading import load

DATA = Path(__file__).with_name("data")
FILES = sorted(DATA.glob("checkpoint-format-*.h5"))


def make() -> rein.Loop:
    environment = Gridworld(2, [(2, 4)], seed=0, max_episode_steps=9)
    agent = QLearning(environment.single_observation_space, environment.single_action_space, seed=0)
    return rein.training_loop(agent, environment, iterations=7, epochs=4)


def test_checkpoints_of_all_formats_exist():
    assert [int(path.stem.rpartition("-")[2]) for path in FILES] == list(range(2, FORMAT + 1))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_old_checkpoint_is_resumed(path):
    found = read_checkpoint(path)
    assert found.about["kind"] == "run"
    assert (found.about["epoch"], found.about["iteration"], found.about["epoch_open"]) == (3, 3, True)
    loop = make()
    rein.resume(loop, path)
    assert loop.state.memory["note"] == "kept" and torch.equal(loop.state.memory["tensor"], torch.arange(3))
    assert loop.state.total_iterations == 17 and loop.state.clocks.env_steps == 34
    assert [record.epoch for record in loop.state.history] == [1, 2]
    table = loop.parts["agent"].table.clone()
    assert torch.equal(table, found.state["parts"]["agent"]["table"])
    final = loop.run()
    assert (final.status, final.epoch, final.total_iterations) == ("completed", 4, 28)
    assert not torch.equal(loop.parts["agent"].table, table)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_agent_is_loaded_from_an_old_checkpoint(path):
    agent = make().parts["agent"]
    load(agent, path)
    assert agent.env_steps == 34
