"""Checks that rewards and observations are finite.

Shapes: N environments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rein.errors import NonFiniteError
from rein.loop.state import State
from rein.ops.trees import Read, leaves, map_tree, read_together
from rein.replay.rollout import Rollout
from rein.spaces import ACTION_MASK
from rein.spaces.masks import MASK_HINT
from rein.types import StepState, TimeStep, Transition, Tree

HINT = (
    "rein.handlers.guards.guard_data(loop) also checks actions and invalid rows; check_finite=False turns the check off"
)

_CHECKED = ("reward", "observation", "next_observation")  # fields of a rollout


class FiniteData:
    """Raises NonFiniteError if a reward or an observation is NaN or infinite.

    For an agent with a `rollout`, all its steps are checked together when the rollout is full, before the update. This
    takes a few operations per rollout instead of per step. For other agents, each step is checked immediately on the
    CPU. On another device, a flag per environment is accumulated without waiting, and `reads` checks the flags.

    Invalid rows and the final observation of a terminated episode are not checked, because no agent learns from them.
    """

    def __init__(self, agent: Any = None) -> None:
        rollout = getattr(agent, "rollout", None)
        self._rollout = rollout if isinstance(rollout, Rollout) else None
        self._vector_step = 0  # vector step of the last row of the rollout
        self._flag_N: Tensor | None = None  # on a device: NaN for environments with a non-finite value
        self._unchecked_N: Tensor | None = None  # invalid rows with a non-finite observation

    def check_reset(self, state: State, observation: Tree) -> None:
        """Check the observation (N, ...) of a reset."""
        self._unchecked_N = None
        for path, leaf in floats(observation, "observation"):
            if problem := first_nonfinite(path, leaf):
                raise NonFiniteError(f"{problem} after a reset ({where(state)}). {HINT}")

    def check_full(self, state: State) -> None:
        """Check the rollout if the current step has filled it."""
        if self._rollout is not None:
            self._vector_step = state.clocks.vector_steps
            if self._rollout.full and self._rollout["reward"].is_cpu:
                self.check_rollout(state)
            elif self._rollout.full:
                self._accumulate(*(self._rollout[name] for name in ("reward", "observation", "valid")))

    def check_rollout(self, state: State) -> None:
        """Check the recorded steps that the agent has not learned from yet. Waits for the device."""
        read_together(self._rollout_reads(state))

    def _rollout_reads(self, state: State) -> Iterator[Read]:
        if self._rollout is not None and len(self._rollout):
            sums = [leaf.sum() for name in _CHECKED for _, leaf in floats(self._rollout[name], "")]
            yield [torch.stack(sums).sum()], lambda total: self._search_rollout(state, self._rollout, total)

    def _search_rollout(self, state: State, rollout: Any, total: Tensor) -> None:
        """Raise for the first value of the rollout that is not finite. A sum of finite values may overflow."""
        if math.isfinite(float(total)):
            return
        fields = {name: rollout[name] for name in (*_CHECKED, "valid", "terminated")}
        for t in range(len(rollout)):
            row = map_tree(lambda rows, t=t: rows[t], fields)
            valid_N = row["valid"]
            checked = {"reward": valid_N, "observation": valid_N, "next_observation": valid_N & ~row["terminated"]}
            for name, checked_N in checked.items():
                for path, leaf in floats(row[name], name):
                    if problem := first_nonfinite(path, leaf, checked_N):
                        raise NonFiniteError(
                            f"{problem} ({where(state, self._vector_step + 1 + t - len(rollout))}). {HINT}"
                        )

    def check_step(self, state: State, received: TimeStep, step_state: StepState) -> None:
        """Check the result of the environment, `received`, and the transition after handlers in `step_state`."""
        if self._rollout is not None:
            return
        transition: Any = step_state.transition
        time_step: Any = step_state.time_step
        on_host = received if received.reward.is_cpu else time_step  # the CPU copy, if there is one
        if not on_host.reward.is_cpu:
            self._accumulate(transition.reward, time_step.observation, transition.valid)
            return
        total = _total(on_host)
        if transition.reward is not time_step.reward:
            total += float(transition.reward.sum())
        if not math.isfinite(total) or self._unchecked_N is not None:
            self._search(state, transition, time_step)

    def _search(self, state: State, transition: Transition, time_step: TimeStep) -> None:
        """Raise for the first value that is not finite. A sum of finite values may overflow without an error."""
        valid_N, before_N = transition.valid, self._unchecked_N
        shaped = "" if transition.reward is time_step.reward else " (changed by a handler of action_applied)"
        fields = [
            (f"reward{shaped}", transition.reward, valid_N),
            ("observation", time_step.observation, valid_N),
            ("final_observation", transition.next_observation, valid_N & ~transition.terminated),
        ]
        if before_N is not None:
            fields.insert(0, ("observation", transition.observation, valid_N & before_N))
        for name, tree, checked_N in fields:
            for path, leaf in floats(tree, name):
                if problem := first_nonfinite(path, leaf, checked_N):
                    raise NonFiniteError(f"{problem} ({where(state)}). {HINT}")
        wrong = [~rows_finite(leaf) for _, leaf in floats(time_step.observation, "")]
        unchecked_N = torch.stack(wrong).any(0) & ~valid_N if wrong else None
        self._unchecked_N = unchecked_N if unchecked_N is not None and bool(unchecked_N.any()) else None

    def _accumulate(self, reward: Tensor, observation: Tree, valid: Tensor) -> None:
        """Flag environments by the values of one step (N, ...) or of several steps (T, N, ...)."""
        value = reward
        for _, leaf in floats(observation, ""):
            value = value + leaf.reshape(*reward.shape, -1).mul(0.0).sum(-1)  # 0 * infinity is NaN
        value_N = torch.where(valid, value, 0.0).mul_(0.0).view(-1, reward.shape[-1]).sum(0)
        self._flag_N = value_N if self._flag_N is None else self._flag_N + value_N

    def reads(self, state: State) -> Iterator[Read]:
        """Yield the checks of all values that were not checked yet."""
        yield from self._rollout_reads(state)
        flag_N, self._flag_N = self._flag_N, None
        if flag_N is not None:
            device = flag_N.device
            yield [flag_N], lambda flag_N: _check_flags(state, flag_N, device)


def _check_flags(state: State, flag_N: Tensor, device: torch.device) -> None:
    if rows := flag_N.isnan().nonzero().flatten().tolist():
        raise NonFiniteError(
            f"reward or observation of environment {_listed(rows)} is not finite in epoch {state.epoch} ("
            f"{device} data is checked only at the end of an epoch). "
            "rein.handlers.guards.guard_data(loop) checks every step and names the first; check_finite=False "
            "turns the check off"
        )


def check_finite_observation(observation: Tree, checked_N: Tensor, when: str) -> None:
    """Raise NonFiniteError if an observation is not finite in the checked rows. Waits for the device."""
    for path, leaf in floats(observation, "observation"):
        if not math.isfinite(float(leaf.sum())) and (problem := first_nonfinite(path, leaf, checked_N)):
            raise NonFiniteError(f"{problem} ({when})")


def _total(time_step: TimeStep) -> float:
    """Return a number that is not finite if a reward or an observation is not. It may overflow for finite values."""
    observation, final = time_step.observation, time_step.final_observation
    total = float(time_step.reward.sum())
    if isinstance(observation, Tensor):  # the usual case, on the hot path
        return total + _product(observation, final) if observation.is_floating_point() else total
    pairs = zip(floats(observation, ""), floats(final, ""), strict=False)
    return total + sum(_product(one, other) for (_, one), (_, other) in pairs)


def _product(one: Tensor, other: Any) -> float:
    """Return the inner product, one operation for two tensors. NaN if the sizes differ; other checks report that."""
    try:
        return float(torch.dot(one.reshape(-1), other.reshape(-1)))
    except RuntimeError:
        return math.nan


def floats(tree: Tree, path: str) -> Iterator[tuple[str, Tensor]]:
    """Return the floating-point leaves of a tree with their paths."""
    return ((name, leaf) for name, leaf in leaves(tree, path) if isinstance(leaf, Tensor) and leaf.is_floating_point())


def rows_finite(leaf: Tensor) -> Tensor:
    """Return which rows contain only finite values, (N,) bool."""
    return torch.isfinite(leaf.reshape(len(leaf), -1)).all(1)


def first_nonfinite(path: str, leaf: Tensor, checked_N: Tensor | None = None) -> str | None:
    """Describe the first value of the checked rows that is not finite. Returns None if all are finite."""
    wrong_N = ~rows_finite(leaf)
    rows = (wrong_N if checked_N is None else wrong_N & checked_N).nonzero().flatten().tolist()
    if not rows:
        return None
    first = leaf[rows[0]]
    place = (~torch.isfinite(first)).nonzero().tolist()[0]
    value = float(first[tuple(place)])
    at = f" at {place}" if place else ""
    others = f", also in environment {_listed(rows[1:])}" if len(rows) > 1 else ""
    hint = f"; {MASK_HINT}" if ACTION_MASK in path.split(".") else ""
    return f"{path} of environment {rows[0]} is {value}{at}{others}{hint}"


def _listed(rows: list[int]) -> str:
    return f"{', '.join(map(str, rows[:8]))}{', ...' if len(rows) > 8 else ''}"


def where(state: State, vector_step: int | None = None) -> str:
    """Return epoch, iteration and vector step for messages. Default: the current step."""
    vector_step = int(state.clocks.vector_steps if vector_step is None else vector_step)
    iteration = vector_step - (state.total_iterations - state.iteration)
    if iteration < 0:  # the rollout began in an earlier epoch
        return f"vector step {vector_step}, before epoch {state.epoch}"
    return f"epoch {state.epoch}, iteration {iteration}, vector step {vector_step}"
