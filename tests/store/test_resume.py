"""Resume from the newest undamaged checkpoint: bit for bit, or with an error that has the reason."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import rein
from rein.agents.q_learning import QLearning
from rein.envs.gridworld import Gridworld
from rein.errors import CheckpointError
from rein.handlers.checkpoint import checkpoint
from rein.handlers.evaluate_every import evaluate_every
from rein.testing.stateful import first_difference


def make(
    path: Path,
    *,
    gamma: float = 0.9,
    num_envs: int = 4,
    every: int = 2,
    episodic: bool = False,
    evaluated: bool = False,
    seed: int | None = 0,
) -> rein.Loop:
    environment = Gridworld(num_envs, [(2, 4)], seed=seed, max_episode_steps=9)
    spaces = environment.single_observation_space, environment.single_action_space
    agent = QLearning(*spaces, gamma=gamma, seed=seed)
    store = rein.HDF5Store(path, exist="resume")
    loop = rein.training_loop(agent, environment, store, episodic=episodic, epochs=8, iterations=7)
    if evaluated:
        test = Gridworld(2, [(2, 4)], seed=1, max_episode_steps=99)
        evaluate_every(loop, agent.policy(), test, episodes=4, every=2)
    checkpoint(loop, store, every=every, keep_last=None)
    return loop


def timeless(state: Any) -> Any:
    """Return the state without wall-clock times and without the outcomes of runs."""
    odd = ("seconds", "epoch_began", "times", "completed", "halted", "failed")
    if isinstance(state, dict):
        return {key: timeless(value) for key, value in state.items() if key not in odd}
    return [timeless(value) for value in state] if isinstance(state, list) else state


def finish(loop: rein.Loop) -> dict[str, Any]:
    loop.run()
    loop.parts["store"].close()
    del loop.parts["store"]  # a closed store has no state
    return timeless(loop.state_dict())


def same_trajectories(one: Path, other: Path) -> None:
    a, b = rein.open_run(one), rein.open_run(other)
    assert a.epochs["number"].tolist() == b.epochs["number"].tolist()
    for name in a.fields:
        assert a.field(name).tobytes() == b.field(name).tobytes(), name
    assert {k: v.tolist() for k, v in a.episodes.items() if k != "final_observation"} == {
        k: v.tolist() for k, v in b.episodes.items() if k != "final_observation"
    }


def interrupted(path: Path, at: int, **options: Any) -> None:
    loop = make(path, **options)
    loop.iteration_completed(once=at)(lambda state: loop.interrupt("enough"))
    loop.run()
    loop.parts["store"].close()


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("episodic", [False, True])
def test_resumed_run_equals_an_uninterrupted_run(tmp_path, episodic):
    whole = finish(make(tmp_path / "whole", episodic=episodic))
    for at in (1, 6, 7, 8, 24, 40):
        path = tmp_path / str(at)
        interrupted(path, at, episodic=episodic)
        loop = make(path, episodic=episodic)
        rein.resume(loop, path)
        assert first_difference(whole, finish(loop)) is None, at
        same_trajectories(tmp_path / "whole", path)


@pytest.mark.default_cases("24")
@pytest.mark.parametrize("at", [6, 24])
def test_resumed_run_with_random_seeds_equals_an_uninterrupted_run(tmp_path, at):
    path = tmp_path / "run"
    loop = make(path, seed=None)
    loop.iteration_completed(once=at)(lambda state: loop.interrupt("enough"))
    loop.run()
    loop.parts["store"].close()
    again = make(path, seed=None)
    assert again.parts["agent"].seed != loop.parts["agent"].seed
    rein.resume(again, path)
    whole = finish(make(tmp_path / "whole", seed=loop.parts["agent"].seed))
    assert first_difference(whole, finish(again)) is None
    same_trajectories(tmp_path / "whole", path)


@pytest.mark.parametrize(
    ("name", "value"), [("part", (1, 2)), ("my part", ([1, 2], [1, 3])), ("a.b", ({"a": 1}, {"a": 2}))]
)
def test_random_configuration_values_are_not_compared(tmp_path, name, value):
    class Part:
        def __init__(self, drawn: Any, chosen: int) -> None:
            self.config = {"drawn": drawn, "chosen": chosen}

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state == {}

    def compose(drawn: Any, chosen: int) -> rein.Loop:
        loop = make(tmp_path)
        loop.own(name, Part(drawn, chosen), by_chance="drawn")
        return loop

    loop = compose(value[0], 1)
    loop.run(epochs=2)
    loop.parts["store"].close()
    assert rein.resume(compose(value[1], 1), tmp_path).path.is_file()
    with pytest.raises(CheckpointError, match=rf": {name}.config.chosen was 1 and is 2;"):
        rein.resume(compose(value[1], 2), tmp_path)


def test_given_seeds_must_match_the_seeds_of_the_run(tmp_path):
    loop = make(tmp_path, seed=None, evaluated=True)
    loop.run(epochs=2)
    loop.parts["store"].close()
    drawn = loop.parts["agent"].seed
    assert rein.resume(make(tmp_path, seed=drawn, evaluated=True), tmp_path).path.name == "epoch-000002.h5"
    with pytest.raises(CheckpointError, match=rf"agent.config.seed was {drawn} and is {drawn + 1}; environment"):
        rein.resume(make(tmp_path, seed=drawn + 1, evaluated=True), tmp_path)


def test_printed_checkpoint_is_short(tmp_path):
    interrupted(tmp_path / "run", 8)
    text = repr(rein.resume(make(tmp_path / "run")))
    assert len(text) < 1000 and text.count("\n") < 10
    assert "epoch: 2" in text and "'agent'" in text


def test_files_newer_than_the_checkpoint_are_moved_aside(tmp_path):
    path = tmp_path / "run"
    finish(make(path))
    old = path / "checkpoints/epoch-000004.h5"
    newer = {
        p.name: p.read_bytes()
        for kind in ("checkpoints", "trajectories")
        for p in (path / kind).glob("*-00000[5-8].h5")
    }
    assert len(newer) == 4
    loop = make(path)
    assert rein.resume(loop, old).path == old
    finish(loop)
    aside = {p.name: p.read_bytes() for p in (path / "aside/epoch-000004").glob("*0*.h5")}
    assert aside == newer
    assert rein.open_run(path).epochs["number"].tolist() == list(range(1, 9))
    assert (path / "checkpoints/latest").read_text() == "epoch-000008.h5\n"


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_damaged_newest_checkpoint_is_skipped(tmp_path, caplog, damage):
    path = tmp_path / "run"
    whole = finish(make(path))
    newest = path / "checkpoints/epoch-000008.h5"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes({"flip": content, "cut": content[:-600], "empty": b""}[damage])
    loop = make(path)
    with caplog.at_level(logging.WARNING):
        assert rein.resume(loop, path).path.name == "epoch-000006.h5"
    assert "epoch-000008.h5" in caplog.text and "skipping" in caplog.text
    assert first_difference(whole, finish(loop)) is None
    assert newest.name in {p.name for p in (path / "aside/epoch-000006").iterdir()}
    with pytest.raises(CheckpointError, match=r"epoch-000008\.h5: "):
        rein.resume(make(path), path / "aside/epoch-000006/epoch-000008.h5")


def test_other_configuration_raises_and_moves_nothing(tmp_path):
    path = tmp_path / "run"
    finish(make(path))
    before = sorted(path.rglob("*.h5"))
    loop = make(path, gamma=0.5, num_envs=8)
    with pytest.raises(CheckpointError) as error:
        rein.resume(loop, path)
    assert "agent.config.gamma was 0.9 and is 0.5" in str(error.value)
    assert "environment.config.num_envs was 4 and is 8" in str(error.value)
    assert sorted(path.rglob("*.h5")) == before


def test_non_strict_resume_loads_the_parts_that_fit(tmp_path, caplog):
    path = tmp_path / "run"
    interrupted(path, at=24, evaluated=True)
    loop = make(path, num_envs=8)
    fresh = loop.parts["environment"].state_dict()
    with caplog.at_level(logging.WARNING):
        found = rein.resume(loop, path, strict=False)
    assert "not loaded: evaluation_environment: the loop has no such part" in caplog.text
    assert "not loaded: environment: " in caplog.text
    assert torch.equal(loop.parts["agent"].table, found.state["parts"]["agent"]["table"])
    assert first_difference(fresh, loop.parts["environment"].state_dict()) is None
    final = loop.run()
    loop.parts["store"].close()
    assert (final.status, final.epoch) == ("completed", 8)
    assert rein.open_run(path).epochs["number"].tolist() == list(range(1, 9))


def test_other_package_version_is_logged(tmp_path, caplog, monkeypatch):
    path = tmp_path / "run"
    finish(make(path))
    monkeypatch.setattr("rein.store.loading.versions", lambda: {"torch": "9.9"})
    with caplog.at_level(logging.WARNING):
        rein.resume(make(path), path)
    assert "and is '9.9'" in caplog.text


def test_resume_into_another_folder(tmp_path):
    """The original run is not changed."""
    finish(make(tmp_path / "run"))
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*.h5")}
    loop = make(tmp_path / "branch")
    rein.resume(loop, tmp_path / "run/checkpoints/epoch-000004.h5")
    finish(loop)
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*.h5")} == before
    assert rein.open_run(tmp_path / "branch").epochs["number"].tolist() == [5, 6, 7, 8]


@pytest.mark.slow
def test_repeatedly_resumed_run_equals_an_uninterrupted_run(tmp_path):
    whole = finish(make(tmp_path / "whole"))
    path = tmp_path / "run"
    interrupted(path, at=3)
    for _ in range(10):
        loop = make(path)
        rein.resume(loop, path)
        start = loop.state.total_iterations
        loop.iteration_completed(when=lambda state, n=start: state.total_iterations == n + 6)(
            lambda state, loop=loop: loop.interrupt("again")
        )
        state = finish(loop)
    assert first_difference(whole, state) is None
    same_trajectories(tmp_path / "whole", path)


def test_one_script_starts_and_resumes_a_run(tmp_path):
    whole = finish(make(tmp_path / "whole"))
    first = make(tmp_path / "run")
    assert rein.resume(first) is None
    first.iteration_completed(once=24)(lambda state: first.interrupt("enough"))
    first.run()
    first.parts["store"].close()
    again = make(tmp_path / "run")
    assert rein.resume(again).path.parent == tmp_path / "run/checkpoints"
    assert first_difference(whole, finish(again)) is None
    same_trajectories(tmp_path / "whole", tmp_path / "run")


def test_resume_without_a_path_needs_a_store_opened_for_resuming(tmp_path):
    environment = Gridworld(4, seed=0)
    agent = QLearning(environment, seed=0)
    with pytest.raises(TypeError, match="no HDF5Store; give the path of the run"):
        rein.resume(rein.training_loop(agent, environment))
    loop = rein.training_loop(agent, environment, store=tmp_path / "run")
    with pytest.raises(ValueError, match=r'new folder, .*run; open the run with HDF5Store\(path, "resume"\)'):
        rein.resume(loop)
