"""Resuming: seconds, requests, and parts that do not fit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import rein

STEP = 0.005  # minimum duration of a step in seconds


def composed() -> rein.Loop:
    def step(state: rein.State) -> None:
        time.sleep(STEP * 1.01)

    return rein.Loop(step, epochs=2, iterations=5)


def test_seconds_of_a_resumed_epoch_add_up():
    first, second = composed(), composed()
    first.iteration_completed(once=8)(lambda state: first.interrupt())
    state = first.run()
    assert (state.epoch, state.iteration, state.epoch_open) == (2, 3, True)
    so_far = state.clocks.seconds
    second.load_state_dict(first.state_dict())
    state = second.run()
    assert state.clocks.seconds >= so_far + 2 * STEP
    assert state.times["epoch"] >= 5 * STEP  # three steps before the interruption, two after it
    assert state.times["epoch"] == state.history[1].seconds
    assert sum(record.seconds for record in state.history) <= state.clocks.seconds  # does not include the first epoch


def test_requests_are_cleared_by_loading():
    saved = composed()
    saved.run(epochs=1, iterations=1)
    for loads in (False, True):
        taken, loop = [], composed()
        loop.state.request(lambda state, taken=taken: taken.append(state.iteration))
        if loads:
            loop.load_state_dict(saved.state_dict())
        loop.run(epochs=2, iterations=1)
        assert taken == ([] if loads else [1])


class Picky:
    """Part that loads one half of a state before it rejects the other half."""

    def __init__(self, size: int) -> None:
        self.config = {"size": size}
        self.first_S, self.second_S = torch.zeros(3), torch.zeros(size)

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first_S, "second": self.second_S}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first_S.copy_(state["first"])
        self.second_S.copy_(state["second"])


def test_without_strict_a_part_that_does_not_fit_is_unchanged() -> None:
    def make(size: int) -> rein.Loop:
        loop = rein.Loop(lambda state: (state.step_state or 0) + 1, epochs=3, iterations=4)
        loop.own("picky", Picky(size))
        return loop

    saved, loop = make(5), make(7)
    saved.iteration_completed(once=6)(lambda state: saved.interrupt())
    saved.run()
    saved.parts["picky"].first_S += 1.0
    left = loop.load_state_dict(saved.state_dict(), strict=False)
    assert len(left) == 1 and left[0].startswith("picky: ")
    assert loop.parts["picky"].first_S.tolist() == [0.0] * 3
    assert loop.state.total_iterations == 6
    assert (loop.state.epoch, loop.state.epoch_open, loop.state.step_state) == (1, False, None)  # epoch 2 restarts
    assert loop.run().total_iterations == 6 + 2 * 4


def test_without_strict_missing_parts_are_returned_and_the_epoch_continues() -> None:
    saved, loop = (rein.Loop(lambda state: (state.step_state or 0) + 1, epochs=3, iterations=4) for _ in range(2))
    saved.own("old", Picky(1))
    loop.own("new", Picky(1))
    saved.iteration_completed(once=6)(lambda state: saved.interrupt())
    saved.run()
    assert loop.load_state_dict(saved.state_dict(), strict=False) == [
        "old: the loop has no such part",
        "new: the state has no such part",
    ]
    assert (loop.state.epoch, loop.state.iteration, loop.state.epoch_open) == (2, 2, True)
    assert loop.run().step_state == 12
    with pytest.raises(ValueError, match="missing"):
        loop.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("unit", [None, "epochs"])
@pytest.mark.parametrize("fails_in", ["epoch_completed", "epoch_ended"])
@pytest.mark.parametrize("failing", [1, 2])
def test_epoch_that_failed_in_an_end_event_is_counted_once_by_filters(
    unit: str | None, fails_in: str, failing: int
) -> None:
    loop, fired, due = rein.Loop(lambda state: None, epochs=6, iterations=1), list[tuple[str, int]](), [True]

    @loop.event(fails_in)(when=lambda state: state.epoch == failing)
    def fill_the_disk(state: rein.State) -> None:
        if due:
            raise OSError(due.pop())

    for event in ("epoch_completed", "epoch_ended"):
        loop.on(event, every=2, unit=unit)(lambda state, event=event: fired.append((event, state.epoch)))
    with pytest.raises(OSError, match="True"):
        loop.run()
    before = dict(loop.state.counts)
    loop.run()
    again = [("epoch_completed", 2)] if (failing, fails_in) == (2, "epoch_ended") else []  # it was called before
    assert fired == again + [(event, epoch) for epoch in (2, 4, 6) for event in ("epoch_completed", "epoch_ended")]
    assert before.get("epoch_ended", 0) == failing - 1
    assert (loop.state.counts["epoch_completed"], loop.state.counts["epoch_ended"]) == (6, 6)
