from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from rein.handlers.torch_generators import torch_generators
from rein.loop import Loop
from rein.testing.stateful import copy_state

EPOCHS, BATCHES = 3, 4


def make() -> tuple[Loop, list[float], Any]:
    """Return a loop that records each batch and a number drawn in its step, and a shuffled DataLoader."""
    seen: list[float] = []
    loop = Loop(lambda state: seen.extend([float(state.batch[0]), float(torch.rand(()))]), epochs=EPOCHS)
    torch_generators(loop)
    return loop, seen, DataLoader(TensorDataset(torch.arange(float(BATCHES))), shuffle=True)


@pytest.fixture(autouse=True)
def global_generator_is_left_as_it_was() -> Any:
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        yield


def whole_run() -> list[float]:
    torch.manual_seed(3)
    loop, seen, data = make()
    loop.run(data)
    return seen


@pytest.mark.parametrize("left_at", range(1, EPOCHS * BATCHES))
def test_resumed_run_draws_and_shuffles_like_an_uninterrupted_one(left_at: int) -> None:
    expected = whole_run()
    assert expected[:8:2] != expected[8:16:2]  # the data is shuffled
    torch.manual_seed(3)
    first, before, data = make()
    first.iteration_completed(once=left_at)(lambda state: first.interrupt())
    first.run(data)
    saved = copy_state(first.state_dict())
    torch.rand(7)  # other code draws numbers
    second, after, data = make()
    second.load_state_dict(saved)
    torch.rand(7)
    second.run(data)
    assert before + after == expected


def test_loop_run_again_draws_and_shuffles_like_an_uninterrupted_one() -> None:
    expected = whole_run()
    torch.manual_seed(3)
    loop, seen, data = make()
    for once in (2, 6, 11):
        loop.iteration_completed(once=once)(lambda state: loop.interrupt())
    for _ in range(4):
        loop.run(data)
    assert seen == expected


def make_with_generator(rows: int = 1) -> tuple[Loop, list[float], Any]:
    """Return a loop that records each batch, and a DataLoader that shuffles with a separate generator."""
    seen: list[float] = []
    loop, order = Loop(lambda state: seen.extend(state.batch[0].tolist()), epochs=EPOCHS), torch.Generator()
    torch_generators(loop, generators=[order.manual_seed(3)])
    data = TensorDataset(torch.arange(float(BATCHES * rows - rows // 2)))  # the last batch is smaller
    return loop, seen, DataLoader(data, rows, shuffle=True, generator=order)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("left_at", range(1, EPOCHS * BATCHES))
def test_given_data_generator_is_resumed(left_at: int, rows: int) -> None:
    whole, expected, data = make_with_generator(rows)
    whole.run(data)
    assert expected[:4] != expected[4:8]  # the data is shuffled
    first, before, data = make_with_generator(rows)
    first.iteration_completed(once=left_at)(lambda state: first.interrupt())
    first.run(data)
    second, after, data = make_with_generator(rows)
    second.load_state_dict(copy_state(first.state_dict()))
    second.run(data)
    assert before + after == expected


@pytest.mark.parametrize("same_data", [True, False])
def test_given_data_generator_continues_in_the_same_loop(same_data: bool) -> None:
    whole, expected, data = make_with_generator()
    whole.run(data)
    loop, seen, data = make_with_generator()
    for once in (2, 4, 7, 8, 11):
        loop.iteration_completed(once=once)(lambda state: loop.interrupt())
    for _ in range(6):
        loop.run(data if same_data else DataLoader(data.dataset, shuffle=True, generator=data.generator))
    assert seen == expected


def test_invalid_and_mismatched_generators_raise() -> None:
    loop, _, data = make_with_generator()
    with pytest.raises(TypeError, match=r"generators=\[\.\.\.\]\): expected torch.Generator objects, got DataLoader"):
        torch_generators(Loop(lambda state: None), generators=[data])
    other, _, _ = make()
    with pytest.raises(ValueError, match=r"the saved state has 1 generators .* the loop has 0; pass"):
        other.load_state_dict(loop.state_dict())
    with pytest.raises(ValueError, match=r"the saved state has 0 generators .* the loop has 1; pass"):
        loop.load_state_dict(other.state_dict())


def test_saving_after_loading_keeps_the_state() -> None:
    first, _, data = make()
    first.iteration_completed(once=6)(lambda state: first.interrupt())
    first.run(data)
    saved = copy_state(first.state_dict())["parts"]["torch_generators"]
    second, _, _ = make()
    second.load_state_dict(copy_state(first.state_dict()))
    torch.rand(1)
    again = second.state_dict()["parts"]["torch_generators"]
    assert all(torch.equal(saved[when]["host"], again[when]["host"]) for when in ("now", "epoch_began"))


@pytest.mark.parametrize("attached", ["before", "after"])
@pytest.mark.parametrize("event", ["epoch_started", "iteration_started", "iteration_completed"])
@pytest.mark.parametrize("left_at", [1, 4, 5, 7])
def test_handlers_of_epoch_started_draw_once(left_at: int, event: str, attached: str) -> None:
    def make_drawing() -> tuple[Loop, list[float], Any]:
        seen: list[float] = []
        loop = Loop(lambda state: seen.append(float(state.batch[0])), epochs=EPOCHS)
        if attached == "before":
            loop.epoch_started(lambda state: seen.append(float(torch.rand(()))))
        torch_generators(loop)
        if attached == "after":
            loop.epoch_started(lambda state: seen.append(float(torch.rand(()))))
        return loop, seen, DataLoader(TensorDataset(torch.arange(float(BATCHES))), shuffle=True)

    whole, expected, data = make_drawing()
    whole.run(data)
    torch.manual_seed(3)
    first, before, data = make_drawing()
    handles = []

    def leave(state: Any) -> None:
        if state.total_iterations + (event != "iteration_completed") >= left_at:
            first.interrupt()
            handles.pop().detach()

    handles.append(first.event(event).attach(leave))
    first.run(data)
    assert not handles and len(before) < len(expected)
    second, after, data = make_drawing()
    second.load_state_dict(copy_state(first.state_dict()))
    second.run(data)
    assert before + after == expected


def test_inner_loop_does_not_reset_the_global_generator() -> None:
    def make_nested() -> tuple[Loop, list[float]]:
        torch.manual_seed(3)
        drawn: list[float] = []
        outer = Loop(lambda state: drawn.append(float(torch.rand(()))), epochs=2, iterations=4)
        torch_generators(outer)
        inner = outer.own("inner", Loop(lambda state: drawn.append(float(torch.rand(()))), iterations=1))
        torch_generators(inner)
        outer.epoch_ended(lambda state: inner.run(epochs=inner.state.epoch + 1) and None)
        return outer, drawn

    whole, expected = make_nested()
    whole.run()
    first, before = make_nested()
    first.iteration_completed(once=2)(lambda state: first.interrupt())
    first.run()
    saved = copy_state(first.state_dict())
    second, after = make_nested()
    second.load_state_dict(saved)
    second.run()
    assert before + after == expected


@pytest.mark.parametrize("same_loop", [True, False])
@pytest.mark.parametrize("fails_at", [0, 1, 4, 8])
def test_epoch_keeps_its_order_after_a_failed_step(fails_at: int, same_loop: bool) -> None:
    def make_failing() -> tuple[Loop, list[float], Any]:
        seen: list[float] = []

        def step(state: Any) -> None:
            if failing and state.total_iterations == fails_at:
                failing.clear()
                raise RuntimeError("out of memory")
            seen.append(float(state.batch[0]))

        loop = Loop(step, epochs=EPOCHS)
        torch_generators(loop)
        return loop, seen, DataLoader(TensorDataset(torch.arange(float(BATCHES))), shuffle=True)

    failing: list[bool] = []
    whole, expected, data = make_failing()
    whole.run(data)
    torch.manual_seed(3)
    failing = [True]
    first, before, data = make_failing()
    with pytest.raises(RuntimeError, match="out of memory"):
        first.run(data)
    second, after, _ = (first, [], data) if same_loop else make_failing()
    if not same_loop:
        second.load_state_dict(copy_state(first.state_dict()))
    second.run(data)
    assert before + after == expected
