"""Data types shared by all parts of rein.

Shapes: N environments, O an observation (a tensor or a nested dictionary of them), A an action, T steps, E episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from rein.errors import EnvironmentContractError

Tree = Any  # a Tensor, or a (nested) dictionary of tensors


class _TimeStep(NamedTuple):
    observation: Tree  # (N, *O) next observation of the agent; first of the next episode if an episode ended
    reward: Tensor  # (N,) float32
    terminated: Tensor  # (N,) bool: the task ended, do not bootstrap
    truncated: Tensor  # (N,) bool: the time limit was reached, bootstrap from final_observation
    final_observation: Tree  # (N, *O) before any reset; equal to observation if no episode ended
    valid: Tensor  # (N,) bool: False for rows without a transition, such as a separate reset step
    info: Mapping[str, Tensor]  # success, action masks, ...; usually empty


class TimeStep(_TimeStep):
    """Result of `Environment.apply_action` for N environments. All tensors are new.

    Args:
        observation: `(N, *O)` next observation; the first one of the next episode if an episode ended.
        reward: `(N,)` float32.
        terminated: `(N,)` bool: the task ended, do not bootstrap.
        truncated: `(N,)` bool: the time limit was reached, bootstrap from `final_observation`.
        final_observation: `(N, *O)` observation before any reset. Default: `observation`. The default raises
            EnvironmentContractError if a row was truncated. This check waits for a GPU, so pass `final_observation`
            on a GPU.
        valid: `(N,)` bool, False for rows without a transition. Default: all True. A row that is truncated and not
            valid ends an episode whose rest was lost, for instance with a worker that failed.
        info: tensors `(N, ...)` by name. Default: empty.
    """

    __slots__ = ()

    def __new__(
        cls,
        observation: Tree,
        reward: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        final_observation: Tree = None,
        valid: Tensor | None = None,
        info: Mapping[str, Tensor] | None = None,
    ) -> Self:
        """Fill the optional fields."""
        if final_observation is None:
            if truncated.any():
                raise EnvironmentContractError(
                    f"TimeStep: the episodes of environments {truncated.nonzero().flatten().tolist()} were truncated, "
                    "but final_observation is missing; pass the observation before the reset, from which agents "
                    "bootstrap: TimeStep(..., final_observation=...)"
                )
            final_observation = observation
        if valid is None:
            valid = torch.ones_like(terminated)
        info = {} if info is None else info
        return super().__new__(cls, observation, reward, terminated, truncated, final_observation, valid, info)


class Transition(NamedTuple):
    """Transition `(s_t, a_t, r_t, s_t+1)` of N environments, which agents learn from and stores keep."""

    observation: Tree  # (N, *O) s_t
    action: Tree  # (N, *A) a_t
    reward: Tensor  # (N,) float32 r_t, including changes by handlers
    terminated: Tensor  # (N,) bool
    truncated: Tensor  # (N,) bool
    next_observation: Tree  # (N, *O) s_t+1; the final observation if an episode ended
    valid: Tensor  # (N,) bool: False for rows that are neither learned from nor counted
    extras: Mapping[str, Tensor]  # outputs of the agent besides its action: value, log_prob, ...


class StepState(NamedTuple):
    """Step state of a reinforcement-learning loop. Fields are None until their phase of the step has run."""

    observation: Tree  # (N, *O) on which the action is selected; after the step, the one for the next action
    active: Tensor | None = None  # (N,) bool, episodic epochs only: False if the episode of this epoch has ended
    action: Tree = None  # (N, *A)
    extras: Mapping[str, Tensor] | None = None
    time_step: TimeStep | None = None
    transition: Transition | None = None
    metrics: Mapping[str, Any] | None = None  # metrics that optimize_model returned in this step


class Group(NamedTuple):
    """Agents of the same kind in all worlds of a multi-agent environment."""

    rows: Tensor  # (R,) int64, rows of these agents
    observation_space: Any  # gymnasium.spaces.Space of these agents, before any padding to the space of a row
    action_space: Any  # the same for actions


class Episodes(NamedTuple):
    """Finished episodes, one row each, in the order of their ends; numpy arrays."""

    id: Any  # (E,) int64, counted over the whole run
    environment: Any  # (E,) int64, 0..N-1
    first_step: Any  # (E,) int64, vector step of the first transition (0-based over the whole run)
    last_step: Any  # (E,) int64, vector step of the last transition
    seed: Any  # (E,) int64, seed of the episode's reset; -1 if unknown
    episode_return: Any  # (E,) float64, sum of raw rewards
    length: Any  # (E,) int64, transitions
    terminated: Any  # (E,) bool
    truncated: Any  # (E,) bool
    final_observation: Tree  # (E, *O), or None if it was not recorded
    options: Any = None  # (E,) bytes, reset options as JSON, empty without options; None if no episode has options


EPISODE_COLUMNS = tuple(name for name in Episodes._fields if name not in ("final_observation", "options"))


class Episode(NamedTuple):
    """One complete episode; numpy arrays."""

    id: int  # counted over the whole run
    environment: int  # 0..N-1
    first_step: int  # vector step of the first transition (0-based over the whole run)
    last_step: int  # vector step of the last transition
    seed: int  # seed of the episode's reset, or -1 if unknown
    episode_return: float  # sum of raw rewards
    length: int  # number of transitions
    terminated: bool
    truncated: bool
    fields: dict[str, Tree]  # name -> (length, ...): observation, action, reward, ...
    final_observation: Tree  # (*O), or None if it was not stored
    options: dict[str, Any] | None = None  # options of the episode's reset

    def __repr__(self) -> str:
        end = "terminated" if self.terminated else "truncated"
        return (
            f"Episode(id={self.id}, environment={self.environment}, seed={self.seed}, "
            f"return {self.episode_return:.6g}, {self.length} steps, {end}, fields {', '.join(self.fields)})"
        )


class Trajectory(NamedTuple):
    """One epoch of N environments, as passed to a store: views on the agent's device, to be copied. T may be 0."""

    epoch: int  # 1-based
    status: str  # "completed" or "halted"
    first_step: int  # vector step of row 0, counted over the whole run
    fields: Mapping[str, Tree]  # name -> (T, N, ...): observation, action, reward, terminated, truncated, valid, ...
    next_observation: Tree  # (N, *O) observation of the next action; bootstrap of the last row if no episode ended
    episodes: Episodes  # the episodes that ended in this epoch
    metrics: Mapping[str, float]  # the epoch's metrics
    clocks: Mapping[str, float]  # all clocks at the end of the epoch


STEP_STATE_TYPES: tuple[type, ...] = (TimeStep, Transition, StepState)
NAMED_TUPLES: dict[str, type] = {t.__name__: t for t in (*STEP_STATE_TYPES, Episodes, Trajectory)}
