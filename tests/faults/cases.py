"""Small runs for the fault tests: every agent of rein in every kind of environment.

As a program, `python cases.py FOLDER` finishes every interrupted run FOLDER/CASE/AT in a fork that has not seen the
run, and writes the final state to end.h5 in the folder of the run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import rein
import rein.agents
from rein.agents.base.agent import Agent
from rein.agents.base.on_policy import OnPolicyAgent
from rein.agents.base.replay_agent import ReplayAgent
from rein.agents.dqn import DQN
from rein.agents.ppo import PPO
from rein.envs.cartpole import CartPole
from rein.envs.gridworld import Gridworld
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.envs.probes import Reach
from rein.handlers.checkpoint import checkpoint
from rein.handlers.evaluate_every import evaluate_every
from rein.loop.state import State
from rein.networks.recurrent import GRU, LSTM, MinimalGRU
from rein.options import options_of
from rein.store.checkpoint_file import write_checkpoint

EPOCHS, ITERATIONS = 5, 12

ENVIRONMENTS: dict[str, Callable[[int], Any]] = {
    "gridworld": lambda seed: Gridworld(5, [(2, 4), (0, 1)], seed=seed, max_episode_steps=7),
    "cartpole": lambda seed: CartPole(num_envs=4, seed=seed),
    "taxi": lambda seed: GymnasiumEnvironment("Taxi-v4", num_envs=3, seed=seed, max_episode_steps=9),
    "gymnasium_cartpole": lambda seed: GymnasiumEnvironment("CartPole-v1", num_envs=3, seed=seed, max_episode_steps=9),
    "reach": lambda seed: Reach(4, dimensions=2, seed=seed, max_episode_steps=9),
    "half_cheetah": lambda seed: GymnasiumEnvironment("HalfCheetah-v5", num_envs=2, seed=seed, max_episode_steps=15),
}


POPULATIONS: dict[str, Any] = {"population_ppo": PPO, "population_frozen": PPO, "population_dqn": DQN}


def agents() -> dict[str, Any]:
    """Return all agents by module name, with variants such as `ppo_lstm` and `sac_prioritized`, and populations."""
    found: dict[str, Any] = {**POPULATIONS}
    for module in pkgutil.iter_modules(rein.agents.__path__):
        members = vars(importlib.import_module(f"rein.agents.{module.name}")).values()
        classes = [m for m in members if inspect.isclass(m) and m.__module__ == f"rein.agents.{module.name}"]
        for kind in (member for member in classes if issubclass(member, Agent)):
            found[module.name] = kind
            if issubclass(kind, OnPolicyAgent):
                cores = {"lstm": LSTM, "gru": GRU, "mingru": MinimalGRU} if kind is PPO else {"lstm": LSTM}
                made = {name: functools.partial(core, features=8) for name, core in cores.items()}
                found |= {f"{module.name}_{name}": functools.partial(kind, core=core) for name, core in made.items()}
            if issubclass(kind, ReplayAgent):
                found[f"{module.name}_prioritized"] = functools.partial(kind, prioritized=True, n_step=3)
    return found


def make_agent(name: str, environment: Any) -> Any:
    """Build a small agent that updates several times per epoch. Raises ValueError for unsupported spaces."""
    kind, spaces = agents()[name], (environment.single_observation_space, environment.single_action_space)
    small = {"rollout_steps": 5, "minibatches": 2, "learning_rate": 0.01, "hidden": (16,)}
    small |= {"normalize_observation": True, "normalize_reward": True}
    replay = issubclass(getattr(kind, "func", kind), ReplayAgent)
    small |= {"capacity": 83, "batch_size": 8, "learning_starts": 11, "update_to_data": 0.4} if replay else {}
    known = options_of(getattr(kind, "func", kind))
    options = {option: value for option, value in small.items() if option in known}
    if name in POPULATIONS:
        return rein.Population(kind, environment, learners=2, seed=3, **options | {"learning_rate": [0.01, 0.003]})
    return kind(*spaces, seed=3, **options)


def cases() -> list[str]:
    """Return all combinations of agents, supported environments and modes, such as `ppo-cartpole-episodic`."""
    found, environments = [], {name: make(3) for name, make in ENVIRONMENTS.items()}
    for agent in agents():
        for name, environment in environments.items():
            with contextlib.suppress(ValueError):
                make_agent(agent, environment)
                found += [f"{agent}-{name}-{mode}" for mode in ("continuing", "episodic")]
    for environment in environments.values():
        environment.close()
    return found


def build(case: str, folder: Path, evaluated: bool = False) -> rein.Loop:
    """Build the loop of a case, with a store and checkpoints in `folder`. Every call builds an equal loop."""
    name, place, mode = case.split("-")
    environment = ENVIRONMENTS[place](3)
    agent = make_agent(name, environment)
    store = rein.HDF5Store(folder, exist="resume")
    loop = rein.training_loop(
        agent, environment, store, episodic=mode == "episodic", epochs=EPOCHS, iterations=ITERATIONS
    )
    if name == "population_frozen":
        loop.epoch_ended(once=1)(lambda state: agent.freeze(1))
    loop.metric("vector_steps_seen", lambda state: state.clocks.vector_steps, reduce="sum")

    @loop.iteration_completed(every=7, unit="env_steps")
    def count(state: State) -> None:
        state.memory["crossings"] = [*state.memory.get("crossings", []), state.clocks.env_steps]

    if evaluated:
        evaluate_every(loop, agent.policy(deterministic=False), ENVIRONMENTS[place](4), episodes=4, every=2)
    checkpoint(loop, store, every=2, keep_last=2)
    return loop


def end(loop: rein.Loop) -> dict[str, Any]:
    """Run to the end. Returns the final state without wall-clock times and without the outcomes of runs."""
    loop.run()
    loop.parts["store"].close()
    del loop.parts["store"]
    return _timeless(loop.state_dict())


def _timeless(state: Any) -> Any:
    odd = ("seconds", "epoch_began", "times", "completed", "halted", "failed")
    if isinstance(state, dict):
        return {key: _timeless(value) for key, value in state.items() if key not in odd}
    return [_timeless(value) for value in state] if isinstance(state, list) else state


def finish(folder: Path) -> None:
    """Resume the run in `folder` and write its final state."""
    loop = build(folder.parent.name, folder)
    rein.resume(loop, folder)
    write_checkpoint(folder / "end.h5", end(loop), {"kind": "run"})


if __name__ == "__main__":
    torch.set_num_threads(1)
    for run in sorted(Path(sys.argv[1]).glob("*/*")):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                finish(run)
                status = 0
            finally:
                os._exit(status)
        if os.waitpid(child, 0)[1] != 0:
            sys.exit(f"{run} could not be finished")
