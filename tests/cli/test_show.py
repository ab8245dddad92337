import re

import pytest

from rein.cli import main
from rein.cli.run_folder import show
from rein.errors import StoreError
from rein.store.hdf5 import HDF5Store
from rein.testing.store import make_trajectory, with_fields


@pytest.fixture
def path(tmp_path):
    store = HDF5Store(tmp_path / "run", max_epochs=2)
    store.write_run({"seed": 0})
    for epoch in range(1, 12):
        store.append(make_trajectory(epoch, steps=10))
    store.close()
    return store.path


@pytest.fixture
def output(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    return lambda: re.sub(r" +", " ", capsys.readouterr().out)


def test_show_prints_files_numbers_and_fields(path, output):
    show(path)
    text = output()
    assert "run.json" in text
    assert "trajectories/ 6 files" in text
    assert "000001-000002.h5" in text and "000011-000011.h5" in text and "000005-000006.h5" not in text
    assert "epochs 11 (1 to 11), 5 of them halted" in text
    assert "steps 110 in 3 environments, 330 in total" in text
    assert "episodes 33, 0 of them truncated" in text
    assert "length mean 13, from 13 to 13" in text
    assert "episode_return first 1 in epoch 1, last 11 in epoch 11, minimum 1 in epoch 1, maximum 11 in" in text
    assert "loss always NaN" in text
    assert "observation/camera/left uint8 110 x 3 x 4 x 5 x 3" in text
    assert f"silx view {path}/trajectories/000011-000011.h5" in text, "viewers of the newest file"


def test_show_prints_a_single_file(path, output):
    show(path / "trajectories" / "000003-000004.h5")
    assert "epochs 2 (3 to 4), 1 of them halted" in output()


def test_show_prints_a_run_without_steps(tmp_path, output):
    store = HDF5Store(tmp_path / "run")
    store.append(make_trajectory(1, steps=0)._replace(fields={}, metrics={}))
    store.close()
    show(store.path)
    assert "steps 0 in 0 environments, 0 in total" in output()


def test_damaged_file_raises_before_printing(path, output):
    damaged = path / "trajectories" / "000003-000004.h5"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(StoreError, match="000003-000004"):
        show(path)
    assert output() == ""


def test_names_from_a_file_are_escaped(tmp_path, output):
    store = HDF5Store(tmp_path / "run")
    store.append(
        with_fields(make_trajectory(1)._replace(metrics={"[red]\x1b[2J": 1.0}), **{"[bold]\x1b]0;": reward_field()})
    )
    store.close()
    show(store.path)
    text = output()
    assert "[red]?[2J" in text and "[bold]?]0;" in text
    assert "\x1b[2J" not in text and "\x1b]0;" not in text


def reward_field():
    return make_trajectory(1).fields["reward"]


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["a", "--help"]])
def test_help_shows_the_usage(arguments, output):
    with pytest.raises(SystemExit, match="0"):
        main(["show", *arguments])
    assert "usage: rein show" in output()


def test_show_prints_a_run_without_trajectories(tmp_path, capsys):
    store = HDF5Store(tmp_path / "run", every=0)
    store.write_run({"versions": {}})
    store.close()
    show(tmp_path / "run")
    shown = capsys.readouterr().out
    assert "run.json" in shown and "no trajectories are stored" in shown


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"store": {"config": {"every": 1}}, "rows": {}}, "no trajectory file is finished yet"),
        ({"store": {"config": {"keep_best": [3, "r", "max"]}}, "rows": {}}, "no trajectory file is finished yet"),
        ({"store": {"config": {"every": 0}}, "rows": {}}, "no trajectories are stored"),
        ({"store": {"config": {"every": 1}}}, "no trajectories are stored"),  # a loop without environments
    ],
)
@pytest.mark.parametrize("ended", [False, True])
def test_show_prints_a_run_without_finished_files(tmp_path, capsys, parts, message, ended):
    store = HDF5Store(tmp_path / "run")
    store.write_run({"parts": {**parts, "metrics_files": {}}})
    if ended:
        (tmp_path / "run" / "metrics.csv").write_text("epoch\n1\n")
    show(tmp_path / "run")
    more = "plot the metrics with `rein plot`" if ended else "no epoch has ended yet"
    assert f"{message}; {more}" in " ".join(capsys.readouterr().out.split())
    store.close()
