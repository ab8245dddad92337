"""Base classes of environments that are stepped on the host.

Shapes: W simulators, A agents of each (1 without worlds), N = W * A rows, R rows of some simulators.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from rein.envs.base.contract import (
    CLOSED,
    check_action,
    check_begun,
    check_observation,
    check_open,
    check_rows_of,
    representation,
    restored,
)
from rein.envs.base.seeding import HostEpisodeSeeds
from rein.envs.host.block import Block, Setup, Stepper, check_row_count, rows_of, with_rows
from rein.envs.host.episode_inputs import Options, ResetOptions
from rein.envs.host.pool import Pool, Workers
from rein.envs.host.results import requested, warn_of_mask
from rein.errors import explain
from rein.ops.trees import map_tree
from rein.types import TimeStep, Tree

logger = logging.getLogger(__name__)


@explain("ENVIRONMENT_ATTRIBUTES")
class HostEnvironment:
    """Base class of N environments that are stepped together on the host. An adapter gives a setup and a transport."""

    replayable = False

    def __init__(self, setup: Setup, transport: Stepper, seeds: HostEpisodeSeeds, options: ResetOptions) -> None:
        self._setup, self._transport, self._seeds, self._options = setup, transport, seeds, options
        about = transport.about
        self._agents = about.rows
        self.num_envs = seeds.num_envs * about.rows
        self.device = torch.device("cpu")
        self.single_observation_space = about.observation_space
        self.single_action_space = about.action_space
        self._begun = self._closed = self._checked = False  # whether episodes have begun

    @property
    def seed(self) -> int | None:
        """Random seed of all environments; None until given or drawn at the first reset."""
        return self._seeds.seed

    @property
    def episode_seeds(self) -> Tensor:
        """(N,) int64: seeds of the current episodes, as of the last received step; -1 before the first reset."""
        seed_W = self._transport.episode_seeds
        return seed_W.repeat_interleave(self._agents) if self._setup.worlds else seed_W

    @property
    def episode_options(self) -> list[dict[str, Any] | None] | None:
        """Options with which the current episodes began, one entry for each row; None if none were set."""
        each = self._options.current
        return None if each is None else [options for options in each for _ in range(self._agents)]

    @property
    def awaits_reset(self) -> bool:
        """Whether `reset` must be called before a step: before the first reset, and after a resume without episodes."""
        return not self._begun or self._transport.ended is not None

    @property
    def config(self) -> dict[str, Any]:
        """Constructor options, as JSON values."""
        count = "worlds" if self._setup.worlds else "num_envs"
        return {
            "id": self._setup.name,
            count: self._seeds.num_envs,
            "seed": self.seed,
            "info": requested(self._setup.info),
            "action_mask": self._setup.action_mask,
            **self._setup.config,
        }

    @property
    def render_mode(self) -> str | None:
        """Render mode with which the environments were built."""
        return self._transport.about.render_mode

    @property
    def render_fps(self) -> float | None:
        """Frames per second in the metadata of the environment, or None."""
        return self._transport.about.render_fps

    def set_options(
        self, options: Options | Sequence[Options | None] | None, environments: Iterable[int] | None = None
    ) -> None:
        """Set the options that `reset` of an environment or world gets, for a curriculum.

        They are used from the next reset on, also after the end of an episode, and do not affect the current episodes.
        Environments that were sent and not received get them after the end of their next step. They are stored with
        each episode and saved in checkpoints.

        Args:
            options: dictionary of numbers, strings, lists and dictionaries for all chosen environments, a list with one
                dictionary for each, or None for no options.
            environments: indices of the environments or worlds. By default all.

        Raises:
            TypeError: if the options are not JSON values.
            ValueError: if an index is out of range, or if the list has another length.
        """
        self._options.set(options, environments)

    def reset(self, seed: int | None = None) -> Tree:
        """Begin the next episode of every environment, from episode 0 if `seed` is given. Returns the observation."""
        self._transport.discard()
        self._check_usable("reset")
        if seed is not None:
            self._seeds.restart(seed)
        return self._begin()

    def apply_action(self, action: Tree) -> TimeStep:
        """Step every environment with actions `(N, *A)`.

        Raises RuntimeError before the first reset, and EnvironmentContractError for an action or a result that does not
        fit its space. Exceptions of an environment get a note with the environment, the episode seed and the step.
        After such an error, some environments have been stepped and others have not, and `reset` must be called.
        Workers also raise WorkerDied, WorkerTimeout and WorkerError. They are ended after an error, unless
        `on_failure="restart"` was given, and the environment must be built again.
        """
        self._check_begun("apply_action")
        self._check_action(action, range(self.num_envs))
        return self._transport.step(action, range(self._seeds.num_envs))

    def render(self, index: int = 0) -> Any:
        """Return an RGB frame of the environment or world of one row.

        Raises ValueError if there is none. Environments, but not worlds, must declare `render_mode="rgb_array"`.
        """
        self._check_usable("render")
        renders = self.render_mode == "rgb_array" or self._setup.worlds
        frame = self._transport.render(range(self.num_envs)[index] // self._agents) if renders else None
        if frame is None:
            raise ValueError(
                f"{self._setup.name}: built with render_mode={self.render_mode!r}; give render_mode='rgb_array'"
            )
        return frame

    def reseed(self, seed: int) -> None:
        """Set the random seed. Raises RuntimeError after the first reset."""
        self._seeds.reseed(seed)

    def close(self) -> None:
        """Close every environment and end its workers. A second call does nothing."""
        self._begun, self._closed = False, True
        self._transport.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the seed, the episode counters and the reset options."""
        return {"seeds": self._seeds.state_dict(), "options": self._options.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. `reset` must be called next, and begins new episodes.

        Raises ValueError for another number of environments.
        """
        self._seeds.load_state_dict(state["seeds"])
        self._options.load_state_dict(state["options"])
        self._begun = False

    def __repr__(self) -> str:
        count = f"num_envs={self.num_envs}"
        if self._setup.worlds:
            count = f"worlds={self._seeds.num_envs}, agents={self._agents}"
        return representation(self, repr(self._setup.name), count, *self._shown())

    def _shown(self) -> Sequence[str]:
        """Return further options for `repr`."""
        return ()

    def _begin(self, current: Sequence[int] | None = None, keep_options: bool = False) -> Tree:
        observation = self._transport.begin(current, keep_options)
        self._begun = True
        if self._transport.has_unused_masks:
            warn_of_mask(self._setup.name)
        return observation

    def _check_usable(self, method: str) -> None:
        """Raise RuntimeError if the environment is closed, its workers were ended, or steps were not received."""
        name, transport = self._setup.name, self._transport
        check_open(name, method, CLOSED if self._closed else None)
        if transport.ended is not None and not transport.reusable:
            raise RuntimeError(f"{name}: workers were ended after a failure; build a new one ({transport.ended})")
        if transport.busy and method not in ("send", "receive"):
            raise RuntimeError(f"{name}: call receive() for all environments that were sent, before {method}()")

    def _check_begun(self, method: str) -> None:
        """Raise RuntimeError also before the first reset, and after an error until the next reset."""
        idle = method in ("send", "receive") or not self._transport.sent
        if self._begun and self._transport.ended is None and idle:  # also not closed
            return
        self._check_usable(method)
        check_begun(self._setup.name, method, self._begun, self._transport.ended)
        raise RuntimeError(f"{self._setup.name}: call receive() for all environments that were sent, before {method}()")

    def _check_action(self, action: Tree, rows: Sequence[int]) -> None:
        """Check the first action and observation. Raises EnvironmentContractError."""
        if not self._checked:
            check_action(action, len(rows), self.single_action_space)
            check_observation(self._transport.observation, self.num_envs, self.single_observation_space)
            self._checked = True


class SteppedSeparately(HostEnvironment):
    """Base class of environments whose simulators are stepped separately, in this process or by workers.

    A new adapter makes simulators, which have the methods of a `gymnasium.Env`, and passes a `Setup` with the function
    that makes them.

    Args:
        setup: how simulators are made, and what their rows have in common.
        numbers: numbers of the simulators: a range from 0, unless they are a part of a larger number.
        seed: random seed of all simulators. By default it is drawn at the first reset.
        workers: options of workers. By default simulators are stepped in this process, one after the other.
    """

    steps_separately = True  # stepping a part of the environments costs less than stepping all

    @torch.inference_mode(False)  # inference tensors cannot be modified outside of inference mode
    def __init__(self, setup: Setup, numbers: range, seed: int | None = None, workers: Workers | None = None) -> None:
        seeds, options = HostEpisodeSeeds(len(numbers), seed, numbers.start), ResetOptions(len(numbers))
        self._transport: Block | Pool
        self._worker_options = workers
        transport = Block(setup, numbers, seeds, options) if workers is None else Pool(setup, seeds, options, workers)
        super().__init__(setup, transport, seeds, options)
        self.replayable = setup.replayable

    @property
    def workers(self) -> int | None:
        """Number of workers; None without workers."""
        return None if self._worker_options is None else self._worker_options.workers

    @property
    def restarts(self) -> int:
        """Number of workers that were replaced after a failure."""
        return self._transport.restarts

    @property
    def config(self) -> dict[str, Any]:
        """Constructor options, as JSON values."""
        workers = (
            {} if self._worker_options is None else {"workers": attrs.asdict(self._worker_options)}
        )  # do not change results
        return {**super().config, **workers, "replayable": self.replayable}

    def set_options(
        self, options: Options | Sequence[Options | None] | None, environments: Iterable[int] | None = None
    ) -> None:
        """Set the options that `reset` of an environment or world gets, see `HostEnvironment.set_options`."""
        chosen = range(self._seeds.num_envs) if environments is None else [int(index) for index in environments]
        super().set_options(options, chosen)
        self._transport.options_changed(chosen)

    def part(self, rows: range) -> Callable[[], SteppedSeparately]:
        """Return a function that builds the simulators of `rows` alone, with the same episode seeds."""
        agents = self._agents
        return functools.partial(
            SteppedSeparately, self._setup, range(rows.start // agents, rows.stop // agents), self.seed
        )

    def reset_to(self, episode_seeds: Tensor, options: Sequence[Options | None] | None = None) -> Tree:
        """Begin the episodes with these seeds (N,), for a replay. Later episodes are seeded as usual.

        `options` are the reset options of these episodes. By default they are those of `set_options`. Raises ValueError
        if the rows of a world have different seeds.
        """
        self._transport.discard()
        self._check_usable("reset_to")
        check_rows_of("reset_to", episode_seeds, self.num_envs, torch.int64)
        agents = self._agents
        seed_WA = episode_seeds.view(-1, agents)
        if not torch.equal(seed_WA, seed_WA[:, :1].expand_as(seed_WA)):
            raise ValueError(f"reset_to: expected one seed for all rows of a world, got {episode_seeds}")
        if options is not None:
            if len(options) != self.num_envs:
                got = f"{len(options)} options for {self.num_envs} environments"
                raise ValueError(f"reset_to(options=...): got {got}")
            self._options.override(options[::agents])
        return self._begin(self._seeds.override(seed_WA[:, 0]), options is not None)

    def reset_where(self, mask: Tensor) -> Tree:
        """Begin the next episode where `mask` (N,) is True, or of worlds with such a row.

        Returns the current observation of all environments. Raises RuntimeError before the first reset.
        """
        self._check_begun("reset_where")
        check_rows_of("reset_where", mask, self.num_envs, torch.bool)
        chosen = self._chosen(mask)
        return self._transport.begin_some(chosen) if chosen else self._transport.observation

    def apply_action_where(self, action: Tree, mask: Tensor) -> TimeStep:
        """Step the environments where `mask` (N,) is True, or worlds with such a row, with their rows of `action`.

        The other rows are not `valid`. Their reward is 0, and their observations do not change. Raises the errors of
        `apply_action`, and ValueError if `mask` has another shape or dtype.
        """
        self._check_begun("apply_action_where")
        check_rows_of("apply_action_where", mask, self.num_envs, torch.bool)
        check_row_count(action, self.num_envs)
        still, chosen = no_step(self._transport.observation, self.num_envs, self._setup.info), self._chosen(mask)
        if not chosen:
            return map_tree(torch.clone, still)
        rows = rows_of(chosen, self._agents)
        action_R = map_tree(lambda x: x[rows], action)
        self._check_action(action_R, rows)
        return with_rows(still, rows, self._transport.step(action_R, chosen))

    def send(self, action: Tree, rows: Sequence[int]) -> None:
        """Begin to step the environments `rows` (R,) with `action` `(R, *A)`. Returns at once.

        Without workers, `receive` steps them. Raises RuntimeError before the first reset and for an environment that
        was sent and not received, ValueError for a row that does not exist and for a part of a world, and
        EnvironmentContractError for an action that does not fit.
        """
        self._check_begun("send")
        chosen = self._checked_rows(rows)
        self._check_action(action, rows)
        self._transport.submit(action, chosen)

    def receive(self, timeout: float | None = None) -> tuple[list[int], TimeStep]:
        """Wait until a step that was sent has ended. Returns all environments (R,) whose steps have, and their R rows.

        Raises RuntimeError if no environment was sent, and the errors of `apply_action`. Raises TimeoutError if no
        step of a worker has ended after `timeout` seconds. `receive` can then be called again.
        """
        self._check_begun("receive")
        if not self._transport.sent:
            raise RuntimeError(f"{self._setup.name}: call send() before receive()")
        chosen, time_step = self._transport.collect(timeout)
        return rows_of(chosen, self._agents), time_step

    def state_dict(self) -> dict[str, Any]:
        """Return the seeds of the current episodes and, if they are replayable, their actions so far."""
        if not self._closed and (self._transport.reusable or self._transport.ended is None):
            self._check_usable("state_dict")
        observation = None if self.awaits_reset else self._transport.observation
        return {**super().state_dict(), "observation": observation, **self._transport.save()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Reset with the saved seeds and repeat the actions. Without saved actions, `reset` must be called next.

        Raises ValueError for the state of other environments, and EnvironmentContractError if a repeated episode
        differs from the saved one.
        """
        self._check_usable("load_state_dict")
        super().load_state_dict(state)
        self._transport.forget()
        steps_N = restored(state, "steps", torch.empty(self.num_envs, dtype=torch.int64, device="cpu"))
        if state["observation"] is None:
            return
        if not self.replayable:
            logger.warning(
                "%s is not replayable: open episodes are lost, and reset() begins new ones", self._setup.name
            )
        elif bool((steps_N < 0).any()):
            logger.warning(
                "%s: an open episode was longer than max_replay_steps, so its actions were not saved; reset() begins "
                "new episodes",
                self._setup.name,
            )
        else:
            self._transport.load(state)
            self._begun = True

    def _shown(self) -> Sequence[str]:
        options = self._worker_options
        return () if options is None else (f"workers={options.workers}", f"mode={options.mode!r}")

    def _chosen(self, mask: Tensor) -> list[int]:
        """Return the simulators with a row in `mask` (N,)."""
        return mask.view(self._seeds.num_envs, -1).any(1).nonzero().flatten().tolist()

    def _checked_rows(self, rows: Sequence[int]) -> list[int]:
        """Return the simulators of rows that are sent. Raises ValueError or RuntimeError for wrong rows."""
        if wrong := [row for row in rows if not 0 <= row < self.num_envs]:
            raise ValueError(f"send(rows=...): got {wrong[0]}, but there are {self.num_envs} environments")
        agents, sent = self._agents, {*self._transport.sent}
        chosen = [row // agents for row in rows[::agents]]
        if [*rows] != rows_of(chosen, agents):
            raise ValueError(f"send(rows={[*rows]}): give all {agents} rows of a world in order")
        if len({*chosen}) < len(chosen) or not sent.isdisjoint(chosen):
            raise RuntimeError(f"send(rows={[*rows]}): an environment was sent twice; call receive() first")
        return chosen


def no_step(observation: Tree, num_envs: int, info: Mapping[str, np.ndarray[Any, Any]]) -> TimeStep:
    """Return the result of N environments that were not stepped. Its tensors may share memory."""
    nothing_N = torch.zeros(num_envs, dtype=torch.bool, device="cpu")
    missing = {key: torch.from_numpy(value) for key, value in info.items()}
    return TimeStep(
        observation=observation,
        reward=torch.zeros(num_envs, dtype=torch.float32, device="cpu"),
        terminated=nothing_N,
        truncated=nothing_N,
        final_observation=observation,
        valid=nothing_N,
        info={key: value.expand(num_envs, *value.shape) for key, value in missing.items()},
    )
