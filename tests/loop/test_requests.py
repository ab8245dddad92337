"""Requests for edges, and the loop as a stream of epochs."""

from __future__ import annotations

from typing import Any

import pytest

import rein


def nothing(state: rein.State) -> None:
    return None


def log_of_edges(event: str, **limits: Any) -> list[Any]:
    """Return what fires around an action that is requested in `event`."""
    loop, log = rein.Loop(nothing), []

    def action(state: rein.State) -> None:
        log.append("action")

    loop.event(event).attach(lambda state: state.request(action), once=1)
    for name in loop.events:
        loop.on(name)(lambda state, name=name: log.append(name))
    loop.event(event).attach(lambda state: state.request(action), once=1)
    loop.run(**{"epochs": 1, "iterations": 1} | limits)
    return log


def yields(state: rein.State) -> Any:
    yield state


@pytest.mark.parametrize("action", [yields, None, int])
def test_invalid_action_is_rejected_when_requested(action: Any) -> None:
    with pytest.raises(TypeError, match=r"state.request\(...\): .*callback"):
        rein.Loop(nothing).state.request(action)


ALL = [
    "started",
    "epoch_started",
    "iteration_started",
    "iteration_completed",
    "epoch_completed",
    "epoch_ended",
    "completed",
]


@pytest.mark.parametrize(
    ("event", "edge"),
    [(event, "iteration_completed") for event in ALL[:4]]
    + [(event, "epoch_ended") for event in ALL[4:6]]
    + [("completed", "completed")],
)
def test_action_is_called_once_at_the_next_edge_after_all_handlers(event: str, edge: str) -> None:
    at = ALL.index(edge) + 1
    assert log_of_edges(event) == [*ALL[:at], "action", *ALL[at:]]


def test_action_sees_final_counters_and_a_closed_epoch() -> None:
    loop, seen = rein.Loop(nothing), []

    def action(state: rein.State) -> None:
        seen.append((state.iteration, state.epoch_open, state.clocks.epochs, len(state.history)))

    loop.on("iteration_completed", "epoch_ended")(lambda state: state.request(action))
    loop.run(iterations=2)
    assert seen == [(1, True, 0, 0), (2, True, 0, 0), (2, False, 1, 1)]


def test_actions_are_called_in_the_order_of_requests() -> None:
    loop, log = rein.Loop(nothing), []
    for n in range(5):
        action = lambda state, n=n: log.append(n)  # noqa: E731  # short
        loop.iteration_completed(lambda state, action=action: state.request(action))
    loop.run(iterations=1)
    assert log == list(range(5))


def test_action_can_halt_the_run() -> None:
    loop = rein.Loop(nothing)
    loop.iteration_completed(once=2)(lambda state: state.request(lambda state: state.halt_loop("disk full")))
    final = loop.run(iterations=5)
    assert (final.iteration, final.status, final.reason) == (2, "halted", "disk full")


def test_action_can_request_the_next_edge() -> None:
    loop, log = rein.Loop(nothing), []

    def again(state: rein.State) -> None:
        log.append(state.iteration)
        state.request(again)

    loop.started(lambda state: state.request(again))
    loop.run(iterations=3)
    assert log == [1, 2, 3, 3, 3]


def test_action_of_a_halted_run_is_called_at_the_edge_and_final_event() -> None:
    loop, log = rein.Loop(nothing), []
    loop.iteration_completed(once=2)(lambda state: loop.interrupt())
    loop.iteration_completed(lambda state: state.request(lambda state: log.append(state.status)))
    loop.halted(lambda state: state.request(lambda state: log.append(state.status)))
    loop.run(iterations=5)
    assert log == ["running", "running", "halted"]


def test_action_requested_in_a_failing_iteration_is_not_called() -> None:
    loop, log = rein.Loop(nothing), []
    loop.iteration_completed(lambda state: state.request(lambda state: log.append("edge")))
    loop.iteration_completed(lambda state: 1 / 0)
    loop.failed(lambda state: state.request(lambda state: log.append("final")))
    with pytest.raises(ZeroDivisionError):
        loop.run(iterations=1)
    assert log == ["final"]


def test_stream_yields_the_state_at_the_end_of_each_epoch() -> None:
    loop = rein.Loop(lambda state: {"x": state.batch})
    loop.metric("x", "x", "sum")
    seen = [(state.epoch, state.metrics["x"], state.epoch_open) for state in loop.stream([1, 2, 3], epochs=3)]
    assert seen == [(1, 6.0, False), (2, 6.0, False), (3, 6.0, False)]
    assert loop.state.status == "completed"


def test_stream_and_run_are_equivalent() -> None:
    traces = []
    for use in (lambda loop: loop.run(epochs=4, iterations=3), lambda loop: [*loop.stream(epochs=4, iterations=3)]):
        loop, trace = rein.Loop(nothing), []
        loop.iteration_completed(once=5)(rein.State.halt_epoch)
        loop.epoch_ended(once=3)(rein.State.halt_loop)
        for name in loop.events:
            # called in this iteration
            loop.on(name)(lambda state, name=name: trace.append((name, state.epoch, state.iteration)))  # noqa: B023
        use(loop)
        traces.append(trace)
    assert traces[0] == traces[1]


def test_leaving_a_stream_early_halts_the_loop() -> None:
    loop, fired = rein.Loop(nothing), []
    loop.on("epoch_ended", "completed", "halted", "failed")(lambda state: fired.append(state.status))
    for state in loop.stream(epochs=10, iterations=2):
        if state.epoch == 2:
            break
    assert fired == ["running", "running", "halted"]
    assert (loop.state.reason, loop.running, loop.state.epoch) == ("the stream was left", False, 2)
    assert loop.run(epochs=3, iterations=2).status == "completed"


def test_exception_in_the_loop_body_does_not_fire_failed() -> None:
    loop, fired = rein.Loop(nothing), []
    loop.on("halted", "failed")(lambda state: fired.append(state.status))

    def use() -> None:
        for _ in loop.stream(epochs=10, iterations=1):
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert fired == ["halted"]


def test_halt_in_the_loop_body_applies_between_epochs() -> None:
    loop = rein.Loop(nothing)
    for state in loop.stream(epochs=10, iterations=1):
        if state.epoch == 3:
            state.halt_loop("seen enough")
    assert (loop.state.epoch, loop.state.status, loop.state.reason) == (3, "halted", "seen enough")


def test_open_epoch_is_not_yielded() -> None:
    loop = rein.Loop(nothing)
    loop.iteration_completed(once=3)(lambda state: loop.interrupt())
    assert [state.epoch for state in loop.stream(epochs=3, iterations=2)] == [1]
    assert [state.epoch for state in loop.stream(epochs=3, iterations=2)] == [2, 3]


def test_stream_checks_its_arguments_before_iteration() -> None:
    loop = rein.Loop(nothing)
    with pytest.raises(ValueError, match="epochs=0"):
        loop.stream(epochs=0)
    with pytest.raises(ValueError, match="the data is empty"):
        loop.stream([])


def test_second_stream_must_wait_for_the_first() -> None:
    loop = rein.Loop(nothing)
    first, second = loop.stream(epochs=2, iterations=1), loop.stream(epochs=2, iterations=1)
    assert loop.state.status is None, "nothing runs before the first state is requested"
    next(first)
    with pytest.raises(
        RuntimeError, match="the loop is running; call this outside of handlers, after the stream is closed"
    ):
        next(second)
    with pytest.raises(RuntimeError, match="the loop is running"):
        loop.run()
    first.close()  # type: ignore[attr-defined]  # streams are generators
    assert [state.epoch for state in loop.stream(epochs=2, iterations=1)] == [2]
