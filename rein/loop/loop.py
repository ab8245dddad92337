"""The `Loop` class: public interface of a run."""

from __future__ import annotations

import contextlib
import logging
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from rein.errors import check_keywords, hints
from rein.loop import checks, engine, saving
from rein.loop.checks import check_function, name_of
from rein.loop.data import Batches
from rein.loop.events import Event
from rein.loop.filters import NOT_GIVEN
from rein.loop.metrics import Metrics, Reduce
from rein.loop.state import HALT_LOOP, INTERRUPT, State
from rein.ops.trees import Codec, checked_device

logger = logging.getLogger("rein")

F = TypeVar("F", bound=Callable[..., Any])


class Loop:
    """Event-driven loop: calls `step(state)`, which returns the next step_state, and fires events around it.

    Args:
        step: Function of the state that returns the next step_state.
        epochs: Default of `run`. 1 if it is not given and `stop_at` limits no clock; None for no limit.
        iterations: Default of `run`: iterations per epoch. None for no limit.
        compile: Compile the step with `torch.compile`: True, or a mapping of its options.
        device: Device that batches are moved to. On CUDA, a batch is copied from pinned memory while the device still
            computes the last step.
        strict: Raise if structure, shapes, dtypes or devices of the step_state change. The error names the path.
        debug: Log every event with the time since the previous one.
        step_state_types: Classes of the named tuples in the step_state. Loading a state from a file needs them,
            because a file contains only their names.
        codecs: Other classes in the step_state, by a name that checkpoints contain: class, function that returns an
            object of it as a dictionary, list or tensor, and function of that value that returns the object.
    """

    def __init__(
        self,
        step: Callable[[State], Any],
        *,
        epochs: int | None = NOT_GIVEN,
        iterations: int | None = None,
        compile: bool | Mapping[str, Any] = False,
        device: torch.device | str | None = None,
        strict: bool = False,
        debug: bool = False,
        step_state_types: Iterable[type] = (),
        codecs: Mapping[str, Codec] | None = None,
    ) -> None:
        check_function("Loop(step)", "step", step)
        self.epochs = 1 if epochs is NOT_GIVEN else checks.limit("epochs", epochs)
        self.epochs_by_default = epochs is NOT_GIVEN  # `stop_at` replaces this limit
        self.iterations = checks.limit("iterations", iterations)
        if compile:
            step = torch.compile(step, **({} if compile is True else compile))
        self.step = checks.strict(step) if strict else step
        self.step_state_types = {kind.__name__: kind for kind in step_state_types}
        self.codecs = {} if codecs is None else dict(codecs)
        self.state = State(metrics=Metrics())
        self.parts: dict[str, Any] = {}
        self.by_chance: set[tuple[str, str]] = set()  # (part, entry of its configuration)
        self.events: dict[str, Event] = {}
        self.running = False
        self.resumed = False  # whether a state was loaded and no run has continued from it yet
        self.step_cut = False  # whether the last step began but did not end, and no run has continued since
        self.cleanups: list[Callable[[], None]] = []  # each called once when a run ends in any way
        self.before_saving: list[Callable[[State], None]] = []  # called before the state is saved
        self.epoch_began = 0.0  # value of clocks.seconds at the start of the epoch
        self._device = None if device is None else checked_device(device)
        self._source: Batches | None = None
        self._init: Any = None  # `init` of the last run
        self.make_step_state: Callable[[Any], Any] | None = None  # called with the first batch
        self._debug, self._traced_at = debug, time.perf_counter()
        self.started = self.define("started")
        self.epoch_started = self.define("epoch_started")
        self.iteration_started = self._define("iteration_started", _iteration_begun)
        self.iteration_completed = self._define("iteration_completed", operator.attrgetter("_total_iterations"))
        self.epoch_completed = self.define("epoch_completed")
        self.epoch_halted = self.define("epoch_halted")
        self.epoch_ended = self.define("epoch_ended")
        self.completed = self.define("completed")
        self.halted = self.define("halted")
        self.failed = self.define("failed")

    def define(self, name: str) -> Event:
        """Add a custom event. Fire it with `loop.emit(name)` and attach handlers with `@loop.<name>`."""
        return self._define(name, None)

    def _define(self, name: str, count: Callable[[State], int] | None) -> Event:
        checks.event_name(name)
        if name in self.events or name in self.__dict__ or hasattr(type(self), name):
            raise ValueError(f"define({name!r}): the loop already has an attribute or event with this name")
        event = self.events[name] = Event(name, self, self.state, count)
        if self._debug:
            event.observe(lambda loop, state: loop._trace(name))
        return event

    def __getattr__(self, name: str) -> Event:
        events = self.__dict__.get("events", {})
        if name in events:
            return events[name]
        if name in (methods := hints().LOOP_METHODS):
            raise AttributeError(f"a loop has no {name}; use {methods[name]}")
        raise AttributeError(f"a loop has no event {name!r}{checks.closest(name, events)}")

    def __setattr__(self, name: str, value: Any) -> None:
        event = self.__dict__.get("events", {}).get(name)
        if event is not None and value is not event:
            raise AttributeError(
                f"loop.{name} is an event; assigning to it attaches no handler. Write loop.{name}(handler) or "
                f"@loop.{name} above the handler"
            )
        super().__setattr__(name, value)

    def event(self, name: str) -> Event:
        """Return the event with this name. Raises ValueError, with the known names, if there is none."""
        if name not in self.events:
            raise ValueError(f"a loop has no event {name!r}{checks.closest(name, self.events)}")
        return self.events[name]

    def on(self, *names: str, **filters: Any) -> Callable[[F], F]:
        """Return a decorator that attaches a handler to several events by name."""
        events = [self.event(name) for name in names]
        if not events:
            raise ValueError(f"on() needs the names of events: {', '.join(self.events)}")

        def decorate(function: F) -> F:
            for event in events:
                event.attach(function, **filters)
            return function

        return decorate

    def on_all(self, function: F) -> F:
        """Attach a handler to every event that is defined now."""
        return self.on(*self.events)(function)

    def emit(self, name: str) -> None:
        """Fire an event by name with the loop's state."""
        self.event(name).fire(self.state)

    @contextlib.contextmanager
    def muted(self, *names: str) -> Iterator[None]:
        """Context manager that suppresses the handlers and observers of these events.

        Firings are still counted, and the wiring of the loop still runs: a store, for example, records every epoch.
        """
        events = [self.event(name) for name in names]
        for event in events:
            event.mute(+1)
        try:
            yield
        finally:
            for event in events:
                event.mute(-1)

    def metric(
        self,
        name: str,
        source: str | Callable[[State], Any],
        reduce: str | Reduce | Sequence[str] = "mean",
        *,
        weight: Callable[[State], float] | None = None,
    ) -> None:
        """Accumulate a number over each epoch. Read it with `state.metrics[name]`.

        Args:
            name: Name of the metric.
            source: Key of the step's metrics, or a function of the state. Steps that return None or lack the key are
                skipped.
            reduce: "mean", "sum", "min", "max", "last", "median" (keeps all values of the epoch), or a function of
                (accumulated value or None, value, count) that returns the new accumulated value. Several names, such as
                `("min", "max")`, make the metrics `<name>_min` and `<name>_max`.
            weight: Function of the state that returns the weight of the value in a mean, such as the size of the batch.
                By default all values have the same weight.
        """
        if isinstance(reduce, list | tuple):
            for each in reduce:
                self.metrics.accumulate(f"{name}_{each}", source, each, weight)
        else:
            self.metrics.accumulate(name, source, reduce, weight)  # type: ignore[arg-type]  # not a sequence

    @property
    def metrics(self) -> Metrics:
        """Metrics of the current epoch."""
        return self.state.metrics  # type: ignore[return-value]  # set in __init__

    def own(self, name: str, part: Any, *, by_chance: str | Iterable[str] = ()) -> Any:
        """Register a part whose state or configuration belongs to the run: checkpoints, resume and run.json use it.

        The state of a part is its `state_dict`, or the state of a `torch.Generator`.

        Args:
            name: Unique name of the part.
            part: Object with `state_dict` and `load_state_dict`, with `config`, or a `torch.Generator`.
            by_chance: Entries of the configuration that were drawn at random, such as a seed. A resume takes them from
                the checkpoint and does not compare them.

        Returns:
            The part.
        """
        if name in self.parts:
            there = type(self.parts[name]).__name__
            hint = "choose another name (plug-ins accept name=)"
            raise ValueError(f"own({name!r}): the loop already owns a part with this name, {there}; {hint}")
        loads = hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
        if not (loads or hasattr(part, "config") or isinstance(part, torch.Generator)):
            raise TypeError(f"own({name!r}): {type(part).__name__} has neither state_dict/load_state_dict nor config")
        self.parts[name] = part
        self.by_chance |= {(name, entry) for entry in ([by_chance] if isinstance(by_chance, str) else by_chance)}
        return part

    @check_keywords
    def run(
        self,
        data: Iterable[Any] | None = None,
        *,
        epochs: int | None = NOT_GIVEN,
        iterations: int | None = NOT_GIVEN,
        init: Any = None,
        first_epoch: int | None = None,
    ) -> State:
        """Run until `epochs` epochs have ended in total, the data ends, or a handler halts the loop.

        A second run continues from the end of the first one.

        Args:
            data: Iterable of batches, iterated once per epoch. An iterator is used up over all epochs.
            epochs: Total number of epochs, earlier runs included. None for no limit.
            iterations: Iterations per epoch. None for no limit.
            init: First step_state, or a function that returns it for the first batch.
            first_epoch: Number of the first epoch of a new run, 1 by default. A run that starts with the weights of
                another one can continue its numbers: `epochs` minus `first_epoch` plus 1 epochs are run. Ignored if
                this run continues an earlier one, for example after a resume.

        Returns:
            The state of the run.

        Raises:
            ValueError: If the data is empty, a limit is below 1, or `first_epoch` is not from 1 to `epochs`.
        """
        try:
            for _ in self.stream(data, epochs=epochs, iterations=iterations, init=init, first_epoch=first_epoch):
                pass
        except KeyboardInterrupt as interrupt:
            if self.state.status != "failed":  # the run has ended in order, and is not the cause
                raise interrupt.with_traceback(None) from None
            raise
        return self.state

    def stream(
        self,
        data: Iterable[Any] | None = None,
        *,
        epochs: int | None = NOT_GIVEN,
        iterations: int | None = NOT_GIVEN,
        init: Any = None,
        first_epoch: int | None = None,
    ) -> Iterator[State]:
        """Same as `run`, but yield the state at the end of each epoch. Leaving the `for` loop early halts the run."""
        self.check_idle("run")
        state = self.state
        state.max_epochs = self.epochs if epochs is NOT_GIVEN else checks.limit("epochs", epochs)
        state.max_iterations = self.iterations if iterations is NOT_GIVEN else checks.limit("iterations", iterations)
        if first_epoch is not None and not state.epoch:
            state._epoch = state._epochs_ended = checks.first_epoch(first_epoch, state.max_epochs) - 1
        source = self._open(data)
        self._set_step_state(init)
        if source is None and state.max_iterations is None:
            self._warn_if_endless()
        return engine.run(self, source)

    def _set_step_state(self, init: Any) -> None:
        state = self.state
        is_function = isinstance(init, checks.FUNCTIONS)
        self.make_step_state = init if is_function else None
        if state.step_state is None:
            state.step_state = None if is_function else init
        elif self.resumed and init is not None and not is_function:
            # the state came from a file, which contains names but no types
            state.step_state = saving.retype(state.step_state, init, self.step_state_types)
        elif init is not None and init is not self._init and not self.resumed:
            logger.warning("run(init=...) is ignored: the run continues with its current step_state")
        self._init = init if init is not None else self._init

    def _warn_if_endless(self) -> None:
        """Warn if only a halt can end an epoch and no handler could request one."""
        ends = ("epoch_completed", "epoch_halted", "epoch_ended", "completed", "halted", "failed")
        if not any(event.handlers or event.wiring for name, event in self.events.items() if name not in ends):
            logger.warning("run(...) has neither data nor iterations: an epoch ends only when the step halts it")

    def stop(self, reason: str | None = None) -> None:
        """End the run, like `state.halt_loop(reason)`. Can be called from any thread.

        A running evaluation ends at its next step and is discarded, also in the final event. Warns if the loop is not
        running.
        """
        self.state._request_halt(HALT_LOOP, reason, self.running)

    def interrupt(self, reason: str | None = None) -> None:
        """End the run after this iteration and leave the epoch open for a resume. Can be called from any thread.

        A running evaluation ends at its next step, and the next run finishes it. In the final event it is discarded.
        """
        self.state._request_halt(INTERRUPT, reason, self.running)

    def count_cut_step(self) -> None:
        """Count the interrupted step (`step_cut`) as an iteration. For handlers of `started`.

        Use this if parts were changed by the step permanently. `iteration_completed` does not fire for it.
        """
        self.state._iteration += 1
        self.state._total_iterations += 1

    @property
    def iterates_anew(self) -> bool:
        """Whether the epoch starts a new iteration of its data, skipping the elements of finished iterations."""
        return self._source is not None and self._source.begins_anew(self.state.iteration)

    def _open(self, data: Iterable[Any] | None) -> Batches | None:
        if data is None:
            return None
        source = self._source
        if source is None or source.data is not data or not (source.one_shot or self.state.epoch_open):
            source = Batches(data, self._device)
            if source.one_shot and self.resumed:
                raise ValueError("a bare iterator cannot be resumed: pass data that can be iterated again")
            self._source = source
        return source

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run and of all owned parts as dictionaries, lists, tensors and numbers.

        A state taken at an edge (see `State.request`) resumes exactly. It may share memory with the parts.
        """
        return saving.save(self)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> list[str]:
        """Load the result of `state_dict` into a loop with the same parts.

        Args:
            state: Result of `state_dict`.
            strict: If False, parts that are missing on one side or do not fit are left unchanged. If a part does not
                fit, the open epoch is restarted.

        Returns:
            One line for each part that was not loaded.

        Raises:
            ValueError: If the state has another format or, with `strict`, other parts.
            RuntimeError: If the loop is running.
        """
        self.check_idle("load_state_dict")
        left = saving.load(self, state, strict)
        self._source, self.resumed = None, True
        return left

    def check_idle(self, what: str) -> None:
        """Raise RuntimeError while the loop runs."""
        if self.running:
            raise RuntimeError(
                f"{what}: the loop is running; call this outside of handlers, after the stream is closed"
            )

    def _trace(self, name: str) -> None:
        before, self._traced_at = self._traced_at, time.perf_counter()
        state, passed = self.state, self._traced_at - before
        logger.info("%s epoch=%d iteration=%d +%.6f s", name, state.epoch, state.iteration, passed)

    def __reduce__(self) -> Any:
        raise TypeError("a loop cannot be copied or pickled: build a new one and load loop.state_dict() into it")

    def __repr__(self) -> str:
        lines = [f"Loop({name_of(self.step)}, epochs={self.epochs}, iterations={self.iterations})"]
        lines += [f"  {e.name}: {', '.join(map(name_of, e.handlers))}" for e in self.events.values() if e.handlers]
        lines += [f"  metrics: {', '.join(self.metrics)}"] if len(self.metrics) else []
        parts = ", ".join(f"{name}={type(part).__name__}" for name, part in self.parts.items())
        lines += [f"  parts: {parts}"] if parts else []
        return "\n".join(lines)


def _iteration_begun(state: State) -> int:
    # includes iterations whose step was skipped
    return state._total_iterations + state.counts.get("iteration_started", 0) + 1
