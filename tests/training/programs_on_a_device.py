"""Train with programs on a simulated device, which refuses what a program cannot contain, and print results as JSON.

`python programs_on_a_device.py CASE...` prints, for each case, the difference to the CPU, the number of calls of
programs, and the operations of a call of each program by name.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from stand_in_device import NAME, as_program, operations, stand_in

import rein
from rein.accelerate import compiled
from rein.envs import Acrobot, CartPole, Gridworld, MountainCar, Navigation, Pendulum
from rein.ops.trees import leaves

ROLLOUT, N = 8, 4
PPO = functools.partial(rein.PPO, rollout_steps=ROLLOUT, minibatches=2, update_epochs=2)
A2C = functools.partial(rein.A2C, rollout_steps=ROLLOUT)
MAKE: dict[str, Any] = {
    "CartPole": functools.partial(CartPole, N, max_episode_steps=6),
    "Pendulum": functools.partial(Pendulum, N, max_episode_steps=5),
    "Acrobot": functools.partial(Acrobot, N, max_episode_steps=5),
    "MountainCar": functools.partial(MountainCar, N, max_episode_steps=5),
    "Gridworld": functools.partial(Gridworld, N, max_episode_steps=5),
    "Navigation": functools.partial(Navigation, N // 2, 2, early_leave=True, max_episode_steps=5),
}
CASES = {f"{agent.func.__name__}, {name}": (agent, name) for agent in (PPO, A2C) for name in MAKE}


class Checked:
    """Calls the function within `as_program` instead of a replay, and counts its operations."""

    def __init__(self) -> None:
        self.calls = 0
        self.operations: dict[str, dict[str, int]] = {}

    def __call__(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        name = str(function.__closure__[-1].cell_contents._function.__name__)  # type: ignore[index]  # of the program
        outputs: list[Any] = []

        def replay() -> None:
            self.calls += 1
            operations.clear()
            with as_program(name):
                results = function()
            self.operations[name] = dict(operations)
            for (_, output), (_, result) in zip(leaves(outputs[0]), leaves(results), strict=True):
                if isinstance(output, torch.Tensor):
                    output.copy_(result)

        with torch.no_grad():
            outputs.append(function())
        first = [True]

        def replay_or_skip() -> None:
            if not first.pop() if first else True:
                replay()

        return replay_or_skip, outputs[0]


def learned(case: str, device: str, epochs: int) -> list[torch.Tensor]:
    """Train and return the parameters, on the CPU."""
    agent, name = CASES[case]
    environment = MAKE[name](seed=0, device=device)
    spaces = environment.single_observation_space, environment.single_action_space
    trained = agent(*spaces, hidden=(8,), seed=0, device=device, compile=device == NAME)
    rein.training_loop(trained, environment, seed=0).run(epochs=epochs, iterations=ROLLOUT)
    return [parameter.detach().cpu() for parameter in trained.networks.parameters()]


def main() -> None:
    """Print the results of each case."""
    torch.compile = lambda function, **options: function  # type: ignore[assignment]
    report: dict[str, Any] = {}
    for case in sys.argv[1:] or CASES:
        on_host = learned(case, "cpu", 6)
        with stand_in():
            checked = compiled.CAPTURES[NAME] = Checked()
            there = learned(case, NAME, 6)
        distance = max(float((a - b).abs().max()) for a, b in zip(on_host, there, strict=True))
        report[case] = {"distance": distance, "calls": checked.calls, "operations": checked.operations}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
