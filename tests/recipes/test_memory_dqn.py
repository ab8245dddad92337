"""The recipe memory-dqn: options, command line, and learning."""

from __future__ import annotations

import pytest

from rein.agents.dqn import DQN
from rein.cli import main
from rein.cli.catalog import find
from rein.episodes import evaluate
from rein.ops.random import stream_seed
from rein.recipes.memory_dqn import memory_dqn
from rein.recipes.tasks import CORES
from rein.testing.stateful import first_difference

SMALL = {
    "num_envs": 4,
    "iterations": 8,
    "epochs": 3,
    "learning_starts": 20,
    "train_frequency": 4,
    "update_to_data": 0.25,
}


def test_agent_uses_the_options_of_the_recipe():
    parts = memory_dqn(**SMALL, gamma=0.5, sequence_length=7, burn_in=3, batch_size=9, tau=0.25, seed=7).parts
    config = parts["agent"].config
    names = ("gamma", "sequence_length", "burn_in", "batch_size", "tau", "seed", "train_frequency", "learning_starts")
    assert [config[name] for name in names] == [0.5, 7, 3, 9, 0.25, 7, 4, 20]
    assert parts["environment"].seed == 7
    assert parts["evaluation_environment"].seed == stream_seed(7, "evaluation")


def test_updates_follow_train_frequency():
    state = memory_dqn(**SMALL).run()
    assert (state.clocks.env_steps, state.clocks.updates) == (96, (96 - 20) // 4)


def test_options_are_command_line_flags(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert find("memory-dqn") is memory_dqn
    flags = [word for key, value in SMALL.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    main(["train", "memory-dqn", "--quiet", "--core", "gru", "--burn-in", "2", *flags])
    assert "96 env steps" in capsys.readouterr().out
    assert list(tmp_path.glob("runs/memory-dqn/trajectories/*.h5"))


def test_results_depend_only_on_the_seed():
    def trained(seed: int) -> object:
        loop = memory_dqn(seed=seed, **SMALL)
        loop.run()
        return loop.parts["agent"].state_dict()

    assert first_difference(trained(1), trained(1)) is None
    assert first_difference(trained(1), trained(2)) is not None


@pytest.mark.parametrize("core", CORES)
def test_core_is_selected_by_name(core):
    agent = memory_dqn(core=core).parts["agent"]
    kind = CORES[core]
    assert isinstance(agent, DQN) if kind is None else isinstance(agent.networks.online.core, kind)


def test_unknown_core_is_rejected():
    with pytest.raises(ValueError, match=r"core='rnn': use one of lstm, gru, mingru, none"):
        memory_dqn(core="rnn")


def test_solves_memory_task():
    loop = memory_dqn()
    assert loop.run().reason == "solved"
    environment = type(loop.parts["environment"])(100, 4, 8, seed=1)
    assert evaluate(loop.parts["agent"].policy(), environment, 100).mean_return >= 0.95


def test_return_stays_at_chance_without_core():
    state = memory_dqn(core="none", epochs=10).run()
    assert state.status == "completed"
    assert 0.1 < state.metrics["evaluation_return"] < 0.45  # chance is 1/4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("core", ["lstm", "gru", "mingru"])
def test_memory_is_solved(core, seed):
    assert memory_dqn(core=core, seed=seed).run().reason == "solved"
