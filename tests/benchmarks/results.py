"""Train every row of docs/project/results.md with several seeds, and write its table.

    python tests/benchmarks/results.py train [NAME ...] [--seeds 3] [--runs runs/results]
    python tests/benchmarks/results.py table [--runs runs/results] [--output docs/project/results.md]

`train` skips runs that exist. Each run is a separate process with one thread. At its end, the greedy policy plays 100
episodes in environments with a new seed, and the result is written to `result.json` in the folder of the run. `table`
writes the table of the existing runs.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sizes import size

EPISODES = size(100, 1)  # evaluation episodes at the end of a run
LONGEST = size(10_000, 20)  # steps of an evaluation episode
SHORT = size({}, {"epochs": 1, "iterations": 4})  # the budget of tiny runs


class Row(NamedTuple):
    """Row of the table."""

    task: str
    target: str
    kind: str  # "recipe", or the name of a function below that returns a loop and the environment to evaluate in
    options: dict[str, Any] = {}  # noqa: RUF012  # never changed


BANDIT = {"probe": "SignBandit", "num_envs": 128, "iterations": 2, "rounds": 100, "minibatches": 1}
BANDIT |= {"learning_rate": 1e-2, "hidden": (16,), "log_std": -0.5}
CORRIDOR = {"probe": "OpenCorridor", "num_envs": 256, "iterations": 8, "rounds": 300, "learning_rate": 3e-3}
WHOLE = {"stop_when_solved": False}  # uses the whole budget
CHEETAH = {"env_steps": 30_000, "learning_starts": 1_000}
TWICE = {**CHEETAH, "env_steps": 60_000}
ROWS = {
    "cartpole": Row("CartPole-v1, PPO", "500", "recipe"),
    "acrobot": Row("Acrobot-v1, PPO", ">= -85", "recipe"),
    "pendulum-ppo": Row("Pendulum-v1, PPO", ">= -250", "recipe"),
    "mountaincar": Row("MountainCar-v0, PPO", ">= -120", "recipe"),
    "lunarlander": Row("LunarLander-v3, PPO", ">= 200", "recipe"),
    "memory-lstm": Row("Memory, PPO with an LSTM", ">= 0.95", "recipe", {"recipe": "memory-ppo", "core": "lstm"}),
    "memory-mingru": Row("Memory, PPO with a minGRU", ">= 0.95", "recipe", {"recipe": "memory-ppo", "core": "mingru"}),
    "memory-mlp": Row(
        "Memory, PPO without a core", "0.25 is chance", "recipe", {"recipe": "memory-ppo", "core": "none"}
    ),
    "sign-bandit": Row("JaxDEM's bandit, PPO", "mean action > 0.5", "probe", BANDIT),
    "open-corridor": Row("JaxDEM's corridor, PPO", "mean action > 0.55", "probe", CORRIDOR),
    **{
        f"probe-{name}": Row(
            f"Probe {name.replace('-', ' ')}, PPO", "95 % of the best return", "own_probe", {"key": name}
        )
        for name in ("bandit", "delayed", "corridor", "continuous-corridor", "fork", "reach")
    },
    "pong": Row("Pong, PPO, 2 M steps", "20 of 21", "recipe", {"env_steps": 2_000_000}),
    "halfcheetah-ppo": Row("HalfCheetah-v5, PPO", "compare with SB3", "recipe"),
    "halfcheetah-zoo": Row("HalfCheetah-v5, PPO, rl-zoo's parameters", "compare with SB3", "zoo"),
    "halfcheetah-sb3": Row("HalfCheetah-v5, PPO of Stable-Baselines3", "", "sb3"),
    "cartpole-dqn": Row("CartPole-v1, DQN", ">= 475", "recipe"),
    "lunarlander-dqn": Row("LunarLander-v3, DQN", ">= 150", "recipe"),
    "gridworld-dqn": Row("Gridworld, DQN", ">= -11.7", "recipe"),
    "pendulum-sac": Row("Pendulum-v1, SAC", ">= -200", "recipe", WHOLE),
    "pendulum-td3": Row("Pendulum-v1, TD3", ">= -200", "recipe", WHOLE),
    "pendulum-ddpg": Row("Pendulum-v1, DDPG", ">= -200", "recipe", WHOLE),
    "pendulum-iql": Row("Pendulum-v1, IQL, from 6,000 recorded steps", "above BC", "offline", {"algorithm": "iql"}),
    "pendulum-awac": Row("Pendulum-v1, AWAC, from the same", "above BC", "offline", {"algorithm": "awac"}),
    "pendulum-bc": Row("Pendulum-v1, BC, from the same", "", "offline", {"algorithm": "bc"}),
    "turtleworld-sac": Row("Turtleworld, SAC", "straight ahead: -107", "recipe"),
    "memory-dqn": Row("Memory, DQN with an LSTM", ">= 0.95", "recipe"),
    "memory-dqn-mlp": Row(
        "Memory, DQN without a core", "0.25 is chance", "recipe", {"recipe": "memory-dqn", "core": "none"}
    ),
    "halfcheetah-sac": Row("HalfCheetah-v5, SAC", "compare with SB3", "recipe", CHEETAH),
    "halfcheetah-sac-sb3": Row("HalfCheetah-v5, SAC of Stable-Baselines3", "", "sb3_sac", CHEETAH),
    "halfcheetah-sac-twice": Row(
        "HalfCheetah-v5, SAC, twice the steps", "compare with SB3", "recipe", {"recipe": "halfcheetah-sac", **TWICE}
    ),
    "halfcheetah-sac-twice-sb3": Row("HalfCheetah-v5, SAC of Stable-Baselines3, the same", "", "sb3_sac", TWICE),
}


def train_one(name: str, seed: int, folder: Path) -> None:
    """Train and evaluate one run in this process."""
    import torch

    torch.set_num_threads(1)
    row = ROWS[name]
    began = time.process_time()
    score = {
        "recipe": of_recipe,
        "probe": of_probe,
        "own_probe": of_own_probe,
        "zoo": of_zoo,
        "sb3": of_stable_baselines,
        "sb3_sac": of_stable_baselines_sac,
        "offline": of_offline,
    }[row.kind]
    result = score(name, seed, folder, **row.options)
    result |= {"name": name, "seed": seed, "cpu_seconds": time.process_time() - began}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result, indent=1))


def of_recipe(name: str, seed: int, folder: Path, recipe: str | None = None, **options: Any) -> dict[str, Any]:
    """Run a recipe with its defaults, as `rein train` does."""
    import rein
    from rein.cli.catalog import find

    store = rein.HDF5Store(folder)
    make = find(recipe or name)
    loop = make(store, seed=seed, **options)
    environment = loop.parts["environment"]
    if hasattr(environment, "inner"):  # wrapped environments are built by the recipe
        others = make(seed=10_000 + seed, num_envs=10, **options).parts["environment"]
    else:
        others = fresh(environment, seed)
    final = loop.run(**SHORT)
    store.close()
    score = mean_return(loop.parts["agent"], others)
    return {"score": score, "env_steps": final.clocks.env_steps, "solved": "solved" in final.memory}


def fresh(environment: Any, seed: int) -> Any:
    """Return environments of the same kind with a new seed."""
    from rein.envs.gymnasium import GymnasiumEnvironment

    config = environment.config
    if isinstance(environment, GymnasiumEnvironment):
        return GymnasiumEnvironment(config["id"], 10, 10_000 + seed, **config["make_kwargs"])
    options = {name: config[name] for name in inspect.signature(type(environment)).parameters if name in config}
    return type(environment)(**{**options, "num_envs": EPISODES, "seed": 10_000 + seed})


def mean_return(agent: Any, environment: Any) -> float:
    """Return the mean return of the greedy policy."""
    import rein

    return rein.evaluate(agent.policy(), environment, EPISODES, max_episode_steps=LONGEST).mean_return


def of_probe(name: str, seed: int, folder: Path, **budget: Any) -> dict[str, Any]:
    """Run a task of JaxDEM's tests. As there, the score is the policy's mean action at the start of an episode."""
    import torch

    import rein
    from rein.agents.ppo import PPO
    from rein.envs.probes import jaxdem

    kind, num_envs, iterations, epochs = (budget.pop(key) for key in ("probe", "num_envs", "iterations", "rounds"))
    environment = getattr(jaxdem, kind)(num_envs, seed=seed)
    agent = PPO(environment, rollout_steps=iterations, update_epochs=1, seed=seed, **budget)
    final = rein.train(agent, environment, folder, **{"epochs": epochs, "iterations": iterations, **SHORT})
    with torch.no_grad():
        mean = agent.networks(agent.networks.preprocess(torch.zeros(1, 1)))[0].mode()
    return {"score": float(mean), "env_steps": final.clocks.env_steps, "solved": None}


def of_own_probe(name: str, seed: int, folder: Path, key: str) -> dict[str, Any]:
    """Run one of `rein.envs.probes`. The score is the return of the greedy policy relative to the optimal return."""
    import rein
    from rein.agents.ppo import PPO
    from rein.envs import probes
    from rein.schedules import linear

    kinds = {"bandit": probes.Bandit, "delayed": probes.DelayedReward}
    kinds |= {"corridor": probes.Corridor, "fork": probes.Fork, "reach": probes.Reach}
    kinds["continuous-corridor"] = functools.partial(probes.Corridor, continuous=True)
    environment = kinds[key](64, seed=seed)
    budget = {"rollout_steps": 16, "hidden": (32,), "learning_rate": linear(1e-2, 1e-3, env_steps=200 * 1024)}
    budget |= {"gamma": 0.9, "entropy_coefficient": 0.01, "log_std": -0.7 if key == "reach" else 0.0}
    agent = PPO(environment, seed=seed, **budget)
    final = rein.train(agent, environment, folder, **{"epochs": 200, "iterations": 16, **SHORT})
    reached = mean_return(agent, kinds[key](EPISODES, seed=10_000 + seed))
    best = environment.optimal_return
    share = 1.0 - (best - reached) / max(1.0, abs(best))  # also for negative optimal returns
    return {"score": share, "env_steps": final.clocks.env_steps, "solved": None}


def of_zoo(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run rein's PPO with the hyperparameters of rl-zoo, for the env steps of the recipe."""
    import rein
    from rein.agents.ppo import PPO
    from rein.envs.gymnasium import GymnasiumEnvironment

    environment = GymnasiumEnvironment("HalfCheetah-v5", 1, seed)
    tuned = {"learning_rate": 2.0633e-5, "gamma": 0.98, "gae_lambda": 0.92, "rollout_steps": 512, "update_epochs": 20}
    tuned |= {"minibatches": 8, "clip": 0.1, "entropy_coefficient": 0.000401762, "value_coefficient": 0.58096}
    tuned |= {"max_grad_norm": 0.8, "hidden": (256, 256), "activation": "relu", "log_std": -2.0}
    agent = PPO(environment, normalize_observation=True, normalize_reward=True, seed=seed, **tuned)
    final = rein.train(agent, environment, folder, **{"epochs": 800, "iterations": 512, **SHORT})
    score = mean_return(agent, fresh(environment, seed))
    return {"score": score, "env_steps": final.clocks.env_steps, "solved": None}


def of_stable_baselines(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run PPO of Stable-Baselines3 with rl-zoo's hyperparameters for HalfCheetah-v4 and the recipe's env steps."""
    import gymnasium
    from stable_baselines3 import PPO
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
    from torch import nn

    ours = json.loads((folder.parent / f"halfcheetah-ppo-{seed}" / "result.json").read_text())
    environment = VecNormalize(DummyVecEnv([lambda: gymnasium.make("HalfCheetah-v5")]), gamma=0.98)
    network = {"log_std_init": -2, "ortho_init": False, "activation_fn": nn.ReLU, "net_arch": [256, 256]}
    tuned = {"batch_size": 64, "n_steps": 512, "gamma": 0.98, "learning_rate": 2.0633e-05, "ent_coef": 0.000401762}
    tuned |= {"clip_range": 0.1, "n_epochs": 20, "gae_lambda": 0.92, "max_grad_norm": 0.8, "vf_coef": 0.58096}
    agent = PPO("MlpPolicy", environment, seed=seed, policy_kwargs=network, device="cpu", **tuned)
    agent.learn(ours["env_steps"])
    environment.training = environment.norm_reward = False
    environment.seed(10_000 + seed)
    score, _ = evaluate_policy(agent, environment, n_eval_episodes=EPISODES // 5)
    return {"score": float(score), "env_steps": agent.num_timesteps, "solved": None}


def of_offline(name: str, seed: int, folder: Path, algorithm: str) -> dict[str, Any]:
    """Run an offline algorithm for the whole budget. All algorithms of a seed use the same recorded data."""
    from rein.envs.pendulum import Pendulum
    from rein.recipes.pendulum_iql import pendulum_iql, record

    data = folder.parent / f"data-{seed}"
    if not data.exists():
        record(data, size(6_000, 60), seed)
    loop = pendulum_iql(data=str(data), algorithm=algorithm, seed=seed, stop_when_solved=False)
    final = loop.run(**SHORT)
    score = mean_return(loop.parts["agent"], Pendulum(EPISODES, seed=10_000 + seed))
    return {"score": score, "env_steps": 0, "updates": final.clocks.updates, "solved": None}


def of_stable_baselines_sac(name: str, seed: int, folder: Path, env_steps: int, learning_starts: int) -> dict[str, Any]:
    """Run SAC of Stable-Baselines3 with its defaults, which equal those of the recipe."""
    import gymnasium
    from stable_baselines3 import SAC
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import DummyVecEnv

    environment = DummyVecEnv([lambda: gymnasium.make("HalfCheetah-v5")])
    agent = SAC("MlpPolicy", environment, seed=seed, learning_starts=learning_starts, device="cpu")
    agent.learn(env_steps)
    environment.seed(10_000 + seed)
    score, _ = evaluate_policy(agent, environment, n_eval_episodes=EPISODES // 5)
    return {"score": float(score), "env_steps": agent.num_timesteps, "solved": None}


HEADING = "| task | target | runs | score, IQM (95 % interval) | each run | env steps | CPU s |"


def table(runs: Path) -> str:
    """Return the table of all runs in the folder."""
    import torch

    from rein.ops.random import generator
    from rein.ops.statistics import bootstrap_interval, interquartile_mean

    lines = [HEADING, "|---|---|---|---|---|---|---|"]
    for name, row in ROWS.items():
        found = [json.loads(path.read_text()) for path in sorted(runs.glob(f"{name}-[0-9]*/result.json"))]
        if not found:
            continue
        scores = [result["score"] for result in found]
        score_ST = torch.tensor(scores, dtype=torch.float64).unsqueeze(-1)
        mean, (low, high) = interquartile_mean(score_ST), bootstrap_interval(score_ST, generator(0, "bootstrap"))
        steps, seconds = (float(np.median([result[key] for result in found])) for key in ("env_steps", "cpu_seconds"))
        each = ", ".join(f"{score:.4g}" for score in scores)
        lines.append(
            f"| {row.task} | {row.target} | {len(found)} | {mean:.4g} ({low:.4g} to {high:.4g}) | {each} "
            f"| {steps:,.0f} | {seconds:.1f} |"
        )
    return "\n".join(lines) + "\n"


def train_all(names: list[str], seeds: int, runs: Path) -> None:
    """Train all missing rows and seeds, one after another."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in names or ROWS:
        for seed in range(seeds):
            folder = runs / f"{name}-{seed}"
            if (folder / "result.json").exists():
                continue
            command = [sys.executable, __file__, "one", name, str(seed), str(folder)]
            subprocess.run(command, check=True, env=environment)
            result = json.loads((folder / "result.json").read_text())
            values = (f"{key}={result[key]}" for key in ("score", "env_steps", "solved", "cpu_seconds"))
            print(name, seed, *values, flush=True)


def main() -> None:
    """Run the command line."""
    words = sys.argv[1:]
    if words[:1] == ["one"]:
        train_one(words[1], int(words[2]), Path(words[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "table"], nargs="?", default="table")
    parser.add_argument("names", nargs="*", choices=[*ROWS, []], help="rows; all by default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/results"))
    parser.add_argument("--output", type=Path)
    options = parser.parse_intermixed_args(words)
    if options.what == "train":
        train_all(options.names, options.seeds, options.runs)
    rows = table(options.runs)
    if options.output is None:
        print(rows)
    else:  # replace the table
        page = options.output.read_text(encoding="utf-8")
        before, after = page.split(HEADING)
        options.output.write_text(before + rows + after[after.index("\n\n") + 1 :], encoding="utf-8")


if __name__ == "__main__":
    main()
