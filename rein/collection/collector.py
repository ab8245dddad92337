"""Base class of collectors, which collect the steps of each environment on its own and hand them over as rows.

Their policy selects actions for some of the environments.

Shapes: N environments, R of them, L rows that a collector holds, C features of a carry.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from rein.agents.base.action_noise import OrnsteinUhlenbeck
from rein.agents.base.agent import Agent
from rein.agents.base.policies import build_on, load_parameters, parameters_of, snapshot
from rein.episodes.step import Collected
from rein.ops.random import generator
from rein.ops.trees import map_tree, to_device
from rein.types import Tree


class CollectionPolicy:
    """Policy that selects exploring actions for some of the environments, with the parameters of an agent.

    The policy has its own generator, and a carry and exploration noise for each environment. Schedules are those of the
    agent.

    Args:
        agent: agent that learns.
        num_envs: number of environments N.
        copies: whether the policy has a copy of the parameters. Otherwise it shares the modules of the agent. In both
            cases `refresh` must be called after the agent has learned.
        epsilon: probability of a random action in each environment (N,), for agents with action values. By default the
            environments explore as the agent does.
        device: device that selects actions, by default that of the agent.

    Raises:
        TypeError: if the agent is not a `rein.Agent`, or if it does not support `epsilon`.
    """

    def __init__(
        self,
        agent: Any,
        num_envs: int,
        *,
        copies: bool,
        epsilon: Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        if not isinstance(agent, Agent):
            raise TypeError(
                f"{type(agent).__name__} cannot act for a part of the environments; use a subclass of rein.Agent"
            )
        if epsilon is not None and not hasattr(agent, "explore_by"):
            raise TypeError(f"epsilon: {type(agent).__name__} does not explore with random actions; remove it")
        self._agent, self._num_envs, self._copies, self._epsilon = agent, num_envs, copies, epsilon
        self.device = device or agent.device
        exploration = getattr(agent, "exploration", None)
        self._copy: Any = None
        if self.device == agent.device:
            self._copy = snapshot(agent, shared=[exploration])
        else:
            self._copy = build_on(agent, self.device)()
            if exploration is not None:
                self._copy.exploration = exploration
        self._copy.generator = generator(agent._root_seed, "collection", agent.env_steps, device=self.device)
        self._copy.carry, self._carry = None, None  # (R, C) and (N, C)
        noise = getattr(agent, "noise", None)
        self._noise = _Noise(noise, num_envs) if isinstance(noise, OrnsteinUhlenbeck) else None
        if self._noise is not None:
            vars(self._copy)["noise"] = self._noise
        self.refresh()

    def refresh(self) -> None:
        """Use the current parameters of the agent from now on."""
        if self._copies:
            load_parameters(self._copy, parameters_of(self._agent))
        else:
            vars(self._copy).update({name: getattr(self._agent, name) for name in parameters_of(self._agent)})

    @torch.no_grad()
    def select_action(self, observation: Tree, rows: Sequence[int]) -> tuple[Tree, dict[str, Tree]]:
        """Return exploring actions (R, ...) and extras for the observations (R, ...) of the environments `rows`."""
        acting = self._copy
        acting.env_steps, acting.updates = self._agent.env_steps, self._agent.updates
        if self._carry is not None:
            acting.carry = self._carry[rows]
        if self._noise is not None:
            self._noise.rows = rows
        if self._epsilon is None or acting.env_steps < getattr(acting, "learning_starts", 0):
            action, extras = acting.select_action(observation)
        else:
            action, extras = acting.act(observation, self._epsilon[rows]), {}
        carry = getattr(acting, "_next_carry", None)
        carry = acting.carry if carry is None else carry
        if carry is not None:
            if self._carry is None:
                self._carry = carry.new_zeros(self._num_envs, carry.shape[1])
            self._carry[rows], acting.carry = carry, None
        return action, extras

    def begin_episodes(self, rows: Sequence[int]) -> None:
        """Zero the carry and reset the noise of the environments `rows`."""
        if self._carry is not None:
            self._carry[rows] = 0.0
        if self._noise is not None:
            self._noise.begin_episodes(rows)


class _Noise:
    """Ornstein-Uhlenbeck noise of the environments `rows`."""

    def __init__(self, noise: OrnsteinUhlenbeck, num_envs: int) -> None:
        self.rows: Sequence[int] = ()
        self._of = [OrnsteinUhlenbeck(noise.theta, noise.amount, noise.mu) for _ in range(num_envs)]

    def __call__(self, action_RA: Tensor, generator: torch.Generator, **counts: int) -> Tensor:
        """Return the next noise (R, A)."""
        actions = zip(self.rows, action_RA.split(1), strict=True)
        return torch.cat([self._of[row](action_1A, generator, **counts) for row, action_1A in actions])

    def begin_episodes(self, rows: Sequence[int]) -> None:
        """Restart the random walks of the environments `rows`."""
        for row in rows:
            self._of[row].reset(torch.ones(1, dtype=torch.bool, device="cpu"))


class Collector(ABC):
    """Holds the steps of N environments until every environment has made one, and hands them over as a row.

    The steps of an environment stay in order. Row d of the loop consists of step d of every environment. A subclass
    is a transport of steps: it begins episodes, and collects until a row is complete.

    Args:
        agent: agent that learns.
        environment: environments that are stepped.
        options: options of the collection, such as `FirstCome()`.
        length: number of rows L that are held at most.
        device: device of these rows, by default that of the agent.
    """

    def __init__(
        self, agent: Any, environment: Any, options: Any, length: int, device: torch.device | None = None
    ) -> None:
        self._agent, self._environment, self._options, self._length = agent, environment, options, length
        self._device = device or agent.device
        self.num_envs, self.single_observation_space = environment.num_envs, environment.single_observation_space
        self.awaits_reset = False
        self.staleness = 0.0  # mean number of updates since the actions of the last row were selected
        self._changed = threading.Condition()  # guards the counts of steps
        self._clear()

    @property
    def config(self) -> dict[str, Any]:
        """Options of the collection, as JSON values."""
        return {"collection": type(self._options).__name__, **attrs.asdict(self._options)}

    @property
    def episode_seeds(self) -> Tensor:
        """(N,) int64: seeds of the episodes to which the next row belongs; -1 before the first reset."""
        seed_N = self._current_seeds().clone()
        with self._changed:
            place = self._delivered % self._length
            for row, sent in enumerate(self._sent):
                if sent > self._delivered:
                    seed_N[row] = self._seeds[place][row]
        return seed_N

    def reset(self) -> Tree:
        """Begin new episodes in all environments. Rows that were not handed over are discarded."""
        self.pause()
        self._clear()
        observation = self._begin()
        self.awaits_reset = False
        return observation

    def next_row(self) -> Collected:
        """Wait until every environment has made its next step, and return the steps as one row."""
        with self._failing():
            self._collect()
        place = self._delivered % self._length
        self.staleness = self._agent.updates - sum(self._versions[place]) / self.num_envs
        fields = {name: map_tree(lambda x: x[place].clone(), field) for name, field in self._fields.items()}
        fields = to_device(fields, self._agent.device)
        seed_N = torch.tensor(self._seeds[place], dtype=torch.int64, device="cpu")
        options = None if self._reset_options[place].count(None) == self.num_envs else [*self._reset_options[place]]
        with self._changed:
            self._delivered += 1
        return Collected(**fields, seed=seed_N, options=options)

    @abstractmethod
    def pause(self) -> None:
        """Wait until no environment steps. Rows that were not handed over are kept."""

    def state_dict(self) -> dict[str, Any]:
        """Pause, so that the state of the environments can be read. Rows that were not handed over are not saved."""
        self.pause()
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Request new episodes, because the environments were ahead of the saved run."""
        self.awaits_reset = True

    @abstractmethod
    def _begin(self) -> Tree:
        """Begin new episodes. Returns the first observations (N, *O)."""

    @abstractmethod
    def _collect(self) -> None:
        """Collect steps until a row is complete."""

    @abstractmethod
    def _current_seeds(self) -> Tensor:
        """Return the seeds (N,) of the episodes to which the next steps belong."""

    def _clear(self) -> None:
        """Discard all rows."""
        rows = range(self._length)
        self._sent, self._received, self._delivered = [0] * self.num_envs, [0] * self.num_envs, 0
        self._fields: dict[str, Tree] = {}
        self._versions = [[0] * self.num_envs for _ in rows]  # updates of the parameters that selected the actions
        self._seeds = [[-1] * self.num_envs for _ in rows]
        self._reset_options: list[list[Any]] = [[None] * self.num_envs for _ in rows]  # reset options
        self._error: BaseException | None = None

    def _complete(self) -> bool:
        return min(self._received) > self._delivered

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Context after whose errors the environments must be reset. Until then, `pause` does not wait for them."""
        try:
            yield
        except BaseException as error:  # raised again
            self._error, self.awaits_reset = error, True
            raise

    def _write_sent(
        self,
        values: Mapping[str, Tree],
        rows: Sequence[int],
        version: int,
        seeds: Sequence[int],
        reset_options: Sequence[Any] | None = None,
    ) -> None:
        """Write observations, actions and extras (R, ...) of the next steps of `rows`.

        `seeds` and `reset_options` belong to the episodes of these rows.
        """
        self._write(values, rows, self._sent)
        for row, seed, options in zip(rows, seeds, reset_options or [None] * len(rows), strict=True):
            place = self._sent[row] % self._length
            self._versions[place][row], self._seeds[place][row], self._reset_options[place][row] = (
                version,
                seed,
                options,
            )

    def _count(self, counts: list[int], rows: Sequence[int]) -> None:
        """Count the steps of `rows` as sent or received."""
        with self._changed:
            for row in rows:
                counts[row] += 1
            self._changed.notify_all()

    def _write(self, values: Mapping[str, Tree], rows: Sequence[int], counts: Sequence[int]) -> None:
        place_R = torch.tensor([counts[row] % self._length for row in rows], dtype=torch.int64, device=self._device)
        row_R = torch.tensor(rows, dtype=torch.int64, device=self._device)
        for name, value in to_device(dict(values), self._device).items():
            if name not in self._fields:
                self._fields[name] = map_tree(lambda x: x.new_zeros(self._length, self.num_envs, *x.shape[1:]), value)
            map_tree(lambda field, x: field.index_put_((place_R, row_R), x), self._fields[name], value)
