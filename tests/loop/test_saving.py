"""Saving and loading: the contents of a state, the state of a loaded loop, and rejected states."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import rein

PAGE = (Path(__file__).parents[2] / "docs/reference/loop.md").read_text(encoding="utf-8")


def nothing(state: rein.State) -> None:
    return None


def step(state: rein.State) -> None:
    state.clocks.advance(env_steps=16)


def loaded(saved: dict[str, Any], step: Callable[[rein.State], Any] = nothing) -> rein.Loop:
    loop = rein.Loop(step)
    loop.load_state_dict(saved)
    return loop


def left(how: str) -> rein.Loop:
    """Return a loop after a run of 2 x 3 that was cut in one of the ways of the table."""
    loop = rein.Loop(nothing, epochs=2, iterations=3)
    if how == "ended between two epochs":
        loop.epoch_ended(once=1)(rein.State.halt_loop)
    if how == "was interrupted in `started`":
        loop.started(once=1)(lambda state: loop.interrupt())
    if "mid-epoch" in how:
        loop.iteration_completed(once=2)(lambda state: loop.interrupt())
    if "halted as well" in how:
        loop.iteration_completed(once=2)(rein.State.halt_epoch)
    if "last iteration" in how:
        loop.iteration_completed(once=3)(lambda state: loop.interrupt())
    loop.run()
    return loop


def rows() -> list[tuple[str, list[str]]]:
    table = PAGE[PAGE.index("| the last run |") :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return [(how, re.findall(r"`(\w+)`", first)) for how, first in cells]


@pytest.mark.parametrize(("how", "first"), rows())
@pytest.mark.parametrize("new_loop", [False, True])
def test_next_run_fires_first_the_event_in_the_table(how: str, first: list[str], new_loop: bool) -> None:
    loop, fired = left(how), []
    loop = loaded(loop.state_dict()) if new_loop else loop
    for name in loop.events:
        loop.on(name)(lambda state, name=name: fired.append(name))
    loop.run(epochs=2, iterations=3)
    assert fired[: len(first)] == first


def test_failed_run_continues_as_in_the_table() -> None:
    due, fired = [True], []
    loop = rein.Loop(nothing, epochs=2, iterations=3)
    loop.iteration_completed(once=2)(lambda state: due.pop() and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.run()
    loop.on("epoch_started", "iteration_started")(lambda state: fired.append((state.epoch, state.iteration)))
    loop.run()
    assert fired[0] == (1, 2)


def test_counts_continue_except_those_of_started() -> None:
    loop = rein.Loop(nothing)
    for name in loop.events:
        loop.on(name, every=1)(nothing)
    loop.run(epochs=3, iterations=2)
    resumed = loaded(loop.state_dict())
    assert (resumed.state.counts["epoch_ended"], resumed.state.counts.get("started")) == (3, None)
    resumed.run(epochs=5, iterations=2)
    assert (resumed.state.counts["epoch_ended"], resumed.state.counts["started"]) == (5, 1)


def test_filter_keeps_its_schedule_if_attached_before_or_after_loading() -> None:
    def attach(loop: rein.Loop, log: list[int]) -> None:
        loop.iteration_completed(every=100, unit="env_steps")(lambda state: log.append(state.clocks.env_steps))

    whole, log = rein.Loop(step), list[int]()
    attach(whole, log)
    whole.run(iterations=30)
    for before in (True, False):
        first, resumed, pieces = rein.Loop(step), rein.Loop(step), list[int]()
        attach(first, pieces)
        first.iteration_completed(once=9)(lambda state, loop=first: loop.interrupt())
        first.run(iterations=30)
        if before:
            attach(resumed, pieces)
        resumed.load_state_dict(first.state_dict())
        if not before:
            attach(resumed, pieces)
        resumed.run(iterations=30)
        assert pieces == log == [112, 208, 304, 400]


def test_new_handler_counts_from_the_loaded_clock_values() -> None:
    first = rein.Loop(step)
    first.run(iterations=10)
    resumed, log = rein.Loop(step), []
    resumed.iteration_completed(every=1000, unit="env_steps")(lambda state: log.append(state.clocks.env_steps))
    resumed.iteration_completed(once=100, unit="env_steps")(lambda state: log.append("passed long ago"))
    resumed.epoch_ended(once=1)(lambda state: log.append("passed long ago"))
    resumed.load_state_dict(first.state_dict())
    resumed.run(epochs=2, iterations=60)
    assert log == [1008]


def test_handler_of_another_name_does_not_inherit_memory() -> None:
    def old(state: rein.State) -> None:
        log.append(("old", state.clocks.env_steps))

    def new(state: rein.State) -> None:
        log.append(("new", state.clocks.env_steps))

    first, log = rein.Loop(step), list[tuple[str, int]]()
    first.run(iterations=2)
    first.iteration_completed(once=40, unit="env_steps")(old)
    first.run(epochs=2, iterations=4)
    resumed = rein.Loop(step)
    for handler in (new, old):
        resumed.iteration_completed(once=40, unit="env_steps")(handler)
    resumed.load_state_dict(first.state_dict())
    resumed.run(epochs=3, iterations=4)
    assert log == [("old", 48)]
    assert {key.split("/")[1].split(".")[-1] for key in resumed.state.counts if "/" in key} == {"new", "old"}


def test_halt_of_an_epoch_at_an_edge_is_saved() -> None:
    loop, saved = rein.Loop(nothing), []
    loop.iteration_completed(once=2)(lambda state: state.request(lambda state: saved.append(loop.state_dict())))
    loop.iteration_completed(once=2)(rein.State.halt_epoch)
    loop.run(epochs=2, iterations=5)
    final = loaded(saved[0]).run(epochs=2, iterations=5)
    assert [(record.status, record.iterations) for record in final.history] == [("halted", 2), ("completed", 5)]


def test_halt_of_the_loop_is_not_saved() -> None:
    loop = rein.Loop(nothing)
    loop.epoch_ended(lambda state: state.halt_loop("solved"))
    saved: list[dict[str, Any]] = []
    loop.on("epoch_ended", "halted")(lambda state: state.request(lambda state: saved.append(loop.state_dict())))
    loop.run(epochs=3, iterations=1)
    for state_dict in saved:
        final = loaded(state_dict).run(epochs=3, iterations=1)
        assert (final.epoch, final.status, final.reason) == (3, "completed", None)
    assert len(saved) == 2


def test_saved_state_does_not_change_when_the_run_continues() -> None:
    loop = rein.Loop(lambda state: {"x": torch.tensor(float(state.total_iterations))})
    loop.metric("x", "x")
    loop.iteration_completed(every=3, unit="iteration")(nothing)
    loop.iteration_completed(lambda state: state.memory.__setitem__("n", state.iteration))
    loop.epoch_ended(lambda state: state.metrics.__setitem__("assigned", state.epoch))
    loop.run(epochs=1, iterations=4)
    saved = loop.state_dict()
    before = repr(saved)
    loop.run(epochs=3, iterations=4)
    assert repr(saved) == before


class Point(NamedTuple):
    x: Any

    def doubled(self) -> Any:
        return self.x * 2


def test_named_tuples_keep_fields_and_get_types_from_init() -> None:
    loop = rein.Loop(lambda state: Point(state.step_state.x + 1))
    loop.run(iterations=3, init=Point(0))
    doubling = lambda state: Point(state.step_state.doubled())  # noqa: E731  # short
    assert loaded(loop.state_dict(), doubling).run(epochs=2, iterations=1, init=Point(0)).step_state == Point(6)
    untyped = loaded(loop.state_dict())
    assert untyped.state.step_state.x == 3
    with pytest.raises(AttributeError, match="doubled"):
        loaded(loop.state_dict(), doubling).run(epochs=2, iterations=1)


@dataclasses.dataclass
class Grid:
    cells: torch.Tensor
    parts: list[Any]


CODECS: Any = {"grid": (Grid, vars, lambda saved: Grid(**saved))}


def test_codec_stores_objects_of_a_class_in_a_checkpoint(tmp_path: Path) -> None:
    def build(codecs: Any) -> rein.Loop:
        return rein.Loop(lambda state: (Grid(state.step_state[0].cells + 1, [Point(1)]),), codecs=codecs)

    loop = build(CODECS)
    rein.checkpoint(loop, store=rein.Checkpoints(tmp_path))
    loop.run(iterations=2, init=(Grid(torch.zeros(2), []),))
    resumed = build(CODECS)
    rein.resume(resumed, tmp_path)
    final = resumed.run(epochs=2, iterations=3).step_state
    assert type(final[0]) is Grid and final[0].cells.tolist() == [5.0, 5.0] and final[0].parts == [(1,)]
    with pytest.raises(ValueError, match="grid"):
        build(None).load_state_dict(loop.state_dict())


def test_memory_can_hold_tensors_and_is_loaded_in_place() -> None:
    loop = rein.Loop(nothing)
    loop.state.memory["best"] = {"weights": torch.ones(2), "at": (1, 2)}
    resumed = rein.Loop(nothing)
    held = resumed.state.memory
    held["stale"] = 1
    resumed.load_state_dict(loop.state_dict())
    assert held is resumed.state.memory and set(held) == {"best"}
    assert torch.equal(held["best"]["weights"], torch.ones(2)) and held["best"]["at"] == (1, 2)


def test_seconds_of_run_and_epoch_exclude_the_time_between_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("rein.loop.state.time.perf_counter", lambda: now[0])

    def tick(state: rein.State) -> None:
        now[0] += 1.0

    loop = rein.Loop(tick)
    loop.iteration_completed(once=6)(lambda state: loop.interrupt())
    loop.run(epochs=2, iterations=4)
    saved = loop.state_dict()
    for again in (loop, loaded(saved, tick)):
        now[0] += 1000.0
        final = again.run(epochs=2, iterations=4)
        assert [record.seconds for record in final.history] == [4.0, 4.0]
        assert final.clocks.seconds == 8.0


def test_loading_ignores_new_and_removed_metrics() -> None:
    loop = rein.Loop(lambda state: {"x": 1.0, "y": 2.0})
    loop.metric("x", "x", "sum")
    loop.iteration_completed(once=2)(lambda state: loop.interrupt())
    loop.run(iterations=3)
    resumed = rein.Loop(lambda state: {"x": 1.0, "y": 2.0})
    resumed.metric("y", "y", "sum")
    resumed.load_state_dict(loop.state_dict())
    assert dict(resumed.run(iterations=3).metrics) == {"y": 2.0}


def test_iterator_cannot_be_resumed_even_after_retries() -> None:
    loop = rein.Loop(nothing)
    loop.run(iter([1, 2]))
    resumed, iterator = loaded(loop.state_dict()), iter([1, 2])
    for _ in range(2):
        with pytest.raises(ValueError, match="a bare iterator cannot be resumed: pass data that can be iterated again"):
            resumed.run(iterator, epochs=2)
    resumed.stream([1, 2], epochs=2)  # not started, so no run has continued yet
    with pytest.raises(ValueError, match="a bare iterator cannot be resumed"):
        resumed.run(iterator, epochs=2)
    assert resumed.run([1, 2], epochs=2).status == "completed"
    assert resumed.run(iterator, epochs=3).status == "completed"
    resumed.load_state_dict(resumed.state_dict())
    with pytest.raises(ValueError, match="a bare iterator cannot be resumed"):
        resumed.run(iterator, epochs=4)


class Part:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


def test_state_of_another_format_or_other_parts_is_rejected() -> None:
    saved = rein.Loop(nothing).state_dict()
    with pytest.raises(ValueError, match="this state has format version 99; this rein reads version 2"):
        loaded(saved | {"format": 99})
    loop = rein.Loop(nothing)
    loop.own("agent", Part())
    with pytest.raises(
        ValueError,
        match=r"parts of the loop and the state differ: missing in the loop \[\], missing in the state \['agent'\]",
    ):
        loop.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"missing in the loop \['agent'\], missing in the state \[\]"):
        rein.Loop(nothing).load_state_dict(loop.state_dict())


def test_loading_replaces_all_state_of_an_earlier_run() -> None:
    fresh, loop = rein.Loop(nothing).state_dict(), rein.Loop(nothing)
    loop.iteration_completed(once=2)(lambda state: state.halt_loop("earlier"))
    loop.run(epochs=3, iterations=2)
    loop.load_state_dict(fresh)
    state = loop.state
    assert (state.epoch, state.iteration, state.total_iterations, state.epoch_open) == (0, 0, 0, False)
    assert (state.status, state.reason, state.epoch_status, len(state.history)) == (None, None, None, 0)
    assert loop.run(epochs=2, iterations=1).history[-1].status == "halted", (
        "the halt in the second iteration must fire again"
    )
