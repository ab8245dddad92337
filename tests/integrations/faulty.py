"""Environment that fails in chosen workers, for tests of supervision."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Faulty(gymnasium.Env[Any, Any]):
    """Environment that observes its steps and a random number of its episode. Episodes have 4 steps.

    Worker `who` calls `fault()` at the place `where`: "making", "reset", "close", or "step", which is the third step.
    With a path `once`, it does so if the file does not exist, and creates the file.
    """

    observation_space = spaces.Box(0.0, 100.0, (2,))
    action_space = spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 12}  # noqa: RUF012  # as Gymnasium has it
    render_mode = "rgb_array"

    def __init__(
        self, fault: Callable[[], Any] | None = None, where: str = "step", who: int = 1, once: Path | None = None
    ) -> None:
        names = multiprocessing.current_process().name, threading.current_thread().name
        self.fault = fault if any(name.startswith(f"rein worker {who} of ") for name in names) else None
        self.where, self.once, self.frames = where, once, 0
        self.meet("making")

    def meet(self, place: str) -> Any:
        if self.fault is not None and self.where == place:
            if self.once is not None:
                if self.once.exists():
                    return None
                self.once.touch()
            return self.fault()
        return None

    def observe(self) -> Any:
        return np.array([self.steps, self.drawn], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.drawn, self.steps = float(self.np_random.integers(90)), 0
        self.meet("reset")
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        wrong = self.meet("step") if self.steps == 3 else None
        return self.observe() if wrong is None else wrong, float(action), self.steps == 4, False, {}

    def render(self) -> Any:
        self.frames += 1
        self.meet("render")
        return np.full((2, 2, 3), self.frames, np.uint8)

    def close(self) -> None:
        self.meet("close")


def exits() -> None:
    os._exit(3)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crashes() -> None:
    faulthandler.disable()  # it would print a traceback
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs() -> None:
    time.sleep(1000.0)


def raises() -> None:
    raise ZeroDivisionError("the simulator divides by zero")


def raises_a_class_of_its_own() -> None:
    class Boom(Exception):
        pass

    raise Boom("the simulator is out of fuel")


def leaves() -> None:
    raise SystemExit("the simulator leaves")


def wrong_data() -> Any:
    return np.zeros(3, np.float32)


def own_pipe() -> int:
    """Return the descriptor of the pipe of this worker process, of rein or of Gymnasium."""
    frame: Any = sys._getframe()
    while frame.f_code.co_name not in ("serve", "_async_worker"):
        frame = frame.f_back
    return frame.f_locals["pipe"].fileno()


def stops_in_an_answer() -> None:
    os.write(own_pipe(), b"\0\0")
    os.kill(os.getpid(), signal.SIGSTOP)


def writes_garbage() -> None:
    os.write(own_pipe(), b"out of memory\n")


def fill(pid: int, pipe: int) -> None:
    """Stop a worker and fill the pipe to it, so that nothing more can be sent."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, bytes(1 << 12))
