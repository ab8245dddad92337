"""Child processes of `ppo.py` and `population.py`, one for each row of their tables.

Usage: `python ppo_peers.py NAME OPTIONS`, options as JSON.

A worker is a generator. It yields once when it is built, and then the env steps of each round.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from measuring import Rounds, serve
from sizes import size

SOLVED = 475.0
SPAN = size(32, 1)  # rollouts of a round of `adapter`
# hyperparameters of rl-zoo for CartPole-v1, where learning rate and clip range decay linearly to 0 over TOTAL env steps
TUNED: dict[str, Any] = {
    "n_steps": 32,
    "batch_size": 256,
    "gae_lambda": 0.8,
    "gamma": 0.98,
    "n_epochs": 20,
    "ent_coef": 0.0,
}
NUM_ENVS, LEARNING_RATE, CLIP, TOTAL = 8, 1e-3, 0.2, 100_000


def rein(num_envs: int, rollout_steps: int, **options: Any) -> Rounds:
    """Run rollouts and updates on native CartPoles, or the share of one process of a group."""
    from rein.agents.base.data_parallel import process_group
    from rein.agents.ppo import PPO
    from rein.envs.cartpole import CartPole
    from rein.training.training_loop import training_loop

    with process_group() as group:
        environment = CartPole(num_envs // group.processes, seed=group.rank)
        spaces = environment.single_observation_space, environment.single_action_space
        agent = PPO(*spaces, rollout_steps=rollout_steps, seed=0, **options)
        yield 0
        for _ in training_loop(agent, environment, epochs=None, iterations=rollout_steps).stream():
            yield environment.num_envs * rollout_steps


def population(num_envs: int, rollout_steps: int, learners: int, **options: Any) -> Rounds:
    """Run rollouts and updates of several learners on native CartPoles, `num_envs` for each."""
    from rein import Population
    from rein.agents.ppo import PPO
    from rein.envs.cartpole import CartPole
    from rein.training.training_loop import training_loop

    environment = CartPole(learners * num_envs, seed=0)
    agent = Population(PPO, environment, learners=learners, rollout_steps=rollout_steps, seed=0, **options)
    yield 0
    for _ in training_loop(agent, environment, epochs=None, iterations=rollout_steps).stream():
        yield environment.num_envs * rollout_steps


def purejaxrl(
    checkout: str, num_envs: int, rollout_steps: int, update_epochs: int, minibatches: int, learners: int = 1
) -> Rounds:
    """Run two rollouts and their updates with new networks, as one compiled program for all learners."""
    for name in ("brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training", "navix"):
        sys.modules[name] = MagicMock()  # PureJaxRL imports them for other environments
    sys.path.insert(0, str(Path(checkout) / "purejaxrl"))
    jax, ppo = (importlib.import_module(name) for name in ("jax", "ppo"))

    steps = 2 * num_envs * rollout_steps
    config = {"ENV_NAME": "CartPole-v1", "NUM_ENVS": num_envs, "NUM_STEPS": rollout_steps, "TOTAL_TIMESTEPS": steps}
    config |= {"UPDATE_EPOCHS": update_epochs, "NUM_MINIBATCHES": minibatches, "LR": 3e-4, "ANNEAL_LR": False}
    config |= {"GAMMA": 0.99, "GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2, "ENT_COEF": 0.0, "VF_COEF": 0.5}
    train = ppo.make_train(config | {"MAX_GRAD_NORM": 0.5, "ACTIVATION": "tanh"})
    train = jax.jit(train if learners == 1 else jax.vmap(train))
    key = jax.random.PRNGKey(0)
    yield 0
    while True:
        key, drawn = jax.random.split(key)
        jax.block_until_ready(train(drawn if learners == 1 else jax.random.split(drawn, learners)))
        yield learners * steps


def adapter() -> Rounds:
    """Run rein's PPO on Gymnasium's CartPoles with the hyperparameters of `TUNED`."""
    from rein.agents.ppo import PPO
    from rein.envs.gymnasium import GymnasiumEnvironment
    from rein.training.training_loop import training_loop

    environment = GymnasiumEnvironment("CartPole-v1", num_envs=NUM_ENVS, seed=0)
    agent = PPO(
        environment.single_observation_space,
        environment.single_action_space,
        learning_rate=LEARNING_RATE,
        clip=CLIP,
        rollout_steps=TUNED["n_steps"],
        minibatches=NUM_ENVS * TUNED["n_steps"] // TUNED["batch_size"],
        update_epochs=TUNED["n_epochs"],
        gamma=TUNED["gamma"],
        gae_lambda=TUNED["gae_lambda"],
        seed=0,
    )
    yield 0
    states = training_loop(agent, environment, epochs=None, iterations=TUNED["n_steps"]).stream()
    while True:
        for _ in range(SPAN):
            next(states)
        yield SPAN * NUM_ENVS * TUNED["n_steps"]


def sb3() -> Rounds:
    """Run PPO of Stable-Baselines3 with the same hyperparameters."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    environment = make_vec_env("CartPole-v1", n_envs=NUM_ENVS, seed=0)
    tuned: dict[str, Any] = TUNED | {"learning_rate": LEARNING_RATE, "clip_range": CLIP}
    model, steps = PPO("MlpPolicy", environment, **tuned, seed=0, device="cpu"), SPAN * NUM_ENVS * TUNED["n_steps"]
    yield 0
    while True:
        model.learn(steps, reset_num_timesteps=False)
        yield steps


def sb3_solve(seed: int) -> None:
    """Train until the last 100 training episodes have a mean return of 475, and print this as `rein train` does."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    class UntilSolved(BaseCallback):
        mean = 0.0

        def _on_rollout_end(self) -> None:
            returns = [episode["r"] for episode in self.model.ep_info_buffer or ()]
            self.mean = sum(returns) / 100 if len(returns) == 100 else 0.0
            if self.mean >= SOLVED:
                print(f"solved: a mean return of {self.mean:.2f} after {self.num_timesteps:,} env steps")

        def _on_step(self) -> bool:
            return self.mean < SOLVED

    environment = make_vec_env("CartPole-v1", n_envs=NUM_ENVS, seed=seed)
    falling: dict[str, Any] = {
        "learning_rate": lambda left: LEARNING_RATE * left,
        "clip_range": lambda left: CLIP * left,
    }
    PPO("MlpPolicy", environment, **TUNED, **falling, seed=seed, device="cpu").learn(TOTAL, callback=UntilSolved())


WORKERS = {"rein": rein, "population": population, "purejaxrl": purejaxrl, "adapter": adapter, "sb3": sb3}


def main(words: list[str]) -> None:
    if not words:
        print("ppo_peers.py runs nothing without arguments; start ppo.py instead")
        return
    name, options = words[0], json.loads(words[1])
    if name == "sb3_solve":
        sb3_solve(**options)
    else:
        serve(WORKERS[name](**options))


if __name__ == "__main__":
    main(sys.argv[1:])
