"""What the parts look like to each other: shapes, no base classes. `rein.testing` ships a test suite for each.

Shapes: N environments, O one observation, A one action, T steps. Observations may be nested dictionaries of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rein.types import TimeStep, Trajectory, Transition, Tree


@runtime_checkable
class Stateful(Protocol):
    """Whatever must come back at a resume exactly as it was.

    A state is made of dictionaries with string keys, lists, tensors, numbers, strings, booleans and None only, so that
    a checkpoint can hold it without pickle. `state_dict` may share memory with the part: whoever keeps it copies it.
    Of wrappers ask with `hasattr`: they have a state where the environment inside has one.
    """

    def state_dict(self) -> dict[str, Any]:
        """Everything that the part's future depends on."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become the part that `state_dict` was taken from."""
        ...


@runtime_checkable
class Environment(Protocol):
    """N environments that step together. Each one resets itself in the step in which its episode ends."""

    @property
    def num_envs(self) -> int:
        """N."""
        ...

    @property
    def single_observation_space(self) -> Any:
        """The gymnasium.spaces.Space of one environment's observations."""
        ...

    @property
    def single_action_space(self) -> Any:
        """The gymnasium.spaces.Space of one environment's actions."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of observations and actions."""
        ...

    @property
    def seed(self) -> int | None:
        """None until given, or seeded by `training_loop(seed=)`."""
        ...

    @property
    def replayable(self) -> bool:
        """Whether the seed and the actions of an episode reproduce it bit for bit."""
        ...

    @property
    def episode_seeds(self) -> Tensor:
        """(N,) int64: seeds of the current episodes; -1 if unknown."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """Constructor options, as JSON."""
        ...

    def reset(self, seed: int | None = None) -> Tree:
        """Begin the next episode of every environment, from episode 0 if `seed` is given. Returns (N, *O)."""
        ...

    def apply_action(self, action: Tree) -> TimeStep:
        """Step every environment with `action` (N, *A)."""
        ...

    def reseed(self, seed: int) -> None:
        """Set the seed of all streams. Raises RuntimeError after the first reset."""
        ...

    def close(self) -> None:
        """Release all resources. May be called twice."""
        ...


@runtime_checkable
class Replayable(Protocol):
    """An environment that can repeat episodes by their seeds, for replays and videos."""

    def reset_to(self, episode_seeds: Tensor) -> Tree:
        """Begin the episodes with these seeds (N,). Later episodes are seeded as usual. Returns (N, *O)."""
        ...


@runtime_checkable
class PartlyResettable(Protocol):
    """An environment that can reset some rows only. Test wrappers with `hasattr`, see `Wrapper`."""

    def reset_where(self, mask: Tensor) -> Tree:
        """Begin the next episode where `mask` (N,) is True. Returns the observation (N, *O) of all environments."""
        ...


@runtime_checkable
class PartlySteppable(Protocol):
    """An environment that can step some rows only. Test wrappers with `hasattr`, see `Wrapper`.

    A row that is not stepped is not valid, nothing ended in it, its reward is 0, and its observation and
    final_observation are the current one. With an attribute `steps_separately = True`, stepping a part costs less than
    stepping all: evaluations, replays and episodic epochs then leave out the environments whose episode has ended.
    """

    def apply_action_where(self, action: Tree, mask: Tensor) -> TimeStep:
        """Step the rows where `mask` (N,) is True; `action` (N, *A) has all rows."""
        ...


@runtime_checkable
class Policy(Protocol):
    """Acts and nothing else. Shares the agent's parameters; has buffers, carry and generator of its own.

    One that draws or remembers is `Stateful` as well: its state is what it does not share with the agent. One that
    lives elsewhere than its environments has a `device`.
    """

    def select_action(self, observation: Tree) -> tuple[Tree, Mapping[str, Tensor]]:
        """The action (N, *A) for an observation (N, *O), and what goes with it."""
        ...

    def reset(self, mask: Tensor | None = None) -> None:
        """Begin new episodes where `mask` (N,) is True; everywhere without one."""
        ...


@runtime_checkable
class AgentProtocol(Protocol):
    """Agent as the training loop uses it. `rein.agents.Agent` is a base class that provides most of it.

    An agent owns its networks, optimizers, replay and random generator, and counts env steps and updates.
    """

    @property
    def observation_space(self) -> Any:
        """The gymnasium.spaces.Space of one environment's observations."""
        ...

    @property
    def action_space(self) -> Any:
        """The gymnasium.spaces.Space of one environment's actions."""
        ...

    @property
    def device(self) -> torch.device:
        """Where observations are expected and actions come from."""
        ...

    @property
    def seed(self) -> int | None:
        """None until given, or seeded by `training_loop(seed=)`."""
        ...

    @property
    def env_steps(self) -> int:
        """Rows recorded so far, N per vector step."""
        ...

    @property
    def updates(self) -> int:
        """Optimizer steps so far."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        ...

    def select_action(self, observation: Tree) -> tuple[Tree, Mapping[str, Tensor]]:
        """The action (N, *A) to explore with for an observation (N, *O), and extras to be recorded with it."""
        ...

    def record_observation(self, transition: Transition) -> None:
        """Take in one transition of every environment; rows that are not `valid` are no data."""
        ...

    def observe_reset(self, observation: Tree, mask: Tensor) -> None:
        """The environments in `mask` (N,) were reset outside a step: no return or sequence may reach over it."""
        ...

    def optimize_model(self) -> Mapping[str, Tensor]:
        """Learn, if it is time to. Returns metrics, left on the device; empty when nothing was done."""
        ...

    def policy(self, deterministic: bool = True) -> Policy:
        """A policy that follows the agent's parameters; evaluating it never touches training."""
        ...

    def reseed(self, seed: int) -> None:
        """Take `seed` for all streams and draw the parameters anew; refused after the first step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """See `Stateful`."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Stateful`."""
        ...


@runtime_checkable
class Buffer(Protocol):
    """Keeps transitions of N environments, which are sampled from."""

    def append(self, transition: Transition) -> None:
        """Take in one transition of every environment."""
        ...

    def observe_reset(self, mask: Tensor) -> None:
        """The environments in `mask` (N,) bool were reset outside a step: nothing reaches over that."""
        ...

    def sample(self, batch_size: int, generator: torch.Generator) -> Any:
        """So many rows, drawn under `generator`; a named tuple of tensors (B, ...). Raises ValueError for none."""
        ...

    def __len__(self) -> int:
        """Transitions that can be sampled."""
        ...


@runtime_checkable
class Store(Protocol):
    """Keeps trajectories for good. `append` hands over a whole epoch; what it returns from `flush` is safe."""

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        ...

    def append(self, trajectory: Trajectory) -> None:
        """Take in one epoch; may return before it is on the disk. Raises StoreError if an earlier write failed."""
        ...

    def flush(self) -> None:
        """Return when everything appended so far is safe."""
        ...

    def close(self) -> None:
        """Flush and release what the store holds; may be called twice."""
        ...


@runtime_checkable
class Logger(Protocol):
    """Takes down numbers: an observer, which never influences a run.

    It may have `describe(settings)`, `go_on(clocks)` and `finish(status)` as well, which `rein.handlers.loggers.attach`
    calls where they are: what the run is, that it goes on from a loaded state that stands there, and how it ended.
    """

    def write(self, clocks: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Take down the metrics of an epoch with the clocks at which they were measured."""
        ...

    def close(self) -> None:
        """Write what is left and release what the logger holds; may be called twice."""
        ...
