"""Over which clock curves are drawn."""

from __future__ import annotations

from collections.abc import Mapping

from rein.loop.clocks import CLOCKS

_USUAL = ("env_steps", "iterations")  # the one advances in the first iteration or never, so a resumed run has the same


class Axis:
    """The clock over which a logger draws: the one that is given, else the first of `_USUAL` that has advanced.

    It is chosen at the first step at which one of them has, and stays. Raises ValueError for no clock, in the name of
    `owner`.
    """

    def __init__(self, owner: str, clock: str | None) -> None:
        if clock is not None and clock not in CLOCKS:
            raise ValueError(f"{owner}(clock={clock!r}): the clocks are {', '.join(CLOCKS)}")
        self._clock = clock

    def step(self, clocks: Mapping[str, float]) -> int:
        """Where a point of that time stands."""
        if self._clock is None:
            self._clock = next((name for name in _USUAL if clocks.get(name)), None)
        return 0 if self._clock is None else int(clocks[self._clock])
