"""Simulators in worker processes or threads: requests and answers, failures, restarts and termination.

Shapes: W simulators, A agents of each, N = W * A rows, R rows of some simulators, O one observation.
"""

from __future__ import annotations

import logging
import math
import operator
import queue
import reprlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from multiprocessing import util
from typing import Any, Literal, NamedTuple, NoReturn

import attrs
import numpy as np
import torch
from torch import Tensor

from rein.envs.base.contract import checked_count
from rein.envs.base.seeding import HostEpisodeSeeds
from rein.envs.host.block import About, Setup, Stepper, check_alike, check_row_count, rows_of, with_rows
from rein.envs.host.episode_inputs import ResetOptions, put_actions
from rein.envs.host.processes import GARBAGE_ADVICE, check_descriptors, check_timeout, ending, refuse_on_windows
from rein.envs.host.server import Answer, Request, as_arrays, loads
from rein.envs.host.worker import MOMENT, ProcessWorker, ThreadWorker, wait_for_processes, wait_for_threads
from rein.errors import WorkerDied, WorkerError, WorkerTimeout, text_of
from rein.ops.trees import map_tree
from rein.types import TimeStep, Tree

logger = logging.getLogger(__name__)

AnyWorker = ProcessWorker | ThreadWorker

_GRACE = 3.0  # seconds that `close` waits for workers before it kills them
_START = 60.0  # seconds that a new worker has to make its simulators, in addition to `timeout`
_ONLY_RAISE = ("save", "load", "render")  # methods whose errors leave the simulators usable


@attrs.frozen(kw_only=True)
class Workers:
    """Options of workers, see `GymnasiumEnvironment`.

    Raises ValueError for an unknown mode or an invalid timeout.
    """

    workers: int = attrs.field(converter=lambda workers: checked_count(f"workers={workers!r}", workers))
    mode: Literal["processes", "threads"] = "processes"
    timeout: float | None = None
    on_failure: Literal["raise", "restart"] = "raise"
    max_restarts: int = 10

    def __attrs_post_init__(self) -> None:
        if self.mode not in ("processes", "threads"):
            raise ValueError(f"mode={self.mode!r}: give 'processes' or 'threads'")
        if self.on_failure not in ("raise", "restart"):
            raise ValueError(f"on_failure={self.on_failure!r}: give 'raise' or 'restart'")
        check_timeout(self.timeout)


def workers_of(workers: int | None, make_kwargs: dict[str, Any], **options: Any) -> Workers | None:
    """Return options of workers, or None without workers: then they are options of the environment of this name."""
    worker_options = {name: value for name, value in options.items() if value is not None}
    if workers is None:
        make_kwargs |= worker_options
        return None
    return Workers(workers=workers, **worker_options)


class Part(NamedTuple):
    """Result of a step of some simulators of a worker, in its slots."""

    worker: AnyWorker
    chosen: Sequence[int]  # simulators of the worker; a range has all
    ended: bool
    options: Sequence[tuple[int, Any]]  # of the episodes that have begun

    @property
    def numbers(self) -> list[int]:
        """Numbers of the simulators."""
        return [self.worker.numbers.start + index for index in self.chosen]

    @property
    def rows(self) -> Any:
        """Index of the rows in arrays of the worker."""
        if isinstance(self.chosen, range):
            return slice(None)
        return np.array(rows_of(self.chosen, self.worker.agents), np.int64)


class Pool(Stepper):
    """K workers that step blocks of about W / K simulators. Has the methods of `Block`.

    The pool passes requests to the workers, and ends or replaces those that fail.

    Args:
        setup: how simulators are made.
        seeds: seeds of their episodes.
        options: reset options of their episodes.
        workers: options of the workers.

    Raises:
        ValueError: for more workers than simulators, or if simulators have different spaces.
        WorkerError: if a worker fails while it makes its simulators.
    """

    reusable = False  # after an error, all workers have ended

    def __init__(self, setup: Setup, seeds: HostEpisodeSeeds, options: ResetOptions, workers: Workers) -> None:
        self.setup, self.seeds, self.options, self._settings = setup, seeds, options, workers
        count, total = workers.workers, seeds.num_envs
        if count > total:
            raise ValueError(f"workers={count}: there are {total} {setup.kind}s, so give {total} at most")
        self.episode_seeds = seeds.current  # (W,) as of the last received step
        processes = workers.mode == "processes"
        if processes:
            refuse_on_windows(f"workers={count}", "mode='threads', or no workers")
            check_descriptors(f"workers={count}", count)
        self._bell = queue.SimpleQueue[None]()  # gets an item for each answer of a thread
        self._wait: Callable[[Any, float], list[Any]] = wait_for_processes if processes else wait_for_threads
        self._begun = False  # whether episodes have begun, so that a new worker must begin them
        self._flying = np.zeros(total, np.bool_)  # simulators that were sent and not received
        self._finished: list[Part] = []  # results that were not received
        self._values: dict[int, Any] = {}  # values and errors of a call, by worker
        self._errors: list[Exception] = []
        self._silence_checked = 0.0
        bounds = [total * k // count for k in range(count + 1)]
        self._blocks = [range(*pair) for pair in pairwise(bounds)]
        self._worker_of = [k for k, numbers in enumerate(self._blocks) for _ in numbers]
        self._workers: list[AnyWorker] = []
        # Also called at exit, before multiprocessing waits for its processes, and if the object is deleted.
        self._end = util.Finalize(self, _end_all, (self._workers, setup.name), exitpriority=100)
        try:
            self._start()
        except BaseException:
            self._end()
            raise

    @property
    def sent(self) -> Collection[int]:  # type: ignore[override]  # computed
        """Simulators that were sent and not received."""
        return np.flatnonzero(self._flying).tolist()

    @property
    def busy(self) -> bool:  # type: ignore[override]  # computed
        """Whether simulators are being stepped."""
        return bool(self._flying.any())

    def begin(self, current: Sequence[int] | None = None, keep_options: bool = False) -> Tree:
        """Begin new episodes, see `Stepper`."""
        self.seeds.start()
        each = [None if current is None else [*current[block.start : block.stop]] for block in self._blocks]
        self._call({k: self._begin_request(k, seeds, keep_options) for k, seeds in enumerate(each)})
        self.has_unused_masks = any(answer.value for answer in self._values.values())
        return self._take_all()

    def begin_some(self, chosen: Sequence[int]) -> Tree:
        """Begin the next episodes of some simulators, in increasing order. Returns the current observation of all."""
        groups = self._by_worker(chosen)
        self._call({k: Request("begin_some", (own, self._workers[k].take_changed())) for k, own in groups.items()})
        return self._take(groups)

    def step(self, action: Tree, chosen: Sequence[int]) -> TimeStep:
        """Step some simulators with the actions `(R, *A)` of their rows, in increasing order. Returns R rows.

        Raises WorkerDied if a process has ended, and WorkerTimeout if a worker does not answer in time. Exceptions of a
        simulator are raised with a note of the worker and the traceback, or as a WorkerError if they cannot be pickled.
        """
        self.submit(action, chosen)
        while any(worker.pending for worker in self._workers):
            self._pump(math.inf)
        return self._received()[1]

    def submit(self, action: Tree, chosen: Sequence[int]) -> None:
        """Let the workers step some simulators with the actions `(R, *A)` of their rows. A range has all."""
        check_row_count(action, len(chosen) * self._agents)
        agents = self._agents
        requested: list[tuple[AnyWorker, Sequence[int]]] = []
        if isinstance(chosen, range):
            for worker in self._workers:
                own_rows = slice(worker.rows.start, worker.rows.stop)
                put_actions(worker.slots.action, slice(None), map_tree(operator.itemgetter(own_rows), action))
                requested.append((worker, range(len(worker.numbers))))
        else:
            place = {number: k for k, number in enumerate(chosen)}
            for k, indices in self._by_worker(chosen).items():
                worker = self._workers[k]
                rows_ = rows_of([place[worker.numbers.start + index] for index in indices], agents)
                own_action = map_tree(operator.itemgetter(rows_), action)
                put_actions(worker.slots.action, np.array(rows_of(indices, agents)), own_action)
                requested.append((worker, indices))
        self._flying[slice(None) if isinstance(chosen, range) else [*chosen]] = True
        try:
            for worker, indices in requested:
                self._ask_step(worker, indices)
        except BaseException as error:  # such as KeyboardInterrupt, after which some simulators were not sent
            self._abort(error)

    def collect(self, timeout: float | None) -> tuple[list[int], TimeStep]:
        """Wait until a step that was sent has ended. Returns all simulators whose steps have, and their R rows.

        Raises TimeoutError if no step has ended after `timeout` seconds. This does not end the workers.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._pump(-math.inf)  # results that are there
        while not self._finished:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{self.setup.name}: no environment has answered within {timeout:g} s")
            self._pump(deadline)
        return self._received()

    def options_changed(self, chosen: Sequence[int]) -> None:
        """Let the workers know the options of the next episodes of some simulators."""
        for worker in self._workers:
            numbers = [number for number in chosen if number in worker.numbers]
            worker.changed |= {number - worker.numbers.start: self.options.next_of(number) for number in numbers}

    def save(self) -> dict[str, Any]:
        """Return the actions of the open episodes of all rows, and their numbers; -1 for unknown ones."""
        actions, step_N = [], torch.full((self.seeds.num_envs * self._agents,), -1, dtype=torch.int64, device="cpu")
        if self._ended is None:
            self._call({worker.number: Request("save", ()) for worker in self._workers})
            for worker in self._workers:
                saved = self._values[worker.number].value
                actions += map_tree(torch.from_numpy, saved["actions"])
                steps = torch.from_numpy(saved["steps"])
                steps[rows_of([*worker.lost], self._agents)] = -1  # the loop knows the lost episode only
                step_N[worker.rows.start : worker.rows.stop] = steps
        return {"actions": actions, "steps": step_N}

    def load(self, state: Mapping[str, Any]) -> Tree:
        """Repeat the episodes of a state. Returns the current observation (N, *O).

        Raises EnvironmentContractError if a repeated episode differs from the saved one.
        """
        requests = {}
        for worker, numbers in zip(self._workers, self._blocks, strict=True):
            own_rows = slice(worker.rows.start, worker.rows.stop)
            part: Any = {"observation": map_tree(operator.itemgetter(own_rows), state["observation"])}
            part |= {"actions": state["actions"][own_rows], "steps": state["steps"][own_rows]}
            seeds = {
                key: value[numbers.start : numbers.stop] if isinstance(value, Tensor) else value
                for key, value in self.seeds.state_dict().items()
            }
            args = as_arrays(seeds), self.options.part(numbers), as_arrays(part)
            requests[worker.number] = Request("load", args, steps=1 + int(state["steps"][own_rows].max()))
        self._call(requests)
        return self._take_all()

    def forget(self) -> None:
        """Do not begin episodes in new workers until `begin` or `load` is called."""
        self._begun = False
        self.episode_seeds = self.seeds.current

    def render(self, index: int) -> Any:
        """Return a frame of one simulator."""
        k = self._worker_of[index]
        self._call({k: Request("render", (index - self._blocks[k].start,))})
        return self._values[k].value

    def close(self) -> None:
        """Close every simulator and end the workers.

        Processes that do not end within 3 seconds are killed, and threads are abandoned; both is logged.
        """
        self._finished, self._flying[:] = [], False
        self._end()

    def _by_worker(self, chosen: Sequence[int]) -> dict[int, list[int]]:
        """Return simulators by worker, as simulators of the worker."""
        groups: dict[int, list[int]] = {}
        for number in chosen:
            k = self._worker_of[number]
            groups.setdefault(k, []).append(number - self._blocks[k].start)
        return groups

    def _ask_step(self, worker: AnyWorker, chosen: Sequence[int]) -> None:
        lost = [index for index in chosen if index in worker.lost] if worker.lost else []
        if lost:
            self._finish_lost(worker, {index: worker.lost.pop(index) for index in lost})
            chosen = [index for index in chosen if index not in lost]
        if chosen:
            indices = None if isinstance(chosen, range) else chosen
            worker.ask(Request("step", (indices, worker.take_changed()), chosen))

    def _received(self) -> tuple[list[int], TimeStep]:
        """Return the simulators whose steps have ended, in increasing order, and their R rows."""
        parts, self._finished = sorted(self._finished, key=lambda part: min(part.numbers)), []
        numbers = [number for part in parts for number in part.numbers]
        slots = [(part.worker.slots, part.rows) for part in parts]
        observation = final = _joined([(one.observation, rows) for one, rows in slots])
        ended = any(part.ended for part in parts)
        if ended:
            each = [part.worker.slots.final if part.ended else part.worker.slots.observation for part in parts]
            final = _joined([(tree, part.rows) for tree, part in zip(each, parts, strict=True)])
        terminated_R, truncated_R, valid_R = torch.from_numpy(
            np.concatenate([one.flags[:, rows] for one, rows in slots], 1)
        ).unbind()
        time_step = TimeStep(
            observation=observation,
            reward=_joined([(one.reward, rows) for one, rows in slots]),
            terminated=terminated_R,
            truncated=truncated_R,
            final_observation=final,
            valid=valid_R,
            info={key: _joined([(one.info[key], rows) for one, rows in slots]) for key in self.setup.info},
        )
        if any(a > b for a, b in pairwise(numbers)):
            order = rows_of(np.argsort(numbers).tolist(), self._agents)
            numbers, time_step = sorted(numbers), map_tree(lambda x: x[order], time_step)
        self._flying[numbers] = False
        self._keep(parts, numbers, time_step.observation)
        if ended:
            self._show(parts)
        return numbers, time_step

    def _keep(self, parts: Sequence[Part], numbers: Sequence[int], observation: Tree) -> None:
        """Set the current observations (R, *O) of the simulators with these numbers, in this order."""
        if len(numbers) < len(self._flying):
            observation = with_rows(self.observation, rows_of(numbers, self._agents), observation)
        self.observation = observation
        for part in parts:
            worker = part.worker
            self.alive[worker.rows.start : worker.rows.stop][part.rows] = worker.slots.alive[part.rows]

    def _show(self, parts: Sequence[Part]) -> None:
        """Update the seeds and options of the current episodes, of which results have been received."""
        self.episode_seeds = self.episode_seeds.clone()
        for part in parts:
            chosen = [*part.chosen]
            self.episode_seeds[part.numbers] = torch.from_numpy(part.worker.slots.seed[chosen])
            for index, options in part.options:
                self.options.record(part.worker.numbers.start + index, options)

    def _take_all(self) -> Tree:
        """Take the first observations of all simulators, and their seeds and options."""
        for worker in self._workers:
            worker.changed = {}
        self._begun = True
        return self._take({worker.number: range(len(worker.numbers)) for worker in self._workers})

    def _take(self, groups: Mapping[int, Sequence[int]]) -> Tree:
        """Take the first observations of some simulators by worker, and their seeds and options."""
        parts = [Part(self._workers[k], chosen, True, self._values[k].options or ()) for k, chosen in groups.items()]
        for part in parts:
            worker = part.worker
            self._follow(worker, part.chosen)
            worker.lost = {index: options for index, options in worker.lost.items() if index not in part.chosen}
        self._show(parts)
        numbers = [number for part in parts for number in part.numbers]
        self._keep(parts, numbers, _joined([(part.worker.slots.observation, part.rows) for part in parts]))
        return self.observation

    def _start(self) -> None:
        for number in range(len(self._blocks)):
            self._workers.append(self._new(number))
        for worker in self._workers:
            worker.start()
        abouts = [self._await_one(worker, None).value for worker in self._workers]
        first: About = abouts[0]
        self.about, self._agents, name = first, first.rows, self.setup.name
        check_alike(self.setup, [block.start for block in self._blocks], abouts)
        self.alive = np.zeros(len(self._worker_of) * first.rows, np.bool_)  # (N,) as of the last received step
        for worker in self._workers:
            worker.attach(first)
        identities = [identity for about in abouts for identity in about.identities]
        if self._settings.mode == "threads" and len({*identities}) < len(identities):
            raise ValueError(f"{name} returned the same environment twice; it must make a new one in each call")

    def _follow(self, worker: AnyWorker, chosen: Sequence[int]) -> None:
        """Update the episode counters, of which results have arrived."""
        for row in chosen:
            index, seed = int(worker.slots.index[row]), int(worker.slots.seed[row])
            self.seeds.follow(worker.numbers.start + row, index, seed)

    def _begin_request(self, k: int, current: Sequence[int] | None = None, keep_options: bool = False) -> Request:
        numbers = self._blocks[k]
        return Request("begin", (self.seeds.part(numbers), self.options.part(numbers), current, keep_options))

    def _finish_lost(self, worker: AnyWorker, lost: Mapping[int, Any]) -> None:
        """Finish the step of simulators whose episode was lost. `lost` has the options of their new episodes."""
        rows = rows_of([*lost], self._agents)
        chosen = [worker.rows.start + row for row in rows]
        worker.slots.put_lost(rows, map_tree(lambda x: x[chosen], self.observation), self.alive[chosen])
        self._finished.append(Part(worker, [*lost], True, [*lost.items()]))

    def _call(self, requests: Mapping[int, Request]) -> None:
        """Send a request to several workers, and set `_values` to their answers. Raises the first error."""
        self._values, self._errors = {}, []
        for k, request in requests.items():
            self._workers[k].ask(request)
        while any(worker.pending for worker in self._workers):
            self._pump(math.inf)
        if self._errors:
            raise self._errors[0]

    def _pump(self, deadline: float) -> None:
        """Wait for answers until `deadline`, but not longer than a moment, and handle them and all failures."""
        busy = [worker for worker in self._workers if worker.pending]
        if not busy:
            return
        try:
            ready = self._wait(busy, min(MOMENT, deadline - time.monotonic()))
            for worker in ready:
                self._handle(worker, worker.receive())
            now = time.monotonic()
            if not ready or now > self._silence_checked + MOMENT:
                self._silence_checked = now
                self._check_silent([worker for worker in busy if worker not in ready], now)
        except Exception:
            raise
        except BaseException as error:  # such as KeyboardInterrupt, which leaves answers pending
            self._abort(error)

    def _handle(self, worker: AnyWorker, answer: Answer | None) -> None:
        if answer is None:
            self._fail(worker, self._lost(worker))
            return
        if answer.trace is not None and worker.pending[0].method not in _ONLY_RAISE:
            self._fail(worker, self._error_of(worker, answer))
            return
        request = worker.pending.popleft()
        worker.since = time.monotonic()
        if answer.trace is not None:
            self._errors.append(self._error_of(worker, answer))
        elif request.method == "step":
            self._finished.append(Part(worker, request.chosen, answer.value, answer.options or ()))
            if answer.value:
                self._follow(worker, request.chosen)
        else:
            self._values[worker.number] = answer

    def _check_silent(self, workers: Sequence[AnyWorker], now: float) -> None:
        """Handle the failures of workers that have ended without an answer, or that do not answer in time."""
        for worker in workers:
            if worker.has_ended and not worker.has_answer:
                self._fail(worker, self._lost(worker))
        limit = math.inf if self._settings.timeout is None else self._settings.timeout
        late = [w for w in workers if w is self._workers[w.number] and now - w.since > limit * w.pending[0].steps]
        late = [w for w in late if not w.has_answer]
        if late and self._settings.on_failure == "raise":
            self._abort(self._late(late), late)
        for worker in late:
            self._fail(worker, self._late([worker]))

    def _fail(self, worker: AnyWorker, error: Exception) -> None:
        """Replace a worker that has failed, or end all workers and raise the error."""
        pending = worker.pending
        while True:
            if self._settings.on_failure == "raise" or self.restarts >= self._settings.max_restarts:
                self._abort(error, [worker])
            self.restarts += 1
            count = f"{self.restarts} of {self._settings.max_restarts}"
            logger.warning("%s: restart %s of a worker after a failure: %s", self.setup.name, count, text_of(error))
            self._discard(worker, isinstance(error, WorkerTimeout))
            worker = self._workers[worker.number] = self._new(worker.number)
            try:
                self._replace(worker, pending)
                return
            except Exception as another:  # the next attempt reports it
                error = another

    def _replace(self, worker: AnyWorker, pending: Sequence[Request]) -> None:
        """Start a worker in the place of one that failed with these requests. Its environments begin new episodes."""
        limit = None if self._settings.timeout is None else _START + self._settings.timeout
        worker.start()
        self._await_one(worker, limit)
        worker.attach(self.about)
        if self._begun:
            worker.ask(self._begin_request(worker.number))
            begun = self._await_one(worker, limit)
            chosen = range(len(worker.numbers))
            self._follow(worker, chosen)
            worker.lost = dict.fromkeys(chosen) | dict(begun.options or ())
        stepped = [index for request in pending if request.method == "step" for index in request.chosen]
        if stepped:
            self._finish_lost(worker, {index: worker.lost.pop(index) for index in stepped})
        for request in pending:
            if request.method != "step":
                worker.ask(request)

    def _await_one(self, worker: AnyWorker, limit: float | None) -> Answer:
        """Return the answer of one worker to its only request."""
        while not self._wait([worker], MOMENT):
            if worker.has_ended and not worker.has_answer:
                raise self._lost(worker)
            if limit is not None and time.monotonic() - worker.since > limit:
                raise self._late([worker], limit)
        answer = worker.receive()
        if answer is None:
            raise self._lost(worker)
        worker.pending.popleft()
        if answer.trace is not None:
            raise self._error_of(worker, answer)
        return answer

    def _new(self, number: int) -> AnyWorker:
        if self._settings.mode == "processes":
            return ProcessWorker(number, self._blocks[number], self.setup)
        return ThreadWorker(number, self._blocks[number], self.setup, self._bell)

    def _discard(self, worker: AnyWorker, hangs: bool) -> None:
        """End a worker that has failed."""
        worker.ask_to_close()
        if not hangs:
            worker.join(time.monotonic() + _GRACE)
        happened = worker.kill()
        if happened and isinstance(worker, ThreadWorker):
            logger.warning("%s: worker %d %s", self.setup.name, worker.number, happened)

    def _abort(self, error: BaseException, failed: Sequence[AnyWorker] = ()) -> NoReturn:
        """End all workers, and raise the error."""
        self._ended = text_of(error)
        self._finished, self._flying[:] = [], False
        for worker in failed:
            self._workers.remove(worker)
            self._discard(worker, isinstance(error, WorkerTimeout))
        self._end()
        raise error

    def _facts(self, worker: AnyWorker) -> dict[str, Any]:
        """Return the attributes of a WorkerError."""
        facts: dict[str, Any] = {"pid": worker.pid, "exitcode": worker.exitcode}
        row, seed = worker.place
        if (
            row < 0
            and worker.is_attached
            and len(worker.numbers) == 1
            and (seed := self.seeds.of(worker.numbers.start)) >= 0
        ):
            row = 0
        if row >= 0:
            own_rows = slice(row * self._agents, (row + 1) * self._agents) if self.setup.worlds else row
            action = map_tree(lambda x: x[own_rows].tolist(), worker.slots.action)
            facts |= {"environment": worker.numbers.start + row, "episode_seed": seed, "action": action}
        return facts

    def _described(self, worker: AnyWorker, facts: Mapping[str, Any]) -> str:
        """Describe a worker, for instance as `Taxi-v4, worker 1 of 4 (pid 71, environment 2, ...)`."""
        details = [f"pid {worker.pid}"] if worker.pid is not None else []
        details += [ending(facts["exitcode"])] if facts["exitcode"] is not None else []
        if "environment" in facts:
            action = reprlib.repr(facts["action"])
            details += [
                f"{self.setup.kind} {facts['environment']}",
                f"episode seed {facts['episode_seed']}",
                f"action {action}",
            ]
        else:
            details += [f"{self.setup.kind}s {worker.numbers.start} to {worker.numbers.stop - 1}"]
            seeds = self.seeds.part(worker.numbers)[2]
            details += [f"episode seeds {reprlib.repr(seeds)}"] if min(seeds) >= 0 else []
        return f"{self.setup.name}, worker {worker.number} of {len(self._blocks)} ({', '.join(details)})"

    def _lost(self, worker: AnyWorker) -> WorkerError:
        """Return the error of a worker that has ended or has sent something other than an answer."""
        facts = self._facts(worker)
        if worker.garbage is not None:
            return WorkerError(f"{self._described(worker, facts)} {worker.garbage}; {GARBAGE_ADVICE}", **facts)
        when = "" if worker.is_attached else " while it made its environments; stderr may contain the reason"
        return WorkerDied(f"{self._described(worker, facts)} ended unexpectedly{when}", **facts)

    def _late(self, workers: Sequence[AnyWorker], limit: float | None = None) -> WorkerTimeout:
        facts = [self._facts(worker) for worker in workers]
        each = [self._described(worker, of_worker) for worker, of_worker in zip(workers, facts, strict=True)]
        seconds = (self._settings.timeout or 0.0) * workers[0].pending[0].steps if limit is None else limit
        return WorkerTimeout(f"{' and '.join(each)}: no answer within {seconds:g} s", **facts[0])

    def _error_of(self, worker: AnyWorker, answer: Answer) -> Exception:
        """Return the exception of an answer with notes, or a WorkerError if it cannot be unpickled."""
        facts = self._facts(worker)
        described, error = self._described(worker, facts), answer.error
        if isinstance(error, bytes):
            try:
                error = loads(error)
            except Exception:  # unpickling runs code of the class of the error
                error = None
        if not isinstance(error, Exception):
            return WorkerError(f"{described} raised an error:\n{answer.trace}", **facts)
        error.add_note(f"in {described}")
        if worker.pid is not None:
            error.add_note(f"Traceback of the worker:\n{answer.trace}")
        return error


def _end_all(workers: list[AnyWorker], name: str) -> None:
    """End workers. Processes are killed after a few seconds."""
    for worker in workers:
        worker.ask_to_close()
    deadline = time.monotonic() + _GRACE
    for worker in workers:
        worker.join(deadline)
    for worker in workers:
        if happened := worker.kill():
            logger.warning("%s: worker %d %s", name, worker.number, happened)
    workers.clear()


def _joined(pieces: Sequence[tuple[Any, Any]]) -> Tree:
    """Return the chosen rows of several trees of arrays (N, ...) as new tensors."""
    first = pieces[0][0]
    if isinstance(first, dict):
        return {key: _joined([(tree[key], chosen) for tree, chosen in pieces]) for key in first}
    return torch.from_numpy(np.concatenate([tree[chosen] for tree, chosen in pieces]))
