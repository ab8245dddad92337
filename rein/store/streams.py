"""The transitions of a run, one environment after the other.

Shapes: G rows of all environments.
"""

from __future__ import annotations

import functools

import numpy as np

from rein.store.datasets import Transitions
from rein.store.reader import Run

_FIELDS = ("observation", "action", "reward", "terminated", "truncated")


class Streams(Transitions):
    """`Transitions` in another order: all of environment 0 in the order of time, then all of environment 1, and so on.

    So what follows an element is what followed in time, wherever that was recorded, which n-step returns need. It has
    the fields that are learned from.
    """

    def __init__(self, transitions: Transitions) -> None:
        """Raises ValueError where a file does not have these fields, or has others in another shape."""
        super().__init__(transitions._contents, _FIELDS, transitions._episodes)

    @functools.cached_property
    def _first(self) -> np.ndarray:
        row = np.flatnonzero(self._rows.whole_G)
        file = np.searchsorted(self._rows.base, row, "right") - 1
        environment = (row - self._rows.base[file]) % self._envs[file]
        return row[np.argsort(environment, kind="stable")]


def streams(recorded: Run | Transitions) -> Streams:
    """All of a run, or those of its transitions that were chosen."""
    return Streams(recorded.transitions(_FIELDS) if isinstance(recorded, Run) else recorded)
