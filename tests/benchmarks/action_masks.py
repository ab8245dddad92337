"""PPO with action masks, and MaskablePPO of sb3-contrib with the same hyperparameters.

`python tests/benchmarks/action_masks.py [rein | sb3] [SEEDS...]`, by default both with seeds 0, 1 and 2; sb3 needs
sb3-contrib. The script prints the mean return of greedy actions over 1,000 episodes after each part of the training,
and the CPU seconds. The task is the gridworld of `tests/envs/masked_grid.py` as a Gymnasium environment.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
from sizes import size

SIZE, WALLS = 4, ((1, 1), (2, 3), (3, 0))
JUMPS = [(dx * k, dy * k) for k in (1, 2, 3) for dx, dy in ((0, 1), (0, -1), (1, 0), (-1, 0))]
FREE = [(x, y) for x in range(SIZE) for y in range(SIZE) if (x, y) not in WALLS]
PARTS = size((4_096, 8_192, 16_384, 32_768), (512, 1_024))  # env steps
EPISODES, SEEDS = size(1_000, 10), size((0, 1, 2), (0,))
NUM_ENVS, ROLLOUT, BATCH, EPOCHS = 8, 64, 128, 4
LEARNING_RATE, GAMMA, GAE_LAMBDA, ENTROPY = 1e-3, 0.95, 0.95, 0.01


class MaskedGrid(gymnasium.Env):
    """Jump to a target on a board with walls. With `masked`, the mask is the entry `action_mask` of the observation."""

    def __init__(self, masked: bool) -> None:
        self.masked = masked
        position = gymnasium.spaces.Box(0.0, 1.0, (4 * SIZE,), np.float32)
        mask = gymnasium.spaces.MultiBinary(len(JUMPS))
        entries = {"observation": position, "action_mask": mask}
        self.observation_space = gymnasium.spaces.Dict(entries) if masked else position
        self.action_space = gymnasium.spaces.Discrete(len(JUMPS))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        start, target = self.np_random.choice(len(FREE), 2, replace=False)
        self.cell, self.target, self.steps = FREE[start], FREE[target], 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.action_masks()[action]:
            raise ValueError(f"action {action} is not valid")
        (x, y), (dx, dy) = self.cell, JUMPS[action]
        self.cell, self.steps = (x + dx, y + dy), self.steps + 1
        return self._observation(), -1.0, self.cell == self.target, self.steps >= 12, {}

    def action_masks(self) -> np.ndarray[Any, np.dtype[np.int8]]:
        x, y = self.cell
        return np.array([(x + dx, y + dy) in FREE for dx, dy in JUMPS], np.int8)

    def _observation(self) -> Any:
        position = np.eye(SIZE, dtype=np.float32)[[*self.cell, *self.target]].reshape(-1)
        return {"observation": position, "action_mask": self.action_masks()} if self.masked else position


def with_rein(seed: int) -> Iterator[Callable[[], float]]:
    """Train PPO, and yield a function that evaluates it after each part."""
    import rein

    environment = rein.make(lambda: MaskedGrid(True), num_envs=NUM_ENVS, seed=seed)
    agent = rein.PPO(
        environment,
        seed=seed,
        rollout_steps=ROLLOUT,
        update_epochs=EPOCHS,
        minibatches=NUM_ENVS * ROLLOUT // BATCH,
        learning_rate=LEARNING_RATE,
        gamma=GAMMA,
        gae_lambda=GAE_LAMBDA,
        entropy_coefficient=ENTROPY,
        value_coefficient=1.0,  # rein's value loss is half the squared error
    )
    loop = rein.training_loop(agent, environment, epochs=None, iterations=ROLLOUT)
    test = rein.make(lambda: MaskedGrid(True), num_envs=NUM_ENVS, seed=1_000 + seed)
    for part in PARTS:
        loop.run(epochs=part // (NUM_ENVS * ROLLOUT))
        yield lambda: rein.evaluate(agent, test, EPISODES).mean_return


def with_sb3(seed: int) -> Iterator[Callable[[], float]]:
    """Train MaskablePPO, and yield a function that evaluates it after each part."""
    from sb3_contrib import MaskablePPO
    from sb3_contrib.common.maskable.evaluation import evaluate_policy
    from stable_baselines3.common.env_util import make_vec_env

    environment = make_vec_env(lambda: MaskedGrid(False), n_envs=NUM_ENVS, seed=seed)
    model = MaskablePPO(
        "MlpPolicy",
        environment,
        n_steps=ROLLOUT,
        batch_size=BATCH,
        n_epochs=EPOCHS,
        learning_rate=LEARNING_RATE,
        gamma=GAMMA,
        gae_lambda=GAE_LAMBDA,
        ent_coef=ENTROPY,
        vf_coef=0.5,
        seed=seed,
        device="cpu",
    )
    test = make_vec_env(lambda: MaskedGrid(False), n_envs=NUM_ENVS, seed=1_000 + seed)
    for before, part in zip((0, *PARTS), PARTS, strict=False):
        model.learn(part - before, reset_num_timesteps=False)
        yield lambda: float(evaluate_policy(model, test, EPISODES)[0])


def measure(name: str, train: Callable[[int], Iterator[Callable[[], float]]], seed: int) -> None:
    returns, seconds, begin = [], 0.0, time.process_time()
    for evaluate in train(seed):
        seconds += time.process_time() - begin
        returns.append(evaluate())
        begin = time.process_time()
    print(name, seed, dict(zip(PARTS, returns, strict=True)), f"{seconds:.1f} s", flush=True)


def main(words: list[str]) -> None:
    libraries = {"rein": with_rein, "sb3": with_sb3}
    for name in words[:1] or libraries:
        if name == "sb3" and importlib.util.find_spec("sb3_contrib") is None:
            print("sb3: not installed: pip install sb3-contrib==2.9.2")
            continue
        for seed in map(int, words[1:] or SEEDS):
            measure(name, libraries[name], seed)


if __name__ == "__main__":
    main(sys.argv[1:])
