"""Whether the task is solved, by the metric and the value that say so."""

from __future__ import annotations

from typing import Any

from rein.loop import Loop
from rein.loop.state import State

UNSOLVED = "unsolved/"  # begins the keys of `state.memory` for rules that are not met


def solved(
    loop: Loop, metric: str, at_least: float, *, stop: bool = True, event: str = "epoch_ended", **filters: Any
) -> None:
    """Take down in `state.memory["solved"]` when `metric` first reached `at_least`, and halt the loop there if `stop`.

        solved(loop, "evaluation_return", at_least=7.0)

    Attach it after what provides the metric; an epoch without it says nothing. What is solved stays solved: such a run,
    resumed with `stop`, halts in `started`. Of several rules, milestones on the way say, the first that is met is taken
    down as "solved", and each later one as "solved/<metric> <at_least>". A rule that is not met yet is in
    `state.memory["unsolved/<metric> <at_least>"]` with the last value of the metric.
    """
    unsolved = f"{UNSOLVED}{metric} {at_least}"
    rule, own_key = {"metric": metric, "at_least": at_least, "stop": stop}, f"solved/{metric} {at_least}"

    def is_met(state: State) -> bool:
        records = (state.memory.get(key) for key in ("solved", own_key))
        return any(record is not None and rule.items() <= record.items() for record in records)

    @loop.event(event)(**filters)
    def take_down(state: State) -> None:
        if is_met(state):
            return
        value = state.metrics.get(metric)
        if value is None or not value >= at_least:
            last = state.memory.get(unsolved, {}).get("value")
            state.memory[unsolved] = {**rule, "value": last if value is None else value}
            return
        state.memory.pop(unsolved, None)
        clocks = {name: getattr(state.clocks, name) for name in ("env_steps", "episodes", "seconds")}
        key = own_key if "solved" in state.memory else "solved"
        state.memory[key] = {**rule, "value": value, **clocks}
        if stop:
            state.halt_loop("solved")

    @loop.started
    def halt_if_solved(state: State) -> None:
        if stop and is_met(state):
            state.halt_loop("solved")
