from __future__ import annotations

import torch

from rein.ops.exploration import epsilon_greedy
from rein.ops.random import generator

ROWS, ACTIONS = 40_000, 5


def test_without_exploration_the_first_of_the_best_is_taken() -> None:
    value_NA = torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0], [-3.0, -2.0, -1.0]])
    action_N = epsilon_greedy(value_NA, 0.0, generator(0, "agent"))
    assert action_N.dtype == torch.int64
    assert action_N.tolist() == [1, 0, 2]


def test_with_full_exploration_all_actions_are_as_likely() -> None:
    value_NA = torch.tensor([0.0, 9.0, 0.0, 0.0, 0.0]).expand(ROWS, ACTIONS)
    count_A = epsilon_greedy(value_NA, 1.0, generator(0, "agent")).bincount(minlength=ACTIONS)
    share = 1.0 / ACTIONS
    deviation = (ROWS * share * (1 - share)) ** 0.5
    assert ((count_A - ROWS * share).abs() < 4 * deviation).all()


def test_epsilon_is_the_probability_of_a_random_action_which_may_be_the_best_one() -> None:
    epsilon, value_NA = 0.3, torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0]).expand(ROWS, ACTIONS)
    action_N = epsilon_greedy(value_NA, epsilon, generator(0, "agent"))
    other = epsilon * (ACTIONS - 1) / ACTIONS
    deviation = (ROWS * other * (1 - other)) ** 0.5
    assert abs((action_N != 2).sum().item() - ROWS * other) < 4 * deviation


def test_epsilon_may_be_a_tensor_that_stays_on_its_device() -> None:
    value_NA = torch.randn(100, ACTIONS, generator=generator(1, "values"))
    number = epsilon_greedy(value_NA, 0.5, generator(0, "agent"))
    assert torch.equal(number, epsilon_greedy(value_NA, torch.tensor(0.5), generator(0, "agent")))


def test_the_stream_advances_alike_for_every_epsilon() -> None:
    one, other = generator(0, "agent"), generator(0, "agent")
    epsilon_greedy(torch.zeros(10, ACTIONS), 0.0, one)
    epsilon_greedy(torch.zeros(10, ACTIONS), 1.0, other)
    assert torch.equal(one.get_state(), other.get_state())
