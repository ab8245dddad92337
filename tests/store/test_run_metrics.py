"""`metrics.csv`, `evaluations.csv` and `metrics.h5`: complete, correct after a resume, no effect on the run."""

from __future__ import annotations

import csv
import logging
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import rein
from rein.agents.q_learning import QLearning
from rein.envs.gridworld import Gridworld
from rein.errors import StoreError
from rein.handlers import record_metrics as module
from rein.handlers.checkpoint import checkpoint
from rein.handlers.evaluate_every import evaluate_every
from rein.loop.state import CLOCKS
from rein.store.format.nexus import encode_name
from rein.store.format.sealed import verify
from rein.store.verify import verify_run
from rein.testing.stateful import first_difference
from tests import programs

WALL_TIME = "seconds"


def make(path: Path, *, every: int = 4, on: dict[str, Any] | None = None, epochs: int = 10) -> rein.Loop:
    environment = Gridworld(4, [(2, 4)], seed=0, max_episode_steps=9)
    agent = QLearning(environment.single_observation_space, environment.single_action_space, seed=0)
    store = rein.HDF5Store(path, exist="resume")
    loop = rein.training_loop(agent, environment, store, epochs=epochs, iterations=7)
    evaluator = Gridworld(2, [(2, 4)], seed=1, max_episode_steps=9)
    filters: dict[str, Any] = {"every": 5} if on is None else on
    evaluate_every(loop, agent.policy(), evaluator, episodes=4, **filters)
    checkpoint(loop, store, every=every, keep_last=None)
    return loop


def finish(loop: rein.Loop) -> None:
    loop.run()
    loop.parts["store"].close()


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return [{k: v for k, v in row.items() if k != WALL_TIME} for row in csv.DictReader(file)]


def columns(path: Path) -> list[str]:
    return path.read_text().splitlines()[0].split(",")


def assert_same_run(path: Path, whole: Path) -> None:
    """Assert equal rows and curves, except for wall time."""
    for name in ("metrics.csv", "evaluations.csv"):
        assert columns(path / name) == columns(whole / name)
        assert read(path / name) == read(whole / name), name
    with h5py.File(path / "metrics.h5") as one, h5py.File(whole / "metrics.h5") as other:
        for table in ("entry/epochs", "entry/evaluations"):
            a: Any = one[table]
            b: Any = other[table]
            assert list(a) == list(b)
            for name in set(a) - {WALL_TIME}:
                np.testing.assert_array_equal(a[name][()], b[name][()], name)


def default_plot(file: h5py.File) -> h5py.Group:
    """Return the group that a viewer finds by following `@default`."""
    node: Any = file
    while "default" in node.attrs:
        node = node[node.attrs["default"]]
    assert node.attrs["NX_class"] == "NXdata"
    return node


def test_epoch_rows_have_status_clocks_and_metrics(tmp_path: Path) -> None:
    loop = make(tmp_path / "run")
    seen: list[dict[str, str]] = []
    loop.epoch_started.attach(lambda state: seen.append((read(tmp_path / "run/metrics.csv") or [{}])[-1]), after=1)
    loop.epoch_ended(once=3)(lambda state: None)
    loop.iteration_completed(once=3 * 7 - 2)(lambda state: state.halt_epoch())
    finish(loop)
    rows = read(tmp_path / "run/metrics.csv")
    assert [row["epoch"] for row in seen] == [str(epoch) for epoch in range(1, 10)], "written at once"
    assert [row["epoch"] for row in rows] == [str(epoch) for epoch in range(1, 11)]
    assert [row["status"] for row in rows] == [record.status for record in loop.state.history]
    assert rows[2]["status"] == "halted"
    for row, record in zip(rows, loop.state.history, strict=True):
        for name, value in record.metrics.items():
            assert float(row[name]) == pytest.approx(value, rel=0, abs=0, nan_ok=True)
        absent = set(row) - set(record.metrics) - {"epoch", "status", *CLOCKS}
        assert {row[name] for name in absent} <= {""}
    clocks = loop.state.clocks.as_dict()
    assert {name: int(rows[-1][name]) for name in clocks if name in rows[-1]} == {
        name: value for name, value in clocks.items() if name not in ("epochs", WALL_TIME)
    }


def test_evaluation_rows_have_results_and_clocks(tmp_path: Path) -> None:
    loop = make(tmp_path / "run", on={"event": "iteration_completed", "every": 20})
    found = []

    @loop.evaluation_completed
    def note(state: rein.State) -> None:
        found.append((state.metrics["evaluation_return"], state.clocks.iterations, state.epoch))

    finish(loop)
    rows = read(tmp_path / "run/evaluations.csv")
    assert [(float(r["return"]), int(r["iterations"]), int(r["epoch"])) for r in rows] == found
    assert [iteration for _, iteration, _ in found] == [20, 40, 60]
    assert all(float(r["return_min"]) <= float(r["return_iqm"]) <= float(r["return_max"]) for r in rows)
    assert [(row["evaluation"], row["name"], row["played"]) for row in rows] == [
        (str(number), "evaluation", "4") for number in (1, 2, 3)
    ]


def test_default_plot_is_return_over_env_steps_without_gaps(tmp_path: Path) -> None:
    finish(make(tmp_path / "run"))
    path = tmp_path / "run/metrics.h5"
    verify(path)
    rows = read(path.with_name("metrics.csv"))
    with h5py.File(path) as file:
        view: Any = default_plot(file)
        signal, axis = view[view.attrs["signal"]], view[view.attrs["axes"][0]]
        pairs = [(int(r["env_steps"]), float(r["episode_return"])) for r in rows]
        assert list(zip(axis[()], signal[()], strict=True)) == [pair for pair in pairs if not math.isnan(pair[1])]
        assert view.name == "/entry/views/episode_return" and axis.attrs["long_name"] == "env steps"
        evaluated: Any = file["entry/views/evaluation_return"]
        assert evaluated["env_steps"][()].tolist() == [5 * 28, 10 * 28]
        assert np.isfinite(evaluated["evaluation_return"][()]).all()
        whole: Any = file["entry/epochs"]
        assert whole["epoch"][()].tolist() == list(range(1, 11)) and whole["evaluation_return"].shape == (10,)
        assert whole["env_steps"].dtype == np.int64 and whole["status"][0] == b"completed"


KILLED = """
import os, runpy, signal, sys
from pathlib import Path
tools = runpy.run_path(sys.argv[1])
loop = tools["make"](Path(sys.argv[2]))

@loop.iteration_completed(once=7 * 7 + 3)
def die(state):
    loop.parts["store"].checkpoints.flush()  # wait until the checkpoint is written
    os.kill(os.getpid(), signal.SIGKILL)

loop.run()
"""


@pytest.mark.default_cases("8,compl")
@pytest.mark.parametrize("torn", [b"", b"8,compl"])
def test_killed_and_resumed_run_has_the_same_rows(tmp_path: Path, torn: bytes) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    finish(make(whole))
    assert programs.run("-c", KILLED, __file__, run, check=False).returncode == -signal.SIGKILL
    before = read(run / "metrics.csv")
    assert [row["epoch"] for row in before] == [str(epoch) for epoch in range(1, 8)], "no ended epoch is lost"
    with open(run / "metrics.csv", "ab") as file:
        file.write(torn)
    loop = make(run)
    assert rein.resume(loop, run).path.name == "epoch-000004.h5"
    assert [row["epoch"] for row in read(run / "metrics.csv")] == ["1", "2", "3", "4"]
    aside = run / "aside/epoch-000004"
    assert read(run / "metrics.csv") + read(aside / "metrics.csv") == before, "nothing is deleted"
    assert [row["evaluation"] for row in read(aside / "evaluations.csv")] == ["1"]
    finish(loop)
    assert_same_run(run, whole)
    assert [entry.name for entry in (run / "aside").iterdir()] == ["epoch-000004"]


EVENTS = [
    {"event": "epoch_started", "every": 2},
    {"event": "iteration_started", "every": 5},
    {"event": "iteration_completed", "every": 5},
    {"event": "epoch_ended", "every": 2},
]


@pytest.mark.default_cases("epoch_ended")
@pytest.mark.parametrize("on", EVENTS, ids=lambda on: on["event"])
def test_resumed_run_has_every_evaluation_once(tmp_path: Path, on: dict[str, Any]) -> None:
    whole = tmp_path / "whole"
    options: dict[str, Any] = {"on": on, "every": 1, "epochs": 4}
    finish(make(whole, **options))
    for at in (9, 10, 14):
        run = tmp_path / str(at)
        for checkpoint_name in (f"epoch-000002-iteration-00000{at - 7}.h5", "epoch-000001.h5"):
            loop = make(run, **options)
            if not (run / "checkpoints").exists():
                loop.iteration_completed(once=at)(lambda state, loop=loop: loop.interrupt("enough"))
                finish(loop)
                loop = make(run, **options)
            assert (run / "aside").exists() is False
            rein.resume(loop, run / "checkpoints" / checkpoint_name)
            finish(loop)
            assert_same_run(run, whole)


def test_new_run_moves_old_rows_aside(tmp_path: Path) -> None:
    run = tmp_path / "run"
    finish(make(run))
    old = {name: (run / name).read_bytes() for name in ("metrics.csv", "evaluations.csv", "metrics.h5")}
    finish(make(run, epochs=3))
    assert [row["epoch"] for row in read(run / "metrics.csv")] == ["1", "2", "3"]
    assert not (run / "evaluations.csv").exists()
    found = {path.name: path.read_bytes() for path in (run / "aside").rglob("*") if path.name in old}
    assert found == old
    with h5py.File(run / "metrics.h5") as file:
        assert file["entry/epochs/epoch"][()].tolist() == [1, 2, 3]  # type: ignore[index]  # a dataset


def test_second_loop_on_an_open_store_raises(tmp_path: Path) -> None:
    loop = make(tmp_path / "run", epochs=3)
    loop.run()
    store = loop.parts["store"]
    files = [path for path in store.path.rglob("*") if path.is_file() and path.name != "run.log"]
    before = {path: path.read_bytes() for path in files}
    agent = QLearning(*(loop.parts["agent"].observation_space, loop.parts["agent"].action_space), seed=0)
    other = rein.training_loop(agent, Gridworld(4, [(2, 4)], seed=0), store, epochs=3, iterations=7)
    with pytest.raises(
        ValueError, match=r"holds 3 epochs of another loop, but this loop has ended 0; continue the other loop"
    ):
        other.run()
    assert {path: path.read_bytes() for path in files} == before
    loop.run(epochs=5)  # the advice of the message
    assert [row["epoch"] for row in read(store.path / "metrics.csv")] == ["1", "2", "3", "4", "5"]
    store.close()


def test_new_run_in_an_old_folder_explains_how_to_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    finish(make(tmp_path / "run", epochs=3))
    assert "rein.resume" not in caplog.text
    resumed = make(tmp_path / "run", epochs=4)
    rein.resume(resumed, tmp_path / "run")
    finish(resumed)
    assert "starts over" not in caplog.text
    finish(make(tmp_path / "run", epochs=1))
    assert "this run starts over" in caplog.text and "call rein.resume(loop, path)" in caplog.text


@pytest.mark.default_cases("edited", "NUL block", "huge cell")
@pytest.mark.parametrize(
    "damage",
    [b"three,completed", b"\0" * 4096, b'3,"' + b"x" * 200_000 + b'"', b'"3,completed', b"\xff\xfe", b"9" * 5000],
    ids=["edited", "NUL block", "huge cell", "open quote", "no text", "huge number"],
)
def test_damaged_row_is_moved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes) -> None:
    run = tmp_path / "run"
    finish(make(run, epochs=5))
    lines = (run / "metrics.csv").read_bytes().splitlines(keepends=True)
    lines[3] = damage + b"\n"
    (run / "metrics.csv").write_bytes(b"".join(lines))
    assert any(problem.path.name == "metrics.csv" for problem in verify_run(run).problems)
    loop = make(run)
    rein.resume(loop, run)
    assert "moving 1 damaged row" in caplog.text
    finish(loop)
    assert (run / "aside/epoch-000005/metrics.csv").read_bytes() == lines[0] + lines[3]
    assert [row["epoch"] for row in read(run / "metrics.csv")] == ["1", "2", "4", "5", "6", "7", "8", "9", "10"]


def test_file_without_an_epoch_column_is_moved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    finish(make(run, epochs=5))
    edited = (run / "metrics.csv").read_bytes().replace(b"epoch,", b"era,")
    (run / "metrics.csv").write_bytes(edited)
    loop = make(run)
    rein.resume(loop, run)
    assert "has no column 'epoch'" in caplog.text
    finish(loop)
    assert (run / "aside/epoch-000005/metrics.csv").read_bytes() == edited
    assert [row["epoch"] for row in read(run / "metrics.csv")] == ["6", "7", "8", "9", "10"]


@pytest.mark.parametrize("last_line_ends", [True, False])
def test_rows_are_appended_after_an_editor_replaced_the_file(tmp_path: Path, last_line_ends: bool) -> None:
    run = tmp_path / "run"
    loop = make(run, epochs=6)

    @loop.epoch_started(once=4)
    def edit(state: rein.State) -> None:
        content = (run / "metrics.csv").read_bytes()
        (run / "edited").write_bytes(content if last_line_ends else content.removesuffix(b"\n"))
        os.replace(run / "edited", run / "metrics.csv")

    finish(loop)
    assert [row["epoch"] for row in read(run / "metrics.csv")] == [str(epoch) for epoch in range(1, 7)]
    with h5py.File(run / "metrics.h5") as file:
        epochs: Any = file["entry/epochs/epoch"]
        assert epochs[()].tolist() == [1, 2, 3, 4, 5, 6]


def test_rows_continue_after_the_file_was_removed_or_emptied(tmp_path: Path) -> None:
    for number, lose in enumerate((Path.unlink, lambda path: path.write_bytes(b""))):
        run = tmp_path / f"run-{number}"
        loop = make(run, epochs=4)
        loop.epoch_started(once=3)(lambda state, lose=lose, run=run: [lose(run / "metrics.csv")].clear())
        finish(loop)
        assert [row["epoch"] for row in read(run / "metrics.csv")] == ["3", "4"]


@pytest.mark.parametrize("when", ["before it resumes", "while it runs"])
def test_hard_linked_copies_of_a_run_are_independent(tmp_path: Path, when: str) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"

    def link(state: Any = None) -> None:
        first.parts["store"].checkpoints.flush()
        shutil.copytree(run, copy, copy_function=os.link)

    first = make(run, epochs=6)
    if when == "while it runs":
        first.epoch_started(once=5)(link)
    finish(first)
    if when == "before it resumes":
        link()
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    copied = {file: file.read_bytes() for file in copy.rglob("*.csv")}
    assert [row["epoch"] for row in read(copy / "metrics.csv")][-1] == ("6" if when.startswith("before") else "4")
    resumed = make(copy, epochs=8)
    rein.resume(resumed, copy / "checkpoints/epoch-000004.h5")
    finish(resumed)
    assert {file: file.read_bytes() for file in before} == before
    assert {file: file.read_bytes() for file in copied} != copied


@pytest.mark.default_cases(
    "lost0-metrics.csv: has no row of epochs 1 to 2, 5; the run continues after epoch 6 without",
    "lost1-metrics.csv: has no row of epoch 6; the run continues after epoch 6 without",
)
@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ({1, 2, 5}, "metrics.csv: has no row of epochs 1 to 2, 5; the run continues after epoch 6 without"),
        ({6}, "metrics.csv: has no row of epoch 6; the run continues after epoch 6 without"),
        (set(range(1, 7)), "metrics.csv: has no row of epochs 1 to 6; the run continues after epoch 6 without"),
        (set(), None),
    ],
)
def test_missing_earlier_rows_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lost: set[int], message: str | None
) -> None:
    run = tmp_path / "run"
    finish(make(run, epochs=6))
    header, *rows = (run / "metrics.csv").read_text().splitlines(keepends=True)
    left = [row for number, row in enumerate(rows, start=1) if number not in lost]
    (run / "metrics.csv").write_text("".join([header, *left]))
    if not left:
        (run / "metrics.csv").unlink()
    loop = make(run, epochs=7)
    rein.resume(loop, run)
    loop.run()
    loop.run(epochs=8)
    loop.parts["store"].close()
    assert [text for text in caplog.messages if "no row of" in text] == ([f"{run}/{message}"] if message else [])


def test_run_resumed_in_a_new_folder_reports_no_missing_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    finish(make(tmp_path / "run", epochs=6))
    for epochs, source in ((7, "run"), (8, "other")):
        loop = make(tmp_path / "other", epochs=epochs)
        rein.resume(loop, tmp_path / source)
        finish(loop)
    assert [row["epoch"] for row in read(tmp_path / "other/metrics.csv")] == ["7", "8"]
    assert "no row of" not in caplog.text


@pytest.mark.default_cases("metrics.csv", "metrics.h5")
@pytest.mark.parametrize("name", ["metrics.csv", "evaluations.csv", "metrics.h5"])
def test_failed_write_is_reported_once_and_does_not_affect_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    whole, loop = make(tmp_path / "whole"), make(tmp_path / "run")
    (tmp_path / "run" / name).mkdir()
    finish(whole)
    with caplog.at_level(logging.ERROR):
        finish(loop)
    assert len(caplog.records) == 1
    assert f"{tmp_path / 'run' / name}: is no longer written; the run continues" in caplog.text
    others = [other for other in ("metrics.csv", "evaluations.csv", "metrics.h5") if other != name]
    assert all((tmp_path / "run" / other).is_file() for other in others), "the other files are written"
    states = [run.state for run in (whole, loop)]
    assert states[0].status == states[1].status == "completed"
    metrics = [[dict(record.metrics) for record in state.history] for state in states]
    assert str(metrics[0]) == str(metrics[1])
    agents = [run.parts["agent"].state_dict() for run in (whole, loop)]
    assert first_difference(*agents) is None


class Clock:
    """Module `time` with a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(("cost", "expected"), [(0.0, [3, 5, 8, 10]), (0.15, [3, 7, 10])])
def test_plot_is_written_at_bounded_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cost: float, expected: list[int]
) -> None:
    clock, written = Clock(), []
    monkeypatch.setattr(module, "time", clock)
    write_whole = module.write_whole
    loop = make(tmp_path / "run", every=5)

    def write(path: Path, data: Any) -> None:
        written.append(loop.state.clocks.epochs)
        write_whole(path, data)
        clock.now += cost

    monkeypatch.setattr(module, "write_whole", write)

    @loop.epoch_ended
    def pass_time(state: rein.State) -> None:
        clock.now += 4.0

    finish(loop)
    assert written == expected


def test_rows_are_synced_only_at_checkpoints_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, names = [], ("metrics.csv", "evaluations.csv")
    loop = make(tmp_path / "run", every=6)
    fsync = os.fsync

    def note(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        if name in names:
            synced.append((name, loop.state.clocks.epochs))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    finish(loop)
    assert set(synced) == {(name, epoch) for name in names for epoch in (6, 10)}


def test_metrics_of_any_name_are_drawn(tmp_path: Path) -> None:
    names = ("name", "evaluation", "status", "env_steps", "title", "a/b", 'say, "x"', "views")
    loop = make(tmp_path / "run", epochs=3)
    for name in names:
        loop.metric(name, lambda state, name=name: state.total_iterations)
    finish(loop)
    expected = [record.metrics["name"] for record in loop.state.history]
    rows = read(tmp_path / "run/metrics.csv")
    with h5py.File(tmp_path / "run/metrics.h5") as file:
        for name in names:
            column = f"{name}_metric" if name in ("status", "env_steps") else name
            view: Any = file[f"entry/views/{encode_name(column)}"]
            assert view[view.attrs["signal"]][()].tolist() == expected, name
            assert [float(row[column]) for row in rows] == expected


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("epoch" + ",".join(["", *(f"m{number}" for number in range(20_000))]) + "\n", "20,001 columns"),
        ("epoch," + "m" * (2 << 20) + "\n", "a line of more than"),
        ("epoch,status\n1,completed" + "," * (2 << 20) + "\n", "a line of more than"),
    ],
    ids=["columns", "header", "row"],
)
def test_table_beyond_a_limit_is_refused_each_time(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "metrics.csv").write_text(text)
    table = module.CSVTable(tmp_path / "metrics.csv")
    for _ in range(2):
        with pytest.raises(StoreError, match=f"metrics.csv: has {word}"):
            table.refresh()


def test_long_text_in_a_table_is_cut(tmp_path: Path) -> None:
    """All texts of a column have the size of the longest one in memory."""
    (tmp_path / "metrics.csv").write_text(
        "epoch,status\n" + "1,completed\n" * 1000 + f"1,{'x' * 100_000}\n\n1,halted\n"
    )
    columns = module.CSVTable(tmp_path / "metrics.csv").refresh()
    assert columns["status"].nbytes < 200_000
    assert columns["status"][[0, -1]].tolist() == [b"completed", b"halted"]
    assert len(columns["epoch"]) == 1002
