from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rein
from rein.handlers.population_based_training import PopulationBasedTraining
from rein.testing.stateful import copy_state, first_difference

S, N = 4, 4
SMALL: dict[str, Any] = {"hidden": (8, 8), "rollout_steps": 16, "minibatches": 1, "update_epochs": 1}
OFF: dict[str, Any] = {"hidden": (8,), "batch_size": 8, "learning_starts": 16, "capacity": 200, "update_to_data": 0.05}
BOUNDS = {"learning_rate": (1e-3, 1e-2)}


def made(kind: Any = rein.PPO, rates: Any = (1e-3, 1e-3, 1e-2, 1e-2), **options: Any) -> tuple[rein.Population, Any]:
    env = rein.envs.CartPole(len(rates) * N, seed=1)
    small = SMALL if kind is rein.PPO else OFF
    settings = {**small, "learning_rate": list(rates), **options}
    return rein.Population(kind, env, learners=len(rates), seed=0, **settings), env


def looped(population: rein.Population, env: Any, store: Any = None, **options: Any) -> rein.Loop:
    loop = rein.training_loop(population, env, store, epochs=6, iterations=32)
    rein.handlers.population_based_training(loop, **{"bounds": BOUNDS, "every": 2, **options})
    return loop


def part_of(loop: rein.Loop) -> PopulationBasedTraining:
    return loop.parts["population_based_training"]


def with_returns(loop: rein.Loop, returns: list[float]) -> rein.State:
    """Return the state of a loop whose learners have had these returns."""
    for learner, value in enumerate(returns):
        mine = loop.parts["statistics"]._learner_returns[learner]
        mine.clear()
        mine.extend([] if math.isnan(value) else [value])
    return loop.state


@pytest.mark.parametrize("kind", [rein.PPO, rein.DQN])
def test_worst_learner_becomes_a_copy_of_the_best_with_a_changed_rate(kind: Any) -> None:
    population, env = made(kind)
    loop = looped(population, env, every=0)
    loop.run(epochs=1)
    before = copy_state(population.state_dict()["agents"])
    state = with_returns(loop, [20.0, 10.0, 40.0, 30.0])
    part_of(loop).evolve(state)
    after = population.state_dict()["agents"]
    assert first_difference(after[1]["networks"], before[2]["networks"]) is None
    assert first_difference(after[1]["learners"], before[2]["learners"]) is None
    for learner in (0, 2, 3):
        assert first_difference(after[learner], before[learner]) is None
    kept = [name for name in after[1] if name not in ("networks", "learners")]
    assert first_difference({name: after[1][name] for name in kept}, {name: before[1][name] for name in kept}) is None
    rates = part_of(loop).values()["learning_rate"]
    assert rates[:1] + rates[2:] == [1e-3, 1e-2, 1e-2]
    assert 1e-3 <= rates[1] <= 1e-2
    assert rates[1] != 1e-3
    assert state.metrics["copied_from/1"] == 2
    assert math.isnan(state.metrics["learner_return/1"])


def test_factor_multiplies_the_value_of_the_source_within_the_bounds() -> None:
    loop = looped(*made(rates=[1e-3, 4e-3, 4e-3, 4e-3]), resample_probability=0.0, factors=[0.5, 2.0])
    part = part_of(loop)
    assert {round(part._changed("learning_rate", 4e-3), 9) for _ in range(20)} == {2e-3, 8e-3}
    assert {round(part._changed("learning_rate", 8e-3), 9) for _ in range(20)} == {4e-3, 1e-2}


def test_random_values_are_spread_evenly_over_the_logarithm() -> None:
    part = part_of(looped(*made(), resample_probability=1.0, bounds={"learning_rate": (1e-4, 1.0)}))
    exponents = np.log10([part._changed("learning_rate", 0.5) for _ in range(400)])
    counts, _ = np.histogram(exponents, bins=[-4, -3, -2, -1, 0])
    assert counts.sum() == 400
    assert counts.min() > 60


def test_random_values_with_a_negative_bound_are_spread_linearly() -> None:
    population, env = made(target_kl=[0.1, 0.2, 0.1, 0.2])
    part = part_of(looped(population, env, resample_probability=1.0, bounds={"target_kl": (-1.0, 1.0)}))
    values = [part._changed("target_kl", 0.5) for _ in range(200)]
    assert np.mean(np.array(values) < 0) == pytest.approx(0.5, abs=0.15)


@pytest.mark.parametrize("bounds", [(1, 8), (1.0, 8.0)])
def test_integer_options_stay_integers(bounds: tuple[float, float]) -> None:
    population, env = made(update_epochs=[1, 2, 3, 4])
    part = part_of(looped(population, env, bounds={"update_epochs": bounds}))
    values = {part._changed("update_epochs", 4) for _ in range(50)}
    assert all(isinstance(value, int) and 1 <= value <= 8 for value in values)
    assert len(values) > 1


@pytest.mark.parametrize("option", ["learning_rate", "gamma", "clip"])
def test_floats_within_integer_bounds_are_not_rounded(option: str) -> None:
    part = part_of(looped(*made(), bounds={option: (0, 1)}, resample_probability=1.0))
    values = [part._changed(option, 0.5) for _ in range(20)]
    assert len({*values}) == 20
    assert 0 < min(values) < 0.5 < max(values) < 1


@pytest.mark.parametrize(("option", "bounds"), [("update_epochs", (0.5, 4)), ("gamma", (0, 2))])
def test_bound_that_the_option_refuses_raises(option: str, bounds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=option):
        looped(*made(), bounds={option: bounds})


@pytest.mark.parametrize("returns", [[5.0] * 4, [math.nan, math.nan, math.nan, 1.0]])
def test_equal_and_missing_returns_replace_no_learner(returns: list[float]) -> None:
    population, env = made()
    loop = looped(population, env, every=0)
    loop.run(epochs=1)
    before = copy_state(population.state_dict())
    part_of(loop).evolve(with_returns(loop, returns))
    assert first_difference(population.state_dict(), before) is None


def test_frozen_learner_is_not_replaced() -> None:
    population, env = made()
    loop = looped(population, env, every=0)
    loop.run(epochs=1)
    population.freeze(1)
    before = copy_state(population.state_dict()["agents"])
    part_of(loop).evolve(with_returns(loop, [20.0, 10.0, 40.0, 30.0]))
    assert first_difference(population.state_dict()["agents"], before) is None


@pytest.mark.slow
def test_population_with_hopeless_learners_improves() -> None:
    def returns(evolves: bool) -> list[float]:
        population, env = made(rates=[1e-9, 1e-9, 1e-2, 1e-2], hidden=(16, 16), update_epochs=4)
        loop = rein.training_loop(population, env, epochs=12, iterations=64)
        if evolves:
            rein.handlers.population_based_training(
                loop, {"learning_rate": (5e-3, 2e-2)}, every=2, before=9, fraction=0.5
            )
        metrics = loop.run().metrics
        return [metrics[f"learner_return/{learner}"] for learner in range(S)]

    alone, evolved = returns(False), returns(True)
    assert max(alone[:2]) < 40
    assert min(evolved[:2]) > 1.5 * max(alone[:2])


def test_metrics_show_the_values_and_the_sources_of_all_learners(tmp_path: Path, caplog: Any) -> None:
    loop = looped(*made(), tmp_path / "run")
    with caplog.at_level("INFO", logger="rein"):
        loop.run()
    copied = [
        (record.epoch, learner, int(source))
        for record in loop.state.history
        for learner in range(S)
        if not math.isnan(source := record.metrics[f"copied_from/{learner}"])
    ]
    assert {epoch for epoch, _, _ in copied} == {2, 4, 6}
    assert caplog.text.count("copies learner") == len(copied)
    rates = [loop.state.history[-1].metrics[f"learning_rate/{learner}"] for learner in range(S)]
    assert rates == part_of(loop).values()["learning_rate"]
    header = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"learner_return/3", "learning_rate/3", "copied_from/3"} <= {*header}


@pytest.mark.default_cases("DQN-2", "PPO-4")
@pytest.mark.parametrize("epoch", [2, 4])
@pytest.mark.parametrize("kind", [rein.PPO, rein.DQN])
def test_resumed_run_equals_uninterrupted_run(tmp_path: Path, kind: Any, epoch: int) -> None:
    """The run is interrupted after the copies of epoch 2, or killed after those of epoch 4."""

    def build(folder: Path) -> rein.Loop:
        loop = looped(*made(kind), rein.HDF5Store(folder, exist="resume"))
        rein.checkpoint(loop, every=3)  # epoch 2 and 4 change the population between two checkpoints
        return loop

    whole = build(tmp_path / "whole")
    whole.run()
    cut = build(tmp_path / "cut")

    @cut.epoch_ended(once=epoch)
    def end(state: rein.State) -> None:
        if epoch == 4:
            raise RuntimeError("killed")
        cut.interrupt("on purpose")

    with pytest.raises(RuntimeError, match="killed") if epoch == 4 else contextlib.nullcontext():
        cut.run()
    cut.parts["store"].close()
    resumed = build(tmp_path / "cut")
    assert rein.resume(resumed, tmp_path / "cut").about["clocks"]["epochs"] == (3 if epoch == 4 else 2)
    resumed.run()
    for part in ("agent", "statistics", "population_based_training"):
        assert first_difference(whole.parts[part].state_dict(), resumed.parts[part].state_dict()) is None
    theirs, mine = (loop.parts["population_based_training"].values() for loop in (whole, resumed))
    assert theirs == mine
    assert theirs["learning_rate"] != [1e-3, 1e-3, 1e-2, 1e-2]


@pytest.mark.parametrize(
    ("change", "kind", "word"),
    [
        ({"bounds": {"learning_rat": (1e-3, 1e-2)}}, TypeError, "learning_rate"),
        ({"bounds": {"hidden": (8, 16)}}, ValueError, "cannot change"),
        ({"bounds": {}}, ValueError, "bounds"),
        ({"bounds": {"learning_rate": (1e-2, 1e-3)}}, ValueError, "lower"),
        ({"bounds": {"learning_rate": (0.0, math.inf)}}, ValueError, "lower"),
        ({"bounds": {"target_kl": (0.01, 0.1)}}, ValueError, "target_kl"),
        ({"bounds": {"update_epochs": (1, 4)}}, ValueError, "together"),
        ({"fraction": 0.0}, ValueError, "fraction"),
        ({"fraction": 0.6}, ValueError, "fraction"),
        ({"factors": []}, ValueError, "factors"),
        ({"factors": [0.0, 1.2]}, ValueError, "factors"),
        ({"resample_probability": 1.1}, ValueError, "resample_probability"),
        ({"evry": 3}, TypeError, "evry"),
    ],
)
def test_invalid_arguments_raise(change: dict[str, Any], kind: Any, word: str) -> None:
    with pytest.raises(kind, match=word):
        looped(*made(), **change)


@pytest.mark.parametrize(
    ("options", "kind", "word"),
    [
        ({"learning_rate": rein.schedules.linear(1e-3, 0.0, env_steps=100)}, TypeError, "schedule"),
        ({"hidden": (8, 8), "activation": ["tanh", "relu", "tanh", "tanh"]}, ValueError, "activation"),
    ],
)
def test_unsuitable_learners_raise(options: dict[str, Any], kind: Any, word: str) -> None:
    with pytest.raises(kind, match=word):
        looped(*made(**options))


def test_single_learner_raises() -> None:
    with pytest.raises(ValueError, match="learners"):
        looped(*made(rates=[1e-3]))


def test_agent_that_is_no_population_raises() -> None:
    env = rein.envs.CartPole(2)
    with pytest.raises(TypeError, match="Population"):
        rein.handlers.population_based_training(rein.training_loop(rein.PPO(env), env), BOUNDS)
