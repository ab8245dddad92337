"""Gymnasium environments in worker processes or threads, with supervision.

Shapes: N environments, R of them, A one action, O one observation.
"""

from __future__ import annotations

import functools
import logging
import math
import queue
import reprlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from multiprocessing import util
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.contract import (
    check_action,
    check_observation,
    check_rows_of,
    checked_count,
    checked_num_envs,
    representation,
)
from rein.envs.base.options import Options, ResetOptions
from rein.envs.base.pipes import GARBAGE_ADVICE
from rein.envs.base.seeding import HostEpisodeSeeds
from rein.envs.base.step_checks import missing_values
from rein.envs.gymnasium.adapter import (
    GymnasiumEnvironment,
    Source,
    as_json,
    can_repeat,
    check_sent,
    name_of,
    no_step,
    with_rows,
)
from rein.envs.gymnasium.async_vector_env import check_descriptors, check_timeout, ending
from rein.envs.gymnasium.history import put_actions
from rein.envs.gymnasium.masks import warn_of_mask
from rein.envs.gymnasium.worker import (
    MOMENT,
    About,
    Answer,
    ProcessWorker,
    Request,
    ThreadWorker,
    loads,
    wait_for_processes,
    wait_for_threads,
)
from rein.errors import EnvironmentContractError, WorkerDied, WorkerError, WorkerTimeout, explain, text_of
from rein.ops.trees import leaves, map_tree
from rein.spaces import ACTION_MASK
from rein.types import TimeStep, Tree

logger = logging.getLogger(__name__)

_Worker = ProcessWorker | ThreadWorker

_GRACE = 3.0  # seconds that `close` waits for workers before it kills them
_START = 60.0  # seconds that a new worker has to make its environments, in addition to `timeout`
_ONLY_RAISE = ("save", "load", "render")  # methods whose errors leave the environments usable


class _Part(NamedTuple):
    """Result of a step of some environments of a worker, in its slots."""

    worker: _Worker
    rows: Sequence[int]  # of the worker; a range has all
    ended: bool
    options: Sequence[tuple[int, Any]]  # of the episodes that have begun

    @property
    def first(self) -> int:
        """Smallest environment."""
        return self.worker.rows.start + min(self.rows)

    @property
    def chosen(self) -> Any:
        """Index of the rows in arrays."""
        return slice(None) if isinstance(self.rows, range) else np.array(self.rows, np.int64)


@explain("ENVIRONMENT_ATTRIBUTES")
class GymnasiumWorkers:
    """N environments of `GymnasiumEnvironment` in K worker processes or threads, with the same episodes bit for bit.

    Worker k steps a contiguous block of about N / K environments, one after the other. Use as many workers as there are
    cores for environments that compute, and more for those that wait, for instance for a network. A state can be loaded
    with another number of workers, or by a `GymnasiumEnvironment`.

    If a worker fails, `on_failure` decides. A worker fails if an environment raises or returns wrong data, if its
    process ends, or if a step takes longer than `timeout`. With "raise", all workers are ended, and the error is
    raised. With "restart", a new worker begins new episodes. The lost episodes end in that step: it is truncated, not
    `valid`, and its final observation is the last observation. A restart is logged and counted in `restarts`.

    Processes ignore Ctrl-C, and end together with the main process. Threads cannot be killed: a thread that does not
    answer is abandoned, and does not prevent the end of the main process.

    Args:
        workers: number of workers K, from 1 to N. By default one for each environment.
        mode: "processes", or "threads" for environments that cannot be pickled or that wait.
        timeout: seconds that a step or reset of the environments of a worker may take; None for no limit.
        on_failure: "raise" or "restart".
        max_restarts: number of restarts before a failure is raised.

    The other options are those of `GymnasiumEnvironment`.

    Raises:
        ValueError: as `GymnasiumEnvironment`, and for an invalid number of workers, mode or timeout.
        TypeError: as `GymnasiumEnvironment`.
        WorkerError: if a worker fails while it makes its environments.
    """

    steps_separately = True

    @torch.inference_mode(False)  # inference tensors cannot be modified outside of inference mode
    def __init__(
        self,
        id_or_factory: Source,
        num_envs: int = 1,
        seed: int | None = None,
        *,
        workers: int | None = None,
        mode: Literal["processes", "threads"] = "processes",
        timeout: float | None = None,
        on_failure: Literal["raise", "restart"] = "raise",
        max_restarts: int = 10,
        info: Mapping[str, Any] | None = None,
        action_mask: bool | None = None,
        replayable: bool = True,
        max_replay_steps: int = 1_000_000,
        **make_kwargs: Any,
    ) -> None:
        self.num_envs = num_envs = checked_num_envs(num_envs)
        count = num_envs if workers is None else checked_count(f"workers={workers!r}", workers)
        if count > num_envs:
            raise ValueError(f"workers={workers}: there are {num_envs} environments, so give {num_envs} at most")
        if mode not in ("processes", "threads"):
            raise ValueError(f"mode={mode!r}: give 'processes' or 'threads'")
        if on_failure not in ("raise", "restart"):
            raise ValueError(f"on_failure={on_failure!r}: give 'raise' or 'restart'")
        check_timeout(timeout)
        self.mode, self.timeout, self.on_failure, self.max_restarts = mode, timeout, on_failure, max_restarts
        self.restarts = 0
        self.replayable, self.device = replayable, torch.device("cpu")
        self._info, self._action_mask = missing_values(info), action_mask
        self._name, self._make_kwargs = name_of(id_or_factory), make_kwargs
        self._seeds, self._options = HostEpisodeSeeds(num_envs, seed), ResetOptions(num_envs)
        self._episode_seeds = self._seeds.current
        self._observation: Tree = None  # the current observation; None before a reset
        self._checked = False
        self._build = functools.partial(
            GymnasiumEnvironment,
            id_or_factory,
            info=info,
            action_mask=action_mask,
            replayable=replayable,
            max_replay_steps=max_replay_steps,
            **make_kwargs,
        )
        if mode == "processes":
            check_descriptors(f"workers={count}", count)
        self._bell = queue.SimpleQueue[None]()  # gets an item for each answer of a thread
        self._wait: Callable[[Any, float], list[Any]] = wait_for_processes if mode == "processes" else wait_for_threads
        self._failure: str | None = None
        self._begun = False  # whether episodes have begun, so that a new worker must begin them
        self._flying = np.zeros(num_envs, np.bool_)  # environments that were sent and not received
        self._finished: list[_Part] = []  # results that were not received
        self._values: dict[int, Any] = {}  # values and errors of a call, by worker
        self._errors: list[Exception] = []
        self._silence_checked = 0.0
        bounds = [num_envs * k // count for k in range(count + 1)]
        self._blocks = [range(*pair) for pair in pairwise(bounds)]
        self._worker_of = [k for k, rows in enumerate(self._blocks) for _ in rows]
        self._workers: list[_Worker] = []
        # Also called at exit, before multiprocessing waits for its processes, and if the object is deleted.
        self._end = util.Finalize(self, _end_all, (self._workers, self._name), exitpriority=100)
        try:
            self._start()
        except BaseException:
            self._end()
            raise

    def _start(self) -> None:
        for number in range(len(self._blocks)):
            self._workers.append(self._new(number))
        for worker in self._workers:
            worker.start()
        abouts = [self._await_one(worker, None).value for worker in self._workers]
        first: About = abouts[0]
        self._about = first
        for worker, about in zip(self._workers, abouts, strict=True):
            for kind in ("observation_space", "action_space"):
                if getattr(about, kind) != getattr(first, kind):
                    raise ValueError(
                        f"{self._name}: environment 0 has the {kind} {getattr(first, kind)}, environment"
                        f" {worker.rows.start} {getattr(about, kind)}; all environments must have equal spaces"
                    )
            worker.attach(first)
        identities = [identity for about in abouts for identity in about.identities]
        if self.mode == "threads" and len({*identities}) < self.num_envs:
            raise ValueError(f"{self._name} returned the same environment twice; it must make a new one in each call")
        self.single_observation_space: spaces.Space[Any] = first.observation_space
        self.single_action_space: spaces.Space[Any] = first.action_space

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self._blocks)

    @property
    def seed(self) -> int | None:
        """Random seed of all environments; None until given or drawn at the first reset."""
        return self._seeds.seed

    @property
    def episode_seeds(self) -> Tensor:
        """(N,) int64: seeds of the current episodes, as of the last received step; -1 before the first reset."""
        return self._episode_seeds

    @property
    def episode_options(self) -> list[dict[str, Any] | None] | None:
        """Options with which the current episodes began, one entry for each environment; None if none were set."""
        return self._options.current

    def set_options(
        self, options: Options | Sequence[Options | None] | None, environments: Iterable[int] | None = None
    ) -> None:
        """Set the options that `reset` of an environment gets, see `GymnasiumEnvironment.set_options`.

        Environments that were sent and not received get them after the end of their next step.
        """
        rows = range(self.num_envs) if environments is None else [int(index) for index in environments]
        self._options.set(options, rows)
        for worker in self._workers:
            chosen = [row - worker.rows.start for row in rows if row in worker.rows]
            worker.changed |= {row: self._options.next_of(worker.rows.start + row) for row in chosen}

    @property
    def awaits_reset(self) -> bool:
        """Whether `reset` must be called before a step: before the first reset, and after a resume without episodes."""
        return self._observation is None

    @property
    def config(self) -> dict[str, Any]:
        """Constructor options, as JSON values."""
        return {
            "id": self._name,
            "num_envs": self.num_envs,
            "seed": self.seed,
            "workers": {  # does not change results
                "workers": self.workers,
                "mode": self.mode,
                "timeout": self.timeout,
                "on_failure": self.on_failure,
                "max_restarts": self.max_restarts,
            },
            "info": {key: missing.tolist() for key, missing in self._info.items()},
            "action_mask": self._action_mask,
            "replayable": self.replayable,
            "make_kwargs": {key: as_json(value) for key, value in self._make_kwargs.items()},
        }

    def reset(self, seed: int | None = None) -> Tree:
        """Begin the next episode of every environment, from episode 0 if `seed` is given. Returns the observation."""
        self._check_usable("reset")
        if seed is not None:
            self._seeds.restart(seed)
        self._seeds.start()
        return self._begin(None, [()] * len(self._workers))

    def reset_to(self, episode_seeds: Tensor, options: Sequence[Options | None] | None = None) -> Tree:
        """Begin the episodes with these seeds (N,), for a replay. Later episodes are seeded as usual.

        `options` are the reset options of these episodes. By default they are those of `set_options`.
        """
        self._check_usable("reset_to")
        check_rows_of("reset_to", episode_seeds, self.num_envs, torch.int64)
        if options is not None:
            self._options.override(options)
        self._seeds.start()
        each = [episode_seeds[rows.start : rows.stop].tolist() for rows in self._blocks]
        return self._begin(options is not None, each)

    def reset_where(self, mask: Tensor) -> Tree:
        """Begin the next episode where `mask` (N,) is True. Returns the current observation of all environments.

        Raises RuntimeError before the first reset.
        """
        self._check_usable("reset_where")
        if self._observation is None:
            raise RuntimeError(f"{self._name}: call reset() before reset_where()")
        check_rows_of("reset_where", mask, self.num_envs, torch.bool)
        rows = mask.nonzero().flatten().tolist()
        groups = self._by_worker(rows)
        self._call({k: Request("reset_where", (mine, self._workers[k].take_changed())) for k, mine in groups.items()})
        if rows:
            parts = [_Part(self._workers[k], mine, True, self._values[k].options or ()) for k, mine in groups.items()]
            for worker, mine, _, _ in parts:
                self._follow(worker, mine)
                worker.lost = {row: options for row, options in worker.lost.items() if row not in mine}
            self._show(parts)
            begun_R = _joined([(part.worker.slots.observation, part.chosen) for part in parts])
            row_R = torch.tensor(rows, dtype=torch.int64, device="cpu")
            self._observation = with_rows(self._observation, row_R, begun_R)
        return self._observation

    def apply_action(self, action: Tree) -> TimeStep:
        """Step every environment with actions `(N, *A)`.

        Raises RuntimeError before the first reset and after a failure, EnvironmentContractError for an action or a
        result that does not fit its space, WorkerDied if a process has ended, and WorkerTimeout if a worker does not
        answer in time. Exceptions of an environment are raised with a note of the worker, the environment, the episode
        seed and the traceback, or as a WorkerError if they cannot be pickled.
        """
        self._check("apply_action", action, self.num_envs)
        self._ask_steps(action, range(self.num_envs))
        return self._await_steps()

    def apply_action_where(self, action: Tree, mask: Tensor) -> TimeStep:
        """Step the environments where `mask` (N,) is True, with their rows of `action`: `(N, *A)`.

        The other rows are not `valid`. Their reward is 0, and their observations do not change. Raises the errors of
        `apply_action`, and ValueError if `mask` has another shape or dtype.
        """
        self._check("apply_action_where", action, self.num_envs)
        check_rows_of("apply_action_where", mask, self.num_envs, torch.bool)
        row_R, still = mask.nonzero().flatten(), no_step(self._observation, self.num_envs, self._info)
        if not len(row_R):
            return map_tree(torch.clone, still)
        self._ask_steps(map_tree(lambda x: x[row_R], action), row_R.tolist())
        return with_rows(still, row_R, self._await_steps())

    def send(self, action: Tree, rows: Sequence[int]) -> None:
        """Begin to step the environments `rows` (R,) with `action` `(R, *A)`. Returns at once.

        The environments of one call are stepped in order. Raises RuntimeError before the first reset and for an
        environment that was sent and not received, ValueError for a row that does not exist, and
        EnvironmentContractError for an action that does not fit.
        """
        check_sent(rows, self.num_envs, np.flatnonzero(self._flying).tolist())
        self._check("send", action, len(rows))
        self._ask_steps(action, rows)

    def receive(self, timeout: float | None = None) -> tuple[list[int], TimeStep]:
        """Wait until a step that was sent has ended. Returns all environments (R,) whose steps have, and their R rows.

        Raises RuntimeError if no environment was sent, and the errors of `apply_action`. Raises TimeoutError if no
        step has ended after `timeout` seconds; this does not end the workers, and `receive` can be called again.
        """
        self._check_failure()
        if not self._flying.any():
            raise RuntimeError(f"{self._name}: call send() before receive()")
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._pump(-math.inf)  # results that are there
        while not self._finished:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{self._name}: no environment has answered within {timeout:g} s")
            self._pump(deadline)
        return self._received()

    @property
    def render_fps(self) -> float | None:
        """Frames per second in the metadata of the environment, or None."""
        return self._about.render_fps

    def render(self, index: int = 0) -> Any:
        """Return an RGB frame of one environment. Raises ValueError unless built with `render_mode="rgb_array"`."""
        if (mode := self._about.render_mode) != "rgb_array":
            raise ValueError(f"{self._name}: built with render_mode={mode!r}; give render_mode='rgb_array'")
        self._check_usable("render")
        row = range(self.num_envs)[index]
        k = self._worker_of[row]
        self._call({k: Request("render", (row - self._blocks[k].start,))})
        return self._values[k].value

    def reseed(self, seed: int) -> None:
        """Set the random seed. Raises RuntimeError after the first reset."""
        self._seeds.reseed(seed)

    def close(self) -> None:
        """Close every environment and end the workers. A second call does nothing.

        Processes that do not end within 3 seconds are killed, and threads are abandoned; both is logged.
        """
        self._observation = None
        self._failure = self._failure or "it is closed"
        self._finished, self._flying[:] = [], False
        self._end()

    def state_dict(self) -> dict[str, Any]:
        """Return the seeds of the current episodes and, if they are replayable, their actions so far."""
        actions, step_N = [], torch.full((self.num_envs,), -1, dtype=torch.int64, device="cpu")
        if self._failure is None:
            self._check_usable("state_dict")
            self._call({worker.number: Request("save", ()) for worker in self._workers})
            for worker in self._workers:
                saved = self._values[worker.number].value
                actions += map_tree(torch.from_numpy, saved["actions"])
                step_N[worker.rows.start : worker.rows.stop] = torch.from_numpy(saved["steps"])
                step_N[[worker.rows.start + row for row in worker.lost]] = -1  # the loop knows the lost episode only
        return {
            "seeds": self._seeds.state_dict(),
            "options": self._options.state_dict(),
            "observation": self._observation,
            "actions": actions,
            "steps": step_N,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Reset with the saved seeds and repeat the actions. Without saved actions, `reset` must be called next.

        Raises ValueError for the state of other environments, and EnvironmentContractError if a repeated episode
        differs from the saved one.
        """
        self._check_usable("load_state_dict")
        self._seeds.load_state_dict(state["seeds"])
        self._options.load_state_dict(state["options"])
        self._observation, self._begun = None, False
        self._episode_seeds = self._seeds.current
        if not can_repeat(self._name, state, self.num_envs, self.replayable):
            return
        requests = {}
        for k, rows in enumerate(self._blocks):
            args = ({**_state_of(state, rows), "options": self._options.part(rows)},)
            requests[k] = Request("load", args, steps=1 + int(state["steps"][rows.start : rows.stop].max()))
        self._call(requests)
        self._take_all()

    def __repr__(self) -> str:
        of_workers = f"workers={self.workers}, mode={self.mode!r}"
        return representation(self, repr(self._name), f"num_envs={self.num_envs}", of_workers)

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"{self._name}: workers were ended; build a new environment ({self._failure})")

    def _check_usable(self, method: str) -> None:
        self._check_failure()
        if self._flying.any():
            raise RuntimeError(f"{self._name}: call receive() for all environments that were sent, before {method}()")

    def _check(self, method: str, action: Tree, rows: int) -> None:
        if self._observation is None and self._failure is None:
            raise RuntimeError(f"{self._name}: call reset() before {method}()")
        if method == "send":
            self._check_failure()
        else:
            self._check_usable(method)
        if not self._checked:
            check_action(action, rows, self.single_action_space)
            check_observation(self._observation, self.num_envs, self.single_observation_space)
            self._checked = True
        for path, leaf in leaves(action, "action"):
            if leaf.shape[:1] != (rows,):
                raise EnvironmentContractError(f"{path}: expected a tensor of {rows} rows, got {tuple(leaf.shape)}")

    def _by_worker(self, rows: Sequence[int]) -> dict[int, list[int]]:
        """Return the environments `rows` by worker, as rows of the worker."""
        groups: dict[int, list[int]] = {}
        for row in rows:
            k = self._worker_of[row]
            groups.setdefault(k, []).append(row - self._blocks[k].start)
        return groups

    def _ask_steps(self, action: Tree, rows: Sequence[int]) -> None:
        """Let the workers step the environments `rows` (R,) with `action` (R, *A). A range has all environments."""
        asked: list[tuple[_Worker, Sequence[int]]] = []
        if isinstance(rows, range):
            for worker in self._workers:
                mine = slice(worker.rows.start, worker.rows.stop)
                put_actions(worker.slots.action, slice(None), map_tree(lambda x, mine=mine: x[mine], action))
                asked.append((worker, range(len(worker.rows))))
        else:
            place = {row: k for k, row in enumerate(rows)}
            for k, mine in self._by_worker(rows).items():
                worker = self._workers[k]
                chosen = torch.tensor([place[worker.rows.start + row] for row in mine], dtype=torch.int64, device="cpu")
                put_actions(worker.slots.action, np.array(mine), map_tree(lambda x, chosen=chosen: x[chosen], action))
                asked.append((worker, mine))
        self._flying[slice(None) if isinstance(rows, range) else [*rows]] = True
        try:
            for worker, mine in asked:
                self._ask_step(worker, mine)
        except BaseException as error:  # such as KeyboardInterrupt, after which some environments were not sent
            self._abort(error)

    def _ask_step(self, worker: _Worker, rows: Sequence[int]) -> None:
        lost = [row for row in rows if row in worker.lost] if worker.lost else []
        if lost:
            self._finish_lost(worker, {row: worker.lost.pop(row) for row in lost})
            rows = [row for row in rows if row not in lost]
        if rows:
            mine = None if isinstance(rows, range) else rows
            worker.ask(Request("step", (mine, worker.take_changed()), rows))

    def _finish_lost(self, worker: _Worker, lost: Mapping[int, Any]) -> None:
        """Finish the step of environments whose episode was lost. `lost` has the options of their new episodes."""
        numbers = [worker.rows.start + row for row in lost]
        worker.slots.put_lost([*lost], map_tree(lambda x: x[numbers], self._observation))
        self._finished.append(_Part(worker, [*lost], True, [*lost.items()]))

    def _await_steps(self) -> TimeStep:
        while any(worker.pending for worker in self._workers):
            self._pump(math.inf)
        return self._received()[1]

    def _received(self) -> tuple[list[int], TimeStep]:
        """Return the environments (R,) whose steps have ended, in increasing order, and their rows."""
        parts, self._finished = sorted(self._finished, key=lambda part: part.first), []
        rows = [part.worker.rows.start + row for part in parts for row in part.rows]
        slots = [(part.worker.slots, part.chosen) for part in parts]
        observation = final = _joined([(one.observation, chosen) for one, chosen in slots])
        ended = any(part.ended for part in parts)
        if ended:
            each = [part.worker.slots.final if part.ended else part.worker.slots.observation for part in parts]
            final = _joined([(tree, part.chosen) for tree, part in zip(each, parts, strict=True)])
        terminated_R, truncated_R, valid_R = torch.from_numpy(
            np.concatenate([one.flags[:, chosen] for one, chosen in slots], 1)
        ).unbind()
        time_step = TimeStep(
            observation=observation,
            reward=_joined([(one.reward, chosen) for one, chosen in slots]),
            terminated=terminated_R,
            truncated=truncated_R,
            final_observation=final,
            valid=valid_R,
            info={key: _joined([(one.info[key], chosen) for one, chosen in slots]) for key in self._info},
        )
        if any(a > b for a, b in pairwise(rows)):
            order_R = torch.tensor(rows, dtype=torch.int64, device="cpu").argsort()
            rows, time_step = sorted(rows), map_tree(lambda x: x[order_R], time_step)
        if len(rows) == self.num_envs:
            self._observation, self._flying = time_step.observation, np.zeros(self.num_envs, np.bool_)
        else:
            row_R = torch.tensor(rows, dtype=torch.int64, device="cpu")
            self._observation = with_rows(self._observation, row_R, time_step.observation)
            self._flying[rows] = False
        if ended:
            self._show(parts)
        return rows, time_step

    def _show(self, parts: Sequence[_Part]) -> None:
        """Update the seeds and options of the current episodes, of which results have been received."""
        self._episode_seeds = self._episode_seeds.clone()
        for part in parts:
            first = part.worker.rows.start
            numbers = [first + row for row in part.rows]
            self._episode_seeds[numbers] = torch.from_numpy(part.worker.slots.seed[part.chosen])
            for row, options in part.options:
                self._options.record(first + row, options)

    def _follow(self, worker: _Worker, rows: Sequence[int]) -> None:
        """Update the episode counters, of which results have arrived."""
        for row in rows:
            index, seed = int(worker.slots.index[row]), int(worker.slots.seed[row])
            self._seeds.follow(worker.rows.start + row, index, seed)

    def _begin(self, again: bool | None, episode_seeds: Sequence[Sequence[int]]) -> Tree:
        self._call({k: self._begin_request(k, again, episode_seeds[k]) for k in range(len(self._workers))})
        if any(answer.value for answer in self._values.values()):
            warn_of_mask(self._name, {ACTION_MASK: True})
        return self._take_all()

    def _begin_request(self, k: int, again: bool | None = None, episode_seeds: Sequence[int] = ()) -> Request:
        rows = self._blocks[k]
        return Request("begin", (self._seeds.part(rows), self._options.part(rows), again, episode_seeds))

    def _take_all(self) -> Tree:
        """Take the first observations of all environments, and their seeds and options."""
        for worker in self._workers:
            self._follow(worker, range(len(worker.rows)))
            worker.lost, worker.changed = {}, {}
        options = [(worker, self._values[worker.number].options or ()) for worker in self._workers]
        self._show([_Part(worker, range(len(worker.rows)), True, mine) for worker, mine in options])
        self._observation = _joined([(worker.slots.observation, slice(None)) for worker in self._workers])
        self._begun = True
        return self._observation

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

    def _handle(self, worker: _Worker, answer: Answer | None) -> None:
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
            self._finished.append(_Part(worker, request.rows, answer.value, answer.options or ()))
            if answer.value:
                self._follow(worker, request.rows)
        else:
            self._values[worker.number] = answer

    def _check_silent(self, workers: Sequence[_Worker], now: float) -> None:
        """Handle the failures of workers that have ended without an answer, or that do not answer in time."""
        for worker in workers:
            if worker.has_ended and not worker.has_answer:
                self._fail(worker, self._lost(worker))
        limit = math.inf if self.timeout is None else self.timeout
        late = [w for w in workers if w is self._workers[w.number] and now - w.since > limit * w.pending[0].steps]
        late = [w for w in late if not w.has_answer]
        if late and self.on_failure == "raise":
            self._abort(self._late(late), late)
        for worker in late:
            self._fail(worker, self._late([worker]))

    def _fail(self, worker: _Worker, error: Exception) -> None:
        """Replace a worker that has failed, or end all workers and raise the error."""
        pending = worker.pending
        while True:
            if self.on_failure == "raise" or self.restarts >= self.max_restarts:
                self._abort(error, [worker])
            self.restarts += 1
            count = f"{self.restarts} of {self.max_restarts}"
            logger.warning("%s: restart %s of a worker after a failure: %s", self._name, count, text_of(error))
            self._discard(worker, isinstance(error, WorkerTimeout))
            worker = self._workers[worker.number] = self._new(worker.number)
            try:
                self._replace(worker, pending)
                return
            except Exception as another:  # the next attempt reports it
                error = another

    def _replace(self, worker: _Worker, pending: Sequence[Request]) -> None:
        """Start a worker in the place of one that failed with these requests. Its environments begin new episodes."""
        limit = None if self.timeout is None else _START + self.timeout
        worker.start()
        self._await_one(worker, limit)
        worker.attach(self._about)
        if self._begun:
            worker.ask(self._begin_request(worker.number))
            begun = self._await_one(worker, limit)
            rows = range(len(worker.rows))
            self._follow(worker, rows)
            worker.lost = dict.fromkeys(rows) | dict(begun.options or ())
        stepped = [row for request in pending if request.method == "step" for row in request.rows]
        if stepped:
            self._finish_lost(worker, {row: worker.lost.pop(row) for row in stepped})
        for request in pending:
            if request.method != "step":
                worker.ask(request)

    def _await_one(self, worker: _Worker, limit: float | None) -> Answer:
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

    def _new(self, number: int) -> _Worker:
        rows = self._blocks[number]
        if self.mode == "processes":
            return ProcessWorker(number, rows, self._build, self._name)
        return ThreadWorker(number, rows, self._build, self._bell, self._name)

    def _discard(self, worker: _Worker, hangs: bool) -> None:
        """End a worker that has failed."""
        worker.ask_to_close()
        if not hangs:
            worker.join(time.monotonic() + _GRACE)
        happened = worker.kill()
        if happened and isinstance(worker, ThreadWorker):
            logger.warning("%s: worker %d %s", self._name, worker.number, happened)

    def _abort(self, error: BaseException, failed: Sequence[_Worker] = ()) -> NoReturn:
        """End all workers, and raise the error."""
        self._failure = text_of(error)
        self._observation = None
        self._finished, self._flying[:] = [], False
        for worker in failed:
            self._workers.remove(worker)
            self._discard(worker, isinstance(error, WorkerTimeout))
        self._end()
        raise error

    def _facts(self, worker: _Worker) -> dict[str, Any]:
        """Return the attributes of a WorkerError."""
        facts: dict[str, Any] = {"pid": worker.pid, "exitcode": worker.exitcode}
        row, seed = worker.place
        if (
            row < 0
            and worker.is_attached
            and len(worker.rows) == 1
            and (seed := self._seeds.of(worker.rows.start)) >= 0
        ):
            row = 0
        if row >= 0:
            action = map_tree(lambda x: x[row].tolist(), worker.slots.action)
            facts |= {"environment": worker.rows.start + row, "episode_seed": seed, "action": action}
        return facts

    def _described(self, worker: _Worker, facts: Mapping[str, Any]) -> str:
        """Describe a worker, for instance as `Taxi-v4, worker 1 of 4 (pid 71, environment 2, ...)`."""
        known = [f"pid {worker.pid}"] if worker.pid is not None else []
        known += [ending(facts["exitcode"])] if facts["exitcode"] is not None else []
        if "environment" in facts:
            action = reprlib.repr(facts["action"])
            known += [
                f"environment {facts['environment']}",
                f"episode seed {facts['episode_seed']}",
                f"action {action}",
            ]
        else:
            known += [f"environments {worker.rows.start} to {worker.rows.stop - 1}"]
            seeds = self._seeds.part(worker.rows)[2]
            known += [f"episode seeds {reprlib.repr(seeds)}"] if min(seeds) >= 0 else []
        return f"{self._name}, worker {worker.number} of {len(self._blocks)} ({', '.join(known)})"

    def _lost(self, worker: _Worker) -> WorkerError:
        """Return the error of a worker that has ended or has sent something other than an answer."""
        facts = self._facts(worker)
        if worker.garbage is not None:
            return WorkerError(f"{self._described(worker, facts)} {worker.garbage}; {GARBAGE_ADVICE}", **facts)
        when = "" if worker.is_attached else " while it made its environments; stderr may contain the reason"
        return WorkerDied(f"{self._described(worker, facts)} ended unexpectedly{when}", **facts)

    def _late(self, workers: Sequence[_Worker], limit: float | None = None) -> WorkerTimeout:
        facts = [self._facts(worker) for worker in workers]
        each = [self._described(worker, mine) for worker, mine in zip(workers, facts, strict=True)]
        seconds = (self.timeout or 0.0) * workers[0].pending[0].steps if limit is None else limit
        return WorkerTimeout(f"{' and '.join(each)}: no answer within {seconds:g} s", **facts[0])

    def _error_of(self, worker: _Worker, answer: Answer) -> Exception:
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


def _joined(pieces: Sequence[tuple[Any, Any]]) -> Tree:
    """Return the chosen rows of several trees of arrays (N, ...) as new tensors."""
    first = pieces[0][0]
    if isinstance(first, dict):
        return {key: _joined([(tree[key], chosen) for tree, chosen in pieces]) for key in first}
    return torch.from_numpy(np.concatenate([tree[chosen] for tree, chosen in pieces]))


def _state_of(state: Mapping[str, Any], rows: range) -> dict[str, Any]:
    """Return the part of a state that belongs to the environments `rows`, without options."""
    mine = slice(rows.start, rows.stop)
    seeds = {key: value[mine] if isinstance(value, Tensor) else value for key, value in state["seeds"].items()}
    part = {"seeds": seeds, "observation": map_tree(lambda x: x[mine], state["observation"])}
    part |= {"actions": state["actions"][mine], "steps": state["steps"][mine]}
    return map_tree(lambda x: x.numpy() if isinstance(x, Tensor) else x, part)


def _end_all(workers: list[_Worker], name: str) -> None:
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
