"""A resumed loop: seconds and requests."""

from __future__ import annotations

import time

import rein

STEP = 0.005  # seconds that a step takes at least


def composed() -> rein.Loop:
    def step(state: rein.State) -> None:
        time.sleep(STEP * 1.01)

    return rein.Loop(step, epochs=2, iterations=5)


def test_the_seconds_of_a_resumed_epoch_are_those_before_and_after_the_break():
    first, second = composed(), composed()
    first.iteration_completed(once=8)(lambda state: first.interrupt())
    state = first.run()
    assert (state.epoch, state.iteration, state.epoch_open) == (2, 3, True)
    so_far = state.clocks.seconds
    second.load_state_dict(first.state_dict())
    state = second.run()
    assert state.clocks.seconds >= so_far + 2 * STEP
    assert state.times["epoch"] >= 5 * STEP  # three steps before the break, two after it
    assert state.times["epoch"] == state.history[1].seconds
    assert sum(record.seconds for record in state.history) <= state.clocks.seconds  # the first epoch's are not in it


def test_what_was_asked_for_before_loading_is_forgotten():
    saved = composed()
    saved.run(epochs=1, iterations=1)
    for loads in (False, True):
        taken, loop = [], composed()
        loop.state.request(lambda state, taken=taken: taken.append(state.iteration))
        if loads:
            loop.load_state_dict(saved.state_dict())
        loop.run(epochs=2, iterations=1)
        assert taken == ([] if loads else [1])
