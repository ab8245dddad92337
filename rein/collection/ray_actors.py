"""Collection by Ray actors, on one machine or on a cluster.

Each actor steps a part of the environments with a copy of the agent, and returns fragments of several steps.

Shapes: N environments, n of an actor, T steps of a fragment.
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from rein.agents.base.policies import load_parameters, parameters_of
from rein.collection.collector import CollectionPolicy, Collector
from rein.envs.base.contract import checked_count
from rein.errors import WorkerDied, optional_import
from rein.ops.random import stream_seed
from rein.ops.trees import map_tree, to_device
from rein.options import options_of
from rein.types import TimeStep, Tree

logger = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class RayActors:
    """Collection by Ray actors, which step the environments and select actions with a copy of the agent.

    Requires `pip install ray`. Call `ray.init(address="auto")` first to use a cluster. Otherwise Ray starts
    on this machine. The environments must come from `rein.make(id_or_factory, num_envs)`, and are built again in the
    actors.

    Each row of the loop has one step of every environment. If an actor dies, a new one begins new episodes. The steps
    that it had not returned are lost, and its open episodes end as truncated with a row that is not valid.

    Args:
        actors: number of actors, at most N. Each has about N / `actors` environments.
        fragment: number of steps T that an actor makes at a time. By default the rollout of an on-policy agent, or 32.
        ahead: number of fragments that an actor may be ahead of the agent. With 0, actors wait while the agent learns.
        refresh: number of updates after which the actors get new parameters.
        max_restarts: number of actors that may be replaced before WorkerDied is raised.
        num_cpus: number of CPUs that Ray reserves for an actor.
    """

    actors: int = 2
    fragment: int | None = None
    ahead: int = 1
    refresh: int = 1
    max_restarts: int = 10
    num_cpus: float = 1.0

    def __attrs_post_init__(self) -> None:
        for name in ("actors", "fragment", "refresh"):
            if getattr(self, name) is not None:
                checked_count(f"RayActors({name}={getattr(self, name)!r})", getattr(self, name))

    def collector(self, agent: Any, environment: Any) -> RayCollector:
        """Return the collector of a loop."""
        return RayCollector(agent, environment, self)


class RayCollector(Collector):
    """Collects fragments of Ray actors. See `RayActors`."""

    def __init__(self, agent: Any, environment: Any, options: RayActors) -> None:
        with optional_import("RayActors needs Ray: pip install ray"):
            ray: Any = importlib.import_module("ray")
        worlds, workers = (getattr(environment, name, None) for name in ("worlds", "workers"))
        if not hasattr(environment, "part") or worlds is not None or workers is not None:
            raise TypeError(
                f"training_loop(collection={options!r}): Ray actors cannot build {type(environment).__name__} again; "
                "use rein.make(id_or_factory, num_envs)"
            )
        num_envs, rollout = environment.num_envs, vars(agent).get("rollout")
        if options.actors > num_envs:
            raise ValueError(f"RayActors(actors={options.actors}): there are {num_envs} environments; give fewer")
        self.ray, self.options, self.restarts = ray, options, 0
        self.fragment = options.fragment or (32 if rollout is None else rollout.steps)
        host = torch.device("cpu")  # of the fragments
        super().__init__(agent, environment, options, (options.ahead + 1) * self.fragment, host)
        bounds = [num_envs * k // options.actors for k in range(options.actors + 1)]
        self._blocks = [range(*pair) for pair in pairwise(bounds)]
        self.index_N = torch.full((num_envs,), -1, dtype=torch.int64, device="cpu")  # of the current episodes
        self._actors: list[_Handle] = []

    def pause(self) -> None:
        """Do nothing: actors wait on their own."""

    def _begin(self) -> Tree:
        if not self.ray.is_initialized():
            self.ray.init(include_dashboard=False)
        self._put_weights()
        self._actors = [_Handle(self, block) for block in self._blocks]
        for actor in self._actors:
            actor.begin()
        joined = map_tree(lambda *x: torch.cat(x), *[actor.observation for actor in self._actors])
        return to_device(joined, self._agent.device)

    def _collect(self) -> None:
        if self._agent.updates - self.version >= self.options.refresh:
            self._put_weights()
        for actor in self._actors:
            actor.request()
        while waiting := [actor for actor in self._actors if not self.waiting_rows(actor.block)]:
            done, _ = self.ray.wait([actor.pending for actor in waiting], num_returns=1)
            for actor in waiting:
                if actor.pending in done:
                    actor.receive()
                    actor.request()

    def _current_seeds(self) -> Tensor:
        if not self._actors:
            return torch.full((self.num_envs,), -1, dtype=torch.int64, device="cpu")
        return torch.cat([actor.next_seed for actor in self._actors])

    def _put_weights(self) -> None:
        self.weights, self.version = self.ray.put(_arrays(parameters_of(self._agent))), self._agent.updates

    @property
    def counts(self) -> tuple[int, int]:
        """Env steps and updates of the agent, for its schedules."""
        return self._agent.env_steps, self._agent.updates

    def parts(self, block: range) -> tuple[Any, ...]:
        """Return what an actor needs to build some environments and a copy of the agent."""
        agent = self._agent
        options = {name: getattr(agent, name) for name in options_of(type(agent))}
        options["seed"] = stream_seed(agent._root_seed, f"Ray actor, restart {self.restarts}", block.start)
        spaces = agent.observation_space, agent.action_space
        return self._environment.part(block), type(agent), spaces, {**options, "device": "cpu"}

    def state_dict(self) -> dict[str, Any]:
        """Return the indices of the current episodes. Rows that were not handed over are not saved."""
        return {"index": self.index_N}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the episodes after those of the state."""
        self.index_N, self.awaits_reset = state["index"].clone(), True

    def replace(self, error: BaseException) -> None:
        """Count the replacement of an actor. Raises WorkerDied if there were too many."""
        self.restarts += 1
        if self.restarts > self.options.max_restarts:
            raise WorkerDied(f"a Ray actor died, after {self.options.max_restarts} others had been replaced") from error
        logger.warning("a Ray actor died and is replaced (%d of %d)", self.restarts, self.options.max_restarts)

    def waiting_rows(self, block: range) -> int:
        """Return the number of rows of an actor that were not handed over."""
        return self._received[block.start] - self._delivered

    def add(self, block: range, step: Mapping[str, Any], version: int) -> None:
        """Add one step of the environments of an actor."""
        time_step = TimeStep(**step["time_step"])
        values = {name: step[name] for name in ("observation", "action", "extras")}
        self._write_sent({**values, "time_step": time_step}, block, version, step["seed"].tolist())
        self._count(self._sent, block)
        self._count(self._received, block)


class _Handle:
    """The actor of some environments."""

    def __init__(self, collector: RayCollector, block: range) -> None:
        self._collector, self.block = collector, block
        self.pending: Any = None  # reference of the fragment that was requested
        self.observation: Tree = None  # (n, *O) after the last row
        self.next_seed: Any = None  # (n,) of the current episodes after the last row
        self._last: dict[str, Any] | None = None  # the last step

    def begin(self) -> None:
        """Start an actor and begin new episodes. An actor that dies meanwhile is replaced."""
        owner, own_rows = self._collector, slice(self.block.start, self.block.stop)
        remote = owner.ray.remote(max_restarts=0, num_cpus=owner.options.num_cpus)(_Remote)
        while True:
            try:
                self._actor = remote.remote(*owner.parts(self.block))
                begun = owner.ray.get(self._actor.begin.remote(owner.index_N[own_rows].numpy()))
                break
            except owner.ray.exceptions.RayActorError as error:
                owner.replace(error)
        self.observation, self.next_seed = _tensors(begun)
        owner.index_N[own_rows] += 1

    def request(self) -> None:
        """Request a fragment, unless one was requested or the actor is too far ahead."""
        owner = self._collector
        most_waiting = max(owner.options.ahead * owner.fragment - 1, 0)
        if self.pending is None and owner.waiting_rows(self.block) <= most_waiting:
            self.pending = self._actor.collect.remote(owner.weights, owner.version, owner.counts, owner.fragment)

    def receive(self) -> None:
        """Take the fragment that was requested. If the actor has died, end its episodes and replace it."""
        owner = self._collector
        reference, self.pending = self.pending, None
        try:
            received = owner.ray.get(reference)
        except owner.ray.exceptions.RayActorError as error:
            owner.replace(error)
            self._lose_episodes()
            return
        fragment, version, self.observation, self.next_seed = _tensors(received)
        time_step = fragment["time_step"]
        ended_Tn = time_step["terminated"] | time_step["truncated"]
        owner.index_N[self.block.start : self.block.stop] += ended_Tn.sum(0)
        for step in range(len(ended_Tn)):
            last = self._last = map_tree(lambda x, step=step: x[step], fragment)
            owner.add(self.block, last, version)

    def _lose_episodes(self) -> None:
        """Begin new episodes in another actor, after a row that is not valid."""
        last, before, seed_n = self._last, self.observation, self.next_seed
        self.begin()
        if last is None:  # no step of the lost episodes was returned
            return
        time_step = map_tree(torch.zeros_like, last["time_step"])
        time_step |= {"observation": self.observation, "final_observation": before}
        time_step["truncated"] = torch.ones_like(time_step["truncated"])
        row = {"observation": before, "action": last["action"], "extras": last["extras"], "time_step": time_step}
        self._collector.add(self.block, {**row, "seed": seed_n}, self._collector.version)


class _Remote:
    """Environments and a copy of the agent, in the process of a Ray actor."""

    def __init__(
        self, build: Callable[[], Any], kind: type[Any], spaces: tuple[Any, Any], options: dict[str, Any]
    ) -> None:
        torch.set_num_threads(1)
        self._environment = build()
        self._agent = kind(*copy.deepcopy(spaces), **options)  # Ray's arrays are read-only
        self._rows = list(range(self._environment.num_envs))
        self._policy = CollectionPolicy(self._agent, len(self._rows), copies=False)
        self._version = -1

    def begin(self, index_n: Any) -> Any:
        """Begin the episodes after those with these indices (n,). Returns observations (n, *O) and seeds (n,)."""
        environment = self._environment
        state = environment.state_dict()
        seeds = {"seed": environment.seed, "index": _tensors(index_n), "current": state["seeds"]["current"]}
        environment.load_state_dict({**state, "seeds": {**seeds, "started": True}})
        self._observation = environment.reset()
        return _arrays((self._observation, environment.episode_seeds))

    def collect(self, weights: Any, version: int, counts: tuple[int, int], steps: int) -> Any:
        """Make T steps. Returns the fragment (T, n, ...), the version, and the next observations and seeds."""
        self._agent.env_steps, self._agent.updates = counts
        if version != self._version:
            load_parameters(self._agent, _tensors(weights))
            self._version = version
        rows = [self._step() for _ in range(steps)]
        fragment = map_tree(lambda *x: torch.stack(x), *rows)
        return _arrays((fragment, version, self._observation, self._environment.episode_seeds))

    def pid(self) -> int:
        """Return the id of the process."""
        return os.getpid()

    def _step(self) -> dict[str, Any]:
        seed_n, observation = self._environment.episode_seeds, self._observation
        action, extras = self._policy.select_action(observation, self._rows)
        time_step = self._environment.apply_action(action)
        ended_n = time_step.terminated | time_step.truncated
        self._policy.begin_episodes(ended_n.nonzero().flatten().tolist())
        self._observation = time_step.observation
        row = {"observation": observation, "action": action, "extras": extras, "seed": seed_n}
        return {**row, "time_step": time_step._asdict()}


def _arrays(tree: Any) -> Any:
    """Return a tree with arrays, which Ray shares without a copy."""
    return map_tree(lambda x: x.numpy(force=True) if isinstance(x, Tensor) else x, tree)


def _tensors(tree: Any) -> Any:
    """Return a tree with new tensors for its arrays, which Ray makes read-only."""
    return map_tree(lambda x: torch.from_numpy(np.array(x)) if isinstance(x, np.ndarray | np.generic) else x, tree)
