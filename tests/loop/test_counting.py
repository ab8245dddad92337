"""Counters, limits and clocks: their values in handlers, after a run, and after a second run."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

import rein


def nothing(state: rein.State) -> None:
    return None


def test_default_is_one_epoch_and_run_returns_the_state() -> None:
    loop = rein.Loop(lambda state: state.step_state + 1)
    final = loop.run(iterations=5, init=0)
    assert final is loop.state
    assert (final.step_state, final.epoch, final.iteration, final.status) == (5, 1, 5, "completed")


def test_step_sees_the_number_of_finished_iterations() -> None:
    seen = []
    rein.Loop(lambda state: seen.append((state.epoch, state.iteration, state.total_iterations))).run(
        epochs=2, iterations=2
    )
    assert seen == [(1, 0, 0), (1, 1, 1), (2, 0, 2), (2, 1, 3)]


def test_epochs_is_a_total_over_all_runs() -> None:
    loop, fired = rein.Loop(nothing), []
    for name in loop.events:
        loop.on(name)(lambda state, name=name: fired.append(name))
    loop.run(epochs=10, iterations=1)
    fired.clear()
    loop.run(epochs=10, iterations=1)
    assert fired == ["started", "completed"]
    loop.run(epochs=12, iterations=1)
    assert (loop.state.epoch, loop.state.total_iterations) == (12, 12)


def test_limits_of_the_loop_are_defaults_of_run() -> None:
    final = rein.Loop(nothing, epochs=3, iterations=2).run()
    assert (final.epoch, final.total_iterations) == (3, 6)
    again = rein.Loop(nothing, epochs=3, iterations=2).run(epochs=1, iterations=5)
    assert (again.epoch, again.total_iterations) == (1, 5)


def test_run_without_limits_ends_with_a_halt() -> None:
    loop = rein.Loop(nothing)
    loop.iteration_completed(every=7)(rein.State.halt_epoch)
    loop.epoch_ended(once=4)(rein.State.halt_loop)
    final = loop.run(epochs=None, iterations=None)
    assert (final.epoch, final.total_iterations, final.max_epochs, final.max_iterations) == (4, 28, None, None)


@pytest.mark.parametrize("name", ["epochs", "iterations"])
@pytest.mark.parametrize("value", [0, -1, True])
def test_limit_below_one_raises(name: str, value: int) -> None:
    expected = f"{name}={value!r}: give 1 or more, or None for no limit"
    with pytest.raises(ValueError) as built:
        rein.Loop(nothing, **{name: value})
    loop = rein.Loop(nothing)
    with pytest.raises(ValueError) as run:
        loop.run(**{name: value})
    assert str(built.value) == str(run.value) == expected
    assert loop.state.status is None, "the error is raised before anything happens"


@pytest.mark.parametrize("value", [2.0, "3", [1]])
def test_non_integer_limit_raises(value: object) -> None:
    with pytest.raises(TypeError, match="give a whole number, or None for no limit"):
        rein.Loop(nothing).run(epochs=value)  # type: ignore[arg-type]  # invalid on purpose


@pytest.mark.parametrize("number", [np.int64, np.uint8, torch.tensor])
def test_limits_accept_numpy_and_torch_integers(number: type) -> None:
    final = rein.Loop(nothing).run(epochs=number(2), iterations=number(3))
    assert (final.epoch, final.total_iterations) == (2, 6)
    assert type(final.max_iterations) is int


@pytest.mark.parametrize("name", ["epoch", "iteration", "total_iterations", "epoch_open", "remaining"])
def test_counters_are_read_only_for_handlers(name: str) -> None:
    loop = rein.Loop(nothing)
    loop.iteration_completed(lambda state: setattr(state, name, 7))
    with pytest.raises(AttributeError):
        loop.run(iterations=1)


def test_misspelled_attribute_of_the_state_raises() -> None:
    loop = rein.Loop(nothing)
    loop.iteration_completed(lambda state: setattr(state, "step_sate", 7))
    with pytest.raises(AttributeError, match="step_sate"):
        loop.run(iterations=1)


def test_epoch_open_during_an_epoch() -> None:
    loop, seen = rein.Loop(nothing), []
    loop.on_all(lambda state: seen.append(state.epoch_open))
    loop.run(epochs=2, iterations=1)
    in_an_epoch = [True] * 5
    assert seen == [False, *in_an_epoch, *in_an_epoch, False]


def test_epoch_status_is_set_only_in_end_events() -> None:
    loop = rein.Loop(nothing)
    loop.iteration_completed(once=1)(rein.State.halt_epoch)
    seen = []
    loop.on("epoch_started", "iteration_completed", "epoch_ended")(lambda state: seen.append(state.epoch_status))
    loop.run(epochs=2, iterations=1)
    assert seen == [None, None, "halted", None, None, "completed"]


def test_remaining_goes_from_one_to_zero() -> None:
    loop, seen = rein.Loop(nothing), []
    loop.on("started", "iteration_completed", "epoch_ended", "completed")(lambda state: seen.append(state.remaining))
    loop.run(epochs=2, iterations=2)
    assert seen == [1.0, 0.75, 0.5, 0.5, 0.25, 0.0, 0.0, 0.0]


def test_remaining_is_nan_without_a_limit_of_epochs() -> None:
    assert math.isnan(rein.State().remaining)


def test_parts_can_advance_only_their_clocks() -> None:
    clocks = rein.State().clocks
    clocks.advance(env_steps=16, vector_steps=1)
    clocks.env_steps += 4
    assert clocks.as_dict() | {"seconds": 0.0} == dict(
        env_steps=20, vector_steps=1, updates=0, episodes=0, iterations=0, epochs=0, seconds=0.0
    )
    with pytest.raises(ValueError, match="a part can advance env_steps, vector_steps, updates, episodes"):
        clocks.advance(iterations=1)
    for name in ("iterations", "epochs", "seconds", "env_stepps"):
        with pytest.raises(AttributeError):
            setattr(clocks, name, 3)


def test_clock_with_a_tensor_is_fetched_when_read() -> None:
    clocks = rein.State().clocks
    ended = torch.tensor(3)
    clocks.advance(episodes=ended)
    clocks.advance(episodes=torch.tensor([True, False, True]).sum())
    assert isinstance(clocks._episodes, torch.Tensor)
    assert clocks.episodes == 5 and type(clocks.episodes) is int
    assert type(clocks._episodes) is int
    assert ended == 3, "the tensor of the part must not change"


def test_times_are_reset_in_each_epoch() -> None:
    loop, seen = rein.Loop(nothing), []
    loop.epoch_started(once=1)(lambda state: state.times.__setitem__("mine", 1.0))
    loop.epoch_ended(lambda state: seen.append(set(state.times)))
    loop.run(epochs=2, iterations=1)
    assert seen == [{"mine", "epoch"}, {"epoch"}]


def test_nested_loops_share_no_state() -> None:
    inner = rein.Loop(nothing, epochs=100)
    outer = rein.Loop(lambda state: inner.run(epochs=inner.state.epoch + 1, iterations=3).total_iterations)
    counted = []
    inner.iteration_completed(lambda state: counted.append(state.total_iterations))
    final = outer.run(epochs=2, iterations=2)
    assert (final.step_state, final.total_iterations, inner.state.epoch) == (12, 4, 4)
    assert counted == list(range(1, 13))


def test_state_can_be_deep_copied() -> None:
    loop = rein.Loop(lambda state: torch.tensor(float(state.total_iterations)))
    loop.metric("value", lambda state: state.step_state)
    loop.run(epochs=1, iterations=3)
    before = copy.deepcopy(loop.state)
    loop.run(epochs=2, iterations=3)
    assert (before.epoch, before.total_iterations, before.clocks.epochs) == (1, 3, 1)
    assert (before.metrics["value"], loop.state.metrics["value"]) == (1.0, 4.0)
    assert (len(before.history), len(loop.state.history)) == (1, 2)
