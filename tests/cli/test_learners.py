"""`rein train --learners`: values of options for each learner, and runs that resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rein
from rein.cli import main
from rein.cli.plan import plan
from rein.cli.recipes import Recipe, of_run

TRAIN = ["train", "cartpole", "--num-envs", "4", "--iterations", "16", "--minibatches", "2", "--quiet"]


def each(*params: str, learners: int = 5, **options: Any) -> Any:
    words = [word for text in params for word in ("--param", text)]
    return plan("cartpole", ["--learners", str(learners), *words], **options).each


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
        plan("cartpole", [], Recipe("cartpole", {"learners": 2, "param": param}))


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
    assert plan("cartpole", ["--learners", "2"]).options["stop_when_solved"] is False
    assert plan("cartpole", ["--learners", "2", "--stop-when-solved"]).options["stop_when_solved"] is True
    assert plan("cartpole", []).options["stop_when_solved"] is True


def test_recorded_recipe_has_the_texts_and_single_values(tmp_path: Path) -> None:
    run = tmp_path / "run"
    main([*TRAIN, "--learners", "2", "--param", "clip=0.1..0.3", "--epochs", "1", "--run", str(run)])
    options = of_run(run).options
    assert options["param"] == ["clip=0.1..0.3"]
    assert options["clip"] == 0.2
