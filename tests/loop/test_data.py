"""Data: iterables, iterators, elements that are given back, and the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import rein

EMPTY = r"run\(data=...\): the data is empty; give None to run without data"


def collecting(**options: Any) -> tuple[rein.Loop, list[tuple[int, Any]]]:
    log: list[tuple[int, Any]] = []
    return rein.Loop(lambda state: log.append((state.epoch, state.batch)), **options), log


class Counted:
    """Iterable without a length that counts its iterations."""

    def __init__(self, elements: int) -> None:
        self.elements, self.iterated = elements, 0

    def __iter__(self) -> Iterator[int]:
        self.iterated += 1
        return iter(range(self.elements))


def test_iterable_is_iterated_once_per_epoch() -> None:
    loop, log = collecting()
    final = loop.run(data := Counted(2), epochs=3)
    assert log == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert (data.iterated, final.batch) == (3, None)


def test_epoch_ends_at_the_limit_or_the_end_of_the_data() -> None:
    for iterations, expected in ((2, [2, 2]), (5, [3, 3]), (None, [3, 3])):
        final = collecting()[0].run([1, 2, 3], epochs=2, iterations=iterations)
        assert [record.iterations for record in final.history] == expected
        assert {record.status for record in final.history} == {"completed"}


def test_batch_is_set_only_during_its_iteration() -> None:
    loop, seen = rein.Loop(lambda state: None), []
    loop.on_all(lambda state: seen.append(state.batch))
    loop.run([1, 2])
    assert seen == [None, None, 1, 1, 2, 2, None, None, None]


def test_iterator_is_used_up_over_epochs_and_completes_the_run() -> None:
    loop, log = collecting()
    final = loop.run(iter(range(7)), epochs=None, iterations=3)
    assert [batch for _, batch in log] == list(range(7))
    assert [record.iterations for record in final.history] == [3, 3, 1]
    assert final.status == "completed"


def test_iterator_that_ends_with_an_epoch_starts_no_further_one() -> None:
    loop, log = collecting()
    begun = []
    loop.epoch_started(lambda state: begun.append(state.epoch))
    final = loop.run(iter(range(6)), epochs=10, iterations=3)
    assert (len(log), begun, final.epoch, final.status) == (6, [1, 2], 2, "completed")


def test_iterator_is_not_advanced_beyond_the_epochs() -> None:
    iterator = iter(range(10))
    collecting()[0].run(iterator, epochs=2, iterations=3)
    assert next(iterator) == 6


@pytest.mark.parametrize("ask", [rein.State.halt_epoch, rein.State.halt_loop])
def test_element_of_a_skipped_step_is_given_back(ask: Any) -> None:
    loop, log = collecting()
    iterator = iter(range(6))
    loop.iteration_started(once=2)(ask)
    loop.run(iterator, epochs=2, iterations=3)
    loop.run(iterator, epochs=9, iterations=3)
    assert [batch for _, batch in log] == list(range(6))


def test_element_fetched_before_a_halted_epoch_is_not_lost() -> None:
    loop, log = collecting()
    iterator = iter(range(4))
    loop.epoch_started(once=2)(rein.State.halt_epoch)
    loop.epoch_started(once=3)(rein.State.halt_loop)
    loop.run(iterator, epochs=4, iterations=2)
    loop.run(None, epochs=4, iterations=1)
    loop.run(iterator, epochs=9, iterations=1)
    assert [batch for _, batch in log if batch is not None] == [0, 1, 2, 3]


def test_element_of_a_failed_step_is_given_back() -> None:
    due, log = [True], []

    def step(state: rein.State) -> None:
        if state.batch == 1 and due:
            raise KeyError(due.pop())
        log.append(state.batch)

    loop, iterator = rein.Loop(step), iter(range(4))
    with pytest.raises(KeyError):
        loop.run(iterator)
    assert loop.state.batch is None
    assert loop.run(iterator).status == "completed"
    assert log == [0, 1, 2, 3]


def test_iterator_continues_in_an_interrupted_epoch() -> None:
    loop, log = collecting()
    iterator = iter(range(5))
    loop.iteration_completed(every=2)(lambda state: loop.interrupt())
    while loop.run(iterator, epochs=1).status != "completed":
        pass
    assert log == [(1, number) for number in range(5)]


def test_iterable_skips_finished_elements_of_the_open_epoch() -> None:
    loop, log = collecting()
    loop.iteration_completed(every=2)(lambda state: loop.interrupt())
    while loop.run([5, 6, 7, 8, 9], epochs=2).status != "completed":
        pass
    assert log == [(epoch, number) for epoch in (1, 2) for number in (5, 6, 7, 8, 9)]


def test_data_shorter_than_the_open_epoch_raises() -> None:
    loop, _ = collecting()
    loop.iteration_completed(once=3)(lambda state: loop.interrupt())
    loop.run([1, 2, 3, 4])
    with pytest.raises(ValueError, match="the open epoch resumes at element 3, but the data is shorter"):
        loop.run([1, 2])


@pytest.mark.parametrize(
    "empty", [[], {}, torch.zeros(0, 3), np.zeros((0, 2)), DataLoader(TensorDataset(torch.zeros(0)))]
)
def test_empty_data_is_rejected_before_the_run_starts(empty: Any) -> None:
    loop, _ = collecting()
    with pytest.raises(ValueError, match=EMPTY):
        loop.run(empty)
    assert (loop.state.status, loop.state.counts) == (None, {})


def test_data_emptied_between_two_runs_is_rejected() -> None:
    loop, data = collecting()[0], [1]
    loop.run(data)
    data.clear()
    with pytest.raises(ValueError, match=EMPTY):
        loop.run(data, epochs=2)
    assert loop.state.counts["started"] == 1


@pytest.mark.parametrize("empty", [lambda: iter([]), lambda: (x for x in []), lambda: Counted(0)])
def test_empty_data_without_a_length_raises(empty: Any) -> None:
    loop, log = collecting()
    loop.failed(lambda state: log.append((state.epoch, "failed")))
    with pytest.raises(ValueError, match=EMPTY):
        loop.run(empty())
    assert [what for _, what in log] == ["failed"]


@pytest.mark.parametrize("data", [3, 1.5, object()])
def test_non_iterable_data_is_rejected(data: Any) -> None:
    with pytest.raises(TypeError, match=r"run\(data=...\): expected an iterable of batches, got"):
        collecting()[0].run(data)


def test_elements_can_be_anything_including_none() -> None:
    loop, log = collecting()
    loop.run([None, 0, "", ()])
    assert [batch for _, batch in log] == [None, 0, "", ()]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_data_loader_over_a_stream_needs_no_length() -> None:
    loop, log = collecting()
    loop.run(DataLoader(Stream(), batch_size=None), epochs=2)
    assert log == [(epoch, number) for epoch in (1, 2) for number in range(3)]


def test_arrays_and_tensors_yield_their_rows() -> None:
    for rows in (np.eye(3), torch.eye(3)):
        loop = rein.Loop(lambda state: state.batch.argmax())
        assert loop.run(rows).step_state == 2


def test_nested_batches_are_moved_to_the_device() -> None:
    loop, log = collecting(device="meta")
    loop.run([{"x": torch.zeros(2), "y": (torch.zeros(1), 3)}])
    batch = log[0][1]
    assert (batch["x"].device.type, batch["y"][0].device.type, batch["y"][1]) == ("meta", "meta", 3)


def test_batch_is_unchanged_without_a_device() -> None:
    element = {"x": torch.zeros(2)}
    loop, log = collecting()
    loop.run([element])
    assert log[0][1] is element


class Shuffled:
    """Iterable with another order of its elements in each iteration."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(8, generator=self.generator).tolist()


@pytest.mark.parametrize("cut_by", ["an interrupt", "an error"])
def test_open_epoch_continues_in_its_original_order(cut_by: str) -> None:
    loop, log = collecting()
    cut = (lambda state: loop.interrupt()) if cut_by == "an interrupt" else (lambda state: 1 / 0)
    data, handle = Shuffled(), loop.iteration_started.attach(cut, once=4)
    with contextlib.suppress(ZeroDivisionError):
        loop.run(data, epochs=2)
    handle.detach()
    assert len(log) == (4 if cut_by == "an interrupt" else 3)
    loop.run(data, epochs=2)
    expected = Shuffled()
    assert log == [(epoch, element) for epoch in (1, 2) for element in expected]


def test_data_interrupted_at_its_end_stays_at_its_end() -> None:
    loop, log = collecting()
    data, handle = Counted(3), loop.epoch_completed.attach(lambda state: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.run(data)
    handle.detach()
    loop.run(data)
    assert [element for _, element in log] == [0, 1, 2]


def test_failed_data_restarts_and_skips_finished_elements() -> None:
    class Faulty(Counted):
        def __iter__(self) -> Iterator[int]:
            self.iterated += 1
            for element in range(self.elements):
                if (self.iterated, element) == (1, 2):
                    raise OSError("gone")
                yield element

    loop, log = collecting()
    data = Faulty(5)
    with pytest.raises(OSError, match="gone"):
        loop.run(data)
    loop.run(data)
    assert (log, data.iterated) == ([(1, element) for element in range(5)], 2)


def test_loader_seeded_by_epoch_resumes_in_its_order() -> None:
    """The code is the example in docs/reference/loop.md."""

    def composed() -> tuple[rein.Loop, list[tuple[int, Any]], DataLoader[Any]]:
        order = torch.Generator()
        loader = DataLoader(range(8), batch_size=2, shuffle=True, generator=order)  # type: ignore[arg-type]  # a range is indexable
        loop = rein.Loop(lambda state: log.append((state.epoch, state.batch.tolist())), epochs=3)
        log: list[tuple[int, Any]] = []

        @loop.on("started", "epoch_started")
        def set_order(state: rein.State) -> None:
            order.manual_seed(state.epoch)

        return loop, log, loader

    whole, expected, loader = composed()
    whole.run(loader)
    first, log, loader = composed()
    first.iteration_completed(once=6)(lambda state: first.interrupt())
    first.run(loader)
    second, rest, loader = composed()
    second.load_state_dict(first.state_dict())
    second.run(loader)
    assert log + rest == expected
    assert expected[:4] != expected[4:8]
