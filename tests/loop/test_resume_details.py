"""A resumed loop: seconds and requests."""

from __future__ import annotations

import time

import rein


def composed() -> rein.Loop:
    def step(state: rein.State) -> None:
        time.sleep(0.002)

    return rein.Loop(step, epochs=2, iterations=5)


def test_the_seconds_of_a_resumed_epoch_are_those_before_and_after_the_break():
    first, second = composed(), composed()
    first.iteration_completed(once=8)(lambda state: first.interrupt())
    state = first.run()
    assert (state.epoch, state.iteration, state.epoch_open) == (2, 3, True)
    first_epoch, so_far = state.history[0].seconds, state.clocks.seconds
    second.load_state_dict(first.state_dict())
    began = second.epoch_began
    assert first_epoch <= began <= so_far
    state = second.run()
    rest = state.clocks.seconds - so_far
    assert rest >= 2 * 0.002
    assert state.times["epoch"] >= (so_far - began) + 2 * 0.002
    assert state.times["epoch"] == state.history[1].seconds
    assert sum(record.seconds for record in state.history) <= state.clocks.seconds


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
