"""Numbers of epochs that do not begin at 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rein


def numbers(loop: rein.Loop) -> list[int]:
    """Return a list that collects the number of each epoch."""
    seen: list[int] = []
    loop.epoch_started(lambda state: seen.append(state.epoch))
    return seen


def make() -> rein.Loop:
    return rein.Loop(lambda state: None, iterations=2)


def test_first_epoch_numbers_the_epochs_up_to_the_total() -> None:
    loop = make()
    seen = numbers(loop)
    state = loop.run(epochs=5, first_epoch=3)
    assert seen == [3, 4, 5]
    assert [record.epoch for record in state.history] == [3, 4, 5]
    assert (state.clocks.epochs, state.total_iterations) == (5, 6)


def test_second_run_and_resume_keep_their_numbers() -> None:
    loop, resumed = make(), make()
    seen = numbers(resumed)
    loop.run(epochs=4, first_epoch=3)
    resumed.load_state_dict(loop.state_dict())
    for _ in range(2):
        resumed.run(epochs=5, first_epoch=3)
    assert seen == [5]


@pytest.mark.parametrize("first_epoch", [0, -1, True, 6])
def test_first_epoch_out_of_range_is_refused(first_epoch: Any) -> None:
    with pytest.raises(ValueError, match="first_epoch"):
        make().run(epochs=5, first_epoch=first_epoch)


def build(folder: Path) -> rein.Loop:
    env = rein.envs.CartPole(num_envs=2, seed=0)
    agent = rein.PPO(env, rollout_steps=4, minibatches=1, hidden=(8,), seed=0)
    loop = rein.training_loop(agent, env, rein.HDF5Store(folder, exist="resume"), iterations=4, seed=0)
    rein.checkpoint(loop)
    return loop


def test_stored_run_has_these_numbers_and_resumes(tmp_path: Path) -> None:
    build(tmp_path).run(epochs=52, first_epoch=51)
    resumed = build(tmp_path)
    rein.resume(resumed)
    resumed.run(epochs=53, first_epoch=51)
    assert rein.open_run(tmp_path).epochs["number"].tolist() == [51, 52, 53]
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "51", "52", "53"]


def test_train_passes_first_epoch_on() -> None:
    env = rein.envs.CartPole(num_envs=2, seed=0)
    agent = rein.PPO(env, rollout_steps=4, minibatches=1, hidden=(8,), seed=0)
    state = rein.train(agent, env, epochs=52, first_epoch=51, iterations=4)
    assert [record.epoch for record in state.history] == [51, 52]
