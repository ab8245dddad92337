"""The events of every kind of run, compared with traces derived from the tables of docs/reference/events.md.

The model below uses only the tables: the next event of each event, the counters, and the effect of each halt and
exception. It does not use the code of the loop.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import rein

PAGE = (Path(__file__).parents[2] / "docs/reference/events.md").read_text(encoding="utf-8")
EPOCHS, ITERATIONS = 3, 2
WAYS = ("state.halt_epoch()", "state.halt_loop()", "loop.interrupt()", "an exception")


def table(first_heading: str) -> dict[str, dict[str, str]]:
    """Return a table of the page as {first cell: {heading: cell}}. First cells are names in backticks."""
    page = PAGE[PAGE.index(f"| {first_heading} ") :].splitlines()
    lines = itertools.takewhile(lambda line: line.startswith("|"), page)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    headings = [heading.strip("`") for heading in cells[0]]
    return {row[0].strip("`"): dict(zip(headings[1:], row[1:], strict=True)) for row in cells[2:]}


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


COUNTERS = ("epoch", "iteration", "total_iterations", "clocks.epochs")
EVENTS, HALTS = table("event"), table("requested in")


class Seen(NamedTuple):
    event: str
    epoch: int
    iteration: int
    total_iterations: int
    epochs: int


class Ask(NamedTuple):
    """A halt or exception in an event, at its `at`-th firing."""

    event: str
    way: str
    at: int


def expected(ask: Ask | None) -> Iterator[Seen]:
    """Yield the trace that the tables predict for EPOCHS x ITERATIONS, with one halt or exception."""
    k, i, seen = 0, 0, Seen("", 0, 0, 0, 0)
    times: collections.Counter[str] = collections.Counter()
    due = ["started"]
    while due:
        event = due.pop(0)
        if event == "epoch_started":
            k, i, t = k + 1, 0, seen.total_iterations
        i += event == "iteration_completed"
        times[event] += 1
        formulas = [EVENTS[event][heading].strip("`") for heading in COUNTERS]
        same = formulas == ["unchanged"] * len(COUNTERS)
        seen = Seen(event, *(seen[1:] if same else [eval(each, {}, {"k": k, "i": i, "t": t}) for each in formulas]))
        yield seen
        if ask is not None and (event, times[event]) == (ask.event, ask.at):
            cell = HALTS[event][ask.way]
            due = names(cell) + (following("epoch_ended", k, i) if "next epoch" in cell else [])
            if "epoch open" in cell:
                seen = seen._replace(epochs=k - 1)
        due = due or following(event, k, i)


def following(event: str, k: int, i: int) -> list[str]:
    """Return the event after an event: the first name if iterations or epochs remain, else the last."""
    left = {"started": k < EPOCHS, "epoch_ended": k < EPOCHS, "iteration_completed": i < ITERATIONS}
    choice = names(EVENTS[event]["then"])
    return choice[:1] if left.get(event, True) else choice[-1:]


def composed(ask: Ask | None, trace: list[Seen], step: Callable[[rein.State], Any] | None = None) -> rein.Loop:
    """Return a loop that records every event in `trace` and applies `ask`."""
    loop = rein.Loop(step or (lambda state: loop.emit("phase")), epochs=EPOCHS, iterations=ITERATIONS)
    loop.define("phase")
    for name in loop.events:
        record_and_ask(loop, name, ask if ask is not None and ask.event == name else None, trace)
    return loop


def record_and_ask(loop: rein.Loop, name: str, ask: Ask | None, trace: list[Seen]) -> None:
    def record(state: rein.State) -> None:
        trace.append(Seen(name, state.epoch, state.iteration, state.total_iterations, state.clocks.epochs))
        if ask is not None and ask.at == sum(seen.event == name for seen in trace):
            how[ask.way](state)

    how: dict[str, Callable[[rein.State], Any]] = {
        "state.halt_epoch()": rein.State.halt_epoch,
        "state.halt_loop()": rein.State.halt_loop,
        "loop.interrupt()": lambda state: loop.interrupt(),
        "an exception": lambda state: 1 / 0,
    }
    loop.event(name).attach(record)


def recorded(ask: Ask | None) -> tuple[rein.Loop, list[Seen]]:
    """Return the loop and the trace of a run with `ask`. Exceptions propagate."""
    trace: list[Seen] = []
    loop = composed(ask, trace)
    with pytest.raises(ZeroDivisionError) if ask and ask.way == "an exception" else contextlib.nullcontext():
        loop.run()
    return loop, trace


FINAL = ("completed", "halted", "failed")
IN_THE_RUN = [name for name in EVENTS if name not in (*FINAL, "epoch_halted")]
ASKS = [
    Ask(event, way, at)
    for event in IN_THE_RUN
    for way in WAYS
    for at in range(1, 1 + sum(seen.event == event for seen in expected(None)))
]


def test_tables_list_all_events_of_a_loop() -> None:
    loop = rein.Loop(lambda state: None)
    assert set(EVENTS) == set(HALTS) == {*loop.events, "phase"}


def test_completed_run_follows_the_tables() -> None:
    trace = recorded(None)[1]
    assert trace == list(expected(None))
    assert len(trace) == 2 + EPOCHS * (3 + 3 * ITERATIONS)


@pytest.mark.parametrize("ask", ASKS, ids=lambda ask: f"{ask.way} in {ask.event} {ask.at}")
def test_halt_or_exception_follows_the_tables(ask: Ask) -> None:
    loop, trace = recorded(ask)
    assert trace == list(expected(ask))
    assert loop.state.status == trace[-1].event
    assert loop.state.epoch_open == ("epoch open" in HALTS[ask.event][ask.way])


@pytest.mark.parametrize("way", WAYS)
def test_halt_or_exception_in_epoch_halted_follows_the_tables(way: str) -> None:
    """`epoch_halted` fires only if something else has halted the epoch, so its row is applied to that trace."""
    cell = HALTS["epoch_halted"][way]
    trace: list[Seen] = []
    loop = composed(Ask("epoch_halted", way, 1), trace)
    loop.iteration_completed(once=3)(rein.State.halt_epoch)
    with pytest.raises(ZeroDivisionError) if way == "an exception" else contextlib.nullcontext():
        loop.run()
    fired = [seen.event for seen in trace]
    followed, promised = fired[1 + fired.index("epoch_halted") :], names(cell)
    assert followed[: len(promised)] == promised
    assert followed[len(promised) : len(promised) + 1] == (["epoch_started"] if "next epoch" in cell else [])
    assert loop.state.epoch_open == ("epoch open" in cell)
    assert trace[-1].epochs == loop.state.clocks.epochs == loop.state.epoch - loop.state.epoch_open


@pytest.mark.parametrize("final", FINAL)
@pytest.mark.parametrize("way", WAYS)
def test_halt_in_a_final_event_is_too_late(final: str, way: str) -> None:
    cell, trace = HALTS[final][way], list[Seen]()

    def fail(state: rein.State) -> None:
        raise LookupError

    loop = composed(Ask(final, way, 1), trace, step=fail if final == "failed" else None)
    if final == "halted":
        loop.epoch_ended(once=1)(rein.State.halt_loop)
    raised = LookupError if final == "failed" else ZeroDivisionError if cell == "raised" else None
    text = f"requested in `{final}` or later is ignored: the run has ended"
    with (
        pytest.warns(RuntimeWarning, match=text) if "warning" in cell else contextlib.nullcontext(),
        pytest.raises(raised) if raised else contextlib.nullcontext() as error,
    ):
        loop.run()
    notes = getattr(error and error.value, "__notes__", [])
    assert any("a handler of `failed` raised ZeroDivisionError" in note for note in notes) == ("noted" in cell)
    assert [seen.event for seen in trace if seen.event in FINAL] == [final]
    assert (loop.state.status, loop.running) == (final, False)


def test_every_event_fires_in_some_run() -> None:
    one_of_each_way = [None, *(Ask("iteration_started", way, 1) for way in WAYS)]
    assert {seen.event for ask in one_of_each_way for seen in recorded(ask)[1]} == set(EVENTS)
