"""Attaching and detaching handlers: order, decorators, several events, and all kinds of callables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import pytest

import rein


def nothing(state: rein.State) -> None:
    return None


def note(log: list[Any], what: Any) -> Callable[[rein.State], None]:
    return lambda state: log.append(what)


def test_filtered_and_unfiltered_handlers_keep_the_order() -> None:
    loop, log = rein.Loop(nothing), []
    for number in range(6):
        loop.iteration_completed(note(log, number), **({"every": 1} if number % 2 else {}))
    loop.run(iterations=1)
    assert log == list(range(6))


def test_handler_sees_assignments_of_earlier_handlers() -> None:
    loop = rein.Loop(lambda state: 1)

    @loop.iteration_completed
    def double(state: rein.State) -> None:
        state.step_state *= 2

    @loop.iteration_completed
    def add(state: rein.State) -> None:
        state.step_state += 3
        state.memory["seen"] = state.step_state

    assert loop.run(iterations=1).memory == {"seen": 5}


def test_decorators_stack_and_return_the_function() -> None:
    loop, log = rein.Loop(nothing), []

    def handler(state: rein.State) -> None:
        log.append((state.epoch, state.iteration))

    decorated = loop.epoch_ended(loop.iteration_completed(every=2)(loop.started()(handler)))
    assert decorated is handler
    assert loop.on("epoch_started")(handler) is handler
    assert loop.on_all(handler) is handler
    assert loop.epoch_ended.observe(handler) is handler


def test_handle_detaches_only_its_attachment_and_can_repeat() -> None:
    loop, log = rein.Loop(nothing), []
    handler = note(log, "x")
    first, second = loop.epoch_ended.attach(handler), loop.epoch_ended.attach(handler, every=2)
    first.detach()
    first.detach()
    loop.run(epochs=2, iterations=1)
    assert log == ["x"]
    loop.epoch_ended.detach(second)
    assert loop.epoch_ended.handlers == ()


def test_detaching_a_function_removes_all_its_attachments() -> None:
    loop = rein.Loop(nothing)
    for _ in range(3):
        loop.epoch_ended(nothing)
    loop.epoch_ended(other := note([], "y"))
    loop.epoch_ended.detach(nothing)
    assert loop.epoch_ended.handlers == (other,)
    with pytest.raises(ValueError, match="epoch_ended: nothing is not attached"):
        loop.epoch_ended.detach(nothing)


def test_bound_method_can_be_detached() -> None:
    class Part:
        def handle(self, state: rein.State) -> None: ...

    loop, part = rein.Loop(nothing), Part()
    loop.epoch_ended(part.handle)
    loop.epoch_ended.detach(part.handle)
    assert loop.epoch_ended.handlers == ()


@attrs.define(eq=True)
class Equal:
    """Handler that is equal to all others of its class."""

    log: list[str] = attrs.field(eq=False)
    name: str = attrs.field(eq=False)

    def __call__(self, state: rein.State) -> None:
        self.log.append(self.name)


def test_equal_handlers_are_detached_separately() -> None:
    loop, log = rein.Loop(nothing), []
    one, other = Equal(log, "one"), Equal(log, "other")
    assert one == other
    loop.epoch_ended(one)
    loop.epoch_ended(other)
    loop.epoch_ended.detach(one)
    loop.run(epochs=1, iterations=1)
    assert log == ["other"]


def test_equal_actions_are_all_called() -> None:
    loop, log = rein.Loop(nothing), []

    @loop.epoch_ended
    def ask(state: rein.State) -> None:
        for action in (one, other, one):
            state.request(action)

    one, other = Equal(log, "one"), Equal(log, "other")
    loop.run(epochs=1, iterations=1)
    assert log == ["one", "other"]


def test_attach_to_several_events_by_name() -> None:
    loop, log = rein.Loop(nothing), []

    @loop.on("epoch_started", "epoch_ended", every=2)
    def handler(state: rein.State) -> None:
        log.append(state.epoch_status)

    loop.run(epochs=4, iterations=1)
    assert log == [None, "completed", None, "completed"]


def test_on_all_includes_custom_events() -> None:
    loop, fired = rein.Loop(nothing), []
    sampled = loop.define("sampled")
    loop.on_all(lambda state: fired.append(state.epoch))
    sampled.fire(loop.state)
    assert fired == [0]
    assert all(len(event.handlers) == 1 for event in loop.events.values())


@pytest.mark.parametrize("attach", [lambda loop: loop.on("epoch_end"), lambda loop: loop.event("epoch_end")])
def test_unknown_event_suggests_the_closest_name(attach: Callable[[rein.Loop], Any]) -> None:
    with pytest.raises(ValueError, match="a loop has no event 'epoch_end'; did you mean 'epoch_ended'"):
        attach(rein.Loop(nothing))
    with pytest.raises(ValueError, match="no event 'xyz'; its events are started, epoch_started, "):
        rein.Loop(nothing).emit("xyz")
    with pytest.raises(ValueError, match=r"on\(\) needs the names of events"):
        rein.Loop(nothing).on()


def test_unknown_event_attribute_raises_attribute_error() -> None:
    loop = rein.Loop(nothing)
    with pytest.raises(AttributeError, match="a loop has no event 'iteration_complete'; did you mean 'iteration_comp"):
        loop.iteration_complete(nothing)
    assert not hasattr(loop, "epoch_end")


def test_muted_event_calls_nothing_but_is_counted() -> None:
    loop, log = rein.Loop(nothing), []
    loop.epoch_ended(every=2)(lambda state: log.append(state.epoch))
    loop.epoch_ended.observe(lambda loop, state: log.append(-state.epoch))
    with loop.muted("epoch_ended", "epoch_started"):
        with loop.muted("epoch_ended"):
            loop.run(epochs=1, iterations=1)
        loop.run(epochs=3, iterations=1)
    loop.run(epochs=4, iterations=1)
    assert log == [4, -4]


def test_clock_crossings_during_muting_are_dropped() -> None:
    loop, log = rein.Loop(lambda state: state.clocks.advance(env_steps=10)), []
    loop.iteration_completed(every=40, unit="env_steps")(lambda state: log.append(state.clocks.env_steps))
    loop.iteration_completed(once=50, unit="env_steps")(lambda state: log.append("once"))
    with loop.muted("iteration_completed"):
        loop.run(epochs=1, iterations=7)
    loop.run(epochs=2, iterations=7)
    assert log == [80, 120]


def test_muting_ends_if_the_body_raises() -> None:
    loop, log = rein.Loop(nothing), []
    loop.epoch_ended(note(log, "x"))
    with pytest.raises(KeyError), loop.muted("epoch_ended"):
        raise KeyError
    loop.run(iterations=1)
    assert log == ["x"]


def test_attaching_during_a_firing_takes_effect_at_the_next_one() -> None:
    loop, log = rein.Loop(nothing), []
    late = note(log, "late")

    @loop.iteration_completed
    def change(state: rein.State) -> None:
        log.append(state.iteration)
        if state.iteration == 1:
            loop.iteration_completed(late)
        if state.iteration == 3:
            handle.detach()
            loop.iteration_completed.detach(change)

    handle = loop.iteration_completed.attach(note(log, "old"))
    loop.run(iterations=4)
    assert log == [1, "old", 2, "old", "late", 3, "old", "late", "late"]


@pytest.mark.parametrize(
    "filters", [{"once": 1}, {"every": 1}, {"every": 1, "when": lambda state: True}, {"once": 1, "before": 9}]
)
@pytest.mark.parametrize("unit", ["env_steps", "iteration"])
def test_filtered_handler_can_be_detached_by_an_earlier_one(filters: dict[str, Any], unit: str) -> None:
    loop, log = rein.Loop(lambda state: state.clocks.advance(env_steps=1)), []
    loop.iteration_completed(lambda state: handle.detach())
    handle = loop.iteration_completed.attach(note(log, "x"), unit=unit, **filters)
    final = loop.run(iterations=3)
    assert handle.key not in final.counts, "its memory must not be reused by a handler of the same name"


class CallableObject:
    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def __call__(self, state: rein.State) -> None:
        self.log.append(state.iteration)

    def method(self, state: rein.State, *more: int) -> None:
        self.log.append(state.iteration)

    @staticmethod
    def static(log: list[Any], state: rein.State) -> None:
        log.append(state.iteration)


def test_any_callable_that_accepts_the_state_is_a_handler() -> None:
    loop, log = rein.Loop(nothing), []
    part = CallableObject(log)
    loop.iteration_completed(part)
    loop.iteration_completed(part.method)
    loop.iteration_completed(functools.partial(CallableObject.static, log))
    loop.iteration_completed(functools.partial(functools.partial(CallableObject.method), part))
    loop.iteration_completed(lambda state, factor=2: log.append(state.iteration))
    loop.iteration_completed([].append)
    loop.run(iterations=1)
    assert log == [1] * 5
    assert "iteration_completed: CallableObject, CallableObject.method, CallableObject.static" in repr(loop)


async def asynchronous(state: rein.State) -> None: ...


def generating(state: rein.State):
    yield


class AsynchronousObject:
    async def __call__(self, state: rein.State) -> None: ...


@pytest.mark.parametrize(
    ("handler", "text"),
    [
        (10, "epoch_ended: a handler must be a function of the state, got int"),
        ("report", "a handler must be a function of the state, got str"),
        (CallableObject, "a handler must be a function of the state, got the class CallableObject"),
        (asynchronous, "handler asynchronous is asynchronous or a generator: calling it would run nothing"),
        (generating, "handler generating is asynchronous or a generator"),
        (AsynchronousObject(), "handler AsynchronousObject is asynchronous or a generator"),
        (functools.partial(asynchronous), "handler asynchronous is asynchronous or a generator"),
        (lambda: None, "cannot be called with the state as its only argument: too many positional arguments"),
        (
            lambda state, more: None,
            "cannot be called with the state as its only argument: missing a required argument: 'more'",
        ),
    ],
)
def test_invalid_handler_is_rejected_when_attached(handler: Any, text: str) -> None:
    loop = rein.Loop(nothing)
    with pytest.raises(TypeError, match=text):
        loop.epoch_ended(handler)
    with pytest.raises(TypeError, match=text):
        loop.on("epoch_ended", every=2)(handler)
    assert loop.epoch_ended.handlers == ()


@pytest.mark.parametrize("filters", [{}, {"every": 1, "unit": "iterations"}, {"every": 1, "unit": "iteration"}])
def test_handler_detached_during_a_firing_still_runs_in_it(filters: dict) -> None:
    loop, seen = rein.Loop(nothing, epochs=1, iterations=4), []

    def detach(state: rein.State) -> None:
        if state.iteration == 2:
            loop.iteration_completed.detach(note)

    def note(state: rein.State) -> None:
        seen.append(state.iteration)

    loop.iteration_completed(detach)
    loop.iteration_completed.attach(note, **filters)
    loop.run()
    assert seen == [1, 2]


@pytest.mark.parametrize("unit", ["iterations", "iteration"])
def test_muting_and_unmuting_during_a_firing_hides_nothing_of_it(unit: str) -> None:
    loop, seen = rein.Loop(nothing, epochs=1, iterations=6), []

    @loop.iteration_completed
    def mute(state: rein.State) -> None:
        with loop.muted("iteration_completed"):
            pass

    loop.iteration_completed(every=2, unit=unit)(lambda state: seen.append(("every", state.iteration)))
    loop.iteration_completed(once=3, unit=unit)(lambda state: seen.append(("once", state.iteration)))
    loop.run()
    assert seen == [("every", 2), ("once", 3), ("every", 4), ("every", 6)]
