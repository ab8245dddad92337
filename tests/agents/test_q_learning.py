from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

import rein
from rein.agents.q_learning import QLearning
from rein.envs.gridworld import Gridworld
from rein.handlers.checkpoint import checkpoint
from rein.ops.random import generator
from rein.schedules import linear
from rein.testing import AgentContract
from rein.types import TimeStep, Transition


class TestQLearningWithStart(AgentContract):
    """Spaces with a start other than 0."""

    def make(self, seed: int | None) -> QLearning:
        return QLearning(spaces.Discrete(6, start=-2), spaces.Discrete(2, start=3), seed=seed)

    def environment(self, num_envs: int, seed: int) -> Corridor:
        return Corridor(num_envs, seed, first=-2, first_action=3)


class Corridor:
    """Six cells in a row: action 1 moves right, action 0 left. The last cell terminates with a reward of 1."""

    device = torch.device("cpu")
    replayable = False

    def __init__(self, num_envs: int, seed: int, first: int = 0, first_action: int = 0) -> None:
        self.num_envs, self.seed, self.first, self.first_action = num_envs, seed, first, first_action
        self.single_observation_space = spaces.Discrete(6, start=first)
        self.single_action_space = spaces.Discrete(2, start=first_action)
        self.generator = generator(seed, "environment")

    def reset(self, seed: int | None = None) -> Tensor:
        self.cell_N = torch.randint(5, (self.num_envs,), generator=self.generator)
        return self.cell_N + self.first

    def apply_action(self, action_N: Tensor) -> TimeStep:
        last_N = self.cell_N
        final_N = (last_N + 2 * (action_N - self.first_action) - 1).clamp(0, 5)
        terminated_N = final_N == 5
        restart_N = torch.randint(5, (self.num_envs,), generator=self.generator)
        self.cell_N = torch.where(terminated_N, restart_N, final_N)
        return TimeStep(
            self.cell_N + self.first,
            terminated_N.float(),
            terminated_N,
            torch.zeros_like(terminated_N),
            final_N + self.first,
            torch.ones_like(terminated_N),
            {},
        )

    def close(self) -> None:
        pass


def agent(states: int = 4, actions: int = 2, **options: object) -> QLearning:
    return QLearning(spaces.Discrete(states), spaces.Discrete(actions), **{"seed": 0, **options})


def transition(
    observation: list[int],
    action: list[int],
    reward: list[float],
    next_observation: list[int],
    terminated: bool = False,
    truncated: bool = False,
    valid: list[bool] | None = None,
) -> Transition:
    rows = len(reward)
    return Transition(
        torch.tensor(observation),
        torch.tensor(action),
        torch.tensor(reward),
        torch.full((rows,), terminated),
        torch.full((rows,), truncated),
        torch.tensor(next_observation),
        torch.tensor(valid or [True] * rows),
        {},
    )


def learn(learner: QLearning, **fields: object) -> dict[str, object]:
    learner.record_observation(transition(**fields))
    return learner.optimize_model()


def run(learner: QLearning, environment: Corridor | Gridworld, steps: int) -> None:
    observation = environment.reset()
    for _ in range(steps):
        action, extras = learner.select_action(observation)
        time_step = environment.apply_action(action)
        ends = time_step.reward, time_step.terminated, time_step.truncated, time_step.final_observation
        learner.record_observation(Transition(observation, action, *ends, time_step.valid, extras))
        learner.optimize_model()
        observation = time_step.observation


def test_batched_update_matches_a_reference() -> None:
    """N rows with duplicates, terminations, truncations and invalid rows, compared with a float64 Python loop."""
    states, actions, rows, learning_rate, gamma = 5, 3, 64, 0.2, 0.9
    learner = agent(states, actions, learning_rate=learning_rate, gamma=gamma)
    table, draws = learner.table.double().numpy().copy(), np.random.default_rng(0)
    for _ in range(20):
        s, a, s2 = (
            draws.integers(states, size=rows),
            draws.integers(actions, size=rows),
            draws.integers(states, size=rows),
        )
        reward = draws.normal(size=rows).astype(np.float32)
        terminated, truncated, valid = draws.random((3, rows)) < np.array([[0.3], [0.3], [0.7]])
        target = reward + gamma * np.where(terminated, 0.0, table[s2].max(axis=1))
        before = table.copy()
        for cell in {(int(x), int(y)) for x, y, v in zip(s, a, valid, strict=True) if v}:
            rows_of_cell = valid & (s == cell[0]) & (a == cell[1])
            table[cell] += (1 - (1 - learning_rate) ** rows_of_cell.sum()) * (
                target[rows_of_cell].mean() - before[cell]
            )
        fields = (s, a, reward, terminated, truncated, s2, valid)
        learner.record_observation(Transition(*map(torch.from_numpy, fields), {}))
        metrics = learner.optimize_model()
        td_error = np.abs(target - before[s, a])[valid].mean()
        assert float(metrics["td_error"]) == pytest.approx(td_error, abs=1e-5)
    np.testing.assert_allclose(learner.table.numpy(), table, atol=1e-5)


def test_state_is_the_row_major_index_of_the_observation() -> None:
    learner = QLearning(spaces.MultiDiscrete([5, 5, 5, 5]), spaces.Discrete(4), seed=0)
    observation = torch.tensor([[2, 3, 2, 4], [1, 4, 2, 4], [3, 4, 2, 4]])
    assert torch.equal(learner.q_values(observation), learner.table[[339, 239, 489]])


def test_observation_space_start_is_respected() -> None:
    space = spaces.MultiDiscrete([2, 3], start=[5, -1])
    learner = QLearning(space, spaces.Discrete(2), seed=0)
    observation = torch.tensor([[5 + i, -1 + j] for i in range(2) for j in range(3)])
    assert torch.equal(learner.q_values(observation), learner.table)


def test_action_space_start_is_respected() -> None:
    learner = QLearning(spaces.Discrete(2), spaces.Discrete(3, start=7), learning_rate=1.0, epsilon=0.0, seed=0)
    learn(learner, observation=[1], action=[8], reward=[50.0], next_observation=[0], terminated=True)
    assert learner.table[1, 1] == 50.0
    assert learner.select_action(torch.tensor([1]))[0].tolist() == [8]
    assert learner.policy().select_action(torch.tensor([1]))[0].tolist() == [8]


def test_table_is_initialized_uniformly() -> None:
    table = agent(1000, 10).table
    assert table.abs().max() <= 0.1
    assert table.mean().abs() < 0.004  # 5 standard deviations
    assert table.std().item() == pytest.approx(0.2 / 12**0.5, rel=0.03)


def test_optimize_without_new_transition_does_nothing() -> None:
    learner = agent()
    assert learner.optimize_model() == {}
    assert set(learn(learner, observation=[0], action=[1], reward=[2.0], next_observation=[3])) == {
        "td_error",
        "epsilon",
    }
    before = learner.table.clone()
    assert learner.optimize_model() == {}
    assert learner.updates == 1
    assert torch.equal(before, learner.table)


def test_pending_transition_is_part_of_the_state() -> None:
    learner, other = agent(), agent(seed=1)
    learner.record_observation(transition([0], [1], [2.0], [3], truncated=True))
    other.load_state_dict(learner.state_dict())
    assert learner.optimize_model()["td_error"] == other.optimize_model()["td_error"]
    assert torch.equal(learner.table, other.table)


def test_reset_outside_a_step_keeps_recorded_transitions() -> None:
    learner = agent()
    learner.record_observation(transition([0, 1], [1, 1], [2.0, 1.0], [3, 3]))
    learner.observe_reset(torch.tensor([0, 0]), torch.tensor([True, True]))
    assert learner.optimize_model()


def test_epsilon_follows_its_schedule_on_env_steps() -> None:
    learner, seen = agent(epsilon=linear(1.0, 0.0, env_steps=8)), []
    for _ in range(5):
        metrics = learn(learner, observation=[0, 1], action=[1, 1], reward=[0.0, 0.0], next_observation=[3, 3])
        seen.append(metrics["epsilon"])
    assert seen == [0.75, 0.5, 0.25, 0.0, 0.0]


def test_learning_rate_follows_schedules_and_assignments() -> None:
    learner = agent(learning_rate=linear(1.0, 0.0, updates=2))
    config, values = learner.config, []
    learner.table.zero_()
    for reward in (8.0, 4.0, 100.0, 2.0):
        if len(values) == 3:
            learner.learning_rate = 0.25
        learn(learner, observation=[0], action=[1], reward=[reward], next_observation=[3], terminated=True)
        values.append(learner.table[0, 1].item())
    assert values == [8.0, 6.0, 6.0, 5.0]  # learning rates 1, 0.5, 0, 0.25
    assert learner.config == config  # checkpoints compare the config, and handlers assign again after resuming
    with pytest.raises(ValueError, match=r"QLearning\(learning_rate=1.5\): give a number from 0 to 1"):
        learner.learning_rate = 1.5
    with pytest.raises(ValueError, match=r"QLearning\(epsilon=-0.5\): give a number from 0 to 1"):
        learner.epsilon = -0.5


def test_resumed_run_with_assigned_rates_matches_uninterrupted_run(tmp_path: Path) -> None:
    def loop_until(epochs: int) -> rein.Loop:
        environment = Gridworld(num_envs=2, seed=0, max_episode_steps=9)
        learner = QLearning(environment.single_observation_space, environment.single_action_space, seed=0)
        loop = rein.training_loop(learner, environment, epochs=epochs, iterations=8, seed=0)
        checkpoint(loop, rein.Checkpoints(tmp_path))

        @loop.epoch_started
        def cool(state: rein.State) -> None:
            learner.learning_rate, learner.epsilon = 0.5 / state.epoch, linear(0.8 / state.epoch, 0.0, env_steps=1000)

        return loop

    uninterrupted = loop_until(4)
    uninterrupted.run()
    shutil.rmtree(tmp_path)
    loop_until(2).run()
    again = loop_until(4)
    rein.resume(again, tmp_path)
    again.run()
    assert torch.equal(again.parts["agent"].table, uninterrupted.parts["agent"].table)


def test_solves_corridor_with_optimal_values() -> None:
    learner = agent(6, 2, learning_rate=0.5, gamma=0.9, epsilon=0.5)
    run(learner, Corridor(16, seed=0), steps=300)
    value_S = learner.table.amax(dim=1)[:5]
    assert torch.allclose(value_S, 0.9 ** torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0]), atol=1e-3)
    assert learner.policy().select_action(torch.arange(5))[0].tolist() == [1] * 5


@pytest.mark.parametrize(
    ("observation_space", "action_space", "message"),
    [
        (spaces.Box(0, 1, (2,)), spaces.Discrete(2), "needs Discrete or MultiDiscrete observations; use A2C"),
        (spaces.Discrete(2), spaces.Box(0, 1, (2,)), "requires Discrete actions; use A2C"),
    ],
)
def test_unsupported_spaces_are_rejected(
    observation_space: spaces.Space, action_space: spaces.Space, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        QLearning(observation_space, action_space)


def test_wrong_observation_shape_is_rejected() -> None:
    learner = QLearning(spaces.MultiDiscrete([5, 5]), spaces.Discrete(4), seed=0)
    with pytest.raises(ValueError, match=r"expected observations of shape \(N, 2\), got \(3, 1\)"):
        learner.select_action(torch.zeros(3, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"expected observations of shape \(N\), got \(3, 2\)"):
        agent().select_action(torch.zeros(3, 2, dtype=torch.int64))


def test_state_of_other_spaces_is_rejected_without_changes() -> None:
    learner = agent(states=4)
    before = learner.table.clone()
    with pytest.raises(ValueError, match=r"table has shape \(5, 2\) in the state, but \(4, 2\) here; .* same spaces"):
        learner.load_state_dict(agent(states=5).state_dict())
    assert torch.equal(before, learner.table)


@pytest.mark.parametrize("space", [spaces.MultiDiscrete([1000] * 20), spaces.Discrete(2**60)], ids=str)
def test_table_that_does_not_fit_into_memory_names_the_space(space: spaces.Space) -> None:
    with pytest.raises(MemoryError, match=re.escape(f"{space}")):
        QLearning(space, spaces.Discrete(2))
