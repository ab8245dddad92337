"""Protocols of the parts of rein. `rein.testing` has a test suite for each.

Shapes: N environments, O one observation, A one action, T steps. Observations may be nested dictionaries of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rein.types import Group, TimeStep, Trajectory, Transition, Tree


@runtime_checkable
class Stateful(Protocol):
    """Part whose state is saved in checkpoints and restored exactly at a resume.

    A state consists of dictionaries with string keys, lists, tensors, numbers, strings, booleans and None, so that it
    can be stored without pickle. `state_dict` may share memory with the part; copy it to keep it. Test environment
    wrappers with `hasattr`, because they have a state only if the wrapped environment has one.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the future behavior of the part depends on."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        ...


@runtime_checkable
class Environment(Protocol):
    """N environments that step together. Each one resets itself in the step in which its episode ends."""

    @property
    def num_envs(self) -> int:
        """Number of environments, N."""
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
        """The seed, or None before one is set by the constructor, `reseed`, or `training_loop(seed=)`."""
        ...

    @property
    def replayable(self) -> bool:
        """Whether the seed and the actions of an episode reproduce it bit for bit."""
        ...

    @property
    def episode_seeds(self) -> Tensor:
        """Seeds of the current episodes, `(N,)` int64; -1 if unknown."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """Constructor options, as JSON."""
        ...

    def reset(self, seed: int | None = None) -> Tree:
        """Begin the next episode of every environment, from episode 0 if `seed` is given. Returns `(N, *O)`."""
        ...

    def apply_action(self, action: Tree) -> TimeStep:
        """Step every environment with `action` `(N, *A)`."""
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
        """Begin the episodes with these seeds `(N,)`. Later episodes are seeded as usual. Returns `(N, *O)`."""
        ...


@runtime_checkable
class PartlyResettable(Protocol):
    """An environment that can reset some rows only. Test wrappers with `hasattr`, see `Wrapper`."""

    def reset_where(self, mask: Tensor) -> Tree:
        """Begin the next episode where `mask` `(N,)` is True. Returns all observations `(N, *O)`."""
        ...


@runtime_checkable
class PartlySteppable(Protocol):
    """An environment that can step some rows only. Test wrappers with `hasattr`, see `Wrapper`.

    A row that is not stepped is not valid and has ended no episode, its reward is 0, and its observation and
    final_observation are the current observation. Set the attribute `steps_separately = True` if stepping some rows
    costs less than stepping all: evaluations, replays and episodic epochs then skip environments whose episode has
    ended.
    """

    def apply_action_where(self, action: Tree, mask: Tensor) -> TimeStep:
        """Step the rows where `mask` `(N,)` is True; `action` `(N, *A)` has all rows."""
        ...


@runtime_checkable
class Worlds(Protocol):
    """Multi-agent environment: W worlds of A agents are W * A rows. Test wrappers with `hasattr`, see `Wrapper`.

    Row `world * A + agent` belongs to one agent. All rows of a world have the same episode seed, and a world resets as
    a whole: when all its agents have ended. Until then, the row of an agent that has ended repeats its last
    observation, with reward 0 and `valid` False. Methods with a mask (N,) apply to every world with a row in the mask.
    """

    @property
    def worlds(self) -> int:
        """Number of worlds, W."""
        ...

    @property
    def groups(self) -> Mapping[str, Group]:
        """Groups of agents by name, for statistics. Empty if all agents are of the same kind."""
        ...


@runtime_checkable
class Policy(Protocol):
    """Policy of an agent: selects actions only.

    A policy shares the parameters of its agent, and has separate buffers, carry and random generator. If it has any of
    these, it is `Stateful`, and its state is the part that is not shared. A policy on another device than its
    environments has a `device`.
    """

    def select_action(self, observation: Tree) -> tuple[Tree, Mapping[str, Tensor]]:
        """Return the actions `(N, *A)` for observations `(N, *O)`, and extras."""
        ...

    def reset(self, mask: Tensor | None = None) -> None:
        """Begin new episodes where `mask` `(N,)` is True, or in all environments by default."""
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
        """Device of observations and actions."""
        ...

    @property
    def seed(self) -> int | None:
        """The seed, or None before one is set by the constructor, `reseed`, or `training_loop(seed=)`."""
        ...

    @property
    def env_steps(self) -> int:
        """Number of recorded rows, N per vector step."""
        ...

    @property
    def updates(self) -> int:
        """Number of optimizer steps."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """Constructor options, as JSON."""
        ...

    def select_action(self, observation: Tree) -> tuple[Tree, Mapping[str, Tensor]]:
        """Return exploring actions `(N, *A)` for observations `(N, *O)`, and extras to record with them."""
        ...

    def record_observation(self, transition: Transition) -> None:
        """Record one transition of every environment. Rows that are not `valid` are ignored."""
        ...

    def observe_reset(self, observation: Tree, mask: Tensor) -> None:
        """Handle a reset outside a step of the environments in `mask` `(N,)`. Returns and sequences must end there."""
        ...

    def optimize_model(self) -> Mapping[str, Tensor]:
        """Learn if an update is due. Returns metrics on the device, or an empty mapping without an update."""
        ...

    def policy(self, deterministic: bool = True) -> Policy:
        """Return a policy that follows the agent's parameters. Evaluating it does not influence training."""
        ...

    def reseed(self, seed: int) -> None:
        """Set the seed of all streams and initialize the parameters again. Raises RuntimeError after the first step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """See `Stateful`."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Stateful`."""
        ...


@runtime_checkable
class Buffer(Protocol):
    """Replay buffer: stores transitions of N environments and samples from them."""

    def append(self, transition: Transition) -> None:
        """Append one transition of every environment."""
        ...

    def observe_reset(self, mask: Tensor) -> None:
        """Handle a reset outside a step of the environments in `mask` `(N,)` bool. Returns must end there."""
        ...

    def sample(self, batch_size: int, generator: torch.Generator) -> Any:
        """Sample `batch_size` rows with `generator`. Returns a named tuple of tensors `(B, ...)`.

        Raises ValueError if there are no rows.
        """
        ...

    def __len__(self) -> int:
        """Number of transitions that can be sampled."""
        ...


@runtime_checkable
class Store(Protocol):
    """Storage of trajectories. `append` takes a whole epoch; after `flush`, all appended epochs are safe.

    Optional members, which the training loop uses if present:

    - `begin(epochs)`: the run starts or continues after this many epochs.
    - `check_spaces(spaces)`: raises an error if the spaces cannot be stored.
    - `read_metric`: name of the metric that decides which epochs are kept.
    - `write_run(description)` and `path`: folder of the run for `run.json`, `run.log` and metrics.
    - `end()`: the run has ended; called instead of `flush`.
    """

    @property
    def config(self) -> dict[str, Any]:
        """Constructor options, as JSON."""
        ...

    def append(self, trajectory: Trajectory) -> None:
        """Append one epoch. May return before it is written. Raises StoreError if an earlier write failed."""
        ...

    def flush(self) -> None:
        """Wait until all appended epochs are safe."""
        ...

    def close(self) -> None:
        """Flush, and release all resources. May be called twice."""
        ...


@runtime_checkable
class Logger(Protocol):
    """Writes metrics. A logger never influences a run.

    Optional methods, which `rein.handlers.loggers.attach` calls if present:

    - `describe(settings)`: describes the run.
    - `begin()`: a run starts.
    - `go_on(clocks)`: the run continues from a loaded state; rows newer than these clocks will be written again.
    - `finish(status)`: the run has ended.
    - `write_text`, `write_histogram`, `write_image`, `write_video`, each with `(clocks, name, value)`: values of
      `state.log`.
    """

    def write(self, clocks: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Write the metrics of an epoch with the clocks at which they were measured."""
        ...

    def close(self) -> None:
        """Write pending data, and release all resources. May be called twice."""
        ...


def missing_names(part: Any, protocol: type) -> list[str]:
    """Return the names of the protocol that `part` does not have."""
    return [name for name in vars(protocol) if not name.startswith("_") and not hasattr(part, name)]
