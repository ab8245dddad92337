"""Execution of a run: epochs, iterations and the order of events."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rein.errors import text_of
from rein.loop import checks
from rein.loop.checks import name_of
from rein.loop.data import END, Batches
from rein.loop.events import Event, Handle, Postponed
from rein.loop.state import HALT_EPOCH, HALT_LOOP, INTERRUPT, EpochRecord, Handler, State

if TYPE_CHECKING:
    from rein.loop.loop import Loop


logger = logging.getLogger("rein")

# events whose handlers an interrupt can cut short; the next run calls such a handler first
POSTPONES = ("epoch_started", "iteration_completed", "epoch_completed", "epoch_halted", "epoch_ended")
_ENDS = ("epoch_completed", "epoch_halted", "epoch_ended")


def run(loop: Loop, source: Batches | None) -> Iterator[State]:
    """Run all epochs and yield at the end of each. Fires exactly one of `completed`, `halted` and `failed`."""
    loop.check_idle("run")  # checked again: a stream begins when its first state is requested
    state = loop.state
    # an open epoch that was to be halted is still halted; other halts ended the previous run
    state._halts = {HALT_EPOCH: None} if state._epoch_open and state._halt_requested else {}
    state.status, state._left = "running", False
    loop.running = True  # set after the status: `stop` reads both, possibly from another thread
    state.clocks.start()
    try:
        try:
            loop.started.fire(state)  # its handlers may read `loop.resumed`
            loop.resumed = loop.step_cut = False
            _finish_postponed(loop)
            if state._total_iterations:  # before the first iteration, requests have nothing to save
                _take_requests(state)
            else:
                state.request(checks.first_result(state.step_state))
            while _ran_epoch(loop, source):
                yield state
                state._halts.pop(HALT_EPOCH, None)  # that epoch has ended
        except GeneratorExit:
            state.halt_loop("the stream was left")
        except BaseException as error:  # raised again
            _fail(loop, error)
            raise
        _fire_final(state, loop.halted if HALT_LOOP in state._halts or INTERRUPT in state._halts else loop.completed)
        loop.metrics.warn_of_unseen()
    except StopIteration as error:  # in a generator, Python would replace it by an error without its notes
        replaced = RuntimeError("StopIteration was raised")
        for note in getattr(error, "__notes__", ()):
            replaced.add_note(note)
        raise replaced from error
    finally:
        loop.running = False
        state.clocks.stop()
        with contextlib.ExitStack() as cleanups:  # calls the last one first, and all of them even if one raises
            while loop.cleanups:
                cleanups.callback(loop.cleanups.pop(0))


def _finish_postponed(loop: Loop) -> None:
    """Finish the firing that an interrupt cut short in the last run. `_end_epoch` does this for end events."""
    state = loop.state
    if state._postponed is None or INTERRUPT in state._halts or state._postponed["event"] in _ENDS:
        return
    postponed, state._postponed = state._postponed, None
    try:
        loop.events[postponed["event"]].finish(postponed["handler"], state, wired=False)
    except Postponed as again:
        _postpone(state, again)


def _postpone(state: State, postponed: Postponed, status: str | None = None) -> None:
    """Let the next run finish this firing. `status` is the status of the epoch if it is ending, otherwise None."""
    state._postponed = {"event": postponed.event, "handler": postponed.key, "status": status}


def _ran_epoch(loop: Loop, source: Batches | None) -> bool:
    """Run the next epoch or the rest of an open one. Return False if none is left or the epoch stays open."""
    state, halts = loop.state, loop.state._halts
    # a halt of the loop ends the open epoch as halted; only an interrupt leaves it open
    done = HALT_LOOP in halts or (state.max_epochs is not None and state._epochs_ended >= state.max_epochs)
    if INTERRUPT in halts or (not state._epoch_open and (done or (source is not None and source.exhausted()))):
        return False
    _run_epoch(loop, source)
    return not state._epoch_open


def _run_epoch(loop: Loop, source: Batches | None) -> None:
    """Run one epoch or the rest of an open one. An interrupted epoch stays open."""
    state = loop.state
    if not state._epoch_open:
        state._epoch += 1
        state._iteration, state._epoch_open, state._epoch_status = 0, True, None
        loop.metrics.zero()
        state.times.clear()
        loop.epoch_began = state.clocks.seconds
        try:
            loop.epoch_started.fire(state)
        except Postponed as cut:
            _postpone(state, cut)
    if state._postponed is not None:
        if INTERRUPT not in state._halts:
            _end_epoch(loop, loop.events[f"epoch_{state._postponed['status']}"])
        return
    if not state._halts:
        if source is not None:
            source.begin_epoch(state._iteration)
        if loop.make_step_state is not None and state.step_state is None:
            _initialize(loop.make_step_state, state, source)
        _iterate(loop, source)
    if INTERRUPT not in state._halts:
        _end_epoch(loop, loop.epoch_halted if state._halts else loop.epoch_completed)


def _initialize(make_step_state: Callable[[Any], Any], state: State, source: Batches | None) -> None:
    """Set the first step_state from the first batch, which the first iteration gets again. It is None without data."""
    batch = None if source is None else source.take(state._iteration)
    if batch is not END:
        state.step_state = make_step_state(batch)
        if source is not None:
            source.give_back(batch)


def _iterate(loop: Loop, source: Batches | None) -> None:
    """Iterate until the limit, the end of the data or a halt.

    This is the hot path (tests/benchmarks/loop.py): a handler costs one call, an event without handlers one attribute
    check.
    """
    state, step, metrics = loop.state, loop.step, loop.metrics
    event = started = loop.iteration_started
    completed, call, batch = loop.iteration_completed, None, END
    limit = -1 if state.max_iterations is None else state.max_iterations
    if 0 <= limit <= state._iteration:
        return
    try:
        while True:
            if source is not None:
                call = source
                batch = state.batch = source.take(state._iteration)
                if batch is END:
                    break
            event = started
            if started.calls:
                for call in started.calls:
                    if call(state) is not None:
                        started.reject(call)
            if state._halts and state._halt_requested:  # an interrupt waits for the end of the iteration
                state.counts[started.name] = state.counts.get(started.name, 0) + 1  # a firing without an iteration
                break
            if metrics.just_assigned:
                metrics.just_assigned.clear()
            call = step
            state.step_state = step(state)
            event, batch = completed, END
            state._iteration += 1
            state._total_iterations += 1
            if metrics.updates:
                for call in metrics.updates:
                    call(state)
            if completed.calls:
                for call in completed.calls:
                    if call(state) is not None:
                        completed.reject(call)
            if state._requests:
                call = None
                _take_requests(state)
            if state._halts or state._iteration == limit:
                break
    except Postponed as cut:  # in iteration_completed: the iteration counts
        _postpone(state, cut)
    except BaseException as error:  # raised again
        loop.step_cut = call is step and event is started
        _annotate(loop, error, event, call)
        raise
    finally:
        if source is not None and batch is not END:
            source.give_back(batch)  # its step was skipped or failed
        state.batch = None


def _annotate(loop: Loop, error: BaseException, event: Event, call: Any) -> None:
    """Note in the exception where it was raised. `call` was called last; None if it has added its own note."""
    if call is loop.step:
        error.add_note(f"in step {name_of(call)}, {_where(loop.state)}")
    elif isinstance(call, Batches):
        error.add_note(f"in the data, {_where(loop.state)}")
    elif call in loop.metrics.updates:
        name = getattr(call.__self__, "name", None)
        what = "the metrics of the step" if name is None else f"metric {name!r}"
        error.add_note(f"in {what}, {_where(loop.state)}")
    elif call is not None:
        event.annotate(error, call, loop.state)


def _where(state: State) -> str:
    return f"epoch {state.epoch}, iteration {state.iteration}"


def _end_epoch(loop: Loop, ending: Event) -> None:
    state = loop.state
    state._epochs_ended += 1
    state._epoch_status = status = ending.name.removeprefix("epoch_")
    state.times["epoch"] = seconds = state.clocks.seconds - loop.epoch_began
    counts = dict(state.counts)
    postponed, state._postponed = state._postponed, None
    try:
        for event in (ending, loop.epoch_ended):
            if postponed is None:
                event.fire(state)
            elif postponed["event"] == event.name:
                event.finish(postponed["handler"], state, wired=True)
                postponed = None
        metrics = loop.metrics.freeze()
    except Postponed as cut:
        state._epochs_ended, state._epoch_status = state._epochs_ended - 1, None  # the epoch stays open
        _postpone(state, cut, status)
        return
    except BaseException:  # raised again
        state._epochs_ended, state._epoch_status = state._epochs_ended - 1, None  # the epoch stays open
        for event in (ending, loop.epoch_ended):
            _restore_counts(state, event, counts)
        raise
    state.history.append(EpochRecord(state.epoch, status, state.iteration, seconds, metrics))
    state._epoch_open = False
    _take_requests(state)


def _restore_counts(state: State, event: Event, before: dict[str, Any]) -> None:
    """Restore the count of an end event and the memory of its filters: the event will fire again for this epoch."""
    own = [key for key in state.counts if key == event.name or key.startswith(f"{event.name}/")]
    for key in own:
        if key in before:
            state.counts[key] = before[key]
        elif key == event.name:
            del state.counts[key]
    event.recount()


def _take_requests(state: State) -> None:
    requests, state._requests = state._requests, []
    for action in requests:
        try:
            action(state)
        except BaseException as error:  # raised again
            error.add_note(f"in {name_of(action)}, requested with state.request, {_where(state)}")
            raise


def _fail(loop: Loop, error: BaseException) -> None:
    loop.state._requests = []
    try:
        _fire_final(loop.state, loop.failed)
    except BaseException as second:  # the caller must see the first error; the second one becomes a note
        if text_of(second) == text_of(error):  # a failed store repeats its error on every call
            return
        error.add_note(f"and a handler of `failed` raised {text_of(second)}")
        logger.exception("a handler of `failed` raised")


def _fire_final(state: State, final: Event) -> None:
    state.status = final.name
    final.fire(state)
    _take_requests(state)


class Unfinished(Exception):
    """Raised to leave work that must end before it is complete."""


class Interruptible:
    """Interruptible work of one handler.

    Call `begin` before the work and `check` at each of its steps. If `Unfinished` is raised, undo the work and call
    `leave`. An interrupt then postpones the handler to the next run. A halt of the loop discards the work. In an event
    that cannot be postponed, an interrupt waits until the work is done.
    """

    def __init__(self) -> None:
        self._handle: Handle | None = None  # None if its event cannot be postponed
        self._interruptible = False

    def attach(self, loop: Loop, event: str, handler: Handler, **filters: Any) -> None:
        """Attach the handler that does the work."""
        handle = loop.event(event).attach(handler, **filters)
        if event in POSTPONES:
            self._handle = handle
        if event in POSTPONES or event == "started":  # `started` fires in the next run anyway
            self._interruptible = True

    def begin(self, state: State) -> None:
        """Begin the work. Halts of the loop requested earlier do not end it."""
        state._stopped = False

    def check(self, state: State) -> None:
        """Raise `Unfinished` if a halt of the loop was requested since `begin`, or if an interrupt was requested."""
        if state._stopped or state._left or (self._interruptible and INTERRUPT in state._halts):
            raise Unfinished

    def leave(self, state: State) -> None:
        """End the handler. Raises `Postponed` if the next run must do the work."""
        if self._interruptible and INTERRUPT in state._halts:
            if self._handle is not None:
                raise Postponed(self._handle)
        else:
            state._left = True
