"""`Loop`: what a run is composed of, and its public face."""

from __future__ import annotations

import contextlib
import logging
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from rein.foreign_names import LOOP_METHODS, check_keywords
from rein.loop import checks, engine, saving
from rein.loop.checks import check_function, name_of
from rein.loop.data import Batches
from rein.loop.events import Event
from rein.loop.filters import NOT_GIVEN
from rein.loop.metrics import Metrics, Reduce
from rein.loop.state import HALT_LOOP, INTERRUPT, State
from rein.ops.trees import checked_device

logger = logging.getLogger("rein")

F = TypeVar("F", bound=Callable[..., Any])


class Loop:
    """Calls `step(state) -> the next step_state` and fires events around it.

    `compile` (True or options) passes the step through `torch.compile`; `device` is where batches are moved to;
    `strict` refuses a step_state whose structure, shapes, dtypes or devices drift, naming the path; `debug` logs every
    event with the time since the one before. `step_state_types` are the classes of named tuples in the step_state;
    a state loaded from a file needs them, because a file has names only. `epochs` and `iterations` are the defaults of
    `run`: one epoch if `epochs` is not given and `stop_at` limits no clock.
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
    ) -> None:
        check_function("Loop(step)", "step", step)
        self.epochs = 1 if epochs is NOT_GIVEN else checks.limit("epochs", epochs)
        self.epochs_by_default = epochs is NOT_GIVEN  # `stop_at` replaces this limit
        self.iterations = checks.limit("iterations", iterations)
        if compile:
            step = torch.compile(step, **({} if compile is True else compile))
        self.step = checks.strict(step) if strict else step
        self.step_state_types = {kind.__name__: kind for kind in step_state_types}
        self.state = State(metrics=Metrics())
        self.parts: dict[str, Any] = {}
        self.by_chance: set[tuple[str, str]] = set()  # (part, entry of its configuration)
        self.events: dict[str, Event] = {}
        self.running = False
        self.resumed = False  # whether the state was loaded and no run has gone on from it yet
        self.step_cut = False  # whether the last step was begun and did not end, and no run has gone on since then
        self.cleanups: list[Callable[[], None]] = []  # what is called once when the run is over, however it ended
        self.epoch_began = 0.0  # when the epoch began, by clocks.seconds
        self._device = None if device is None else checked_device(device)
        self._source: Batches | None = None
        self._init: Any = None  # what the last run was given
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
        """Add an event of your own, with the same rights: fire it with `loop.emit(name)`, attach as `@loop.<name>`."""
        return self._define(name, None)

    def _define(self, name: str, count: Callable[[State], int] | None) -> Event:
        checks.event_name(name)
        if name in self.events or name in self.__dict__ or hasattr(type(self), name):
            raise ValueError(f"define({name!r}): the loop has that name already")
        event = self.events[name] = Event(name, self, self.state, count)
        if self._debug:
            event.observe(lambda loop, state: loop._trace(name))
        return event

    def __getattr__(self, name: str) -> Event:
        events = self.__dict__.get("events", {})
        if name in events:
            return events[name]
        if name in LOOP_METHODS:
            raise AttributeError(f"a loop has no {name}; use {LOOP_METHODS[name]}")
        raise AttributeError(f"a loop has no event {name!r}{checks.closest(name, events)}")

    def __setattr__(self, name: str, value: Any) -> None:
        event = self.__dict__.get("events", {}).get(name)
        if event is not None and value is not event:
            raise AttributeError(
                f"loop.{name} is an event, and an assignment attaches nothing; write loop.{name}(handler), or "
                f"@loop.{name} above the handler"
            )
        super().__setattr__(name, value)

    def event(self, name: str) -> Event:
        """The event of that name. Raises ValueError with the names there are."""
        if name not in self.events:
            raise ValueError(f"a loop has no event {name!r}{checks.closest(name, self.events)}")
        return self.events[name]

    def on(self, *names: str, **filters: Any) -> Callable[[F], F]:
        """A decorator that attaches a handler to several events by name."""
        events = [self.event(name) for name in names]
        if not events:
            raise ValueError(f"on() needs the names of events: {', '.join(self.events)}")

        def decorate(function: F) -> F:
            for event in events:
                event.attach(function, **filters)
            return function

        return decorate

    def on_all(self, function: F) -> F:
        """Attach a handler to every event that the loop has now."""
        return self.on(*self.events)(function)

    def emit(self, name: str) -> None:
        """Fire an event by name with the loop's state."""
        self.event(name).fire(self.state)

    @contextlib.contextmanager
    def muted(self, *names: str) -> Iterator[None]:
        """For a while, call no handler and no observer of these events.

        The events are counted all the same, and the loop's own wiring runs: a store, for example, takes every epoch.
        """
        events = [self.event(name) for name in names]
        for event in events:
            event.mute(+1)
        try:
            yield
        finally:
            for event in events:
                event.mute(-1)

    def metric(self, name: str, source: str | Callable[[State], Any], reduce: str | Reduce = "mean") -> None:
        """Accumulate a number over each epoch, from a key of the step's metrics or a function of the state.

        `reduce` is "mean", "sum", "min", "max", "last", or a function of (accumulated or None, value, count) that
        returns what is accumulated then. A step that does not report it does not count. Read it as
        `state.metrics[name]`.
        """
        self.metrics.accumulate(name, source, reduce)

    @property
    def metrics(self) -> Metrics:
        """The metrics of the current epoch."""
        return self.state.metrics  # type: ignore[return-value]  # set in __init__

    def own(self, name: str, part: Any, *, by_chance: str | Iterable[str] = ()) -> Any:
        """Register a part that has state or configuration: checkpoints, resume and run.json are made from these.

        State is what `state_dict` and `load_state_dict` say, and that of a `torch.Generator`.
        `by_chance` are entries of its configuration that nobody chose, as a seed that was drawn: a resume takes them
        from the checkpoint and does not compare them.
        """
        if name in self.parts:
            there = type(self.parts[name]).__name__
            hint = "give this one another name (name=, where a plug-in takes one)"
            raise ValueError(f"own({name!r}): the loop owns a part of that name already, {there}; {hint}")
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
    ) -> State:
        """Run until `epochs` epochs have ended in all, each of `iterations` steps, or until `data` ends or a halt.

        None is no limit. `data` is iterated anew each epoch; `init` is the first step_state. A second run goes on from
        where the first one ended. Raises ValueError for empty data and for limits below 1.
        """
        for _ in self.stream(data, epochs=epochs, iterations=iterations, init=init):
            pass
        return self.state

    def stream(
        self,
        data: Iterable[Any] | None = None,
        *,
        epochs: int | None = NOT_GIVEN,
        iterations: int | None = NOT_GIVEN,
        init: Any = None,
    ) -> Iterator[State]:
        """As `run`, yielding the state at each epoch's end; leaving the `for` early halts the loop."""
        self.check_idle("run")
        state = self.state
        state.max_epochs = self.epochs if epochs is NOT_GIVEN else checks.limit("epochs", epochs)
        state.max_iterations = self.iterations if iterations is NOT_GIVEN else checks.limit("iterations", iterations)
        source = self._open(data)
        self._begin_with(init)
        if source is None and state.max_iterations is None:
            self._warn_of_no_end()
        return engine.run(self, source)

    def _begin_with(self, init: Any) -> None:
        state = self.state
        if state.step_state is None:
            state.step_state = init
        elif self.resumed and init is not None:  # the state came from a file that knows names but not your types
            state.step_state = saving.retype(state.step_state, init, self.step_state_types)
        elif init is not None and init is not self._init:
            logger.warning("run(init=...) is ignored: the run goes on from the step_state that it has")
        self._init = init if init is not None else self._init

    def _warn_of_no_end(self) -> None:
        """An epoch without data or a limit ends by a halt alone; where no handler is there to ask, that is told."""
        ends = ("epoch_completed", "epoch_halted", "epoch_ended", "completed", "halted", "failed")
        if not any(event.handlers or event.wiring for name, event in self.events.items() if name not in ends):
            logger.warning("run(...) has neither data nor iterations: an epoch ends only when the step halts it")

    def stop(self, reason: str | None = None) -> None:
        """From any thread: end the run as `state.halt_loop(reason)` does.

        A running evaluation ends at its next step and is discarded, also in the final event. Warns if the loop does
        not run.
        """
        self.state._ask(HALT_LOOP, reason, self.running)

    def interrupt(self, reason: str | None = None) -> None:
        """From any thread: end the run at this iteration's edge and leave the epoch open, to be resumed in its middle.

        A running evaluation ends at its next step, and the next run finishes it. In the final event it is discarded.
        """
        self.state._ask(INTERRUPT, reason, self.running)

    def count_cut_step(self) -> None:
        """Count the step that was cut off (`step_cut`) as an iteration; for a handler of `started`.

        It is for parts that it has changed for good. `iteration_completed` does not fire for it.
        """
        self.state._iteration += 1
        self.state._total_iterations += 1

    @property
    def iterates_anew(self) -> bool:
        """Whether the epoch begins, or goes on, from the first element of its data, past those that it has had."""
        return self._source is not None and self._source.begins_anew(self.state.iteration)

    def _open(self, data: Iterable[Any] | None) -> Batches | None:
        if data is None:
            return None
        source = self._source
        if source is None or source.data is not data or not (source.one_shot or self.state.epoch_open):
            source = Batches(data, self._device)
            if source.one_shot and self.resumed:
                raise ValueError("a bare iterator cannot be resumed: give data that can be iterated anew")
            self._source = source
        return source

    def state_dict(self) -> dict[str, Any]:
        """The state of the run and of every part it owns, in dictionaries, lists, tensors and numbers only.

        Taken at an edge (see `State.request`), it resumes exactly. It may share memory with the parts.
        """
        return saving.save(self)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> list[str]:
        """Stand where `state_dict` was taken, in a loop composed of the same parts.

        Without `strict`, parts that are missing on one side or do not fit are left as they are; the open epoch, which
        may have stood on them, is begun anew then. Returns what was left, a line each. Raises ValueError for another
        format or, if `strict`, other parts, and RuntimeError while running.
        """
        self.check_idle("load_state_dict")
        left = saving.load(self, state, strict)
        self._source, self.resumed = None, True
        return left

    def check_idle(self, what: str) -> None:
        """Raise RuntimeError while the loop runs."""
        if self.running:
            raise RuntimeError(f"{what}: the loop is running; not from a handler, and not before its stream is closed")

    def _trace(self, name: str) -> None:
        before, self._traced_at = self._traced_at, time.perf_counter()
        state, passed = self.state, self._traced_at - before
        logger.info("%s epoch=%d iteration=%d +%.6f s", name, state.epoch, state.iteration, passed)

    def __reduce__(self) -> Any:
        raise TypeError("a loop is not copied or pickled: build another one and load loop.state_dict() into it")

    def __repr__(self) -> str:
        lines = [f"Loop({name_of(self.step)}, epochs={self.epochs}, iterations={self.iterations})"]
        lines += [f"  {e.name}: {', '.join(map(name_of, e.handlers))}" for e in self.events.values() if e.handlers]
        lines += [f"  metrics: {', '.join(self.metrics)}"] if len(self.metrics) else []
        parts = ", ".join(f"{name}={type(part).__name__}" for name, part in self.parts.items())
        lines += [f"  parts: {parts}"] if parts else []
        return "\n".join(lines)


def _iteration_begun(state: State) -> int:
    return state._total_iterations + state.counts.get("iteration_started", 0) + 1  # those whose step was skipped, too
