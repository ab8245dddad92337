"""Record when a metric first reaches the value that counts as solving the task."""

from __future__ import annotations

from typing import Any

from rein.handlers.output import UNSOLVED
from rein.loop import Loop
from rein.loop.state import State


def record_solved(
    loop: Loop, metric: str, at_least: float, *, stop: bool = True, event: str = "epoch_ended", **filters: Any
) -> None:
    """Record in `state.memory["solved"]` when `metric` first reaches `at_least`, and halt the loop if `stop`.

    Example::

        record_solved(loop, "evaluation_return", at_least=7.0)

    Attach it after the handler that sets the metric. Firings without the metric are ignored. If a solved run is resumed
    with `stop`, it halts in `started`. With several rules, such as milestones, the first one met is recorded as
    "solved" and each later one as "solved/<metric> <at_least>". A rule not yet met is recorded as
    `state.memory["unsolved/<metric> <at_least>"]` with the last value of the metric.
    """
    loop.metrics.read_by(f"record_solved(loop, {metric!r})", metric)
    unsolved = f"{UNSOLVED}{metric} {at_least}"
    rule, rule_key = {"metric": metric, "at_least": at_least, "stop": stop}, f"solved/{metric} {at_least}"

    def is_met(state: State) -> bool:
        records = (state.memory.get(key) for key in ("solved", rule_key))
        return any(record is not None and rule.items() <= record.items() for record in records)

    @loop.event(event)(**filters)
    def record(state: State) -> None:
        if is_met(state):
            return
        value = state.metrics.get(metric)
        if value is None or not value >= at_least:
            last = state.memory.get(unsolved, {}).get("value")
            state.memory[unsolved] = {**rule, "value": last if value is None else value}
            return
        state.memory.pop(unsolved, None)
        clocks = {name: getattr(state.clocks, name) for name in ("env_steps", "episodes", "seconds")}
        key = rule_key if "solved" in state.memory else "solved"
        state.memory[key] = {**rule, "value": value, **clocks}
        if stop and state.status == "running":  # the last evaluation may end in `completed`
            state.halt_loop("solved")

    @loop.started
    def halt_if_solved(state: State) -> None:
        if stop and is_met(state):
            state.halt_loop("solved")
