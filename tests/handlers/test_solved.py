"""`record_solved` records the first time that a metric reaches its bound."""

from __future__ import annotations

import math

from rein.handlers.record_solved import record_solved
from rein.loop import Loop

SCORES = [1.0, math.nan, 7.5, 9.0, 2.0]


def scored(*, stop: bool, report: bool = True, **filters) -> Loop:
    loop = Loop(lambda state: None, epochs=len(SCORES), iterations=1)

    @loop.epoch_ended
    def score(state):
        if report:
            state.metrics["score"] = SCORES[state.epoch - 1]

    record_solved(loop, "score", at_least=7.0, stop=stop, **filters)
    return loop


def test_first_value_that_reaches_the_bound_halts_and_is_recorded():
    state = scored(stop=True).run()
    assert (state.epoch, state.status, state.reason) == (3, "halted", "solved")
    assert (state.memory["solved"]["value"], state.memory["solved"]["at_least"]) == (7.5, 7.0)


def test_without_stop_the_run_continues():
    state = scored(stop=False).run()
    assert (state.epoch, state.status) == (5, "completed")
    assert state.memory["solved"]["value"] == 7.5


def test_solved_run_halts_when_resumed():
    first = scored(stop=True)
    first.run()
    again = scored(stop=True)
    again.load_state_dict(first.state_dict())
    state = again.run()
    assert (state.epoch, state.reason, state.total_iterations) == (3, "solved", 3)


def with_a_milestone() -> Loop:
    loop = Loop(lambda state: None, epochs=10, iterations=1)
    loop.metric("score", lambda state: float(state.epoch), reduce="last")
    record_solved(loop, "score", at_least=2.0, stop=False)
    record_solved(loop, "score", at_least=7.0)
    return loop


def test_milestone_does_not_affect_a_later_rule():
    whole = with_a_milestone().run()
    assert (whole.epoch, whole.reason) == (7, "solved")
    assert (whole.memory["solved"]["at_least"], whole.memory["solved/score 7.0"]["value"]) == (2.0, 7.0)
    first, again = with_a_milestone(), with_a_milestone()
    first.run(epochs=4)
    again.load_state_dict(first.state_dict())
    state = again.run()
    assert (state.epoch, state.reason) == (7, "solved")
    last = with_a_milestone()
    last.load_state_dict(again.state_dict())
    assert (last.run().epoch, last.state.reason) == (7, "solved"), "a resumed run halts again"


def test_close_milestones_and_different_filters_are_recorded_separately():
    loop = Loop(lambda state: None, epochs=8, iterations=1)
    loop.metric("score", lambda state: 1000000.0 + state.epoch, reduce="last")
    for level in (1000001.0, 1000002.0, 1000003.0):
        record_solved(loop, "score", at_least=level, stop=False)
    record_solved(loop, "score", at_least=1000001.0, after=5)
    found = loop.run()
    assert (found.epoch, found.reason) == (6, "solved")
    levels = [record["at_least"] for name, record in found.memory.items() if name.startswith("solved")]
    assert levels == [1000001.0, 1000002.0, 1000003.0, 1000001.0]


def test_epochs_without_the_metric_are_ignored():
    assert "solved" not in scored(stop=True, report=False).run().memory


def test_filters_select_the_epochs_that_count():
    assert scored(stop=True, every=4).run().epoch == 4
