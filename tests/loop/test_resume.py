"""Resuming in the same loop and in a new one, from every edge, is exact."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch

import rein
from rein.loop.metrics import ema


class Position(NamedTuple):
    x: torch.Tensor
    visits: tuple[int, ...] = ()


class Walker:
    """Part with state."""

    def __init__(self) -> None:
        self.seed = 1

    def draw(self) -> int:
        self.seed = self.seed * 1103515245 + 12345 & 0x7FFFFFFF
        return self.seed >> 16

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seed = state["seed"]


DATA = [3, 1, 4, 1, 5, 9, 2, 6]
WITHIN = ["epoch_started", "iteration_started", "phase", "iteration_completed"]
ENDS = ["epoch_completed", "epoch_halted", "epoch_ended"]
UNITS = [None, "iteration", "iterations", "epochs", "env_steps", "vector_steps"]


def composed(seed: int, trace: list[Any], cut_at: set[int]) -> rein.Loop:
    """Return a loop with handlers, filters and halts drawn from a seed, interrupted at some firings."""
    rng, walker = random.Random(seed), Walker()

    def step(state: rein.State) -> Position:
        loop.emit("phase")
        state.clocks.advance(env_steps=walker.draw() % 40, vector_steps=torch.tensor(1))
        position: Position = state.step_state
        return Position(position.x + walker.draw() % 7 - state.batch, (*position.visits[-3:], state.batch))

    loop = rein.Loop(step, epochs=4, iterations=rng.choice([None, 3, 6]))
    loop.define("phase")
    loop.own("walker", walker)
    for reduce in ("mean", "sum", "max", "last", ema(0.5)):
        loop.metric(f"x_{reduce if isinstance(reduce, str) else 'ema'}", lambda state: state.step_state.x, reduce)
    loop.metric("rare", lambda state: float(state.batch) if state.batch > 3 else None, "min")
    for name in WITHIN + ENDS:
        loop.on(name)(recorder(loop, name, trace, cut_at))
    for number in range(12):
        name = rng.choice(WITHIN + ENDS)
        loop.event(name).attach(action(rng, number), **filters(rng))
    return loop


def recorder(loop: rein.Loop, name: str, trace: list[Any], cut_at: set[int]) -> Callable[[rein.State], None]:
    def record(state: rein.State) -> None:
        tick = state.memory["tick"] = state.memory.get("tick", 0) + 1
        x = state.step_state.x.item()
        trace.append((tick, name, state.epoch, state.iteration, state.clocks.epochs, state.clocks.env_steps, x))
        if tick in cut_at:
            loop.interrupt("cut")

    return record


def action(rng: random.Random, number: int) -> Callable[[rein.State], None]:
    """Return a random action of a handler with a visible effect."""

    def remember(state: rein.State) -> None:
        state.memory[f"seen_{number}"] = state.memory.get(f"seen_{number}", 0) + state.memory["tick"]

    def assign(state: rein.State) -> None:
        state.metrics[f"assigned_{number}"] = state.memory["tick"]

    def shift(state: rein.State) -> None:
        state.step_state = state.step_state._replace(x=state.step_state.x * 2)

    def halt_loop(state: rein.State) -> None:
        if state.epoch == 3:
            state.halt_loop("enough")

    return rng.choice([remember, remember, assign, shift, rein.State.halt_epoch, halt_loop])


def filters(rng: random.Random) -> dict[str, Any]:
    unit = rng.choice(UNITS)
    scale = 20 if unit == "env_steps" else 1
    made: dict[str, Any] = {"every": rng.randint(2, 9) * scale} if rng.random() < 0.5 else {}
    made |= {"once": rng.randint(1, 12) * scale} if not made or rng.random() < 0.2 else {}
    made |= {"after": rng.randint(0, 5) * scale} if rng.random() < 0.3 else {}
    made |= {"before": rng.randint(9, 20) * scale} if rng.random() < 0.3 else {}
    made |= {"when": lambda state: state.memory["tick"] % 3 > 0} if rng.random() < 0.3 else {}
    return made | ({"unit": unit} if unit else {})


def stored(value: Any) -> Any:
    """Return a value as a file returns it: equal plain values, sorted keys, and no shared objects."""
    if isinstance(value, dict):
        assert all(isinstance(key, str) for key in value)
        return {key: stored(value[key]) for key in sorted(value)}
    if type(value) is list:
        return [stored(each) for each in value]
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    assert value is None or type(value) in (bool, int, float, str), value
    return value


def outcome(state: rein.State) -> dict[str, Any]:
    """Return everything that a run leaves behind, except seconds and the number of its starts."""
    clocks = {name: value for name, value in state.clocks.as_dict().items() if name != "seconds"}
    history = [record._replace(seconds=0.0, metrics=plain(record.metrics)) for record in state.history]
    counts = {name: value for name, value in state.counts.items() if name not in ("started", "halted", "completed")}
    position = (type(state.step_state), state.step_state.x.item(), state.step_state.visits)
    counters = (state.epoch, state.iteration, state.total_iterations, state.status, state.reason)
    return dict(
        counters=counters, clocks=clocks, history=history, counts=counts, position=position, memory=state.memory
    ) | {"metrics": plain(state.metrics)}


def plain(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: None if value != value else value for name, value in metrics.items()}


START = Position(torch.tensor(0.0, dtype=torch.float64))


def run_to_the_end(
    loop: rein.Loop, again: Callable[[rein.Loop], rein.Loop] = lambda loop: loop
) -> tuple[rein.Loop, int]:
    """Run until all epochs have ended, continuing after every halt. Return the loop and the number of runs."""
    runs = 1
    while loop.run(DATA, init=START).status != "completed":
        loop, runs = again(loop), runs + 1
    return loop, runs


@pytest.mark.default_cases(every=2)
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("new_loop", [False, True])
def test_interrupted_run_ends_like_an_uninterrupted_one(seed: int, new_loop: bool) -> None:
    def load(loop: rein.Loop) -> rein.Loop:
        saved = stored(loop.state_dict())
        loop = composed(seed, trace, cut_at)
        loop.load_state_dict(saved)
        return loop

    expected, trace = list[Any](), list[Any]()
    uncut, runs = run_to_the_end(composed(seed, expected, set()))
    rng = random.Random(-seed)
    cut_at = {rng.randint(1, len(expected)) for _ in range(rng.randint(1, 6))}
    cut, cut_runs = run_to_the_end(composed(seed, trace, cut_at), *([load] if new_loop else []))
    assert cut_runs > runs
    assert trace == expected
    assert outcome(cut.state) == outcome(uncut.state)


@pytest.mark.default_cases(every=2)
@pytest.mark.parametrize("seed", range(100, 130))
def test_state_saved_at_an_edge_resumes_to_the_same_end(seed: int) -> None:
    """The run is not interrupted, as after a kill, when only the last checkpoint is left."""
    expected: list[Any] = []
    loop, chance = composed(seed, expected, set()), random.Random(seed)
    saved: list[dict[str, Any]] = []

    def save(state: rein.State) -> None:
        if chance.random() < 0.3:
            saved.append(stored(loop.state_dict()))

    loop.on("iteration_completed", "epoch_ended")(lambda state: state.request(save))
    uncut = outcome(run_to_the_end(loop)[0].state)
    assert saved
    for checkpoint in saved:
        trace: list[Any] = []
        resumed = composed(seed, trace, set())
        resumed.load_state_dict(checkpoint)
        run_to_the_end(resumed)
        assert trace == expected[checkpoint["memory"]["tick"] :]
        assert outcome(resumed.state) == uncut
