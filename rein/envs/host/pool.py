"""Simulators in worker processes or threads.

Shapes: W simulators, A agents of each, N = W * A rows, R rows of some simulators, O one observation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rein.envs.host.block import check_row_count, rows_of, with_rows
from rein.envs.host.history import put_actions
from rein.envs.host.server import Request
from rein.envs.host.supervision import AnyWorker, Part, Supervisor
from rein.ops.trees import map_tree
from rein.types import TimeStep, Tree


class Pool(Supervisor):
    """K workers that step blocks of about W / K simulators. Has the methods of `Block`.

    Args:
        setup: how simulators are made.
        seeds: seeds of their episodes.
        options: reset options of their episodes.
        workers: options of the workers.

    Raises:
        ValueError: for more workers than simulators, or if simulators have different spaces.
        WorkerError: if a worker fails while it makes its simulators.
    """

    @property
    def sent(self) -> Collection[int]:
        """Simulators that were sent and not received."""
        return np.flatnonzero(self._flying).tolist()

    @property
    def busy(self) -> bool:
        """Whether simulators are being stepped."""
        return bool(self._flying.any())

    def discard(self) -> None:
        """Do nothing: workers cannot forget a request."""

    def begin(self, current: Sequence[int] | None = None, keep_options: bool = False) -> Tree:
        """Begin the next episodes, or those with the seeds `current` and, with `keep_options`, the current options.

        Returns the observation (N, *O).
        """
        self.seeds.start()
        each = [None if current is None else [*current[block.start : block.stop]] for block in self._blocks]
        self._call({k: self._begin_request(k, seeds, keep_options) for k, seeds in enumerate(each)})
        self.has_unused_masks = any(answer.value for answer in self._values.values())
        return self._take_all()

    def begin_some(self, chosen: Sequence[int]) -> Tree:
        """Begin the next episodes of some simulators, in increasing order. Returns the current observation of all."""
        groups = self._by_worker(chosen)
        self._call({k: Request("begin_some", (mine, self._workers[k].take_changed())) for k, mine in groups.items()})
        parts = [Part(self._workers[k], mine, True, self._values[k].options or ()) for k, mine in groups.items()]
        for worker, mine, _, _ in parts:
            self._follow(worker, mine)
            worker.lost = {index: options for index, options in worker.lost.items() if index not in mine}
        self._show(parts)
        begun = _joined([(part.worker.slots.observation, part.rows) for part in parts])
        self._keep(parts, rows_of(chosen, self._agents), begun)
        return self.observation

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
        asked: list[tuple[AnyWorker, Sequence[int]]] = []
        if isinstance(chosen, range):
            for worker in self._workers:
                mine = slice(worker.rows.start, worker.rows.stop)
                put_actions(worker.slots.action, slice(None), map_tree(lambda x, mine=mine: x[mine], action))
                asked.append((worker, range(len(worker.numbers))))
        else:
            place = {number: k for k, number in enumerate(chosen)}
            for k, mine in self._by_worker(chosen).items():
                worker = self._workers[k]
                rows_ = rows_of([place[worker.numbers.start + index] for index in mine], agents)
                of_mine = map_tree(lambda x, rows_=rows_: x[rows_], action)
                put_actions(worker.slots.action, np.array(rows_of(mine, agents)), of_mine)
                asked.append((worker, mine))
        self._flying[slice(None) if isinstance(chosen, range) else [*chosen]] = True
        try:
            for worker, mine in asked:
                self._ask_step(worker, mine)
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
            mine = [number for number in chosen if number in worker.numbers]
            worker.changed |= {number - worker.numbers.start: self.options.next_of(number) for number in mine}

    def save(self) -> dict[str, Any]:
        """Return the actions of the open episodes of all rows, and their numbers; -1 for unknown ones."""
        actions, step_N = [], torch.full((self.seeds.num_envs * self._agents,), -1, dtype=torch.int64, device="cpu")
        if self.ended is None:
            self._call({worker.number: Request("save", ()) for worker in self._workers})
            for worker in self._workers:
                saved = self._values[worker.number].value
                actions += map_tree(torch.from_numpy, saved["actions"])
                mine = torch.from_numpy(saved["steps"])
                mine[rows_of([*worker.lost], self._agents)] = -1  # the loop knows the lost episode only
                step_N[worker.rows.start : worker.rows.stop] = mine
        return {"actions": actions, "steps": step_N}

    def load(self, state: Mapping[str, Any]) -> Tree:
        """Repeat the episodes of a state. Returns the current observation (N, *O).

        Raises EnvironmentContractError if a repeated episode differs from the saved one.
        """
        requests = {}
        for worker, numbers in zip(self._workers, self._blocks, strict=True):
            mine = slice(worker.rows.start, worker.rows.stop)
            part: Any = {"observation": map_tree(lambda x, mine=mine: x[mine], state["observation"])}
            part |= {"actions": state["actions"][mine], "steps": state["steps"][mine]}
            seeds = {
                key: value[numbers.start : numbers.stop] if isinstance(value, Tensor) else value
                for key, value in self.seeds.state_dict().items()
            }
            args = _arrays(seeds), self.options.part(numbers), _arrays(part)
            requests[worker.number] = Request("load", args, steps=1 + int(state["steps"][mine].max()))
        self._call(requests)
        return self._take_all()

    def forget(self) -> None:
        """Do not begin episodes in new workers until `begin` or `load` is called."""
        self._begun, self.episode_seeds = False, self.seeds.current

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
            mine = None if isinstance(chosen, range) else chosen
            worker.ask(Request("step", (mine, worker.take_changed()), chosen))

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
        whole = len(numbers) == len(self._flying)
        self._keep(parts, None if whole else rows_of(numbers, self._agents), time_step.observation)
        if ended:
            self._show(parts)
        return numbers, time_step

    def _keep(self, parts: Sequence[Part], rows: Sequence[int] | None, observation: Tree) -> None:
        """Set the current observations (R, *O) of rows, of which results have been received. None has all."""
        self.observation = observation if rows is None else with_rows(self.observation, rows, observation)
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
            self._follow(worker, range(len(worker.numbers)))
            worker.lost, worker.changed = {}, {}
        options = [(worker, self._values[worker.number].options or ()) for worker in self._workers]
        parts = [Part(worker, range(len(worker.numbers)), True, mine) for worker, mine in options]
        self._show(parts)
        self._keep(parts, None, _joined([(worker.slots.observation, slice(None)) for worker in self._workers]))
        self._begun = True
        return self.observation


def _joined(pieces: Sequence[tuple[Any, Any]]) -> Tree:
    """Return the chosen rows of several trees of arrays (N, ...) as new tensors."""
    first = pieces[0][0]
    if isinstance(first, dict):
        return {key: _joined([(tree[key], chosen) for tree, chosen in pieces]) for key in first}
    return torch.from_numpy(np.concatenate([tree[chosen] for tree, chosen in pieces]))


def _arrays(tree: Any) -> Any:
    return map_tree(lambda x: x.numpy() if isinstance(x, Tensor) else x, tree)
