"""Learning curves of the pages in docs/algorithms.

    python docs/curves.py train [NAME ...] [--seeds 3]
    python docs/curves.py plot [NAME ...]

`train` trains each agent under several seeds and writes `docs/images/curves/NAME.csv`. Every point is the mean return
of the greedy policy in 20 episodes. If Stable-Baselines3 is installed, its implementation is trained under the same
settings, and `rein.evaluate` evaluates both. `plot` draws `docs/images/curve-NAME.png` from these files.

All curves together take about half an hour on one core. `make docs` does not run this program. The tasks of the offline
agents are those of `tests/benchmarks/results.py`.
"""

from __future__ import annotations

import argparse
import copy
import csv
import functools
import importlib.util
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import rein
from rein.agents.base.action_noise import GaussianNoise
from rein.envs import CartPole, Gridworld, Pendulum
from rein.recipes.pendulum_iql import pendulum_iql, record

FOLDER = Path(__file__).parent / "images"
EPISODES = 20
SB3 = importlib.util.find_spec("stable_baselines3") is not None
Point = tuple[int, float]


class Curve(NamedTuple):
    """A figure."""

    title: str
    task: str
    steps: int  # env steps, or updates of offline agents
    ours: Callable[[int], Any]  # seed to agent
    theirs: Callable[[int], Any] | None = None  # seed to the model of Stable-Baselines3
    num_envs: int = 1
    points: int = 20


TASKS: dict[str, Callable[..., Any]] = {
    "CartPole-v1": CartPole,
    "Pendulum-v1": Pendulum,
    "Gridworld": functools.partial(Gridworld, possible_targets=[(2, 4)], max_episode_steps=50),
}


def cartpole(kind: Any, **options: Any) -> Callable[[int], Any]:
    """Return a function from a seed to an agent for CartPole."""
    return lambda seed: kind(CartPole(1), seed=seed, **options)


def pendulum(kind: Any, **options: Any) -> Callable[[int], Any]:
    """Return a function from a seed to an agent for Pendulum."""
    shape = {"hidden": (64, 64), "learning_rate": 1e-3, "learning_starts": 1_000, "capacity": 20_000}
    return lambda seed: kind(Pendulum(1), seed=seed, **shape, **options)


def sb3(name: str, task: str, num_envs: int = 1, noise: float | None = None, **options: Any) -> Callable[[int], Any]:
    """Return a function from a seed to a model of Stable-Baselines3."""

    def make(seed: int) -> Any:
        import numpy as np
        import stable_baselines3
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.noise import NormalActionNoise

        more = {} if noise is None else {"action_noise": NormalActionNoise(np.zeros(1), np.full(1, noise))}
        environment = make_vec_env(task, num_envs, seed=seed)
        settings = copy.deepcopy(options)  # a model adds entries to its policy_kwargs
        return getattr(stable_baselines3, name)("MlpPolicy", environment, seed=seed, device="cpu", **settings, **more)

    return make


def falling(value: float) -> Callable[[float], float]:
    """Return a linear schedule of Stable-Baselines3."""
    return lambda remaining: remaining * value


PPO_STEPS, PENDULUM_STEPS = 50_000, 8_000
OFF_POLICY = {"learning_rate": 1e-3, "learning_starts": 1_000, "buffer_size": 20_000, "batch_size": 256}
OFF_POLICY |= {"policy_kwargs": {"net_arch": [64, 64]}, "train_freq": 1, "gradient_steps": 1}
RMSPROP = functools.partial(torch.optim.RMSprop, alpha=0.99, eps=1e-5)

CURVES = {
    "ppo": Curve(
        "PPO",
        "CartPole-v1",
        PPO_STEPS,
        cartpole(
            rein.PPO,
            rollout_steps=32,
            minibatches=1,
            update_epochs=20,
            gamma=0.98,
            gae_lambda=0.8,
            learning_rate=rein.schedules.linear(1e-3, 0.0, env_steps=PPO_STEPS),
            clip=rein.schedules.linear(0.2, 0.0, env_steps=PPO_STEPS),
            value_coefficient=1.0,  # half the squared error; Stable-Baselines3 weighs all of it by 0.5
        ),
        sb3(
            "PPO",
            "CartPole-v1",
            8,
            n_steps=32,
            batch_size=256,
            n_epochs=20,
            gamma=0.98,
            gae_lambda=0.8,
            learning_rate=falling(1e-3),
            clip_range=falling(0.2),
        ),
        num_envs=8,
    ),
    "a2c": Curve(
        "A2C",
        "CartPole-v1",
        100_000,
        cartpole(rein.A2C, rollout_steps=5, learning_rate=7e-4, optimizer=RMSPROP, value_coefficient=1.0),
        sb3("A2C", "CartPole-v1", 8, n_steps=5, learning_rate=7e-4),
        num_envs=8,
    ),
    "impala": Curve(
        "IMPALA",
        "CartPole-v1",
        100_000,
        cartpole(rein.IMPALA, rollout_steps=16, learning_rate=1e-3, entropy_coefficient=0.01, gamma=0.98),
        num_envs=8,
    ),
    "pqn": Curve(
        "PQN",
        "CartPole-v1",
        100_000,
        cartpole(rein.PQN, rollout_steps=32, epsilon=rein.schedules.linear(1.0, 0.05, env_steps=30_000)),
        num_envs=8,
    ),
    "dqn": Curve(
        "DQN",
        "CartPole-v1",
        24_000,
        cartpole(
            rein.DQN,
            double=False,
            n_step=3,
            capacity=50_000,
            train_frequency=8,
            update_to_data=0.25,
            target_frequency=2,
            tau=0.02,
            epsilon=rein.schedules.linear(1.0, 0.05, env_steps=12_000),
        ),
        sb3(
            "DQN",
            "CartPole-v1",
            8,
            n_steps=3,
            learning_rate=1e-3,
            batch_size=128,
            buffer_size=50_000,
            learning_starts=1_000,
            train_freq=1,
            gradient_steps=2,
            target_update_interval=8,
            tau=0.02,
            exploration_fraction=0.5,
            exploration_final_eps=0.05,
            policy_kwargs={"net_arch": [128, 128]},
        ),
        num_envs=8,
    ),
    "iqn": Curve(
        "IQN",
        "CartPole-v1",
        20_000,
        cartpole(
            rein.IQN,
            hidden=(64, 64),
            n_step=3,
            train_frequency=8,
            update_to_data=0.25,
            tau=0.01,
            capacity=50_000,
        ),
        num_envs=8,
    ),
    "discrete_sac": Curve(
        "DiscreteSAC",
        "CartPole-v1",
        24_000,
        cartpole(
            rein.DiscreteSAC,
            hidden=(64, 64),
            learning_rate=1e-3,
            batch_size=128,
            train_frequency=8,
            update_to_data=0.25,
            tau=0.01,
            target_entropy=0.1,
            capacity=50_000,
        ),
        num_envs=8,
    ),
    "q_learning": Curve(
        "QLearning",
        "Gridworld",
        4_000,
        lambda seed: rein.QLearning(TASKS["Gridworld"](num_envs=1), learning_rate=0.5, seed=seed),
        num_envs=8,
    ),
    "sac": Curve(
        "SAC",
        "Pendulum-v1",
        PENDULUM_STEPS,
        pendulum(rein.SAC),
        sb3("SAC", "Pendulum-v1", **OFF_POLICY),
    ),
    "td3": Curve(
        "TD3",
        "Pendulum-v1",
        PENDULUM_STEPS,
        pendulum(rein.TD3, gamma=0.98, noise=0.1),
        sb3("TD3", "Pendulum-v1", **OFF_POLICY, gamma=0.98, noise=0.1),
    ),
    "ddpg": Curve(
        "DDPG",
        "Pendulum-v1",
        PENDULUM_STEPS,
        pendulum(rein.DDPG, gamma=0.98, noise=GaussianNoise(0.1)),
        sb3("DDPG", "Pendulum-v1", **OFF_POLICY, gamma=0.98, noise=0.1),
    ),
    **{
        name: Curve(name.upper(), "Pendulum-v1, from 6,000 recorded steps", 10_000, lambda seed: None)
        for name in ("bc", "awac", "iql")
    },
}


def train_ours(curve: Curve, seed: int) -> Iterator[Point]:
    """Yield env steps and mean greedy returns of an agent of rein."""
    make = TASKS[curve.task]
    agent, environment = curve.ours(seed), make(num_envs=curve.num_envs, seed=seed)
    proving_ground = make(num_envs=EPISODES, seed=10_000 + seed)
    found: list[Point] = [(0, rein.evaluate(agent, proving_ground, EPISODES).mean_return)]
    loop = rein.training_loop(agent, environment, seed=seed)

    @loop.epoch_completed
    def evaluate(state: rein.State) -> None:
        result = rein.evaluate(agent, proving_ground, EPISODES)
        found.append((state.clocks.env_steps, result.mean_return))

    loop.run(epochs=curve.points, iterations=curve.steps // curve.num_envs // curve.points)
    yield from found


def train_offline(name: str, curve: Curve, seed: int, folder: Path) -> Iterator[Point]:
    """Yield updates and mean greedy returns of an agent that learns from the recording of this seed."""
    data = folder / f"data-{seed}"
    if not data.exists():
        record(data, 6_000, seed)
    loop = pendulum_iql(data=str(data), algorithm=name, seed=seed, stop_when_solved=False)
    found: list[Point] = []

    @loop.on("evaluation_completed")
    def collect(state: rein.State) -> None:
        found.append((state.clocks.updates, float(state.metrics["evaluation_return"])))

    loop.run()
    yield from found


class ModelPolicy:
    """Greedy policy of a model of Stable-Baselines3."""

    device = torch.device("cpu")

    def __init__(self, model: Any) -> None:
        self.model = model

    def select_action(self, observation: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        action, _ = self.model.predict(observation.numpy(), deterministic=True)
        return torch.as_tensor(action), {}

    def reset(self, mask: torch.Tensor | None = None) -> None:
        pass


def train_theirs(curve: Curve, seed: int) -> Iterator[Point]:
    """Yield env steps and mean greedy returns of a model of Stable-Baselines3."""
    from stable_baselines3.common.callbacks import BaseCallback

    proving_ground = TASKS[curve.task](num_envs=EPISODES, seed=10_000 + seed)
    model = curve.theirs(seed)  # type: ignore[misc]
    found: list[Point] = [(0, rein.evaluate(ModelPolicy(model), proving_ground, EPISODES).mean_return)]

    class Evaluate(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps >= len(found) * curve.steps // curve.points:
                result = rein.evaluate(ModelPolicy(self.model), proving_ground, EPISODES)
                found.append((self.num_timesteps, result.mean_return))
            return True

    model.learn(curve.steps, callback=Evaluate())
    yield from found


def train(name: str, seeds: int, folder: Path) -> None:
    """Train all seeds and write the file of a curve."""
    curve, rows = CURVES[name], []
    for seed in range(seeds):
        began = time.process_time()
        offline = name in ("bc", "awac", "iql")
        points = list(train_offline(name, curve, seed, folder) if offline else train_ours(curve, seed))
        rows += [("rein", seed, step, f"{score:.1f}") for step, score in points]
        print(name, seed, "rein", points[-1], f"{time.process_time() - began:.0f} s", flush=True)
        if curve.theirs is not None and SB3:
            began = time.process_time()
            points = list(train_theirs(curve, seed))
            rows += [("Stable-Baselines3", seed, step, f"{score:.1f}") for step, score in points]
            print(name, seed, "Stable-Baselines3", points[-1], f"{time.process_time() - began:.0f} s", flush=True)
    path = FOLDER / "curves" / f"{name}.csv"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("library", "seed", "steps", "mean_return"))
        writer.writerows(rows)


def plot(name: str) -> None:
    """Draw the mean over the seeds, and their range."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rc_file(FOLDER.parent / "matplotlibrc")
    import matplotlib.pyplot as plt

    curve = CURVES[name]
    lines: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    with (FOLDER / "curves" / f"{name}.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            lines[row["library"]][int(row["steps"])].append(float(row["mean_return"]))
    figure, axes = plt.subplots(figsize=(5.6, 3.1), dpi=120, layout="constrained")
    for color, (library, points) in zip(("#1f5fbf", "#d9822b"), lines.items(), strict=False):
        steps = sorted(points)
        axes.plot(steps, [sum(points[step]) / len(points[step]) for step in steps], color=color, lw=1.8, label=library)
        low, high = ([pick(points[step]) for step in steps] for pick in (min, max))
        axes.fill_between(steps, low, high, color=color, alpha=0.15, lw=0)
    axes.set_title(f"{curve.title}, {curve.task}", fontsize=10)
    axes.set_xlabel("updates" if "recorded" in curve.task else "env steps")
    axes.set_ylabel("mean return, greedy")
    axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_xlim(0, None)
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    figure.savefig(FOLDER / f"curve-{name}.png", pil_kwargs={"optimize": True})
    plt.close(figure)


def main() -> None:
    """Train or plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["train", "plot"])
    parser.add_argument("names", nargs="*", choices=[*CURVES, []], help="curves; all by default")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_intermixed_args(sys.argv[1:])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.names or CURVES:
            if options.command == "train":
                train(name, options.seeds, Path(folder))
            else:
                plot(name)


if __name__ == "__main__":
    main()
