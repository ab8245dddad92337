"""Observers and custom events."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import rein


def nothing(state: rein.State) -> None:
    return None


def test_observer_receives_loop_and_state() -> None:
    loop, seen = rein.Loop(nothing), []

    def observer(sender: rein.Loop, *, state: rein.State) -> None:
        seen.append((sender, state))

    loop.epoch_ended.observe(observer)
    loop.run(iterations=1)
    assert seen == [(loop, loop.state)]


def test_observers_run_after_handlers_in_the_order_of_attachment() -> None:
    loop, log = rein.Loop(nothing), []
    for number in range(50):
        loop.epoch_ended.observe(lambda loop, state, number=number: log.append(number))
    loop.epoch_ended(lambda state: log.append("handler"))
    loop.run(iterations=1)
    assert log == ["handler", *range(50)]


def test_observers_are_held_strongly_and_their_results_ignored() -> None:
    loop, log = rein.Loop(nothing), []

    def attach() -> None:
        def local(loop: rein.Loop, state: rein.State) -> str:
            log.append("x")
            return "anything"

        loop.epoch_ended.observe(local)

    attach()
    loop.run(epochs=2, iterations=1)
    assert log == ["x", "x"]


def test_failing_observer_is_logged_once_and_disconnected(caplog: pytest.LogCaptureFixture) -> None:
    loop, log = rein.Loop(nothing), []

    def broken(loop: rein.Loop, state: rein.State) -> None:
        log.append("broken")
        raise KeyError("mine")

    loop.epoch_ended.observe(lambda loop, state: log.append("before"))
    loop.epoch_ended.observe(broken)
    loop.epoch_ended.observe(lambda loop, state: log.append("after"))
    with caplog.at_level(logging.INFO, "rein"):
        final = loop.run(epochs=2, iterations=1)
    assert final.status == "completed"
    assert log == ["before", "broken", "after", "before", "after"]
    (record,) = caplog.records
    assert record.message.startswith("observer test_failing_observer_is_logged_once")
    assert record.message.endswith("broken of epoch_ended failed and is disconnected")
    assert record.exc_info is not None and isinstance(record.exc_info[1], KeyError)


def test_event_without_observers_costs_nothing() -> None:
    loop = rein.Loop(nothing)
    loop.epoch_ended.observe(lambda loop, state: 1 / 0)
    assert len(loop.epoch_ended.calls) == 1
    loop.run(iterations=1)
    assert loop.epoch_ended.calls == ()


def test_event_without_handlers_calls_nothing() -> None:
    loop = rein.Loop(nothing)
    assert all(event.calls == () for event in loop.events.values())
    loop.epoch_ended(every=0)(nothing)
    assert loop.epoch_ended.calls == ()
    loop.epoch_ended(nothing)
    assert loop.epoch_ended.calls == (nothing,)


def test_non_callable_observer_is_rejected() -> None:
    with pytest.raises(TypeError, match="epoch_ended: an observer must be callable with"):
        rein.Loop(nothing).epoch_ended.observe(3)  # type: ignore[type-var]  # invalid on purpose


def test_custom_event_behaves_like_a_built_in_one() -> None:
    loop, log = rein.Loop(lambda state: loop.emit("sampled")), []
    sampled = loop.define("sampled")
    assert loop.sampled is sampled is loop.event("sampled")
    loop.sampled(every=2)(lambda state: log.append(state.total_iterations))
    loop.on("sampled", once=5)(rein.State.halt_epoch)
    sampled.observe(lambda loop, state: log.append("seen"))
    final = loop.run(iterations=9)
    assert log == ["seen", 1, "seen", "seen", 3, "seen", "seen"]
    assert (final.history[-1].status, final.iteration) == ("halted", 5)
    assert final.counts["sampled"] == 5


@pytest.mark.parametrize("name", ["", "two words", "1st", "class", "a-b", 3, None])
def test_event_name_must_be_an_identifier(name: Any) -> None:
    with pytest.raises(ValueError, match="the name of an event must be a Python identifier"):
        rein.Loop(nothing).define(name)


@pytest.mark.parametrize("name", ["epoch_ended", "run", "state", "parts", "epochs", "step", "metrics", "_debug", "own"])
def test_event_name_cannot_hide_an_attribute_of_the_loop(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"define\\('{name}'\\): the loop already has an attribute or event with this name"
    ):
        rein.Loop(nothing).define(name)


@pytest.mark.parametrize("event", ["iteration_completed", "epoch_ended", "completed"])
def test_observer_runs_even_if_a_handler_raised(event: str) -> None:
    loop, heard = rein.Loop(nothing), []
    loop.event(event).attach(lambda state: 1 / 0)
    loop.event(event).observe(lambda loop, state: heard.append(event))
    with pytest.raises(ZeroDivisionError):
        loop.run(iterations=1)
    assert heard == [event]
