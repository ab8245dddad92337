"""Checkpoints: events, filters, rules for files to keep, and objects without an owner."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rein
from rein.agents.q_learning import QLearning
from rein.envs.gridworld import Gridworld
from rein.errors import CheckpointError
from rein.handlers.checkpoint import checkpoint
from rein.handlers.evaluate_every import evaluate_every
from rein.handlers.monitor import early_stop
from rein.store.checkpoint_file import read_checkpoint
from rein.store.format import sealed
from rein.store.loading import best_file
from rein.testing.stateful import copy_state, first_difference


class Counter:
    """Part with state."""

    def __init__(self) -> None:
        self.value_S = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value_S}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value_S = state["value"].clone()


def make(scores: Mapping[int, float] | None = None) -> tuple[rein.Loop, Counter]:
    """Return a loop with five iterations per epoch; `scores` maps epochs to the metric `score`."""
    counter = Counter()

    def step(state: rein.State) -> None:
        counter.value_S += 1.0

    loop = rein.Loop(step, epochs=8, iterations=5)
    loop.own("counter", counter)
    if scores is not None:

        @loop.epoch_ended
        def score(state: rein.State) -> None:
            if state.epoch in scores:
                state.metrics["score"] = scores[state.epoch]

    return loop, counter


def stems(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.h5"))


def test_misspelled_keep_best_metric_raises_after_the_first_epoch(tmp_path):
    loop = rein.Loop(lambda state: None, epochs=2, iterations=1)
    loop.metric("score", lambda state: 1.0)
    checkpoint(loop, rein.Checkpoints(tmp_path), keep_best=("scroe", "max"))
    with pytest.raises(ValueError, match="did you mean 'score'"):
        loop.run()
    assert loop.state.epoch == 1


@pytest.mark.parametrize(
    ("event", "filters", "expected"),
    [
        ("epoch_ended", {"every": 3}, ["epoch-000003", "epoch-000006", "epoch-000008"]),
        ("epoch_completed", {"once": 2}, ["epoch-000002", "epoch-000008"]),
        ("iteration_completed", {"once": 7}, ["epoch-000002-iteration-000002", "epoch-000008"]),
        ("iteration_started", {"once": 7}, ["epoch-000002-iteration-000002", "epoch-000008"]),
        ("epoch_started", {"once": 2}, ["epoch-000002-iteration-000001", "epoch-000008"]),
        ("completed", {}, ["epoch-000008"]),
        ("epoch_ended", {"every": 0}, ["epoch-000008"]),
    ],
)
def test_event_and_filters_determine_checkpoints(tmp_path, event, filters, expected):
    loop, _ = make()
    checkpoint(loop, rein.Checkpoints(tmp_path / "checkpoints"), event=event, keep_last=None, **filters)
    loop.run()
    assert stems(tmp_path / "checkpoints") == expected
    assert (tmp_path / "checkpoints" / "latest").read_text() == f"{expected[-1]}.h5\n"


def test_checkpoint_contains_the_state_at_the_edge(tmp_path):
    loop, _ = make()
    checkpoint(loop, rein.Checkpoints(tmp_path), event="iteration_completed", keep_last=None)
    seen = {}
    loop.iteration_completed(lambda state: state.request(look))

    def look(state: rein.State) -> None:
        seen[state.total_iterations] = copy_state(loop.state_dict())

    loop.run(epochs=2)
    for path in tmp_path.glob("*-iteration-*.h5"):
        found = read_checkpoint(path)
        expected = seen[found.about["total_iterations"]]
        assert first_difference(expected["parts"], found.state["parts"]) is None
        assert found.state["iteration"] == expected["iteration"]
    assert len(seen) == 10


def test_trajectory_is_written_before_the_checkpoint_of_its_epoch(tmp_path):
    """A checkpoint requested before the trajectory is written still comes after it."""
    environment = Gridworld(num_envs=4, possible_targets=[(2, 4)], seed=0)
    agent = QLearning(environment.single_observation_space, environment.single_action_space, seed=0)
    loop = rein.training_loop(agent, environment, rein.HDF5Store(tmp_path / "run"), epochs=3, iterations=5)
    checkpoint(loop, loop.parts["store"], event="epoch_completed", keep_last=None)
    loop.run()
    assert stems(tmp_path / "run/checkpoints") == ["epoch-000001", "epoch-000002", "epoch-000003"]
    for number, path in enumerate(sorted((tmp_path / "run/checkpoints").glob("*.h5")), start=1):
        assert read_checkpoint(path).state["parts"]["store"] == {"epoch": number}
    assert stems(tmp_path / "run/trajectories") == [f"{n:06d}-{n:06d}" for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"keep_last": 2}, [7, 8]),
        ({"keep_last": 1, "keep_every": 3}, [3, 6, 8]),
        ({"keep_last": None}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"keep_last": None, "keep_every": 3}, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_files_that_no_rule_keeps_are_deleted(tmp_path, rules, expected):
    loop, _ = make()
    checkpoint(loop, rein.Checkpoints(tmp_path), **rules)
    loop.run()
    assert stems(tmp_path) == [f"epoch-{n:06d}" for n in expected]


@pytest.mark.parametrize(("mode", "best"), [("max", 5), ("min", 2)])
def test_keep_best_ignores_nan_and_missing_values(tmp_path, mode, best):
    scores = {1: float("nan"), 2: 1.0, 4: 3.0, 5: 9.0, 6: 9.0, 7: float("nan")}
    loop, _ = make(scores)
    checkpoint(loop, rein.Checkpoints(tmp_path), keep_last=1, keep_best=("score", mode))
    loop.run()
    assert stems(tmp_path) == ["epoch-000008"]
    assert stems(tmp_path / "best") == [f"epoch-{best:06d}"]
    assert read_checkpoint(tmp_path / f"best/epoch-{best:06d}.h5").about["metrics"]["score"] == scores[best]


def test_keep_best_ignores_open_epochs_and_agents_with_nan(tmp_path):
    loop, counter = make()
    loop.parts["agent"] = loop.parts.pop("counter")
    loop.metric("score", lambda state: float(state.total_iterations))  # increases over time

    @loop.epoch_started(once=4)
    def spoil(state: rein.State) -> None:
        counter.value_S.fill_(float("nan"))

    checkpoint(loop, rein.Checkpoints(tmp_path), keep_best=("score", "max"))
    loop.run(epochs=2)
    loop.iteration_completed(once=13)(lambda state: loop.interrupt("in the middle"))
    loop.run(epochs=3)
    assert stems(tmp_path)[-1] == "epoch-000003-iteration-000003"
    assert stems(tmp_path / "best") == ["epoch-000002"]
    loop.run(epochs=5)
    assert stems(tmp_path / "best") == ["epoch-000003"]


class Lengths:
    """Policy whose nth evaluation is one episode of `lengths[n]` steps with return 1 + 2 + ... + `lengths[n]`."""

    def __init__(self, environment: Any, lengths: list[int]) -> None:
        self._environment, self._lengths = environment, lengths

    def select_action(self, observation: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return torch.zeros(1, dtype=torch.int64), {}

    def reset(self, mask: torch.Tensor | None = None) -> None:
        if mask is None:
            number = (
                int(self._environment.episode_seeds[0]) // 2
            )  # two episodes begin per round: one is played, one stays open
            self._environment._length_N = torch.tensor([self._lengths[number]])


def make_evaluated(scripted: Any, lengths: list[int], **options: Any) -> tuple[rein.Loop, Counter]:
    """Return a loop with two epochs of twelve iterations, evaluated every second iteration."""
    loop, counter = make()
    loop.epochs, loop.iterations = 2, 12
    environment = scripted([1])
    options = {"event": "iteration_completed", "every": 2, **options}
    evaluate_every(loop, Lengths(environment, lengths), environment, episodes=1, **options)
    return loop, counter


LENGTHS = [3, 5, 9, 4, 2, 8, 6, 9, 1, 7, 3, 4]  # the third is the longest, the ninth the shortest


@pytest.mark.parametrize(
    ("mode", "stem", "iterations"), [("max", "01-iteration-000006", 6), ("min", "02-iteration-000006", 18)]
)
def test_keep_best_compares_evaluations_within_an_epoch(tmp_path, scripted, mode, stem, iterations):
    loop, _ = make_evaluated(scripted, LENGTHS)
    checkpoint(
        loop,
        rein.Checkpoints(tmp_path),
        event="evaluation_completed",
        keep_last=1,
        keep_best=("evaluation_return", mode),
    )
    loop.run()
    assert stems(tmp_path / "best") == [f"epoch-0000{stem}"]
    best = read_checkpoint(tmp_path / f"best/epoch-0000{stem}.h5")
    length = LENGTHS[iterations // 2 - 1]
    assert best.about["metrics"]["evaluation_return"] == length * (length + 1) / 2
    assert best.state["parts"]["counter"]["value"].tolist() == [iterations] * 3


def test_keep_best_is_the_same_after_resuming_within_an_epoch(tmp_path, scripted):
    for stops_at in (None, 10, None):
        folder = tmp_path / ("broken" if (tmp_path / "whole").exists() else "whole")
        loop, _ = make_evaluated(scripted, LENGTHS)
        checkpoint(loop, rein.Checkpoints(folder), event="evaluation_completed", keep_best=("evaluation_return", "max"))
        if folder.exists():
            rein.resume(loop, folder)
        if stops_at is not None:
            interrupt = functools.partial(loop.interrupt, "in the middle")
            loop.iteration_completed(once=stops_at)(lambda state, interrupt=interrupt: interrupt())
        loop.run()
    assert stems(tmp_path / "whole/best") == stems(tmp_path / "broken/best") == ["epoch-000001-iteration-000006"]


def test_keep_best_ignores_other_and_earlier_evaluations(tmp_path, scripted):
    """At iteration 8 the metric has its highest value, but that belongs to iteration 6, whose weights are gone."""
    loop, _ = make_evaluated(scripted, LENGTHS, every=4, name="score")
    environment = scripted([1])
    hard = {"event": "iteration_completed", "every": 3, "name": "score_hard"}
    evaluate_every(loop, Lengths(environment, [3, 9, 5, 4, 2, 8, 6, 7]), environment, episodes=1, **hard)
    best = ("score_hard_return", "max")
    checkpoint(loop, rein.Checkpoints(tmp_path), event="iteration_completed", every=4, keep_best=best)
    loop.run()
    assert stems(tmp_path / "best") == ["epoch-000002-iteration-000012"]


def test_keep_best_warns_if_only_the_last_checkpoint_was_compared(tmp_path, caplog):
    for event, warns in (("epoch_ended", False), ("iteration_completed", True)):
        loop, _ = make()
        loop.metric("score", lambda state: float(state.total_iterations))
        checkpoint(loop, rein.Checkpoints(tmp_path / event), event=event, every=3, keep_best=("score", "max"))
        loop.run()
        assert ("only the checkpoint at the end of the run was compared" in caplog.text) is warns


def test_new_run_moves_old_checkpoints_aside(tmp_path):
    folder = tmp_path / "checkpoints"
    for epochs in (2, 1):
        loop, _ = make(dict.fromkeys(range(1, 9), 1.0) | {2: 5.0})
        checkpoint(loop, rein.Checkpoints(folder), keep_best=("score", "max"))
        loop.run(epochs=epochs)  # the second run starts from the beginning
    assert stems(tmp_path / "aside/epoch-000000") == ["best-epoch-000002", "epoch-000001", "epoch-000002"]
    assert stems(folder) == stems(folder / "best") == ["epoch-000001"]


def test_newest_checkpoint_without_nan_is_always_kept(tmp_path):
    loop, counter = make()
    loop.parts["agent"] = loop.parts.pop("counter")

    @loop.epoch_started(once=4)
    def spoil(state: rein.State) -> None:
        counter.value_S.fill_(float("nan"))

    checkpoint(loop, rein.Checkpoints(tmp_path), keep_last=1)
    loop.run()
    assert stems(tmp_path) == ["epoch-000003", "epoch-000008"]


def test_custom_file_names_are_used_and_checked(tmp_path):
    loop, _ = make()
    checkpoint(loop, rein.Checkpoints(tmp_path), every=4, keep_last=None, name=lambda state: f"after-{state.epoch}")
    loop.run()
    assert stems(tmp_path) == ["after-4", "after-8"]
    other, _ = make()
    assert rein.resume(other, tmp_path).path.stem == "after-8"
    bad, _ = make()
    checkpoint(bad, rein.Checkpoints(tmp_path / "bad"), name=lambda state: "../out")
    with pytest.raises(ValueError, match="invalid checkpoint name"):
        bad.run()


def test_unowned_state_is_an_error_at_the_first_checkpoint(tmp_path):
    def held_in_closure(loop: rein.Loop, forgotten: Counter) -> None:
        loop.iteration_completed(lambda state: forgotten.state_dict() and None)

    def held_in_default(loop: rein.Loop, forgotten: Counter) -> None:
        loop.epoch_ended(lambda state, kept=forgotten: kept.state_dict() and None)

    def held_in_partial(loop: rein.Loop, forgotten: Counter) -> None:
        loop.epoch_ended(functools.partial(lambda kept, state: None, forgotten))

    def bound(loop: rein.Loop, forgotten: Counter) -> None:

        class Handles(Counter):
            def handle(self, state: rein.State) -> None: ...

        loop.epoch_started.attach(Handles().handle)

    def object_that_is_called(loop: rein.Loop, forgotten: Counter) -> None:
        class Handler:
            def __init__(self) -> None:
                self.counter = forgotten

            def __call__(self, state: rein.State) -> None: ...

        loop.epoch_started.attach(Handler())

    for attach in (held_in_closure, held_in_default, held_in_partial, bound, object_that_is_called):
        loop, _ = make()
        attach(loop, Counter())
        checkpoint(loop, rein.Checkpoints(tmp_path / attach.__name__), every=2)
        with pytest.raises(CheckpointError, match=r"would not contain .* add each to the loop"):
            loop.run()
        assert loop.state.epoch == 2


def test_reseeded_and_global_generators_need_no_owner(tmp_path: Path) -> None:
    order, default = torch.Generator(), torch.default_generator

    def step(state: rein.State) -> None:
        torch.rand((), generator=order)
        torch.rand((), generator=default)

    loop = rein.Loop(step, epochs=2, iterations=2)
    loop.on("started", "epoch_started")(lambda state: order.manual_seed(state.epoch) and None)
    checkpoint(loop, rein.Checkpoints(tmp_path))
    assert loop.run().status == "completed"


@pytest.mark.parametrize("strict", [False, True])
def test_generator_used_by_the_step_must_be_owned(tmp_path: Path, strict: bool) -> None:
    drawing = torch.Generator().manual_seed(0)

    def step(state: rein.State) -> None:
        torch.rand((), generator=drawing)

    loop = rein.Loop(step, epochs=2, iterations=2, strict=strict)
    checkpoint(loop, rein.Checkpoints(tmp_path))
    with pytest.raises(
        CheckpointError, match="would not contain Generator 'drawing' in the step: add each to the loop"
    ):
        loop.run()
    loop.own("drawing", drawing)
    assert loop.run(epochs=3).status == "completed"


actor = torch.nn.Linear(1, 1)  # unused global with the name of an attribute


def test_attribute_name_is_not_confused_with_a_global(tmp_path: Path) -> None:
    loop, _ = make()
    holder = SimpleNamespace(actor="an attribute")

    @loop.epoch_ended
    def use(state: rein.State) -> None:
        assert holder.actor == "an attribute"

    checkpoint(loop, rein.Checkpoints(tmp_path))
    assert loop.run().status == "completed"


def test_objects_within_parts_and_without_state_need_no_owner(tmp_path):
    environment = Gridworld(num_envs=4, possible_targets=[(2, 4)], seed=0)
    agent = QLearning(environment.single_observation_space, environment.single_action_space, seed=0)
    loop = rein.training_loop(agent, environment, epochs=2, iterations=5)
    early_stop(loop, "episode_length", mode="min", patience=9)
    greedy, inside = agent.policy(), agent.generator

    @loop.epoch_ended
    def use(state: rein.State) -> None:
        assert greedy and inside and loop and environment

    checkpoint(loop, rein.Checkpoints(tmp_path))
    assert loop.run().status == "completed"


class FullDisk:
    """The module `os` with a full disk."""

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, descriptor, data):
        raise OSError(28, os.strerror(28))


def test_failed_write_ends_the_run(tmp_path, monkeypatch):
    loop, _ = make()
    saver = checkpoint(loop, rein.Checkpoints(tmp_path), every=1)

    @loop.epoch_ended(once=3)
    def fill(state: rein.State) -> None:
        saver.checkpoints.flush()
        monkeypatch.setattr(sealed, "os", FullDisk())

    with pytest.raises(CheckpointError, match=r"epoch-00000\d\.h5: .*No space left on device"):
        loop.run()
    assert loop.state.status in ("failed", "completed")  # the error may surface only when the last write is waited for
    monkeypatch.undo()
    again, _ = make()
    assert rein.resume(again, tmp_path).path.stem == "epoch-000002"
    assert not list(tmp_path.glob(".*"))


def test_failed_write_is_logged_with_on_failure_warn(tmp_path, monkeypatch, caplog):
    loop, _ = make()
    saver = checkpoint(loop, rein.Checkpoints(tmp_path), every=1, on_failure="warn")
    loop.epoch_ended(once=2)(lambda state: monkeypatch.setattr(sealed, "os", FullDisk()))

    @loop.epoch_ended(once=5)
    def make_room(state: rein.State) -> None:
        saver.checkpoints.flush()
        monkeypatch.undo()

    with caplog.at_level(logging.WARNING):
        assert loop.run().status == "completed"
    assert "checkpoint not written: " in caplog.text and "No space left on device" in caplog.text
    assert stems(tmp_path)[-1] == "epoch-000008"


def test_position_is_saved_once(tmp_path, monkeypatch):
    loop, _ = make()
    saver = checkpoint(loop, rein.Checkpoints(tmp_path), every=1)
    loop.epoch_ended(lambda state: saver.ask())
    taken = []
    take = saver.checkpoints.take
    monkeypatch.setattr(saver.checkpoints, "take", lambda *a: taken.append(loop.state.epoch) or take(*a))
    loop.run()
    assert taken == list(range(1, 9))


def test_ask_takes_a_checkpoint_at_the_next_edge(tmp_path):
    loop, _ = make()
    saver = checkpoint(loop, rein.Checkpoints(tmp_path), every=0, keep_last=None)
    saver.ask()  # no run has started yet
    loop.iteration_started(once=8)(lambda state: saver.ask())
    loop.run()
    assert stems(tmp_path) == ["epoch-000002-iteration-000003", "epoch-000008"]


def test_failed_run_takes_no_final_checkpoint(tmp_path):
    loop, _ = make()
    checkpoint(loop, rein.Checkpoints(tmp_path), every=2)

    @loop.iteration_completed(once=23)
    def fail(state: rein.State) -> None:
        raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        loop.run()
    assert stems(tmp_path) == ["epoch-000002", "epoch-000004"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"keep_last": 0}, ValueError, "keep_last=0"),
        ({"keep_every": -1}, ValueError, "keep_every=-1"),
        ({"keep_best": ("x", "best")}, ValueError, "keep_best"),
        ({"on_failure": "ignore"}, ValueError, "on_failure"),
        ({"event": "epoch_end"}, ValueError, "no event"),
        ({"evry": 3}, TypeError, "evry"),
    ],
)
def test_invalid_options_raise_and_attach_nothing(tmp_path, options, error, words):
    loop, _ = make()
    with pytest.raises(error, match=words):
        checkpoint(loop, rein.Checkpoints(tmp_path), **options)
    with pytest.raises(TypeError, match=r"pass an HDF5Store or rein\.Checkpoints"):
        checkpoint(loop, rein.MemoryStore())
    assert not any(event.handlers for event in loop.events.values())


def test_finished_loops_leave_no_threads(tmp_path):
    before = set(threading.enumerate())
    for number in range(20):
        loop, _ = make()
        checkpoint(loop, rein.Checkpoints(tmp_path / str(number)), every=4)
        loop.run()
    assert set(threading.enumerate()) <= before


def test_name_must_return_a_string(tmp_path: Path) -> None:
    loop = rein.Loop(lambda state: None, epochs=3, iterations=1)
    checkpoint(loop, rein.Checkpoints(tmp_path), name=lambda state: state.epoch)  # type: ignore[arg-type, return-value]  # wrong on purpose
    with pytest.raises(TypeError, match=r"name=\.\.\.\): the function returned 1"):
        loop.run()


def test_file_is_kept_if_any_handler_keeps_it(tmp_path):
    for name, rules in (("all", [{"keep_last": None}, {"keep_last": 1}]), ("two", [{}, {"keep_last": 1}])):
        loop, _ = make()
        store = rein.Checkpoints(tmp_path / name)
        for one in rules:
            checkpoint(loop, store, **one)
        loop.run()
    assert stems(tmp_path / "all") == [f"epoch-{n:06d}" for n in range(1, 9)]
    assert stems(tmp_path / "two") == [f"epoch-{n:06d}" for n in (6, 7, 8)]


def test_keep_best_keeps_the_best_file_of_each_metric(tmp_path):
    """One file is kept while it is best by both metrics, then one file for each. Resumed runs keep both."""
    values = {"a": [1.0, 5.0, 2.0, 3.0, 0.0, 6.0], "b": [7.0, 4.0, 9.0, 2.0, 3.0, 8.0]}
    best = {1: {"a": 1, "b": 1}, 2: {"a": 2, "b": 2}, 3: {"a": 2, "b": 2}, 4: {"a": 2, "b": 4}, 6: {"a": 6, "b": 4}}
    for epochs, expected in best.items():
        loop, _ = make()
        store = rein.Checkpoints(tmp_path / "checkpoints")
        for metric, mode in (("a", "max"), ("b", "min")):
            checkpoint(loop, store, keep_last=1, keep_best=(metric, mode))

        @loop.epoch_ended
        def score(state: rein.State) -> None:
            state.metrics.update({metric: values[metric][state.epoch - 1] for metric in values})

        if epochs > 1:
            rein.resume(loop, tmp_path / "checkpoints")
        loop.run(epochs=epochs)
        folder = tmp_path / "checkpoints/best"
        assert stems(folder) == sorted({f"epoch-{epoch:06d}" for epoch in expected.values()})
        for metric, epoch in expected.items():
            assert best_file(folder, metric) == folder / f"epoch-{epoch:06d}.h5"
        if len(set(expected.values())) == 1:
            assert rein.resume(make()[0], folder).path.stem == f"epoch-{expected['a']:06d}"
        else:
            with pytest.raises(CheckpointError, match="several files are best"):
                rein.resume(make()[0], folder)
    with pytest.raises(CheckpointError, match="best by 'c'"):
        best_file(folder, "c")


def test_keep_best_of_two_metrics_works_with_a_constant_file_name(tmp_path):
    loop, _ = make()
    store = rein.Checkpoints(tmp_path)
    for metric in ("a", "b"):
        checkpoint(loop, store, keep_best=(metric, "max"), name=lambda state: "model")

    @loop.epoch_ended
    def score(state: rein.State) -> None:
        state.metrics.update({"a": float(-state.epoch), "b": float(state.epoch)})

    loop.run()
    found = {read_checkpoint(best_file(tmp_path / "best", metric)).about["epoch"] for metric in ("a", "b")}
    assert found == {1, 8} and len(stems(tmp_path / "best")) == 2


def test_keep_best_within_an_epoch_needs_a_metric_of_the_iteration(tmp_path):
    """A value assigned in an earlier iteration does not describe the current weights."""
    loop, _ = make()

    @loop.iteration_completed(every=2)
    def score(state: rein.State) -> None:
        state.metrics["score"] = {2: 1.0, 4: 5.0, 8: 7.0, 12: 9.0, 14: 3.0}.get(state.total_iterations, 0.0)

    loop.epochs, loop.iterations = 1, 15
    every = {"event": "iteration_completed", "every": 3, "keep_last": 1}
    checkpoint(loop, rein.Checkpoints(tmp_path / "third"), **every, keep_best=("score", "max"))
    checkpoint(loop, rein.Checkpoints(tmp_path / "each"), **every | {"every": 1}, keep_best=("score", "max"))
    loop.run()
    assert stems(tmp_path / "third/best") == ["epoch-000001-iteration-000012"]
    assert stems(tmp_path / "each/best") == ["epoch-000001-iteration-000012"]


def test_two_handlers_of_one_event_share_a_checkpoint(tmp_path, monkeypatch):
    loop, _ = make()
    store = rein.Checkpoints(tmp_path)
    saver = checkpoint(loop, store, keep_last=2)
    checkpoint(loop, store, keep_every=4)
    taken, take = [], saver.checkpoints.take
    monkeypatch.setattr(store, "take", lambda *a: taken.append(loop.state.epoch) or take(*a))
    loop.run()
    assert taken == [1, 2, 3, 4, 5, 6, 7, 8]


def test_only_files_written_by_rein_are_removed(tmp_path):
    """Checks the folder of best checkpoints and the folder of all. A copy under another name belongs to the user."""
    folder = tmp_path / "checkpoints"
    loop, counter = make(dict.fromkeys(range(1, 9), 1.0) | {2: 2.0, 6: 3.0})
    checkpoint(loop, rein.Checkpoints(folder), keep_last=1, keep_best=("score", "max"))
    loop.run(epochs=2)
    for place in (folder, folder / "best"):
        (place / "notes.txt").write_text("mine")
        (place / "data.h5").write_bytes(b"of another program")
        rein.save(counter, place / "counter.h5")
        shutil.copy(folder / "best/epoch-000002.h5", place / "copy.h5")
    loop.run()
    assert stems(folder) == ["copy", "counter", "epoch-000008"]
    assert stems(folder / "best") == ["copy", "counter", "epoch-000006"]
    assert all((place / "notes.txt").exists() for place in (folder, folder / "best"))
    assert len([*tmp_path.glob("aside/*/*data.h5")]) == 2  # moved like a damaged checkpoint, not deleted
    again, _ = make()
    checkpoint(again, rein.Checkpoints(folder), keep_last=1, keep_best=("score", "max"))
    assert rein.resume(again, folder).path.stem == "epoch-000008"
    again.run(epochs=9)
    assert stems(folder) == ["copy", "counter", "epoch-000009"]
