"""Halts from handlers, threads and signals: which one wins, and the state afterwards."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable

import pytest

import rein


def nothing(state: rein.State) -> None:
    return None


@pytest.mark.parametrize(
    "event", ["started", "epoch_started", "iteration_started", "iteration_completed", "epoch_completed", "epoch_ended"]
)
@pytest.mark.parametrize("ask", [rein.State.halt_epoch, rein.State.halt_loop])
def test_halt_does_not_skip_later_handlers_of_the_event(event: str, ask: Callable[[rein.State], None]) -> None:
    loop, log = rein.Loop(nothing), []
    loop.event(event).attach(ask)
    loop.event(event).attach(lambda state: log.append("plain"))
    loop.event(event).attach(lambda state: log.append("filtered"), every=1)
    loop.event(event).observe(lambda loop, state: log.append("observer"))
    loop.run(iterations=1)
    assert log == ["plain", "filtered", "observer"]


ASKS: dict[str, Callable[[rein.Loop], None]] = {
    "halt_epoch": lambda loop: loop.state.halt_epoch(),
    "halt_loop": lambda loop: loop.state.halt_loop("loop"),
    "stop": lambda loop: loop.stop("loop"),
    "interrupt": lambda loop: loop.interrupt("interrupt"),
}


@pytest.mark.parametrize("order", list(itertools.permutations(["halt_epoch", "halt_loop", "interrupt"])))
def test_strongest_halt_applies_in_any_order(order: tuple[str, ...]) -> None:
    loop = rein.Loop(nothing)
    for name in order:
        loop.iteration_completed.attach(lambda state, name=name: ASKS[name](loop), once=2)
    final = loop.run(epochs=3, iterations=5)
    assert (final.status, final.reason, final.epoch_open, final.iteration) == ("halted", "interrupt", True, 2)


@pytest.mark.parametrize("order", [("halt_epoch", "halt_loop"), ("halt_loop", "halt_epoch")])
def test_halt_of_the_loop_is_stronger_than_halt_of_the_epoch(order: tuple[str, ...]) -> None:
    loop = rein.Loop(nothing)
    for name in order:
        loop.iteration_completed.attach(lambda state, name=name: ASKS[name](loop), once=2)
    final = loop.run(epochs=3, iterations=5)
    assert (final.status, final.reason, final.epoch, final.history[-1].status) == ("halted", "loop", 1, "halted")


def test_later_weaker_halt_does_not_replace_a_halt() -> None:
    loop = rein.Loop(nothing)
    loop.iteration_completed(lambda state: state.halt_loop("first"))
    loop.epoch_halted(rein.State.halt_epoch)
    loop.epoch_ended(rein.State.halt_epoch)
    final = loop.run(epochs=3, iterations=5)
    assert (final.status, final.epoch) == ("halted", 1)


def test_first_reason_is_kept() -> None:
    loop = rein.Loop(nothing)
    loop.iteration_completed(lambda state: state.halt_loop())
    loop.iteration_completed(lambda state: state.halt_loop("solved"))
    loop.iteration_completed(lambda state: state.halt_loop("too late"))
    reasons = []
    loop.on("epoch_halted", "epoch_ended", "halted")(lambda state: reasons.append(state.reason))
    assert loop.run(iterations=5).reason == "solved"
    assert reasons == ["solved"] * 3


def test_reason_is_reset_by_the_next_run() -> None:
    loop = rein.Loop(nothing)
    loop.epoch_ended(once=1)(lambda state: state.halt_loop("enough"))
    assert loop.run(epochs=3, iterations=1).reason == "enough"
    final = loop.run(epochs=3, iterations=1)
    assert (final.status, final.reason, final.epoch) == ("completed", None, 3)


def test_halt_between_two_epochs_ends_neither() -> None:
    loop = rein.Loop(nothing)
    loop.epoch_ended(lambda state: state.request(rein.State.halt_epoch))
    for state in loop.stream(epochs=3, iterations=2):
        state.halt_epoch()
    assert [record.status for record in loop.state.history] == ["completed"] * 3


@pytest.mark.parametrize("ask", ["stop", "interrupt"])
def test_run_can_be_ended_from_another_thread(ask: str) -> None:
    loop, entered = rein.Loop(lambda state: entered.set() or time.sleep(0)), threading.Event()

    def other() -> None:
        entered.wait()
        getattr(loop, ask)("from outside")

    thread = threading.Thread(target=other)
    thread.start()
    final = loop.run(epochs=None, iterations=3)
    thread.join()
    assert (final.status, final.reason) == ("halted", "from outside")


@pytest.mark.parametrize("ask", ["stop", "interrupt"])
def test_run_can_be_ended_from_a_signal_during_another_halt(ask: str) -> None:
    """A handler of SIGALRM runs between any two instructions, also inside `halt_epoch`, which uses no lock."""
    loop = rein.Loop(nothing)
    loop.iteration_completed(rein.State.halt_epoch)
    before = signal.signal(signal.SIGALRM, lambda *_: getattr(loop, ask)("signal"))
    try:
        for seconds in (0.002, 0.005, 0.011):
            signal.setitimer(signal.ITIMER_REAL, seconds)
            assert loop.run(epochs=None, iterations=3).reason == "signal"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("ask", [*ASKS])
def test_halt_without_a_run_warns_and_is_ignored(ask: str) -> None:
    loop = rein.Loop(nothing)
    with pytest.warns(RuntimeWarning, match="a halt requested before a run is ignored"):
        ASKS[ask](loop)
    loop.run(epochs=2, iterations=2)
    with pytest.warns(RuntimeWarning, match="a halt requested in `completed` or later is ignored: the run has ended"):
        ASKS[ask](loop)
    final = loop.run(epochs=3, iterations=2)
    assert (final.status, final.reason, final.epoch) == ("completed", None, 3)
    assert [record.status for record in final.history] == ["completed"] * 3


def test_interrupt_in_every_iteration_still_makes_progress() -> None:
    loop = rein.Loop(nothing)
    loop.iteration_started(lambda state: loop.interrupt())
    for finished in (1, 2, 3):
        assert loop.run(iterations=3).iteration == finished
    assert loop.run(iterations=3).status == "completed"


@pytest.mark.parametrize("how", ["halt_epoch", "halt_loop", "stop"])
def test_halted_and_interrupted_epoch_ends_as_halted_in_the_next_run(how: str) -> None:
    loop, log = rein.Loop(nothing), []
    loop.iteration_completed(once=2)(lambda state: loop.interrupt())
    loop.iteration_completed(once=2)(lambda state: ASKS[how](loop))
    loop.epoch_halted(lambda state: log.append((state.epoch, state.iteration)))
    assert loop.run(epochs=2, iterations=5).epoch_open
    assert log == []
    final = loop.run(epochs=2, iterations=5)
    assert log == [(1, 2)]
    assert [(r.status, r.iterations) for r in final.history] == [("halted", 2), ("completed", 5)]


def test_interrupted_loop_can_continue_with_other_limits() -> None:
    loop = rein.Loop(nothing)
    loop.iteration_completed(once=4)(lambda state: loop.interrupt())
    loop.run(iterations=10)
    final = loop.run(iterations=3)
    assert (final.iteration, final.status, final.history[-1].iterations) == (4, "completed", 4)
