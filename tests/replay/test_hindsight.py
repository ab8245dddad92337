"""Hindsight replay against a plain loop in float64, its state, and its errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rein
from rein.ops.random import generator
from rein.replay.hindsight import Hindsight, HindsightReplay, PrioritizedHindsightReplay
from rein.testing import BufferContract
from rein.testing.stateful import first_difference
from rein.types import Transition

N, SLOTS = 3, 12
GAMMA = 0.9


def reward(achieved: np.ndarray, desired: np.ndarray, info: Any) -> np.ndarray:
    return -np.abs(achieved - desired).sum(-1)


def is_close(achieved: np.ndarray, desired: np.ndarray, info: Any) -> np.ndarray:
    return np.abs(achieved - desired).sum(-1) < 40.0


def step_of(step: int, drawn: torch.Generator) -> Transition:
    """Return a step in which the achieved goal is the number of the row, and about a quarter of the episodes end."""
    number_N = torch.arange(N, dtype=torch.float32) + N * step
    ends_N = torch.rand(N, generator=drawn)
    observation = {
        "observation": number_N[:, None].expand(N, 2),
        "achieved_goal": number_N[:, None] - N,
        "desired_goal": torch.full((N, 1), -1.0),
    }
    return Transition(
        observation,
        torch.zeros(N, dtype=torch.int64),
        torch.full((N,), 100.0),
        ends_N < 0.1,
        (ends_N >= 0.1) & (ends_N < 0.2),
        {**observation, "achieved_goal": number_N[:, None]},
        torch.rand(N, generator=drawn) < 0.9,
        {},
    )


class Recorded:
    """The newest rows as Python lists, with the rows of each episode."""

    def __init__(self, replay: Any, steps: int, seed: int) -> None:
        drawn = generator(seed, "rows")
        self.rows: dict[float, dict[str, float]] = {}  # by number
        self.episodes: list[list[float]] = []
        open_rows: list[list[float]] = [[] for _ in range(N)]
        for step in range(steps):
            row = step_of(step, drawn)
            replay.append(row)
            reset_N = torch.rand(N, generator=drawn) < 0.1
            replay.observe_reset(reset_N)
            for n in range(N):
                valid, number = bool(row.valid[n]), float(N * step + n)
                over = bool(row.terminated[n] | row.truncated[n] | reset_N[n]) or not valid
                self.rows[number] = {"terminated": float(row.terminated[n]), "over": over, "valid": valid}
                if valid:
                    open_rows[n].append(number)
                if over:
                    self.episodes.append(open_rows[n])
                    open_rows[n] = []
        self.episodes += open_rows

    def later(self, number: float) -> list[float]:
        """Return the rows of the episode from one row on."""
        episode = next(episode for episode in self.episodes if number in episode)
        return episode[episode.index(number) :]

    def window(self, number: float, goal: float, steps: int, terminates: bool) -> tuple[float, bool, float, float]:
        """Return the n-step return, whether it ends in a terminal state, the last achieved goal and the discount."""
        total, last, over, k = 0.0, 0.0, False, 0
        for k, row in enumerate(self.later(number)[:steps]):
            total += GAMMA**k * -abs(row - goal)
            last, over = row, bool(self.rows[row]["terminated"])
            if terminates:
                over = abs(row - goal) < 40.0
                if over:
                    break
        return total, over, last, 0.0 if over else GAMMA ** (k + 1)


def make(strategy: Any = "future", ratio: float = 1.0, terminates: bool = False, **options: Any) -> Any:
    function = is_close if terminates else None
    return Hindsight(reward, strategy=strategy, ratio=ratio, compute_terminated=function).build(SLOTS * N, **options)


def own_numbers(observation: Any) -> Tensor:
    return observation["observation"][:, 0]


@pytest.mark.parametrize("alpha", [{}, {"alpha": 0.6}])
@pytest.mark.parametrize("terminates", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("strategy", ["future", "final"])
def test_relabelled_rows_match_a_plain_loop(strategy: Any, steps: int, terminates: bool, alpha: Any) -> None:
    for length in (5, SLOTS, 41):
        replay = make(strategy, terminates=terminates, **alpha)
        recorded = Recorded(replay, length, length)
        sample = replay.sample(300, generator(1, "draw"), n_step=steps, gamma=GAMMA)
        discount_B = torch.as_tensor(sample.discount).expand(300)
        for b, number in enumerate(own_numbers(sample.observation).tolist()):
            goal, later = float(sample.observation["desired_goal"][b]), recorded.later(number)
            assert goal in (later if strategy == "future" else later[-1:])
            total, terminal, last, discount = recorded.window(number, goal, steps, terminates)
            assert float(sample.reward[b]) == pytest.approx(total, rel=1e-5)
            assert bool(sample.terminated[b]) == terminal
            assert float(sample.next_observation["achieved_goal"][b]) == last
            assert float(sample.next_observation["desired_goal"][b]) == goal
            assert steps == 1 or float(discount_B[b]) == pytest.approx(discount)


def test_windows_end_with_the_episode_if_its_end_is_not_terminal_for_the_new_goal() -> None:
    hindsight = Hindsight(reward, ratio=1.0, compute_terminated=lambda achieved, desired, info: np.zeros(len(achieved)))
    replay = hindsight.build(SLOTS * N)
    recorded = Recorded(replay, SLOTS, 3)
    sample = replay.sample(300, generator(1, "draw"), n_step=3)
    assert not sample.terminated.any()
    last_B = sample.next_observation["achieved_goal"][:, 0]
    assert last_B.tolist() == [recorded.later(n)[:3][-1] for n in own_numbers(sample.observation).tolist()]


def test_future_goals_are_uniform_over_the_rest_of_the_episode() -> None:
    replay = make()
    recorded = Recorded(replay, SLOTS, 3)
    longest = max(recorded.episodes, key=len)
    sample = replay.sample(30_000, generator(1, "draw"))
    first_B = own_numbers(sample.observation) == longest[0]
    counts = torch.unique(sample.observation["desired_goal"][first_B], return_counts=True)[1]
    assert len(counts) == len(longest) > 3
    assert float(counts.max() / counts.min()) < 1.5


def test_ratio_is_the_fraction_of_relabelled_rows() -> None:
    replay = make(ratio=0.75)
    Recorded(replay, SLOTS, 3)
    sample = replay.sample(200, generator(1, "draw"))
    recorded_B = sample.observation["desired_goal"][:, 0] == -1.0
    assert int(recorded_B.sum()) == 50
    assert sample.reward[recorded_B].eq(100.0).all()
    assert replay.take(sample.row).reward.eq(100.0).all()  # stored rows do not change


@pytest.mark.parametrize("alpha", [{}, {"alpha": 0.6}])
def test_state_continues_bit_for_bit(alpha: Any) -> None:
    def step(replay: Any, k: int) -> Any:
        drawn = generator(k, "rows")
        replay.append(step_of(k, drawn))
        replay.observe_reset(torch.rand(N, generator=drawn) < 0.1)
        return replay.sample(8, generator(k, "draw"), n_step=2)._asdict() if len(replay) else {}

    replay, copy = make(**alpha), make(**alpha)
    Recorded(copy, 3, 9)  # rows that loading replaces
    for k in range(60):
        if k in (1, 7, SLOTS, 30):
            copy.load_state_dict(replay.state_dict())
        expected = step(replay, k)
        assert k == 0 or first_difference(expected, step(copy, k)) is None


class TestHindsight(BufferContract):
    def make(self, capacity: int) -> HindsightReplay:
        return Hindsight(reward, ratio=0.0).build(capacity)

    def _transition(self, step: int, valid_N: Tensor | None = None) -> Transition:
        row = super()._transition(step, valid_N)
        goals = {"achieved_goal": row.reward.unsqueeze(1), "desired_goal": row.reward.unsqueeze(1)}
        observations = {name: {**getattr(row, name), **goals} for name in ("observation", "next_observation")}
        return row._replace(**observations)


def test_agents_build_the_replay_from_the_option() -> None:
    env = rein.envs.probes.BitFlip(4, bits=4, seed=0)
    hindsight = Hindsight(env.compute_reward)
    assert type(rein.DQN(env, hindsight=hindsight).replay) is HindsightReplay
    assert type(rein.DQN(env, hindsight=hindsight, prioritized=True).replay) is PrioritizedHindsightReplay
    with pytest.raises(ValueError, match="hindsight"):
        rein.RecurrentDQN(env, hindsight=hindsight)


def test_loaded_agent_needs_the_function_again(tmp_path: Any) -> None:
    env = rein.envs.probes.BitFlip(4, bits=4, seed=0)
    agent = rein.DQN(env, hindsight=Hindsight(env.compute_reward), hidden=(8,), learning_starts=16, seed=0)
    rein.train(agent, env, env_steps=64)
    path = rein.save(agent, tmp_path / "agent.h5") or tmp_path / "agent.h5"
    with pytest.raises(rein.errors.CheckpointError, match="pass hindsight="):
        rein.load_agent(path)
    loaded = rein.load_agent(path, hindsight=Hindsight(env.compute_reward))
    assert len(loaded.replay) == len(agent.replay) == 64
    loaded.learn(1)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Hindsight(reward, strategy="episode"), "strategy"),
        (lambda: Hindsight(reward, ratio=2.0), "ratio=2.0"),
        (lambda: rein.DQN(rein.envs.CartPole(2), hindsight=Hindsight(reward)), ""),
    ],
)
def test_wrong_options_raise(build: Any, words: str) -> None:
    if words:
        with pytest.raises(ValueError, match=words):
            build()
    else:
        with pytest.raises(ValueError, match="achieved_goal"):
            rein.train(build(), rein.envs.CartPole(2, seed=0), env_steps=4)


def test_function_of_single_goals_raises() -> None:
    replay = Hindsight(lambda achieved, desired, info: 0.0).build(10)
    replay.append(step_of(0, generator(0, "rows"))._replace(valid=torch.ones(N, dtype=torch.bool)))
    with pytest.raises(ValueError, match="many goals at once"):
        replay.sample(4, generator(0, "draw"))
