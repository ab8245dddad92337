"""Tabular Q-learning on the Gridworld with one target."""

from __future__ import annotations

import pytest
import torch

import rein
from rein.agents.q_learning import QLearning
from rein.envs.gridworld import Gridworld

UP, DOWN, RIGHT, LEFT = range(4)
TARGET = (2, 4)


def trained(seed: int, num_envs: int) -> tuple[QLearning, Gridworld]:
    environment = Gridworld(num_envs=num_envs, possible_targets=[TARGET], seed=seed)
    spaces = environment.single_observation_space, environment.single_action_space
    agent = QLearning(*spaces, learning_rate=0.5, gamma=0.99, epsilon=0.2, seed=seed)
    rein.train(agent, environment, episodic=True, epochs=300 if num_envs == 1 else 20, iterations=20)
    return agent, environment


def steps_of_greedy_episode(agent: QLearning, environment: Gridworld, x: int) -> int:
    policy, y = agent.policy(deterministic=True), 0
    for step in range(1, 30):
        action, _ = policy.select_action(environment.encode(x=x, y=y, target=TARGET))
        dx, dy = {UP: (0, 1), DOWN: (0, -1), RIGHT: (1, 0), LEFT: (-1, 0)}[int(action)]
        x, y = min(max(x + dx, 0), 4), min(max(y + dy, 0), 4)
        if (x, y) == TARGET:
            return step
    return 30


@pytest.mark.default_cases("0-64", "1-64", "0-1")
@pytest.mark.parametrize("num_envs", [1, 64])
@pytest.mark.parametrize("seed", range(6))
def test_q_learning_finds_shortest_paths(seed, num_envs):
    agent, environment = trained(seed, num_envs)
    cells = torch.cat([environment.encode(x=x, y=y, target=TARGET) for x, y in ((2, 3), (1, 4), (3, 4))])
    assert agent.q_values(cells).argmax(dim=1).tolist() == [UP, RIGHT, LEFT]
    assert [steps_of_greedy_episode(agent, environment, x) for x in range(4)] == [6, 5, 4, 5]
