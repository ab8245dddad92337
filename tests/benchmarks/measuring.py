"""Measurements that several benchmarks use: in turns, in child processes, and of memory. Imports no slow module."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
ALONE = {
    "OMP_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compile in the process that is measured
}

Run = Callable[[int], Any]  # function of a number of steps
Rounds = Iterator[int]  # steps of each round of a worker


def seconds_of(run: Run, steps: int, clock: Callable[[], float] = time.process_time) -> float:
    """Return the seconds of a step."""
    began = clock()
    run(steps)
    return (clock() - began) / steps


def in_turns(
    runs: Mapping[str, Run], steps: Mapping[str, int], repeats: int, clock: Callable[[], float] = time.process_time
) -> dict[str, float]:
    """Return the median seconds of a step by name. Load of the machine affects all runs equally."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            seconds[name].append(seconds_of(run, steps[name], clock))
    return {name: statistics.median(each) for name, each in seconds.items()}


def verdict(reached: bool) -> str:
    """Return the word for a target."""
    return "met" if reached else "MISSED"


def memory(entry: str = "VmRSS") -> float:
    """Return the MiB of an entry of /proc/self/status. Without such a file, NaN."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(text.split()[1]) for text in lines if text.startswith(f"{entry}:")), float("nan")) / 2**10


def steps_of(environment: Any) -> Run:
    """Return a function that steps an environment of rein with actions that are sampled in advance."""
    import torch

    from rein.testing.environment_contract import random_actions

    environment.reset()
    actions = random_actions(environment, 64)

    def run(steps: int) -> None:
        with torch.no_grad():
            for step in range(steps):
                environment.apply_action(actions[step % len(actions)])

    return run


def steps_of_vector(environment: Any) -> Run:
    """Return a function that steps a vector environment of Gymnasium with actions that are sampled in advance."""
    environment.reset(seed=0)
    actions = [environment.action_space.sample() for _ in range(64)]

    def run(steps: int) -> None:
        for step in range(steps):
            environment.step(actions[step % len(actions)])

    return run


class Sample(NamedTuple):
    """Result of one round of a worker."""

    steps: int
    cpu: float
    wall: float


class Worker:
    """Child process, or several that learn together, that runs rounds on request: `python script name options`."""

    def __init__(
        self, script: Path, name: str, options: Mapping[str, Any], cache: str, cores: int = 1, processes: int = 1
    ) -> None:
        self.samples: list[Sample] = []
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (`close` closes it)
        command = [sys.executable, str(script), name, json.dumps(options)]
        environment = os.environ | ALONE | {"TORCHINDUCTOR_CACHE_DIR": cache}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        with pinned(cores):
            self._processes = [
                subprocess.Popen(command, env=environment | place, text=True, **pipes) for place in places(processes)
            ]

    def round(self) -> None:
        """Run a round. With several processes, its wall time is that of the slowest. Does nothing if one has died."""
        if any(process.poll() is not None for process in self._processes):
            return
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):
                print("go", file=process.stdin, flush=True)
        answers = [process.stdout.readline() for process in self._processes if process.stdout is not None]
        if all(answers):
            steps, cpu, wall = zip(*map(json.loads, answers), strict=True)
            self.samples.append(Sample(sum(steps), sum(cpu), max(wall)))
        else:
            for process in self._processes:
                process.wait()

    def close(self) -> str:
        """End the processes. Returns the error if one has died, otherwise an empty string."""
        died = [process.returncode for process in self._processes if process.poll() is not None]
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            process.wait()
        with self._errors as errors:
            errors.seek(0)
            output = errors.read().strip()
        raised = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", output, re.MULTILINE)  # notes may follow the error
        return "" if not died else raised[-1] if raised else f"{output[-200:]} (status {died[0]})"


def places(processes: int) -> list[dict[str, str]]:
    """Return the environment variables that torchrun sets for each process; empty for one process."""
    if processes == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(processes)}
    return [shared | {"RANK": str(rank)} for rank in range(processes)]


@contextlib.contextmanager
def pinned(cores: int) -> Iterator[None]:
    """Context manager: processes started within it run on the first `cores` cores."""
    if CORES:
        os.sched_setaffinity(0, CORES[:cores])
    try:
        yield
    finally:
        if CORES:
            os.sched_setaffinity(0, CORES)


def run_workers(script: Path, specs: Mapping[str, tuple[Any, ...]], repeats: int) -> dict[str, list[Sample] | str]:
    """Return the samples or the error of each worker (name, options, cores, processes) by label.

    The first round builds, the second warms up or compiles, and `repeats` others follow. Workers take turns.
    """
    with tempfile.TemporaryDirectory() as cache:
        workers = {
            label: Worker(script, name, options, f"{cache}/{number}", *rest)
            for number, (label, (name, options, *rest)) in enumerate(specs.items())
        }
        for _ in range(2 + repeats):
            for worker in workers.values():
                worker.round()
        errors = {label: worker.close() for label, worker in workers.items()}
    return {label: errors[label] or worker.samples for label, worker in workers.items()}


def serve(rounds: Rounds) -> None:
    """Run a round for each line of the standard input, and print [steps, CPU seconds, wall seconds].

    Times include child processes, such as compilers.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keep output of libraries out of the answers
    for _ in sys.stdin:
        cpu, wall = cpu_seconds(), time.perf_counter()
        steps = next(rounds)
        print(json.dumps([steps, cpu_seconds() - cpu, time.perf_counter() - wall]), file=answers)


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
