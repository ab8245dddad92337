"""Actions of the open episodes, so that a resumed run can repeat them.

Shapes: N environments, R of them that are stepped, C steps for which there is memory, T steps of one episode.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rein.networks.flatten import children
from rein.ops.trees import map_tree
from rein.rollout.spaces import layout
from rein.types import Tree

logger = logging.getLogger(__name__)

_FIRST = 64  # steps for which memory is allocated at first; doubled when they are used up


class ActionHistory:
    """The actions of each environment's open episode in one array (N, C, *A), which grows up to C = `max_steps`.

    Episodes longer than `max_steps` are counted on, but their actions cannot be returned any more. The first such
    episode is logged once, as a warning that begins with `name`. With `max_steps=0` nothing is kept or logged.
    """

    def __init__(self, name: str, space: spaces.Space[Any], num_envs: int, max_steps: int) -> None:
        self._name, self._space, self._max_steps = name, space, max_steps
        self._steps_N = np.zeros(num_envs, np.int64)
        self._logged = max_steps == 0
        self._allocated = min(_FIRST, max_steps)
        self._actions = _zeros(space, (num_envs, self._allocated))

    def steps(self, index: int) -> int:
        """Number of steps of the open episode of one environment."""
        return int(self._steps_N[index])

    def clear(self, index: int) -> None:
        """Forget the actions of one environment, whose next episode begins."""
        self._steps_N[index] = 0

    def append(self, action: Tree, rows: Sequence[int]) -> None:
        """Keep one step of the environments in `rows` (R,) by their rows of `action` (N, *A)."""
        row_R = np.asarray(rows, np.int64)
        step_R = self._steps_N[row_R]
        self._steps_N[row_R] += 1
        longest = int(step_R.max())
        if longest >= self._allocated:
            self._grow(longest)
            kept_R = step_R < self._allocated
            row_R, step_R = row_R[kept_R], step_R[kept_R]
        if self._allocated:
            map_tree(lambda kept, new: _write(kept, row_R, step_R, new), self._actions, action)

    def restore(self, index: int, actions: Tree, steps: int) -> None:
        """Take the actions (T, *A) of the open episode of one environment."""
        if steps > self._allocated:
            self._grow(steps - 1)
        kept = min(steps, self._allocated)
        map_tree(lambda mine, given: mine[index, :kept].copy_(given[:kept]), self._actions, actions)
        self._steps_N[index] = steps

    def state_dict(self) -> dict[str, Any]:
        """Actions (T, *A) and number of steps T of each environment; -1 steps if the actions were not kept."""
        kept = [steps if steps <= self._allocated else -1 for steps in self._steps_N.tolist()]
        actions = [map_tree(lambda x, i=i, t=t: x[i, : max(t, 0)].clone(), self._actions) for i, t in enumerate(kept)]
        return {"actions": actions, "steps": torch.tensor(kept)}

    def _grow(self, step: int) -> None:
        """Make room for `step`, up to `max_steps`."""
        if step >= self._max_steps and not self._logged:
            self._logged = True
            logger.warning(
                "%s: an episode has more than max_replay_steps=%d steps; a run that is resumed within it begins new"
                " episodes. Give a larger max_replay_steps to keep the actions of longer episodes",
                self._name,
                self._max_steps,
            )
        size = min(max(2 * self._allocated, step + 1), self._max_steps)
        if size > self._allocated:
            larger = _zeros(self._space, (len(self._steps_N), size))
            map_tree(lambda new, old: new[:, : old.shape[1]].copy_(old), larger, self._actions)
            self._actions, self._allocated = larger, size


def _write(kept: torch.Tensor, row_R: Any, step_R: Any, new: torch.Tensor) -> None:
    kept.numpy()[row_R, step_R] = new.to(kept.dtype).numpy(force=True)[row_R]


def _zeros(space: spaces.Space[Any], lead: tuple[int, ...]) -> Tree:
    inner = children(space)
    if inner is not None:
        return {key: _zeros(child, lead) for key, child in inner.items()}
    shape, dtype = layout(space)
    return torch.from_numpy(np.zeros((*lead, *shape), dtype))
