"""Watchers that end a run, or repair it, before it is lost: NaN and infinity, a dead loop, a full disk, full memory."""

from __future__ import annotations

import faulthandler
import logging
import math
import multiprocessing
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

import torch
from torch import Tensor

from rein.errors import NonFiniteError
from rein.loop import Loop
from rein.ops.statistics import global_norm
from rein.ops.trees import leaves
from rein.types import State, StepState

logger = logging.getLogger("rein")

HUNG_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again
_KINDS = ("stop", "skip", "return")


class UpdateGuard:
    """Looks at an agent's losses and gradients before each step of its optimizer, which NaN or infinity never takes.

        guard = UpdateGuard("skip")
        agent = PPO(..., guard=guard)
        guard_updates(loop, guard)

    `on_failure`: "stop" raises NonFiniteError; "skip" leaves the update out; "return" leaves it out and has the agent
    return to its last good checkpoint. After `limit` failures in a row the last two raise as well. `failures` counts
    the updates that were left out.
    """

    def __init__(self, on_failure: Literal["stop", "skip", "return"] = "stop", *, limit: int = 1000) -> None:
        if on_failure not in _KINDS:
            raise ValueError(f"UpdateGuard({on_failure!r}): give one of {', '.join(_KINDS)}")
        if limit < 1:
            raise ValueError(f"UpdateGuard(limit={limit}): give 1 or more")
        self.on_failure, self.limit = on_failure, limit
        self.failures = 0
        self.in_a_row = 0
        self.wanted = False  # to return to the last good checkpoint

    def __call__(self, metrics: Mapping[str, Tensor], gradients: Sequence[Tensor]) -> bool:
        """Whether to take the step; one fused reduction and one look at its result where all is well."""
        numbers = [value for name, value in metrics.items() if name == "grad_norm" or "loss" in name]
        if "grad_norm" not in metrics:
            numbers.append(global_norm(list(gradients)))
        if math.isfinite(_total(numbers)):
            self.in_a_row = 0
            return True
        bad = [name for name, value in metrics.items() if not bool(torch.isfinite(torch.as_tensor(value)).all())]
        bad += [f"gradient {n}" for n, g in enumerate(gradients) if not bool(torch.isfinite(g).all())]
        if not bad:  # finite numbers whose sum is not
            return True
        self.failures, self.in_a_row = self.failures + 1, self.in_a_row + 1
        if self.on_failure == "stop" or self.in_a_row > self.limit:
            times = "" if self.in_a_row == 1 else f", {self.in_a_row} times in a row"
            raise NonFiniteError(f"NaN or infinity in {', '.join(bad)}{times}; the update was not taken")
        self.wanted = self.on_failure == "return"
        return False


def _total(numbers: Sequence[Tensor]) -> float:
    """Their sum, which is not finite where one of them is not; where they lie on a device, by one look at it."""
    if all(number.is_cpu for number in numbers):
        return sum(map(float, numbers))
    return float(torch.stack([number.detach().reshape(()) for number in numbers]).sum())


def guard_updates(loop: Loop, guard: UpdateGuard, saver: Any = None, *, agent: str = "agent") -> None:
    """Report an `UpdateGuard`'s failures as the metric `skipped_updates`, and return to good checkpoints if it says so.

    For "return" give the saver that `checkpoint` returned, attached before. Then the part `agent` of the loop becomes,
    at the iteration's edge, what it was in the newest checkpoint without NaN; its counts, the environments and the
    loop go on, so what it meets next is something else. Raises ValueError where that is not possible, at once or, with
    no such checkpoint, then.
    """
    if guard.on_failure == "return" and saver is None:
        raise ValueError('guard_updates(...): "return" needs the saver that checkpoint(loop, store) returned')
    if agent not in loop.parts:
        raise ValueError(f"guard_updates(agent={agent!r}): the loop owns {', '.join(loop.parts) or 'nothing'}")
    loop.metric("skipped_updates", _increase(guard), reduce="sum")

    def return_to_good(state: State) -> None:
        guard.wanted = False
        part, step_state = loop.parts[agent], state.step_state
        found = next((c for c in saver.checkpoints.good() if c.about.get("finite")), None)
        if found is None:
            raise NonFiniteError(f"NaN or infinity, and no checkpoint without in {saver.checkpoints.folder}")
        counts = part.env_steps, part.updates
        part.load_state_dict(found.state["parts"][agent])
        part.env_steps, part.updates = counts  # clocks never go back
        if isinstance(step_state, StepState):  # nothing reaches from what it had seen then to what it sees now
            everywhere = torch.ones(loop.parts["environment"].num_envs, dtype=torch.bool, device=part.device)
            part.observe_reset(step_state.observation, everywhere)
        logger.warning("NaN or infinity in an update: the %s has returned to %s", agent, found.path)

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
    """End the run where an action, observation or reward is NaN or infinite: NonFiniteError says which and where.

    Actions are looked at before the environment gets them, the rest before the agent does, in rows that are no data
    too: an agent multiplies those by zero, and NaN stays NaN. One reduction and one look at its result, twice a step.
    Raises AttributeError for a loop without these events: it is for training loops.
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
    if math.isfinite(_total([tensor.sum() for tree in fields.values() for tensor in _floats(tree)])):
        return
    for path, leaf in leaves(dict(fields)):
        if not leaf.is_floating_point():
            continue
        bad_N = ~torch.isfinite(leaf.reshape(len(leaf), -1)).all(1)
        if rows := bad_N.nonzero().flatten().tolist():
            where = f"{', '.join(map(str, rows[:8]))}{', ...' if len(rows) > 8 else ''}"
            step = state.clocks.vector_steps
            raise NonFiniteError(f"NaN or infinity in {path} of environment {where}, vector step {step}")


def _floats(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):  # as most are: this stands on the hot path
        return [tree] if tree.is_floating_point() else []
    return [leaf for _, leaf in leaves(tree) if leaf.is_floating_point()]


def watchdog(
    loop: Loop, *, seconds: float = 600.0, kill_after: float | None = None, file: TextIO | None = None
) -> None:
    """When no iteration ends for so long, write what every thread does to `file` (stderr) and interrupt the run.

    A run that comes back ends at the iteration's edge, is saved there by `checkpoint`, and can be resumed. One that
    does not is for whoever reads the stacks, or, with `kill_after`, is ended: where no iteration has ended so many
    seconds later either, the process kills its children (those of `multiprocessing`), flushes what was logged and exits
    at once with `HUNG_EXIT_CODE`, 75, for a scheduler to start it again. An evaluation is part of no iteration: give
    more seconds than the longest takes. Raises ValueError for no time at all, and for an infinite one.
    """
    limits = (seconds,) if kill_after is None else (seconds, kill_after)
    if not all(0 < limit <= threading.TIMEOUT_MAX for limit in limits):
        raise ValueError(f"watchdog({seconds=}, {kill_after=}): give finite numbers above 0")
    ended = threading.Event()

    def watch() -> None:
        state, seen = loop.state, -1
        while not ended.wait(seconds):
            if state.total_iterations == seen:
                stream = sys.stderr if file is None else file
                print(f"rein: no iteration has ended for {seconds:g} s; what the threads do:", file=stream, flush=True)
                faulthandler.dump_traceback(stream)
                loop.interrupt(f"watchdog: no iteration ended for {seconds:g} s")
                if kill_after is not None and not ended.wait(kill_after) and state.total_iterations == seen:
                    _end_process(stream, f"rein: none for {kill_after:g} s more; the process ends with exit code")
                return
            seen = state.total_iterations

    @loop.started
    def begin(state: State) -> None:
        ended.clear()
        thread = threading.Thread(target=watch, name="rein-watchdog", daemon=True)
        thread.start()

        def end() -> None:
            ended.set()
            thread.join()

        loop.cleanups.append(end)


def _end_process(stream: TextIO, text: str) -> None:
    """Whatever hangs may hold locks of what is flushed here, so that gets a moment and no more."""

    def flush() -> None:
        print(f"{text} {HUNG_EXIT_CODE}", file=stream, flush=True)
        logging.shutdown()
        sys.stdout.flush()

    for child in multiprocessing.active_children():
        child.kill()
    flushing = threading.Thread(target=flush, daemon=True)
    flushing.start()
    flushing.join(5.0)
    os._exit(HUNG_EXIT_CODE)


def guard_resources(
    loop: Loop,
    path: str | Path = ".",
    *,
    disk: float = 1e9,
    memory: float | None = None,
    event: str = "epoch_ended",
    **filters: Any,
) -> None:
    """Interrupt the run when the disk under `path` has less than `disk` bytes left, or it uses more than `memory`.

    It ends at the edge with the reason, is saved there by `checkpoint`, and can be resumed when there is room. Memory
    is what the process has resident; None is no limit. Raises ValueError for numbers that are not above 0.
    """
    if not disk > 0 or (memory is not None and not memory > 0):
        raise ValueError(f"guard_resources({disk=}, {memory=}): give numbers of bytes above 0")

    @loop.event(event)(**filters)
    def look(state: State) -> None:
        for reason in _shortages(Path(path), disk, memory):
            logger.warning("%s; the run is interrupted", reason)
            loop.interrupt(reason)


def _shortages(path: Path, disk: float, memory: float | None) -> Iterator[str]:
    while not path.exists():  # a run's folder that is not made yet
        path = path.parent
    free = shutil.disk_usage(path).free
    if free < disk:
        yield f"{path}: {free / 1e9:.2f} GB are free, and {disk / 1e9:.2f} GB shall be"
    used = resident_bytes()
    if memory is not None and used > memory:
        yield f"the process uses {used / 1e9:.2f} GB of memory, and {memory / 1e9:.2f} GB are its limit"


def resident_bytes() -> int:
    """Memory of this process that is resident; where the system does not say, the most that it ever was."""
    try:
        fields = Path("/proc/self/statm").read_text().split()
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
