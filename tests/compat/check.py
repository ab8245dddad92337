"""Check one package in its virtual environment: `python check.py PACKAGE FOLDER train`, then `... resume`.

`train` stores a short run and an uninterrupted run of the final length. `resume` continues the short run in a new
process, compares both runs, replays the stored episodes, reads a trajectory, and writes `result.json`. mjlab and
PettingZoo have one more check each.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import CASES, Case

import rein
from rein.episodes.episode_replay import replay
from rein.ops.trees import leaves

EPOCHS, RESUMED, ITERATIONS = 4, 6, 50  # 200 vector steps, and 100 more
OPTIONS: dict[str, dict[str, Any]] = {
    "PPO": {"rollout_steps": ITERATIONS, "minibatches": 2},
    "SAC": {"learning_starts": 100, "batch_size": 32, "hidden": (32, 32)},
}


def run(case: Case, folder: Path, epochs: int) -> None:
    """Train until epoch `epochs`, from the newest checkpoint in `folder` if there is any."""
    environment = case.make(case.num_envs, 0)
    agent = getattr(rein, case.agent)(environment, seed=0, **OPTIONS[case.agent])
    store = rein.HDF5Store(folder, exist="resume")
    loop = rein.training_loop(agent, environment, store, iterations=ITERATIONS, seed=0)
    rein.checkpoint(loop)
    rein.resume(loop)
    loop.run(epochs=epochs)
    assert agent.updates > 0
    assert agent.env_steps > 0.8 * epochs * ITERATIONS * environment.num_envs
    store.close()
    environment.close()


def difference(one: rein.store.reader.Run, other: rein.store.reader.Run) -> str | None:
    """Return the first field and epoch in which two runs differ."""
    for a, b in zip(one, other, strict=True):
        fields = dict(leaves(b.fields, ""))
        for path, values in leaves(a.fields, ""):
            if not np.array_equal(np.asarray(values), np.asarray(fields[path]), equal_nan=True):
                return f"{path.lstrip('.')}, epoch {a.epoch}"
    return None


def read(stored: rein.store.reader.Run) -> None:
    """Read an epoch, an episode and a batch of transitions."""
    assert len(stored.epochs["number"]) == RESUMED
    assert len(stored.trajectory(1).fields["reward"]) == ITERATIONS
    whole = stored.episodes["id"][stored.episodes["whole"]]
    assert len(whole), "no episode has ended"
    episode = stored.episode(whole[0])
    assert len(episode.fields["reward"]) == episode.length
    assert np.isclose(episode.fields["reward"].sum(dtype=np.float64), episode.episode_return, rtol=1e-4, atol=1e-4)
    transitions = stored.transitions()
    batch = transitions[torch.arange(min(8, len(transitions)))]
    assert torch.isfinite(batch.reward).all()


def replayed(case: Case, stored: rein.store.reader.Run) -> str | None:
    """Return the first difference between stored episodes and their replay."""
    environment = case.make(case.num_envs, 1)
    whole = stored.episodes["id"][stored.episodes["whole"]]
    results = replay(environment, [stored.episode(number) for number in whole[:20]], run=stored)
    environment.close()
    found = [result for result in results if result.difference is not None]
    return f"episode {found[0].id} of {len(results)}: {found[0].difference}" if found else None


def check_final_observations(environment: Any) -> None:
    """Final observations differ from those of the next episode, and only in rows whose episode has ended."""
    environment.reset()
    assert environment.final_observation == "step"
    ends = 0
    for _ in range(100):  # an episode has 1 second
        time_step = environment.apply_action(torch.zeros(environment.num_envs, *environment.single_action_space.shape))
        ended = time_step.terminated | time_step.truncated
        final, seen = (tree["observation"] for tree in (time_step.final_observation, time_step.observation))
        assert torch.equal((final != seen).any(1), ended)
        ends += int(ended.sum())
    assert ends > 0


def check_tic_tac_toe(_: Any) -> None:
    """Tic-tac-toe of PettingZoo equals that of rein."""
    from pettingzoo.classic import tictactoe_v3

    env, native = rein.SelfPlay(tictactoe_v3.env, 8, seed=0), rein.SelfPlay(rein.envs.TicTacToe(), 8, seed=0)
    board, expected = env.reset(), native.reset()
    for _ in range(30):
        assert torch.equal(board["observation"].permute(0, 3, 1, 2).flatten(1), expected["observation"])
        action = expected["action_mask"].argmax(1)
        step, native_step = env.apply_action(action), native.apply_action(action)
        assert torch.equal(step.reward, native_step.reward)
        assert torch.equal(step.terminated, native_step.terminated)
        board, expected = step.observation, native_step.observation


def check_hindsight(environment: Any) -> None:
    """SAC with hindsight reaches the goals of FetchReach."""
    import gymnasium

    compute_reward = gymnasium.make("gymnasium_robotics:FetchReach-v4").unwrapped.compute_reward  # type: ignore[attr-defined]
    options: Any = {"hidden": (64, 64), "learning_rate": 1e-3, "gamma": 0.95, "update_to_data": 0.5}
    agent = rein.SAC(environment, hindsight=rein.replay.Hindsight(compute_reward), seed=0, **options)
    rein.train(agent, environment, env_steps=20_000)
    assert rein.evaluate(agent, environment, episodes=50).success_rate >= 0.9


MORE = {
    "gymnasium-robotics": check_hindsight,
    "mjlab": check_final_observations,
    "pettingzoo": check_tic_tac_toe,
}


def check(case: Case, folder: Path) -> None:
    """Resume and check the run that `train` began."""
    run(case, folder / "run", RESUMED)
    stored, whole = (rein.open_run(folder / name) for name in ("run", "whole"))
    read(stored)
    if case.resumes and (found := difference(stored, whole)):
        raise AssertionError(f"the resumed run differs from the uninterrupted one: {found}")
    if case.replays and (found := replayed(case, stored)):
        raise AssertionError(f"the replay differs from the stored episode: {found}")
    if case.package in MORE:
        environment = case.make(case.num_envs, 2)
        MORE[case.package](environment)
        environment.close()
    version = importlib.metadata.version(case.package)
    (folder / "result.json").write_text(json.dumps({"version": version, "episodes": len(stored.episodes["id"])}))


if __name__ == "__main__":
    package, path, stage = sys.argv[1:]
    if stage == "train":
        run(CASES[package], Path(path) / "run", EPOCHS)
        run(CASES[package], Path(path) / "whole", RESUMED)
    else:
        check(CASES[package], Path(path))
