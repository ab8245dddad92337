"""Guards against NaN and infinity that go beyond the checks of `check_finite`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from rein.episodes.finite import first_nonfinite, floats, where
from rein.errors import NonFiniteError
from rein.loop import Loop
from rein.loop.state import State
from rein.ops.parallel import processes
from rein.ops.statistics import global_norm
from rein.types import StepState

logger = logging.getLogger("rein")

_KINDS = ("stop", "skip", "return")


class UpdateGuard:
    """Check losses and gradients before each step of an agent's optimizer, in place of the default check.

    Example::

        guard = UpdateGuard("skip")
        agent = PPO(..., guard=guard)
        guard_updates(loop, guard)

    An update with NaN or infinity is not applied; `failures` counts these. The guard waits for the device at each
    update.

    Args:
        on_failure: "stop" raises NonFiniteError. "skip" continues without the update. "return" also restores the agent
            from its last good checkpoint, see `guard_updates`.
        limit: With "skip" and "return", raise NonFiniteError after this number of consecutive failures.
    """

    def __init__(self, on_failure: Literal["stop", "skip", "return"] = "stop", *, limit: int = 1000) -> None:
        if on_failure not in _KINDS:
            raise ValueError(f"UpdateGuard({on_failure!r}): expected one of {', '.join(_KINDS)}")
        if limit < 1:
            raise ValueError(f"UpdateGuard(limit={limit}): expected at least 1")
        self.on_failure, self.limit = on_failure, limit
        self.failures = 0
        self.in_a_row = 0
        self.wanted = False  # whether to restore the last good checkpoint

    def __call__(self, metrics: Mapping[str, Tensor], gradients: Sequence[Tensor]) -> bool:
        """Return whether to apply the update. If all values are finite, this is one reduction and one transfer."""
        numbers = [value for name, value in metrics.items() if name == "grad_norm" or "loss" in name]
        if "grad_norm" not in metrics:
            numbers.append(global_norm(list(gradients)))
        if math.isfinite(_total(numbers)):
            self.in_a_row = 0
            return True
        bad = [name for name, value in metrics.items() if not bool(torch.isfinite(value).all())]
        bad += [f"gradient {n}" for n, g in enumerate(gradients) if not bool(torch.isfinite(g).all())]
        if not bad:  # the sum of finite numbers overflowed
            return True
        self.failures, self.in_a_row = self.failures + 1, self.in_a_row + 1
        if self.on_failure == "stop" or self.in_a_row > self.limit:
            times = "" if self.in_a_row == 1 else f", {self.in_a_row} times in a row"
            raise NonFiniteError(f"NaN or infinity in {', '.join(bad)}{times}; the update was not applied")
        self.wanted = self.on_failure == "return"
        return False


def _total(numbers: Sequence[Tensor]) -> float:
    """Return the sum, which is not finite if any number is not. Numbers on a device need one transfer."""
    if all(number.is_cpu for number in numbers):
        return sum(map(float, numbers))
    return float(torch.stack([number.detach().reshape(()) for number in numbers]).sum())


def guard_updates(loop: Loop, guard: UpdateGuard, saver: Any = None, *, agent: str = "agent") -> None:
    """Record an `UpdateGuard`'s failures as the metric `skipped_updates`, and restore good checkpoints for "return".

    For "return", pass the `saver` that `checkpoint` returned. After a failure, the part `agent` of the loop is restored
    at the next edge from the newest checkpoint without NaN. Its counters, the environments and the loop continue, so it
    learns from different data.

    Raises:
        ValueError: If "return" has no saver or is used in a group of processes, or if the loop has no part `agent`.
        NonFiniteError: At a failure, if every checkpoint contains NaN or infinity.
    """
    if guard.on_failure == "return" and saver is None:
        raise ValueError('guard_updates(...): on_failure="return" needs the saver returned by checkpoint(loop, store)')
    if guard.on_failure == "return" and processes() > 1:
        raise ValueError(
            'guard_updates(...): on_failure="return" would restore each process of a group from a separate checkpoint; '
            'use "skip", which all processes do together'
        )
    if agent not in loop.parts:
        raise ValueError(
            f"guard_updates(agent={agent!r}): no such part; the loop owns {', '.join(loop.parts) or 'nothing'}"
        )
    loop.metric("skipped_updates", _increase(guard), reduce="sum")

    def return_to_good(state: State) -> None:
        guard.wanted = False
        part, step_state = loop.parts[agent], state.step_state
        checkpoint = next((c for c in saver.checkpoints.good() if c.about.get("finite")), None)
        if checkpoint is None:
            raise NonFiniteError(
                f"NaN or infinity in an update, and no checkpoint without them in {saver.checkpoints.folder}"
            )
        counts = part.env_steps, part.updates
        part.load_state_dict(checkpoint.state["parts"][agent])
        part.env_steps, part.updates = counts  # clocks never decrease
        if isinstance(
            step_state, StepState
        ):  # memory of the restored agent does not continue into the current episodes
            everywhere = torch.ones(loop.parts["environment"].num_envs, dtype=torch.bool, device=part.device)
            part.observe_reset(step_state.observation, everywhere)
        logger.warning("NaN or infinity in an update: the %s was restored from %s", agent, checkpoint.path)

    @loop.iteration_completed
    def return_if_wanted(state: State) -> None:
        if guard.wanted:
            state.request(return_to_good)


def _increase(guard: UpdateGuard) -> Any:
    seen = guard.failures

    def increase(state: State) -> float:
        nonlocal seen
        seen, before = guard.failures, seen
        return float(guard.failures - before)

    return increase


def guard_data(loop: Loop) -> None:
    """Raise NonFiniteError in the step in which an action, observation or reward is NaN or infinite.

    Use it to find the cause of an error of the default checks. Unlike these, it checks actions before the environment
    receives them, invalid rows, and every step immediately on a GPU, which waits for the device. Raises AttributeError
    if the loop lacks the events of a training loop.
    """

    @loop.action_selected
    def check_action(state: State) -> None:
        _check(state, {"action": state.step_state.action})

    @loop.action_applied
    def check_time_step(state: State) -> None:
        step = state.step_state.time_step
        _check(
            state,
            {"observation": step.observation, "reward": step.reward, "final_observation": step.final_observation},
        )


def _check(state: State, fields: Mapping[str, Any]) -> None:
    tensors = [*floats(dict(fields), "")]
    if math.isfinite(_total([leaf.sum() for _, leaf in tensors])):
        return
    for path, leaf in tensors:
        if problem := first_nonfinite(path, leaf):
            raise NonFiniteError(f"{problem} ({where(state)})")
