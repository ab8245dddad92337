"""Collection that steps each environment as soon as it is ready.

Shapes: N environments, R of them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from rein.collection.collector import CollectionPolicy, Collector
from rein.envs.base.contract import checked_count
from rein.episodes.step import Collected
from rein.ops.trees import checked_device, map_tree, to_device
from rein.types import Tree

_POLL = 0.1  # seconds between two checks whether the background thread must end


@attrs.frozen(kw_only=True)
class FirstCome:
    """Collection that acts in each environment as soon as it is ready, while the others keep stepping.

    Use it for environments whose steps take different times. Each row of the loop has one step of every environment,
    as usual, but an environment may be up to `ahead` steps ahead of the slowest one. On-policy agents learn from
    actions of the current parameters only, because no environment goes beyond the end of a rollout.

    The environments must have `send` and `receive`, such as those of `rein.make(..., workers=8)`.

    Args:
        min_batch: number of ready environments to wait for before actions are selected.
        max_wait: longest time in seconds to wait for `min_batch` environments. By default there is no limit, except
            that actions are selected if all environments are ready.
        ahead: number of steps that an environment may be ahead of the slowest one.
        device: device that selects actions with a copy of the parameters, such as "cpu" for a small network beside an
            agent on a GPU. By default that of the agent.
    """

    min_batch: int = 1
    max_wait: float | None = None
    ahead: int = 64
    device: str | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("min_batch", "ahead"):
            checked_count(f"{type(self).__name__}({name}={getattr(self, name)!r})", getattr(self, name))

    def collector(self, agent: Any, environment: Any) -> Collector:
        """Return the collector of a loop."""
        return FirstComeCollector(agent, environment, self)


@attrs.frozen(kw_only=True)
class Asynchronous(FirstCome):
    """Collection in a separate thread while the agent learns.

    The thread acts with a copy of the parameters. Recorded actions are up to `ahead` steps old. The thread waits if it
    is `ahead` steps ahead of the agent, so no transition is lost. The metric `staleness` is the mean number of updates
    between the selection of an action and its use.

    Args:
        refresh: number of updates after which the copy of the parameters is refreshed.
        epsilon: probability of a random action in each environment (Ape-X, Horgan et al. 2018), for agents with action
            values. By default all environments explore as the agent does.
    """

    refresh: int = 1
    epsilon: Sequence[float] | None = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        checked_count(f"Asynchronous(refresh={self.refresh!r})", self.refresh)

    def collector(self, agent: Any, environment: Any) -> Collector:
        """Return the collector of a loop."""
        return AsynchronousCollector(agent, environment, self)


class FirstComeCollector(Collector):
    """Steps the environments of a loop as soon as each is ready. See `FirstCome`."""

    def __init__(
        self,
        agent: Any,
        environment: Any,
        options: FirstCome,
        *,
        copies: bool = False,
        epsilon: Sequence[float] | None = None,
    ) -> None:
        if not hasattr(environment, "send"):
            raise TypeError(
                f"training_loop(collection={options!r}): {type(environment).__name__} cannot step its environments one "
                "by one; use rein.make(..., workers=...), or remove collection"
            )
        super().__init__(agent, environment, options, options.ahead + 1)
        device = agent.device if options.device is None else checked_device(options.device)
        epsilon_N = _checked_epsilon(epsilon, self.num_envs, device)
        copies = copies or device != agent.device
        self._policy = CollectionPolicy(agent, self.num_envs, copies=copies, epsilon=epsilon_N, device=device)
        self._version = 0  # number of updates of the parameters that the policy uses
        self._acting = threading.Lock()  # held while the policy uses or copies parameters

    def pause(self) -> None:
        """Wait until no environment steps, unless one has failed. Rows that were not handed over are kept."""
        with self._failing():
            while self._in_flight() and self._error is None:
                self._receive(None)

    def _begin(self) -> Tree:
        self._observation = self._environment.reset()
        self._refresh()
        self._policy.begin_episodes(range(self.num_envs))
        return self._observation

    def _collect(self) -> None:
        self._limit = self._delivered + min(self._options.ahead, _rows_left(self._agent))
        if self._agent.updates != self._version:
            self._refresh()
        while not self._complete():
            self._advance(None)

    def _current_seeds(self) -> Tensor:
        return self._environment.episode_seeds

    def _clear(self) -> None:
        super()._clear()
        self._limit = 0  # number of steps that an environment may have been sent
        self._ready_since: float | None = None

    def _refresh(self) -> None:
        with self._acting:
            self._policy.refresh()
            self._version = self._agent.updates

    def _in_flight(self) -> bool:
        return self._sent != self._received

    def _ready(self) -> list[int]:
        pairs = enumerate(zip(self._sent, self._received, strict=True))
        return [row for row, (sent, received) in pairs if sent == received and sent < self._limit]

    def _advance(self, wait: float | None) -> None:
        """Act in the environments that are ready, or wait until another one is, for at most `wait` seconds."""
        ready, now = self._ready(), time.monotonic()
        self._ready_since = None if not ready else self._ready_since or now
        longest = self._options.max_wait
        if ready and longest is not None:
            left = self._ready_since + longest - now  # type: ignore[operator]  # set above
            wait = left if wait is None else min(wait, left)
        enough = len(ready) >= self._options.min_batch or not self._in_flight()
        if ready and (enough or (wait is not None and wait <= 0.0)):
            self._ready_since = None
            self._act(ready)
        else:
            self._receive(wait)

    def _act(self, rows: list[int]) -> None:
        seeds = self._environment.episode_seeds.tolist()
        episode_options = getattr(self._environment, "episode_options", None)
        observation = to_device(map_tree(lambda x: x[rows], self._observation), self._policy.device)
        with self._acting:
            action, extras = self._policy.select_action(observation, rows)
            version = self._version
        values = {"observation": observation, "action": action, "extras": extras}
        options = None if episode_options is None else [episode_options[row] for row in rows]
        self._write_sent(values, rows, version, [seeds[row] for row in rows], options)
        self._environment.send(to_device(action, self._environment.device), rows)
        self._count(self._sent, rows)

    def _receive(self, wait: float | None) -> None:
        try:
            rows, time_step = self._environment.receive(wait)
        except TimeoutError:
            return
        row_R = torch.tensor(rows, dtype=torch.int64, device="cpu")
        self._observation = map_tree(
            lambda x, new: x.index_copy(0, row_R, new), self._observation, time_step.observation
        )
        ended_R = time_step.terminated | time_step.truncated | ~time_step.valid
        with self._acting:
            self._policy.begin_episodes(row_R[ended_R.cpu()].tolist())
        self._write({"time_step": time_step}, rows, self._received)
        self._count(self._received, rows)


class AsynchronousCollector(FirstComeCollector):
    """Steps environments in a thread while the agent learns. See `Asynchronous`."""

    def __init__(self, agent: Any, environment: Any, options: Asynchronous) -> None:
        super().__init__(agent, environment, options, copies=True, epsilon=options.epsilon)
        self._thread: threading.Thread | None = None

    def pause(self) -> None:
        """End the thread, and wait as `FirstComeCollector` does."""
        if self._thread is not None:
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            self._thread.join()
            self._thread = None
        super().pause()

    def _clear(self) -> None:
        super()._clear()
        self._stopping = False

    def next_row(self) -> Collected:
        """Hand over a row, after which the thread may go a step further."""
        row = super().next_row()
        with self._changed:
            self._limit = self._delivered + self._options.ahead
            self._changed.notify_all()
        return row

    def _collect(self) -> None:
        """Refresh the parameters of the policy if an update is due, and wait for the thread to complete a row."""
        if self._agent.updates - self._version >= self._options.refresh:
            self._refresh()
        with self._changed:
            self._limit = self._delivered + self._options.ahead
            if self._thread is None and self._error is None:
                self._stopping = False
                self._thread = threading.Thread(target=self._run, name="rein-collector", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._complete() or self._error is not None)
        if not self._complete() and self._error is not None:
            self.pause()
            raise self._error

    def _run(self) -> None:
        """Collect in the thread until the collector is paused."""
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping or self._in_flight() or self._ready())
                    if self._stopping:
                        return
                self._advance(_POLL)
        except BaseException as error:  # raised again by next_row
            with self._changed:
                self._error = error
                self._changed.notify_all()


def _checked_epsilon(epsilon: Sequence[float] | None, num_envs: int, device: torch.device) -> Tensor | None:
    if epsilon is None:
        return None
    epsilon_N = torch.tensor([*epsilon], dtype=torch.float32, device=device)
    if len(epsilon_N) != num_envs or bool(((epsilon_N < 0) | (epsilon_N > 1)).any()):
        raise ValueError(
            f"Asynchronous(epsilon={epsilon!r}): give one number from 0 to 1 for each of the {num_envs} environments"
        )
    return epsilon_N


def _rows_left(agent: Any) -> int:
    """Return the number of rows until the rollout of an on-policy agent is full."""
    rollout = vars(agent).get("rollout")
    return sys.maxsize if rollout is None else rollout.steps - len(rollout)
