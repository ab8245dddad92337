"""Checkpoint files: write, read, damage, and loading of parts."""

from __future__ import annotations

import errno
import importlib.metadata
import os
from math import inf, nan
from typing import Any

import pytest
import torch
from gymnasium import spaces

import rein
from rein.agents.q_learning import QLearning
from rein.cli import doctor
from rein.envs.gridworld import Gridworld
from rein.errors import CheckpointError, NonFiniteError
from rein.handlers.checkpoint import checkpoint
from rein.loop.info import run_info
from rein.spaces.space_json import describe_build
from rein.store.checkpoint_file import (
    describe_part,
    differences,
    is_finite,
    look,
    read_checkpoint,
    versions,
    write_checkpoint,
)
from rein.store.format import sealed
from rein.store.loading import load, save
from rein.testing.stateful import copy_state, first_difference


def make_agent(seed=0, **options):
    environment = Gridworld(num_envs=4, possible_targets=[(2, 4)], seed=0)
    return QLearning(environment.single_observation_space, environment.single_action_space, seed=seed, **options)


@pytest.fixture
def path(tmp_path):
    write_checkpoint(tmp_path / "some.h5", {"x": torch.arange(1000.0)}, {"kind": "run", "total_iterations": 3})
    return tmp_path / "some.h5"


def test_description_is_read_with_and_without_the_state(path):
    found = read_checkpoint(path)
    assert found.path == path and found.state["x"].shape == (1000,)
    assert look(path) == found.about == {"format": 2, "kind": "run", "total_iterations": 3}


def test_description_may_contain_infinite_numbers(tmp_path):
    description = {"config": {"clip": float("inf"), "low": -float("inf"), "sizes": (1, 2)}}
    write_checkpoint(tmp_path / "some.h5", {}, description)
    assert look(tmp_path / "some.h5")["config"] == {"clip": float("inf"), "low": -float("inf"), "sizes": [1, 2]}
    assert differences(description, look(tmp_path / "some.h5"))[:1] == ["format was absent and is 2"]


def test_damage_anywhere_raises_with_the_file_name(path):
    """Flip a bit, truncate, blank a block of bytes, or append a byte, at many positions of a small file."""
    whole = path.read_bytes()
    flipped = (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 97))
    cut = (whole[:length] for length in range(0, len(whole), 501))
    blank = (
        whole[:at] + bytes(256) + whole[at + 256 :] for at in range(0, len(whole), 701) if any(whole[at : at + 256])
    )
    count = 0
    for mutant in (*flipped, *cut, *blank, whole + b"\0"):
        path.write_bytes(mutant)
        with pytest.raises(CheckpointError, match=r"some\.h5: "):
            read_checkpoint(path)
        look(path)  # does not raise
        count += 1
    assert count > 150


def test_other_format_version_raises(tmp_path):
    write_checkpoint(tmp_path / "new.h5", {}, {"format": 1})
    with pytest.raises(CheckpointError, match="format version 1; this rein reads version 2"):
        read_checkpoint(tmp_path / "new.h5")


def test_missing_file_and_foreign_file_raise(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        read_checkpoint(tmp_path / "none.h5")
    assert look(tmp_path / "none.h5") is None
    (tmp_path / "text").write_text("hello")
    with pytest.raises(CheckpointError, match="user block"):
        read_checkpoint(tmp_path / "text")


def test_failed_write_raises_with_path_and_reason(tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match=r"a\.h5: .*state\.x is a object"):
        write_checkpoint(tmp_path / "a.h5", {"x": object()}, {})
    with pytest.raises(CheckpointError, match=r"none/a\.h5: .*No such file"):
        write_checkpoint(tmp_path / "none" / "a.h5", {}, {})
    monkeypatch.setattr(sealed.os, "write", full)
    with pytest.raises(CheckpointError, match=r"a\.h5: .*No space left.*free some space"):
        write_checkpoint(tmp_path / "a.h5", {}, {})
    assert list(tmp_path.iterdir()) == []


def test_only_loads_the_chosen_entries(tmp_path):
    agent, other = make_agent(), make_agent(seed=1, gamma=0.5)
    agent.table += 1.0
    agent.env_steps = 12
    save(agent, tmp_path / "agent.h5")
    before = copy_state(other.state_dict())
    load(other, tmp_path / "agent.h5", only=["table"])
    assert torch.equal(other.table, agent.table)
    assert first_difference(before, {**other.state_dict(), "table": before["table"]}) is None
    with pytest.raises(CheckpointError, match=r"has no 'weights'; it has: .*table, seed"):
        load(other, tmp_path / "agent.h5", only=["weights"])


def test_other_configuration_raises_with_the_differences(tmp_path):
    save(make_agent(), tmp_path / "agent.h5")
    other = make_agent(gamma=0.5, learning_rate=0.2)
    with pytest.raises(CheckpointError, match=r"config\.learning_rate was 0\.1 and is 0\.2; config\.gamma was 0\.99"):
        load(other, tmp_path / "agent.h5")
    load(other, tmp_path / "agent.h5", strict=False)
    misfit = QLearning(spaces.Discrete(3), spaces.Discrete(2))
    with pytest.raises(CheckpointError, match=r"agent\.h5: does not fit QLearning: .*table has shape"):
        load(misfit, tmp_path / "agent.h5", strict=False)


def test_is_finite_checks_every_tensor():
    assert is_finite({"a": torch.ones(3), "b": [torch.tensor([1, 2])], "c": float("nan")})
    assert not is_finite({"a": torch.ones(3), "b": [torch.tensor([1.0, float("inf")])]})


def test_saving_a_policy_raises(tmp_path):
    with pytest.raises(TypeError, match="save the agent"):
        save(make_agent().policy(), tmp_path / "policy.h5")


def test_failed_load_leaves_the_part_unchanged(tmp_path):
    save(make_agent(), tmp_path / "agent.h5")
    space = spaces.Discrete(4)
    other = QLearning(spaces.Discrete(7), space, seed=1)
    before = copy_state(other.state_dict())
    with pytest.raises(CheckpointError, match="does not fit"):
        load(other, tmp_path / "agent.h5", only="table")
    assert first_difference(before, other.state_dict()) is None


def test_differences_ignore_speed_options_and_random_seeds():
    theirs = {"agent": {"config": {"threads": 1, "device": "cuda", "seed": 5, "gamma": 0.9}}}
    mine = {"agent": {"config": {"threads": 2, "device": "cpu", "seed": None, "gamma": 0.9}}}
    assert differences(theirs, mine) == []
    assert differences({"seed": 5}, {"seed": 6}) == ["seed was 5 and is 6"]
    assert differences({"a": {"x": nan, "y": [1, 2]}}, {"a": {"x": nan, "y": [1, 3]}}) == ["a.y.1 was 2 and is 3"]


def test_agent_with_another_seed_is_loaded(tmp_path):
    save(make_agent(seed=3), tmp_path / "agent.h5")
    agent = make_agent(seed=4)
    load(agent, tmp_path / "agent.h5")
    assert first_difference(agent.state_dict(), make_agent(seed=3).state_dict()) is None


def test_checkpoint_needs_no_package_metadata(tmp_path, monkeypatch):
    """As in a source tree that is not installed, or in a frozen program."""

    def refuse(package):
        raise importlib.metadata.PackageNotFoundError(package)

    for name in ("version", "metadata", "requires"):
        monkeypatch.setattr(importlib.metadata, name, refuse)
    versions.cache_clear()
    loop = rein.Loop(lambda state: None, iterations=1)
    checkpoint(loop, rein.Checkpoints(tmp_path))
    loop.run()
    found = read_checkpoint(tmp_path / "epoch-000001.h5").about["versions"]
    assert (found["rein"], found["torch"]) == (rein.__version__, str(torch.__version__))
    assert run_info(loop)["versions"]["rein"] == rein.__version__
    doctor.doctor()
    versions.cache_clear()


class Heads(rein.Agent):
    """Agent with a list of modules."""

    def build(self, generator):
        self.heads = [torch.nn.Linear(2, 2) for _ in range(2)]

    def act(self, observation, explore):
        return self.heads[0](observation).argmax(1)

    def update(self, batch):
        return {}


def spoiled(kind: str, value: float) -> Any:
    """Return an agent with a parameter that is not finite."""
    if kind == "table":
        agent: Any = make_agent()
        agent.table[0, 0] = value
    elif kind == "population":
        agent = rein.Population(rein.PPO, rein.envs.CartPole(2), learners=2, hidden=(4,), seed=0)
        next(agent.agent(1).networks.parameters()).data.flatten()[0] = value
    elif kind == "custom":
        agent = Heads(spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(2), seed=0)
        agent.heads[1].bias.data.fill_(value)
    else:
        normalize = kind == "normalizer"
        agent = rein.PPO(
            spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(2), hidden=(4,), normalize_observation=normalize, seed=0
        )
        if normalize:
            agent.networks.preprocess.normalizer.mean.fill_(value)
        else:
            agent.networks.value_head.bias.data.fill_(value)
    return agent


@pytest.mark.parametrize(
    ("kind", "value"),
    [("table", nan), ("networks", nan), ("networks", inf), ("population", nan), ("custom", nan), ("normalizer", nan)],
)
def test_parameters_that_are_not_finite_are_neither_saved_nor_loaded(kind, value, tmp_path):
    path = tmp_path / "agent.h5"
    with pytest.raises(NonFiniteError, match="parameter"):
        save(spoiled(kind, value), path)
    assert not path.exists()
    bad, good = spoiled(kind, value), spoiled(kind, 0.5)
    about = {"kind": "part", **describe_part(bad), "build": describe_build(bad)}
    write_checkpoint(path, bad.state_dict(), about)
    before = copy_state(good.state_dict())
    with pytest.raises(CheckpointError, match="not finite"):
        load(good, path)
    assert first_difference(before, good.state_dict()) is None
    if kind == "networks":
        with pytest.raises(CheckpointError, match="not finite"):
            rein.load_policy(path)
