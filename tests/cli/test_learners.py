"""`rein train --learners`: values of options for each learner, and runs that resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import rein
from rein.cli import main
from rein.cli.experiment import Experiment
from rein.cli.plans import Recipe, make_plan, read_run
from rein.integrations.learning_curves import Learners, draw_learners, read_columns, read_learners
from rein.integrations.plot import make_figure

TRAIN = ["train", "cartpole", "--num-envs", "4", "--iterations", "16", "--minibatches", "2", "--quiet"]


def each(*params: str, learners: int = 5, **options: Any) -> Any:
    words = [word for text in params for word in ("--param", text)]
    return make_plan(Experiment("cartpole"), ["--learners", str(learners), *words], **options).each


def agents_of(run: Path) -> list[dict[str, Any]]:
    return json.loads((run / "run.json").read_text())["parts"]["agent"]["config"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("gae_lambda=0..1", [0.0, 0.25, 0.5, 0.75, 1.0]),
        ("learning_rate=log:1e-4..1", [1e-4, 1e-3, 1e-2, 1e-1, 1.0]),
        ("update_epochs=1..9", [1, 3, 5, 7, 9]),
        ("activation=tanh|relu", ["tanh", "relu", "tanh", "relu", "tanh"]),
        ("clip=0.1|0.3|0.2", [0.1, 0.3, 0.2, 0.1, 0.3]),
    ],
)
def test_values_of_an_option_are_spread_over_the_learners(text: str, values: list[Any]) -> None:
    (found,) = each(text).values()
    assert found == (pytest.approx(values) if isinstance(values[0], float) else values)


def test_values_of_further_options_are_in_random_order() -> None:
    found = each("learning_rate=log:1e-4..1e-2", "clip=0.1..0.3", learners=32)
    assert sorted(found["clip"]) == pytest.approx(np.linspace(0.1, 0.3, 32).tolist())
    assert found["clip"] not in (sorted(found["clip"]), sorted(found["clip"])[::-1])
    assert each("learning_rate=log:1e-4..1e-2", "clip=0.1..0.3", learners=32) == found


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["--param", "clip=0.1..0.3"], "--learners"),
        (["--learners", "4", "--param", "clipp=0.1..0.3"], "clip"),
        (["--learners", "4", "--param", "num_envs=4..8"], "num_envs"),
        (["--learners", "4", "--param", "hidden=[8]|[16]"], "hidden"),
        (["--learners", "4", "--param", "seed=1..4"], "seed"),
        (["--learners", "4", "--param", "clip=0.1|0.2", "--param", "clip=0.1..0.2"], "twice"),
        (["--learners", "4", "--param", "clip=0.1..0.2", "--clip", "0.1"], "twice"),
        (["--learners", "4", "--param", "normalize_advantage=true|false", "--no-normalize-advantage"], "twice"),
        (["--learners", "0"], "learners"),
    ],
)
def test_mistake_is_explained(words: list[str], word: str, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main([*TRAIN, *words, "--run", str(tmp_path / "run")])
    assert word in capsys.readouterr().err


@pytest.mark.parametrize("param", [["clip=0.1..0.3", 1], "clip=0.1..0.3", ["activation=/etc/a|tanh"], ["clip=\x07"]])
def test_values_from_a_file_are_checked(param: Any) -> None:
    with pytest.raises(ValueError, match=r"param|activation|clip"):
        make_plan(Experiment("cartpole"), [], Recipe(Experiment("cartpole"), {"learners": 2, "param": param}))


def test_value_for_an_option_that_differs_in_the_file_raises() -> None:
    before = Recipe(Experiment("cartpole"), {"learners": 2, "param": ["clip=0.1..0.3"], "clip": 0.2}, [])
    assert make_plan(Experiment("cartpole"), [], before).each == {"clip": [0.1, 0.3]}
    with pytest.raises(ValueError, match=r"clip in run\.json: .* twice"):
        make_plan(Experiment("cartpole"), ["--clip", "0.2"], before)
    with pytest.raises(ValueError, match=r"clip in run\.json: .* twice"):
        make_plan(Experiment("cartpole"), [], attrs.evolve(before, flags=["--clip"]))


def test_population_run_resumes_with_its_values(tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    main([*TRAIN, "--learners", "3", "--param", "learning_rate=log:1e-4..1e-2", "--epochs", "2", "--run", str(run)])
    assert rein.list_runs(run)[0].env_steps == 2 * 16 * 4
    before = agents_of(run)
    main(["resume", str(run), "--epochs", "4", "--quiet"])
    assert "resuming" in capsys.readouterr().out
    assert agents_of(run) == before
    assert rein.list_runs(run)[0].env_steps == 4 * 16 * 4
    whole = tmp_path / "whole"
    main([*TRAIN, "--config", str(run / "config.toml"), "--epochs", "4", "--run", str(whole)])
    assert agents_of(whole) == before
    states = [rein.store.loading.part_at(path).state for path in (run, whole)]
    assert rein.testing.stateful.first_difference(*states) is None


def test_learners_run_their_whole_budget_unless_the_user_decides() -> None:
    assert make_plan(Experiment("cartpole"), ["--learners", "2"]).options["stop_when_solved"] is False
    assert (
        make_plan(Experiment("cartpole"), ["--learners", "2", "--stop-when-solved"]).options["stop_when_solved"] is True
    )
    assert make_plan(Experiment("cartpole"), []).options["stop_when_solved"] is True


def test_recorded_recipe_has_the_texts_and_single_values(tmp_path: Path) -> None:
    run = tmp_path / "run"
    main([*TRAIN, "--learners", "2", "--param", "clip=0.1..0.3", "--epochs", "1", "--run", str(run)])
    options = read_run(run).options
    assert options["param"] == ["clip=0.1..0.3"]
    assert options["clip"] == 0.2


@pytest.fixture(scope="module")
def population(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of three learners."""
    run = tmp_path_factory.mktemp("runs") / "run"
    main([*TRAIN, "--learners", "3", "--param", "learning_rate=log:1e-4..1e-2", "--epochs", "6", "--run", str(run)])
    return run


def test_summary_names_the_best_learner_and_the_plot(tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    main([*TRAIN, "--learners", "2", "--param", "clip=0.1..0.3", "--epochs", "6", "--run", str(run)])
    lines = capsys.readouterr().out.splitlines()
    (best,) = [line for line in lines if line.startswith("best of 2 learners")]
    assert "clip 0.1" in best or "clip 0.3" in best
    assert any(line.endswith(f"rein plot {run} --x clip") for line in lines)


def test_every_learner_is_evaluated_on_the_same_episodes(population: Path, capsys: Any) -> None:
    main(["evaluate", str(population), "--episodes", "4", "--seed", "1"])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line[:1].isdigit()]
    assert [row[:2] for row in rows] == [["0", "0.0001"], ["1", "0.001"], ["2", "0.01"]]
    main(["evaluate", str(population), "--episodes", "4", "--seed", "1", "--learner", "2"])
    assert f"mean {rows[2][2]}" in capsys.readouterr().out


def test_list_of_runs_shows_the_values_of_a_population(population: Path, tmp_path: Path, capsys: Any) -> None:
    main([*TRAIN, "--epochs", "1", "--run", str(population.parent / "single")])
    main(["runs", str(population.parent)])
    assert "learners" in capsys.readouterr().out


def test_plot_has_a_point_for_each_learner_over_its_option(population: Path, tmp_path: Path) -> None:
    found = read_learners(population, "learning_rate")
    assert found.values == pytest.approx([1e-4, 1e-3, 1e-2])
    columns = read_columns(population).metrics
    assert found.returns.tolist() == [columns[f"learner_return/{learner}"][-1] for learner in range(3)]
    axes = make_figure(4.0, 3.0).add_subplot()
    draw_learners(axes, {"run": found}, option="learning_rate")
    assert axes.get_xscale() == "log"
    points, best = axes.get_lines()
    assert points.get_xydata().tolist() == list(map(list, zip(found.values, found.returns.tolist(), strict=True)))
    assert best.get_xydata()[0][1] == found.returns.max()
    main(["plot", str(population), "--x", "learning-rate", "--output", str(tmp_path / "learners.png")])
    assert (tmp_path / "learners.png").stat().st_size


def test_texts_and_narrow_ranges_have_a_linear_axis() -> None:
    for values in (["relu", "tanh"], [0.1, 0.3], [-1.0, 100.0]):
        axes = make_figure(4.0, 3.0).add_subplot()
        draw_learners(axes, {"run": Learners(values, np.array([1.0, np.nan]))}, option="x")
        assert axes.get_xscale() == "linear"


def test_values_that_change_during_a_run_are_the_last_ones(tmp_path: Path) -> None:
    env = rein.envs.CartPole(8, seed=0)
    agent = rein.Population(rein.PPO, env, learners=4, learning_rate=[1e-4, 1e-4, 1e-2, 1e-2], seed=0)
    loop = rein.training_loop(agent, env, tmp_path / "run", epochs=4, iterations=64)
    rein.handlers.population_based_training(loop, {"learning_rate": (1e-3, 1e-2)})
    loop.run()
    rates = [agent.agent(learner).learning_rate() for learner in range(4)]
    assert read_learners(tmp_path / "run", "learning_rate").values == pytest.approx(rates)


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["evaluate", "--learner", "3"], "0 to 2"),
        (["evaluate", "--learner", "-1"], "0 to 2"),
        (["evaluate", "--video", "films"], "--learner"),
        (["plot", "--x", "gamma"], "learning_rate"),
        (["plot", "--x", "learning_rate", "--episode", "0"], "combined"),
        (["plot", "--x", "learning_rate", "--metric", "value_loss"], "value_loss/0"),
    ],
)
def test_mistake_with_a_population_is_explained(population: Path, words: list[str], word: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main([words[0], str(population), *words[1:]])
    assert word in capsys.readouterr().err
