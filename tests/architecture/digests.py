"""Check that a change keeps results: `python tests/architecture/digests.py REV` compares this checkout with a commit.

Runs named recipes and environments on the host, and writes trajectory files, in a worktree of REV and in the checkout.
Compares the parameters and the bytes. No digest is stored, because digests differ between processors. Exits with
status 1 if anything differs.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

ROOT = Path(__file__).parents[2]
RECIPES: dict[str, dict[str, Any]] = {
    "acrobot": {"epochs": 2},
    "cartpole": {"epochs": 3},
    "cartpole_dqn": {"epochs": 2, "learning_starts": 200},
    "gridworld": {"epochs": 20},
    "gridworld_dqn": {"epochs": 2, "learning_starts": 200},
    "memory_dqn": {"epochs": 2, "learning_starts": 200},
    "memory_ppo": {"epochs": 2},
    "navigation": {"epochs": 2},
    "pendulum_ppo": {"epochs": 2},
    "pendulum_sac": {"epochs": 1, "iterations": 60, "learning_starts": 100},
    "pendulum_td3": {"epochs": 1, "iterations": 60, "learning_starts": 100},
    "turtleworld_sac": {"epochs": 1, "iterations": 60, "learning_starts": 100},
}
# Agent, environment and options of the runs whose trajectories are written. The files contain no times and paths.
WRITTEN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "discrete": ("PPO", "CartPole", {"rollout_steps": 8}),
    "continuous": ("SAC", "Pendulum", {"learning_starts": 16, "batch_size": 8}),
    "recorded log probabilities": ("A2C", "CartPole", {"rollout_steps": 4}),
    "values": ("DQN", "Acrobot", {"learning_starts": 16, "batch_size": 8}),
    "worlds": ("PPO", "Navigation", {"rollout_steps": 8}),
    "table": ("QLearning", "Gridworld", {}),
}
HOST = ("Gymnasium", "vector", "vector, SAME_STEP", "workers", "PettingZoo", "first-come")


class Walkers:
    """Parallel environment of PettingZoo's API: two agents that walk and leave at different steps."""

    possible_agents = ("short", "long")

    def __init__(self) -> None:
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> Any:
        return gymnasium.spaces.Box(-1.0, 99.0, (1 + len(agent) // 5,), "float32")

    def action_space(self, agent: str) -> Any:
        return gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int, options: Any = None) -> Any:
        self.agents, self._at = [*self.possible_agents], dict.fromkeys(self.possible_agents, float(seed % 7))
        return self._observed(), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        for agent, action in actions.items():
            self._at[agent] += float(action)
        here = [*self.agents]
        ends = {agent: self._at[agent] > (9.0 if agent == "short" else 13.0) for agent in here}
        rewards, no = dict.fromkeys(here, 1.0), dict.fromkeys(here, False)
        result = self._observed(), rewards, ends, no, {agent: {} for agent in here}
        self.agents = [agent for agent in here if not ends[agent]]
        return result

    def _observed(self) -> Any:
        return {
            agent: np.full(self.observation_space(agent).shape, self._at[agent], np.float32) for agent in self.agents
        }

    def close(self) -> None:
        pass


def digest(tree: Any) -> str:
    """Return a hash of the structure and of all bits of a tree of tensors, arrays and numbers."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for name in value:
                found.update(str(name).encode())
                add(value[name])
        elif isinstance(value, list | tuple):
            for part in value:
                add(part)
        elif hasattr(value, "detach"):
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            found.update(value.detach().cpu().contiguous().numpy().tobytes())
        else:
            found.update(repr(value).encode())

    add(tree)
    return found.hexdigest()


def host_environment(name: str) -> Any:
    """Return environments that are stepped on the host."""
    import rein

    if name == "PettingZoo":
        return rein.PettingZooEnvironment(Walkers, 2, seed=0)
    if name.startswith("vector"):
        mode = "SAME_STEP" if name.endswith("SAME_STEP") else None
        options = {"autoreset_mode": mode, "vectorization_mode": "sync"}
        return rein.envs.GymnasiumVectorEnvironment("CartPole-v1", 4, seed=0, **options)
    return rein.make("CartPole-v1", 4, seed=0, workers=None if name == "Gymnasium" else 2)


def digests() -> Iterator[tuple[str, str]]:
    """Yield the name and the digest of each run. Uses only public names, which all commits have."""
    import torch

    import rein

    torch.set_num_threads(1)
    for name, options in RECIPES.items():
        recipe = getattr(rein.recipes, name, None)
        if not callable(recipe):  # in earlier commits
            recipe = getattr(importlib.import_module(f"rein.recipes.{name}"), name)
        loop = recipe(None, seed=3, **options)
        loop.run()
        agent = loop.parts["agent"]
        yield f"recipe {name}", digest([agent.state_dict(), loop.state.clocks.as_dict()["env_steps"]])
    for name, (agent_name, environment_name, options) in WRITTEN.items():
        made = {"possible_targets": [(2, 4), (0, 1)]} if environment_name == "Gridworld" else {}
        environment = getattr(rein.envs, environment_name)(4, seed=0, max_episode_steps=7, **made)
        agent, memory = getattr(rein, agent_name)(environment, seed=0, **options), rein.MemoryStore()
        rein.training_loop(agent, environment, memory).run(epochs=3, iterations=16)
        with tempfile.TemporaryDirectory() as folder:
            store = rein.HDF5Store(Path(folder) / "run")
            for trajectory in memory.trajectories:
                clocks = {clock: count for clock, count in trajectory.clocks.items() if clock != "seconds"}
                store.append(trajectory._replace(clocks=clocks))
            store.close()
            files = sorted((store.path / "trajectories").iterdir())
            contents = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
        yield f"trajectories, {name}", digest(contents)
    for name in HOST:
        environment = host_environment(name)
        agent, memory = rein.PPO(environment, rollout_steps=16, seed=0), rein.MemoryStore()
        collection = rein.FirstCome(min_batch=4) if name == "first-come" else None  # in a fixed order
        rein.training_loop(agent, environment, memory, collection=collection).run(epochs=2, iterations=64)
        rows = [[trajectory.fields, trajectory.episodes] for trajectory in memory.trajectories]
        yield f"host, {name}", digest([agent.state_dict(), rows])
        environment.close()


def digests_of(tree: Path) -> dict[str, str]:
    """Run `digests` with the package in a tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"digests.py: the runs in {tree} failed")
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Context manager: check a commit out in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def main(commit: str) -> int:
    """Print a table of all digests. Returns the exit status."""
    with worktree(commit) as tree:
        before = digests_of(tree)
    after = digests_of(ROOT)
    for name, value in after.items():
        print(f"| {name} | {'equal' if before.get(name) == value else 'DIFFERS'} | {value[:12]} |")
    differing = sum(before.get(name) != value for name, value in after.items())
    print(f"\n{len(after)} results, {differing} differ from {commit}")
    return int(differing > 0 or before.keys() != after.keys())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(main(sys.argv[1]))
    print(json.dumps(dict(digests())))
