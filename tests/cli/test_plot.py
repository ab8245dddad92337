"""Plots of runs: curves, fields, paths and values."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.quiver import Quiver

import rein
import rein.agents.ppo
import rein.agents.q_learning
from rein.cli import main
from rein.envs.cartpole import CartPole
from rein.envs.gridworld import Gridworld
from rein.handlers.checkpoint import checkpoint
from rein.integrations.learning_curves import choose_metric, grouped, read_columns
from rein.integrations.plot import (
    COLOURS,
    Curve,
    band,
    curve_of,
    draw_curves,
    draw_field,
    draw_paths,
    draw_values,
    short_number,
)

PNG = b"\x89PNG\r\n\x1a\n"
UP, DOWN, RIGHT, LEFT = range(4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two seeds of a recipe, one run with other options, and one of another recipe."""
    folder = tmp_path_factory.mktemp("runs")
    words = {
        "a": ["gridworld", "--seed", "0"],
        "b": ["gridworld", "--seed", "1"],
        "c": ["gridworld", "--seed", "0", "--gamma", "0.9"],
        "dqn": ["gridworld-dqn", "--hidden", "16", "--iterations", "40", "--learning-starts", "100"],
    }
    for name, chosen in words.items():
        path = folder / name
        main(["train", *chosen, "--epochs", "6", "--run", str(path), "--no-stop-when-solved", "--quiet"])
    return {name: folder / name for name in words}


def axes() -> Any:
    return Figure(figsize=(6, 4)).add_subplot()


def plot(*words: Any) -> None:
    main(["plot", *map(str, words)])


def curve(values: Any, *, start: float = 0.0) -> Curve:
    return Curve(np.arange(len(values)) + start, np.asarray(values, float))


class TestBand:
    def test_mean_lies_within_the_interval(self) -> None:
        curves = [curve([0, 1, 5]), curve([2, 3, 1]), curve([4, 8, 3])]
        found = band(curves)
        assert found.mean.tolist() == [2, 4, 3]
        assert (found.low <= found.mean).all() and (found.mean <= found.high).all()
        assert (found.low >= [0, 1, 1]).all() and (found.high <= [4, 8, 5]).all()

    def test_equal_curves_have_no_interval(self) -> None:
        found = band([curve([1, 2, 3])] * 5)
        assert np.allclose(found.low, found.high)

    def test_interval_equals_the_normal_one_for_many_curves(self) -> None:
        values = torch.randn(200, 1, generator=torch.Generator().manual_seed(0)).numpy()
        found = band([Curve(np.zeros(1), row) for row in values])
        half = 1.96 * values.std() / np.sqrt(len(values))
        assert abs((found.high - found.low)[0] / (2.0 * half) - 1.0) < 0.1

    def test_higher_level_gives_a_wider_band(self) -> None:
        curves = [curve([k, k * k]) for k in range(8)]
        wide, narrow = band(curves, level=0.99), band(curves, level=0.5)
        assert (wide.low < narrow.low).all() and (wide.high > narrow.high).all()

    def test_band_begins_with_the_last_curve_and_ends_with_the_longest(self) -> None:
        found = band([curve(np.zeros(10)), curve(np.ones(6), start=2.0)])
        assert (found.x[0], found.x[-1]) == (2.0, 9.0)
        assert np.allclose(found.mean, 0.5)

    def test_curve_that_ends_early_keeps_its_last_value(self) -> None:
        found = band([curve([0, 10]), curve([0, 1, 2, 3])])
        assert found.mean.tolist() == [0.0, 5.5, 6.0, 6.5]
        assert (found.low <= found.mean).all() and (found.mean <= found.high).all()

    def test_curves_are_interpolated_linearly(self) -> None:
        found = band(
            [Curve(np.array([0.0, 10.0]), np.array([0.0, 10.0])), Curve(np.array([0.0, 5.0, 10.0]), np.zeros(3))]
        )
        assert found.mean.tolist() == [0.0, 2.5, 5.0]

    def test_band_is_deterministic(self) -> None:
        curves = [curve([0, 1, 5]), curve([2, 3, 1])]
        assert all(np.array_equal(a, b) for a, b in zip(band(curves), band(curves), strict=True))

    def test_curve_without_points_raises(self) -> None:
        with pytest.raises(ValueError, match="points"):
            band([curve([]), curve([1])])


def test_curve_omits_nan_and_is_sorted_by_clock() -> None:
    found = curve_of(np.array([30.0, 10.0, 20.0, np.nan]), np.array([3.0, 1.0, np.nan, 4.0]))
    assert (found.x.tolist(), found.y.tolist()) == ([10.0, 30.0], [1.0, 3.0])


class TestCurves:
    def test_runs_with_different_seeds_form_one_curve(self, runs: dict[str, Path]) -> None:
        columns = [read_columns(runs[name]) for name in ("a", "b", "c", "dqn")]
        found = grouped(columns, "episode_return", "env_steps")
        assert {label: len(curves) for label, curves in found.items()} == {
            "gridworld, gamma 0.99": 2,
            "gridworld, gamma 0.9": 1,
            "gridworld-dqn": 1,
        }

    def test_copy_of_a_run_is_not_a_second_seed(self, runs: dict[str, Path], tmp_path: Path) -> None:
        shutil.copytree(runs["a"], tmp_path / "again")
        columns = [read_columns(path) for path in (runs["a"], tmp_path / "again")]
        found = grouped(columns, "episode_return", "env_steps")
        assert {label: len(curves) for label, curves in found.items()} == {
            str(runs["a"]): 1,
            str(tmp_path / "again"): 1,
        }

    def test_runs_of_python_programs_are_grouped(self, tmp_path: Path) -> None:
        for seed, gamma in ((0, 0.9), (1, 0.9), (0, 0.5)):
            environment = Gridworld(4, seed=seed)
            spaces = environment.single_observation_space, environment.single_action_space
            agent = rein.agents.q_learning.QLearning(*spaces, gamma=gamma, seed=seed)
            store = rein.HDF5Store(tmp_path / f"{seed}-{gamma}", exist="error")
            rein.train(agent, environment, store, epochs=3, iterations=20)
            store.close()
        first, second, third = (read_columns(tmp_path / name) for name in ("0-0.9", "1-0.9", "0-0.5"))
        assert list(grouped([first, second], "episode_return", "epochs")) == ["QLearning in Gridworld"]
        found = grouped([first, second, third], "episode_return", "epochs")
        assert sorted(map(len, found.values())) == [1, 1, 1]

    def test_curves_equal_the_stored_metrics(self, runs: dict[str, Path], tmp_path: Path) -> None:
        table = rein.open_run(runs["a"]).epochs
        shutil.copytree(runs["a"], tmp_path / "run")
        (tmp_path / "run" / "metrics.csv").unlink()
        for path in (runs["a"], tmp_path / "run"):
            columns = read_columns(path)
            ((found,),) = grouped([columns], "episode_return", "env_steps").values()
            assert np.array_equal(found.x, table["clocks"]["env_steps"])
            assert np.allclose(found.y, table["metrics"]["episode_return"])
            assert columns.clocks["epochs"].tolist() == [1, 2, 3, 4, 5, 6]

    def test_default_metric_is_the_return(self, runs: dict[str, Path]) -> None:
        columns = [read_columns(runs[name]) for name in ("a", "dqn")]
        assert choose_metric(columns, None, "env_steps") == "episode_return"
        without = [
            column._replace(metrics={k: v for k, v in column.metrics.items() if "episode" not in k})
            for column in columns
        ]
        assert choose_metric(without, None, "env_steps") == "evaluation_return"

    def test_plot_says_that_runs_ended_early(self) -> None:
        drawn = axes()
        draw_curves(drawn, {"a": [curve([1, 2, 3]), curve([2, 3])]}, metric="episode_return")
        assert "keep their last value" in drawn.get_title()
        dotted = [line for line in drawn.lines if line.get_linestyle() == ":"]
        assert [line.get_xydata().tolist() for line in dotted] == [[[1.0, 3.0], [2.0, 3.0]]]

    def test_plot_of_runs_of_equal_length_says_nothing_about_ends(self) -> None:
        drawn = axes()
        draw_curves(drawn, {"a": [curve([1, 2]), curve([2, 3])], "b": [curve([1])]}, metric="episode_return")
        assert "keep their last value" not in drawn.get_title()

    @pytest.mark.parametrize("lengths", [(2, 0), (0, 0)])
    def test_curve_without_points_raises(self, lengths: tuple[int, int]) -> None:
        with pytest.raises(ValueError, match="no points"):
            draw_curves(axes(), {"a": [curve([1.0] * n) for n in lengths]}, metric="episode_return")

    def test_lines_have_labels_and_axes_have_units(self) -> None:
        drawn = axes()
        groups = {f"recipe {k}": [curve([1, 2, k]), curve([2, 3, 4])] for k in range(3)} | {"alone": [curve([5, 6])]}
        draw_curves(drawn, groups, metric="episode_return_100", clock="env_steps")
        labels = [text.get_text() for text in drawn.get_legend().get_texts()]
        assert labels == ["recipe 0 (2 seeds)", "recipe 1 (2 seeds)", "recipe 2 (2 seeds)", "alone"]
        assert drawn.get_xlabel() == "env steps (all environments together)"
        assert drawn.get_ylabel() == "episode return, mean of the last 100 (sum of rewards)"
        assert "95% bootstrap interval" in drawn.get_title()
        named = [line for line in drawn.lines if not line.get_label().startswith("_")]
        assert len({line.get_color() for line in named}) == len({line.get_linestyle() for line in named}) == 4

    def test_text_from_a_file_is_not_a_formula(self) -> None:
        drawn = axes()
        draw_curves(drawn, {r"$\frac{1}{\x1b": [curve([1, 2])]}, metric=r"$\nonsense", clock="seconds")
        drawn.figure.canvas.draw()


# color vision deficiency in linear RGB at severity 1: Machado, Oliveira & Fernandes 2009
BLIND = {
    "red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


@pytest.mark.parametrize("lacking", BLIND)
def test_colors_are_distinct_for_color_blindness(lacking: str) -> None:
    def nearest(colours: Any) -> float:
        seen = np.clip(np.array([to_rgb(colour) for colour in colours]) ** 2.2 @ np.array(BLIND[lacking]).T, 0.0, 1.0)
        seen **= 1.0 / 2.2
        return min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2))

    usual = [f"C{k}" for k in range(len(COLOURS))]
    assert nearest(COLOURS) > max(0.1, 1.5 * nearest(usual))


def test_large_counts_are_abbreviated() -> None:
    assert [short_number(x) for x in (0, 999, 1500, 2_000_000, 3.5e9)] == ["0", "999", "1.5k", "2M", "3.5G"]


class TestFields:
    def test_few_numbers_are_lines(self) -> None:
        drawn = axes()
        values = np.arange(30.0).reshape(10, 3)
        draw_field(drawn, values, "observation")
        assert [line.get_ydata().tolist() for line in drawn.lines] == values.T.tolist()
        assert [text.get_text() for text in drawn.get_legend().get_texts()] == ["[0]", "[1]", "[2]"]
        assert (drawn.get_xlabel(), drawn.get_ylabel()) == ("step of the episode", "observation")

    def test_integers_are_drawn_as_steps(self) -> None:
        for values, style in ((np.array([1, 2, 0]), "steps-mid"), (np.array([0.5, 0.1]), "default")):
            drawn = axes()
            draw_field(drawn, values, "action")
            assert drawn.lines[0].get_drawstyle() == style
            assert drawn.get_legend() is None

    def test_many_numbers_are_colors_scaled_per_row(self) -> None:
        drawn = Figure().add_subplot()
        values = np.arange(40.0).reshape(4, 10) * np.arange(10)
        draw_field(drawn, values, "observation")
        shades = np.asarray(drawn.images[0].get_array())
        assert shades.shape == (10, 4)
        assert np.allclose(shades[1:, 0], 0.0) and np.allclose(shades[1:, -1], 1.0)
        assert drawn.get_yticklabels()[2].get_text() == "[2]  4 to 64"

    @pytest.mark.parametrize("shape", [(12, 8, 9), (12, 8, 9, 1), (12, 4, 8, 9), (12, 3, 8, 9), (12, 8, 9, 3)])
    def test_images_are_drawn_as_images(self, shape: tuple[int, ...]) -> None:
        values = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
        drawn = axes()
        draw_field(drawn, values, "screen")
        sheet = np.asarray(drawn.images[0].get_array())
        newest = values[-1] if len(shape) == 3 else values[-1, -1] if shape[1] == 4 else values[-1, ..., -1]
        newest = np.moveaxis(values[-1], 0, -1) if shape[1] == 3 else values[-1] if shape[-1] == 3 else newest
        assert np.array_equal(sheet[-8:, -9:], newest)
        steps = [text.get_text() for text in drawn.texts]
        assert (steps[0], steps[-1], len(steps)) == ("step 0", "step 11", 8)

    def test_episode_without_steps_raises(self) -> None:
        with pytest.raises(ValueError, match="the episode has no steps"):
            draw_field(axes(), np.zeros((0, 3)), "observation")


class TestBoard:
    def test_path_has_an_arrow_per_move(self) -> None:
        drawn = axes()
        path = np.array([(0, 0), (0, 0), (0, 1), (1, 1)])
        draw_paths(drawn, {"episode 3": path}, targets=[(1, 1)])
        (arrows,) = [artist for artist in drawn.collections if isinstance(artist, Quiver)]
        assert (arrows.U.tolist(), arrows.V.tolist()) == ([0, 1], [1, 0])
        assert arrows.get_offsets().tolist() == [[0, 0], [0, 1]]
        assert [text.get_text() for text in drawn.get_legend().get_texts()] == ["target", "episode 3"]

    def test_equal_paths_are_drawn_side_by_side(self) -> None:
        drawn = axes()
        path = np.array([(0, 0), (0, 1)])
        draw_paths(drawn, {str(k): path for k in range(12)}, targets=[(0, 1)])
        begins = {tuple(a.get_offsets()[0]) for a in drawn.collections if isinstance(a, Quiver)}
        assert len(begins) == 12
        assert all(abs(x) < 0.5 and abs(y) < 0.5 for x, y in begins)  # within its cell

    def test_triangles_show_actions_and_arrow_the_best(self) -> None:
        drawn = axes()
        values = np.zeros((5, 5, 4))
        values[2, 3] = 1.0, 2.0, 3.0, 4.0
        draw_values(drawn, values, target=(2, 4))
        (cells,) = [artist for artist in drawn.collections if isinstance(artist, PolyCollection)][-1:]
        middles = np.array([path.vertices[:3].mean(0) for path in cells.get_paths()])
        shown = np.asarray(cells.get_array())
        for action, (x, y) in {UP: (0, 1), DOWN: (0, -1), RIGHT: (1, 0), LEFT: (-1, 0)}.items():
            nearest = np.argmin(np.hypot(*(middles - (2 + x / 3, 3 + y / 3)).T))
            assert shown[nearest] == action + 1
        arrows = {
            tuple(np.round(a.get_offsets()[0] + 0.5 * np.array([a.U[0], a.V[0]]), 3)): (a.U[0], a.V[0])
            for a in drawn.collections
            if isinstance(a, Quiver)
        }
        u, v = arrows[2.0, 3.0]
        assert u < 0 and v == 0
        assert (2.0, 4.0) not in arrows and len(arrows) == 24

    def test_minus_zero_is_shown_as_zero(self) -> None:
        drawn = axes()
        draw_values(drawn, np.full((5, 5, 4), -0.01), target=(0, 0))
        assert {text.get_text() for text in drawn.texts} == {"0.0"}


class TestCommand:
    def test_output_is_written_and_printed(self, runs: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
        output = tmp_path / "curves.png"
        plot(runs["a"], runs["b"], runs["c"], "--metric", "evaluation_return", "--clock", "seconds", "--output", output)
        assert output.read_bytes().startswith(PNG)
        assert capsys.readouterr().out == f"wrote {output}\n"
        assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]

    @pytest.mark.parametrize(
        ("words", "name"),
        [
            ([], "a-episode_return.png"),
            (["--episode", "2", "3"], "a-episode-2-observation.png"),
            (["--episode", "2", "--field", "action"], "a-episode-2-action.png"),
            (["--paths"], "a-paths.png"),
            (["--values"], "a-values.png"),
        ],
    )
    def test_file_is_written_without_a_screen(
        self, words: list[str], name: str, runs: dict[str, Path], tmp_path: Path, monkeypatch: Any, capsys: Any
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("rein.cli.plots.has_screen", lambda: False)
        plot(runs["a"], *words)
        assert (tmp_path / name).read_bytes().startswith(PNG)
        assert capsys.readouterr().out == f"wrote {name}\n"

    def test_window_is_opened_with_a_screen(self, runs: dict[str, Path], tmp_path: Path, monkeypatch: Any) -> None:
        from matplotlib import pyplot

        shown: list[Any] = []
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("rein.cli.plots.has_screen", lambda: True)
        monkeypatch.setattr(pyplot, "show", lambda: shown.extend(pyplot.get_fignums()))
        plot(runs["a"])
        pyplot.close("all")
        assert len(shown) == 1
        assert list(tmp_path.iterdir()) == []

    def test_backend_without_windows_is_not_a_screen(self, monkeypatch: Any) -> None:
        from matplotlib import pyplot

        from rein.integrations.plot import has_screen

        for backend, screen in (("agg", False), ("TkAgg", True), ("svg", False)):
            monkeypatch.setattr(pyplot, "get_backend", lambda backend=backend: backend)
            assert has_screen() is screen

    def test_paths_equal_the_stored_episodes(self, runs: dict[str, Path], tmp_path: Path, monkeypatch: Any) -> None:
        drawn: dict[str, Any] = {}
        monkeypatch.setattr(
            "rein.cli.plots.draw_paths", lambda axes, paths, targets, size: drawn.update(paths, targets=targets)
        )
        plot(runs["a"], "--paths", "--episode", "300", "301", "--output", tmp_path / "paths.png")
        run = rein.open_run(runs["a"])
        assert drawn.pop("targets") == [(2, 4)]
        for number in (300, 301):
            episode = run.episode(number)
            path = drawn.pop(f"episode {number}")
            assert len(path) == episode.length + 1
            assert (np.abs(np.diff(path, axis=0)).sum(1) <= 1).all() and (path >= 0).all()
            assert (tuple(path[-1]) == (2, 4)) == episode.terminated
        assert drawn == {}

    def test_values_of_a_table_equal_those_of_the_agent(
        self, runs: dict[str, Path], tmp_path: Path, monkeypatch: Any
    ) -> None:
        values = self.values(runs["a"], tmp_path, monkeypatch)
        environment = Gridworld(1)
        agent = rein.agents.q_learning.QLearning(environment.single_observation_space, environment.single_action_space)
        checkpoint = runs["a"] / "checkpoints" / (runs["a"] / "checkpoints" / "latest").read_text().strip()
        rein.load(agent, checkpoint, strict=False)
        for x, y in np.ndindex(5, 5):
            expected = agent.q_values(environment.encode(x=x, y=y, target=(2, 4)))[0]
            assert np.array_equal(values[x, y], expected.numpy())

    def test_values_of_networks_agree_with_the_policy(
        self, runs: dict[str, Path], tmp_path: Path, monkeypatch: Any
    ) -> None:
        values = self.values(runs["dqn"], tmp_path, monkeypatch)
        from rein.recipes.gridworld_dqn import gridworld_dqn

        loop = gridworld_dqn(hidden=(16,), iterations=40)
        agent, environment = loop.parts["agent"], loop.parts["environment"]
        before = agent.policy().select_action(self.cells(environment))[0]
        checkpoint = runs["dqn"] / "checkpoints" / (runs["dqn"] / "checkpoints" / "latest").read_text().strip()
        rein.load(agent, checkpoint, only=["networks"])
        action = agent.policy().select_action(self.cells(environment))[0]
        assert np.array_equal(values.argmax(-1).ravel(), action.numpy())
        assert not torch.equal(before, action)

    def test_larger_board_is_drawn(self, tmp_path: Path, monkeypatch: Any) -> None:
        drawn: dict[str, Any] = {}
        monkeypatch.setattr(
            "rein.cli.plots.draw_paths", lambda axes, paths, targets, size: drawn.update(paths, of=size)
        )
        environment = Gridworld(4, [(6, 1)], seed=0, size=7, max_episode_steps=20)
        agent = rein.agents.q_learning.QLearning(environment.single_observation_space, environment.single_action_space)
        store = rein.HDF5Store(tmp_path / "run")
        loop = rein.training_loop(agent, environment, store, seed=0)
        checkpoint(loop, store)
        loop.run(epochs=1, iterations=60)
        store.close()
        plot(store.path, "--paths", "--output", tmp_path / "paths.png")
        assert drawn.pop("of") == 7
        assert len(drawn) == 7 and max(int(path.max()) for path in drawn.values()) in (5, 6)
        values = self.values(store.path, tmp_path, monkeypatch)
        assert values.shape == (7, 7, 4)
        expected = agent.q_values(environment.encode(x=6, y=0, target=(6, 1)))[0]
        assert np.array_equal(values[6, 0], expected.numpy())

    def values(self, path: Path, tmp_path: Path, monkeypatch: Any) -> np.ndarray:
        drawn: list[np.ndarray] = []
        monkeypatch.setattr("rein.cli.plots.draw_values", lambda axes, board, target: drawn.append(board))
        plot(path, "--values", "--output", tmp_path / "values.png")
        (found,) = drawn
        return found

    def cells(self, environment: Any) -> torch.Tensor:
        return torch.cat([environment.encode(x=x, y=y, target=(2, 4)) for x, y in np.ndindex(5, 5)])

    def test_run_without_finished_epochs_is_reported_and_omitted(
        self, runs: dict[str, Path], tmp_path: Path, capsys: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        environment = Gridworld(4, seed=0)
        agent = rein.agents.q_learning.QLearning(environment.single_observation_space, environment.single_action_space)
        store = rein.HDF5Store(tmp_path / "fresh")
        loop = rein.training_loop(agent, environment, store, seed=0, epochs=1, iterations=3)
        ended = []

        @loop.iteration_completed(once=2)
        def look(state: rein.State) -> None:
            plot(store.path, runs["a"], "--output", tmp_path / "curves.png")
            with pytest.raises(SystemExit) as exited:
                plot(store.path, store.path, "--output", tmp_path / "none.png")
            ended.append(exited.value.code)

        loop.run()
        store.close()
        message = f"{store.path}: no epoch has ended yet, so there is nothing to plot"
        assert caplog.messages == [message] * 2
        assert capsys.readouterr().err.splitlines() == [f"rein: {message}"]
        assert ended == [1]
        assert (tmp_path / "curves.png").exists() and not (tmp_path / "none.png").exists()

    def test_field_name_with_a_dot_is_plotted(self, tmp_path: Path) -> None:
        environment = CartPole(num_envs=2, seed=0)
        agent = rein.agents.ppo.PPO(environment.single_observation_space, environment.single_action_space, seed=0)
        store = rein.HDF5Store(tmp_path / "run")
        more = {"state_to_trajectory": lambda s: {"a.b": s.step_state.transition.reward, "a": {"b": torch.zeros(2)}}}
        rein.train(agent, environment, store, epochs=1, iterations=40, **more)
        store.close()
        plot(store.path, "--episode", "0", "--field", "a.b", "--output", tmp_path / "dot.png")
        assert (tmp_path / "dot.png").exists()

    def test_missing_package_is_named(self, runs: dict[str, Path], monkeypatch: Any, capsys: Any) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(SystemExit):
            plot(runs["a"], "--output", "curves.png")
        assert "pip install matplotlib" in capsys.readouterr().err

    def test_invalid_run_json_is_labeled_by_its_folder(self, runs: dict[str, Path], tmp_path: Path) -> None:
        for number, parts in enumerate(
            [None, [], {"recipe": 3}, {"recipe": {"config": {"options": 3}}}, {"agent": []}]
        ):
            path = tmp_path / str(number)
            shutil.copytree(runs["a"], path)
            (path / "run.json").write_text(json.dumps({"parts": parts}))
            plot(path, "--output", tmp_path / "curves.png")
        assert (tmp_path / "curves.png").read_bytes().startswith(PNG)


class TestPlotFunction:
    @pytest.fixture(autouse=True)
    def _close_figures(self) -> Any:
        yield
        from matplotlib import pyplot

        pyplot.close("all")

    def test_path_and_opened_run_give_the_same_curve(self, runs: dict[str, Path]) -> None:
        by_path, opened = rein.plot(runs["a"]), rein.plot(rein.open_run(runs["a"]), "episode_return")
        assert np.array_equal(by_path.lines[0].get_xydata(), opened.lines[0].get_xydata())
        assert by_path.lines[0].get_ydata() == pytest.approx(read_columns(runs["a"]).metrics["episode_return"])
        assert by_path.get_ylabel() == "episode return (sum of rewards)"

    def test_new_figure_is_shown_by_pyplot(self, runs: dict[str, Path]) -> None:
        from matplotlib import pyplot

        assert rein.plot(runs["a"]).figure is pyplot.gcf()

    def test_mapping_names_the_curves(self, runs: dict[str, Path]) -> None:
        given = axes()
        assert rein.plot({"table": [runs["a"], runs["b"]], "network": runs["dqn"]}, axes=given) is given
        assert [text.get_text() for text in given.get_legend().get_texts()] == ["table (2 seeds)", "network"]

    def test_label_of_a_run_without_settings_is_its_relative_path(
        self, runs: dict[str, Path], tmp_path: Path, monkeypatch: Any
    ) -> None:
        shutil.copytree(runs["a"], tmp_path / "copy")
        (tmp_path / "copy" / "run.json").write_text("{}")
        monkeypatch.chdir(tmp_path)
        assert [text.get_text() for text in rein.plot("copy").get_legend().get_texts()] == ["copy"]

    def test_no_run_and_unknown_metrics_and_clocks_are_errors(self, runs: dict[str, Path]) -> None:
        with pytest.raises(ValueError, match="at least one run"):
            rein.plot([])
        with pytest.raises(ValueError, match="has no metric 'loss'; the metrics are td_error, epsilon, episode_return"):
            rein.plot(runs["a"], "loss")
        with pytest.raises(ValueError, match="has no clock 'steps'; the clocks are env_steps"):
            rein.plot(runs["a"], clock="steps")  # type: ignore[arg-type]
