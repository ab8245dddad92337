"""Measure the overhead of the loop and compare it with pytorch-ignite: `python tests/benchmarks/loop.py`.

Results are CPU times per iteration, medians of interleaved repeats, so load of the machine affects all rows equally.
Further results: 100,000 epochs of one iteration each, and the times of `import torch` and `import rein; rein.PPO`.
Includes `pytorch-ignite` (dependency group `bench`) if it is installed.
"""

from __future__ import annotations

import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import blinker
from measuring import Run, in_turns, memory, verdict
from sizes import size

import rein

try:
    import ignite
    from ignite.engine import Engine, Events
except ImportError:
    ignite = None

ITERATIONS, REPEATS, IMPORTS = size(100_000, 1_000), size(7, 1), size(5, 1)
EPOCHS, PART, WARM_UP = size(100_000, 100), size(10_000, 10), size(1_000, 10)


def nothing(state: Any) -> None:
    return None


def advance(state: rein.State) -> None:
    state.clocks.advance(env_steps=16)


def handlers(number: int) -> list[Callable[[Any], None]]:
    return [lambda state: None for _ in range(number)]


def bare(iterations: int) -> None:
    state = rein.State()
    for _ in range(iterations):
        state.step_state = nothing(state)


def closures(iterations: int) -> None:
    state, attached = rein.State(), handlers(10)
    for _ in range(iterations):
        for handler in attached:
            handler(state)


def send(iterations: int) -> None:
    signal = blinker.Signal()
    receiver: Callable[..., None] = lambda sender, state: None  # noqa: E731  # short
    signal.connect(receiver)
    for _ in range(iterations):
        signal.send(signal, state=None)


def of_rein(number: int = 0, step: Callable[[rein.State], None] = nothing, **filters: Any) -> Run:
    def run(iterations: int) -> None:
        loop = rein.Loop(step)
        for handler in handlers(number):
            loop.iteration_completed.attach(handler, **filters)
        loop.run(iterations=iterations)

    return run


def of_ignite(number: int = 0, **filters: Any) -> Run:
    def run(iterations: int) -> None:
        engine = Engine(lambda engine, batch: None)
        engine.logger.setLevel(logging.ERROR)
        for handler in handlers(number):
            completed = Events.ITERATION_COMPLETED
            engine.add_event_handler(completed(**filters) if filters else completed, handler)
        engine.run(None, max_epochs=1, epoch_length=iterations)

    return run


CASES: dict[str, Run] = {
    "bare": bare,
    "closures": closures,
    "send": send,
    "rein": of_rein(),
    "rein 10": of_rein(10),
    "rein every": of_rein(10, every=100),
    "rein advance": of_rein(0, advance),
    "rein clock": of_rein(10, advance, every=100, unit="env_steps"),
}
PEER: dict[str, Run] = {
    "ignite": of_ignite(),
    "ignite 10": of_ignite(10),
    "ignite every": of_ignite(10, every=100),
}


def per_iteration() -> None:
    cases = CASES | (PEER if ignite else {})
    for case in cases.values():
        case(ITERATIONS // 10)  # warm up
    seconds = in_turns(cases, dict.fromkeys(cases, ITERATIONS), REPEATS)
    ns = {name: 1e9 * each for name, each in seconds.items()}
    ns |= dict.fromkeys(PEER.keys() - ns.keys(), float("nan"))
    version = ignite.__version__ if ignite else "absent: pip install pytorch-ignite==0.5.5"
    print(f"CPU ns per iteration, medians of {REPEATS} x {ITERATIONS:,}; pytorch-ignite {version}")
    row("", "rein", "target", "", "ignite", "ratio")
    compare("loop, minus a bare for", ns["rein"] - ns["bare"], 200, ns["ignite"] - ns["bare"])
    compare("each handler", (ns["rein 10"] - ns["rein"]) / 10, 60, (ns["ignite 10"] - ns["ignite"]) / 10)
    compare("ten with every=100", ns["rein every"] - ns["rein"], 800, ns["ignite every"] - ns["ignite"])
    compare("ten with every=100 on env_steps", ns["rein clock"] - ns["rein advance"], 2500, float("nan"))
    print(f"  a bare for with one call {ns['bare']:.0f}, a list of ten closures {ns['closures']:.0f}, ", end="")
    print(f"one blinker send {ns['send']:.0f}, clocks.advance {ns['rein advance'] - ns['rein']:.0f}\n")


def compare(name: str, ours: float, target: float, theirs: float) -> None:
    peer = (f"{theirs:.0f}", f"{theirs / ours:.1f}x") if theirs == theirs else ()
    row(name, f"{ours:.0f}", f"{target:.0f}", verdict(ours <= target), *peer)


def row(what: str, *cells: Any) -> None:
    print(f"  {what:34}" + "".join(f"{cell or '':>9}" for cell in cells))


def many_epochs() -> None:
    loop, at, total = rein.Loop(lambda state: {"x": 1.0}), dict[int, float](), WARM_UP + EPOCHS
    loop.metric("x", "x")
    loop.epoch_ended(every=100)(nothing)
    grown = 0.0
    for state in loop.stream(epochs=total, iterations=1):
        if state.epoch in (WARM_UP, WARM_UP + PART, total - PART, total):
            at[state.epoch] = time.process_time()
        if state.epoch in (WARM_UP, total):
            grown = memory() - grown
    first, last = at[WARM_UP + PART] - at[WARM_UP], at[total] - at[total - PART]
    print(f"{EPOCHS:,} epochs of one iteration, after a warm-up of {WARM_UP:,}")
    times = f"the first {PART:,} took {first:.3f} s, the last {last:.3f} s of CPU"
    print(f"  {times}: ratio {last / first:.2f} (target 1.2)")
    print(f"  memory increased by {grown:.1f} MiB (target 20)\n")


def imports() -> None:
    seconds: dict[str, list[float]] = {"import torch": [], "import rein; rein.PPO": []}
    for _ in range(IMPORTS):
        for imported, taken in seconds.items():
            program = f"import time; began = time.process_time(); {imported}; print(time.process_time() - began)"
            result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
            taken.append(float(result.stdout))
    torch, own = (statistics.median(taken) for taken in seconds.values())
    print(f"imports, medians of {IMPORTS} fresh processes")
    print("  " + ", ".join(f"`{imported}` {statistics.median(taken):.2f} CPU s" for imported, taken in seconds.items()))
    print(f"  {own - torch:+.2f} s (target 0.3) {verdict(own - torch <= 0.3)}")


if __name__ == "__main__":
    per_iteration()
    many_epochs()
    imports()
