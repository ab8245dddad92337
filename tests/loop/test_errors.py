"""Exceptions: their notes, the events that fire, and the state of the loop afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

import rein


def nothing(state: rein.State) -> None:
    return None


def fail(state: rein.State) -> None:
    raise KeyError("mine")


def notes_of(loop: rein.Loop, error: type[BaseException] = KeyError, **limits: Any) -> list[str]:
    with pytest.raises(error) as raised:
        loop.run(**{"epochs": 2, "iterations": 2} | limits)
    return raised.value.__notes__


EVERYWHERE = ["started", "epoch_started", "iteration_started", "iteration_completed", "epoch_completed", "epoch_ended"]


@pytest.mark.parametrize("event", [*EVERYWHERE, "completed"])
@pytest.mark.parametrize("filters", [{}, {"every": 1}])
def test_failing_handler_is_named_with_event_epoch_and_iteration(event: str, filters: dict[str, Any]) -> None:
    loop, seen = rein.Loop(nothing), []
    loop.event(event).attach(lambda state: seen.append((state.epoch, state.iteration)))
    loop.event(event).attach(fail, **filters)
    loop.event(event).attach(nothing)
    notes = notes_of(loop)
    epoch, iteration = seen[-1]
    assert notes == [f"in handler fail on {event}, epoch {epoch}, iteration {iteration}"]


def assign(state: rein.State) -> None:
    state.my_best = 5  # type: ignore[attr-defined]  # invalid on purpose


def read(state: rein.State) -> None:
    state.my_best  # type: ignore[attr-defined]  # noqa: B018  # invalid on purpose


@pytest.mark.parametrize("handler", [assign, read])
def test_custom_attribute_of_the_state_suggests_memory(handler: Any) -> None:
    loop = rein.Loop(nothing)
    loop.on("epoch_started")(handler)
    where, hint = notes_of(loop, AttributeError)
    assert where.startswith("in handler") and "state.memory" in hint


@pytest.mark.parametrize("event", ["iteration_started", "iteration_completed"])
def test_error_in_a_later_iteration_names_the_right_event(event: str) -> None:
    def fail_later(state: rein.State) -> None:
        if state.total_iterations > 1:
            raise KeyError

    loop = rein.Loop(nothing)
    loop.on("iteration_started", "iteration_completed")(nothing)
    loop.event(event).attach(fail_later)
    (note,) = notes_of(loop, iterations=4)
    assert note.endswith(f".fail_later on {event}, epoch 1, iteration 2")


def test_failing_partial_and_callable_object_are_named() -> None:
    class Watcher:
        def __call__(self, state: rein.State) -> None:
            raise KeyError

    for handler, name in ((functools.partial(fail), "fail"), (Watcher(), Watcher.__qualname__)):
        loop = rein.Loop(nothing)
        loop.epoch_ended(handler)
        assert notes_of(loop) == [f"in handler {name} on epoch_ended, epoch 1, iteration 2"]


def test_failing_step_is_named_with_epoch_and_iteration() -> None:
    def step(state: rein.State) -> None:
        if state.total_iterations == 3:
            raise KeyError

    (note,) = notes_of(rein.Loop(step))
    assert note.startswith("in step test_failing_step_is_named") and note.endswith(".step, epoch 2, iteration 1")


def test_failing_step_is_named_with_strict() -> None:
    assert notes_of(rein.Loop(fail, strict=True)) == ["in step fail, epoch 1, iteration 0"]


def test_failing_handler_of_an_emitted_event_is_named_before_the_step() -> None:
    loop = rein.Loop(lambda state: loop.emit("phase"))
    loop.define("phase").attach(fail)
    first, second = notes_of(loop)
    assert first == "in handler fail on phase, epoch 1, iteration 0"
    assert second.startswith("in step ") and second.endswith("epoch 1, iteration 0")


def test_failing_metric_is_named() -> None:
    loop = rein.Loop(nothing)
    loop.metric("loss", fail)
    loop.iteration_completed(nothing)
    assert notes_of(loop) == ["in metric 'loss', epoch 1, iteration 1"]


def test_failing_data_is_named() -> None:
    def data():
        yield 1
        raise KeyError

    loop = rein.Loop(nothing)
    loop.iteration_completed(nothing)
    assert notes_of(loop, data=data()) == ["in the data, epoch 1, iteration 1"]


def test_failing_request_is_named() -> None:
    loop = rein.Loop(nothing)
    loop.iteration_completed(lambda state: state.request(fail))
    assert notes_of(loop) == ["in fail, requested with state.request, epoch 1, iteration 1"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["step", "handler"])
def test_program_exit_fires_failed_and_propagates(error: type[BaseException], where: str) -> None:
    def leave(state: rein.State) -> None:
        raise error

    loop, fired = rein.Loop(leave if where == "step" else nothing), []
    loop.iteration_completed(leave)
    for name in ("epoch_halted", "epoch_completed", "epoch_ended", "failed", "halted", "completed"):
        loop.on(name)(lambda state, name=name: fired.append((name, state.status)))
    notes_of(loop, error)
    assert fired == [("failed", "failed")]
    assert not loop.running


def test_interrupted_observer_stays_connected() -> None:
    loop, fired = rein.Loop(nothing), []

    def observer(loop: rein.Loop, state: rein.State) -> None:
        raise KeyboardInterrupt

    loop.epoch_started.observe(observer)
    loop.failed(lambda state: fired.append("failed"))
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert fired == ["failed"]


def test_stop_iteration_in_a_step_does_not_end_the_run_silently() -> None:
    """A StopIteration cannot leave a generator. Python raises RuntimeError instead, with the cause."""
    iterator, fired = iter([1, 2]), []
    loop = rein.Loop(lambda state: next(iterator))
    loop.failed(lambda state: fired.append(state.total_iterations))
    with pytest.raises(RuntimeError) as raised:
        loop.run(iterations=5)
    assert isinstance(raised.value.__cause__, StopIteration)
    assert "in step" in raised.value.__cause__.__notes__[0]
    assert any("in step" in note for note in raised.value.__notes__)
    assert fired == [2]


def test_second_error_becomes_a_note_of_the_first(caplog: pytest.LogCaptureFixture) -> None:
    loop = rein.Loop(fail)

    @loop.failed
    def fail_again(state: rein.State) -> None:
        raise ValueError("second")

    assert notes_of(loop)[1] == "and a handler of `failed` raised ValueError: second"
    assert caplog.messages == ["a handler of `failed` raised"]


@pytest.mark.parametrize("returned", [False, 0, "halt_epoch", (1, 2), NotImplemented])
@pytest.mark.parametrize("event", ["started", "iteration_started", "iteration_completed", "epoch_ended", "completed"])
@pytest.mark.parametrize("filters", [{}, {"every": 1}])
def test_handler_that_returns_a_value_is_named(returned: Any, event: str, filters: dict[str, Any]) -> None:
    def wrong(state: rein.State) -> Any:
        return returned

    loop = rein.Loop(nothing)
    loop.event(event).attach(wrong, **filters)
    with pytest.raises(TypeError, match=f"handler .*wrong on {event} must return None; assign to the state, or call"):
        loop.run(iterations=1)


@pytest.mark.parametrize("event", ["epoch_completed", "epoch_halted", "epoch_ended"])
def test_epoch_that_fails_in_an_end_event_ends_again_in_the_next_run(event: str) -> None:
    due, fired = [True], []

    def fail_once(state: rein.State) -> None:
        if due:
            raise KeyError(due.pop())

    loop = rein.Loop(nothing)
    if event == "epoch_halted":
        loop.iteration_completed(once=1)(rein.State.halt_epoch)
    loop.event(event).attach(fail_once)
    loop.on("epoch_completed", "epoch_halted", "epoch_ended", "failed")(
        lambda state: fired.append((state.epoch_status or state.status, state.clocks.epochs))
    )
    notes_of(loop, epochs=1)
    assert (fired[-1], len(loop.state.history)) == (("failed", 0), 0)
    fired.clear()
    final = loop.run(epochs=1, iterations=2)
    ending = "halted" if event == "epoch_halted" else "completed"
    assert fired == [(ending, 1)] * 2
    assert (len(final.history), final.total_iterations) == (1, 1 if event == "epoch_halted" else 2)


def test_unreadable_metric_leaves_the_epoch_open() -> None:
    loop = rein.Loop(nothing)
    loop.metrics.compute("broken", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.run(iterations=1)
    assert (loop.state.clocks.epochs, loop.state.epoch_open) == (0, True)


@pytest.mark.parametrize("event", ["started", "iteration_completed", "epoch_ended", "completed", "failed"])
@pytest.mark.parametrize("what", ["run", "stream", "load_state_dict"])
def test_loop_cannot_be_run_or_loaded_in_its_handlers(event: str, what: str) -> None:
    loop, saved = rein.Loop(nothing if event != "failed" else fail), rein.Loop(nothing).state_dict()
    calls: dict[str, Callable[[], Any]] = {
        "run": loop.run,
        "stream": lambda: next(loop.stream()),
        "load_state_dict": lambda: loop.load_state_dict(saved),
    }
    operations = []

    def nest(state: rein.State) -> None:
        with pytest.raises(RuntimeError, match="the loop is running") as raised:
            calls[what]()
        operations.append(str(raised.value).split(":")[0])

    loop.event(event).attach(nest)
    try:
        loop.run(iterations=1)
    except KeyError:
        assert event == "failed"
    assert operations == ["run" if what == "stream" else what]


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (None, "a step must be a function of the state, got NoneType"),
        (dict, "a step must be a function of the state, got the class dict"),
        (lambda: None, "cannot be called with the state as its only argument"),
        (
            lambda state, batch: None,
            "cannot be called with the state as its only argument: missing a required argument: 'batch'",
        ),
    ],
)
def test_invalid_step_is_rejected(step: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        rein.Loop(step)


@pytest.mark.parametrize("event", ["started", "iteration_completed", "epoch_ended", "completed"])
@pytest.mark.parametrize("filters", [{}, {"every": 1}])
def test_stop_iteration_in_a_handler_keeps_the_name_of_the_handler(event: str, filters: dict) -> None:
    def careless(state: rein.State) -> None:
        next(iter(()))

    loop = rein.Loop(lambda state: None, iterations=1)
    loop.event(event).attach(careless, **filters)
    with pytest.raises(RuntimeError, match="StopIteration") as error:
        loop.run()
    assert any("careless" in note and event in note for note in error.value.__notes__)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda state: state, "returned the state of the run"),
        (lambda state: (n for n in range(3)), "returned a generator"),
    ],
)
def test_result_of_the_step_is_checked_after_the_first_iteration(step: Callable[..., Any], text: str) -> None:
    loop = rein.Loop(step, iterations=9)
    with pytest.raises(TypeError, match=text):
        loop.run()
    assert loop.state.total_iterations == 1


def test_step_can_return_the_generator_passed_as_init() -> None:
    numbers = (n for n in range(3))
    state = rein.Loop(lambda state: state.step_state, iterations=2).run(init=numbers)
    assert state.step_state is numbers


def test_all_cleanups_run_even_if_one_raises() -> None:
    loop, done = rein.Loop(lambda state: None, epochs=1, iterations=1), list[int]()

    def clean(number: int) -> None:
        done.append(number)
        if number == 1:
            raise RuntimeError("cleanup 1")

    loop.started(lambda state: loop.cleanups.extend(functools.partial(clean, number) for number in range(3)))
    with pytest.raises(RuntimeError, match="cleanup 1"):
        loop.run()
    assert done == [2, 1, 0]
    assert not loop.cleanups
