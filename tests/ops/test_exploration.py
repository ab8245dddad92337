from __future__ import annotations

import pytest
import torch

from rein.ops.exploration import boltzmann, epsilon_greedy, random_valid
from rein.ops.random import generator

ROWS, ACTIONS = 40_000, 5


def test_epsilon_zero_takes_the_first_of_the_best_actions() -> None:
    value_NA = torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0], [-3.0, -2.0, -1.0]])
    action_N = epsilon_greedy(value_NA, 0.0, generator(0, "agent"))
    assert action_N.dtype == torch.int64
    assert action_N.tolist() == [1, 0, 2]


def test_epsilon_one_is_uniform() -> None:
    value_NA = torch.tensor([0.0, 9.0, 0.0, 0.0, 0.0]).expand(ROWS, ACTIONS)
    count_A = epsilon_greedy(value_NA, 1.0, generator(0, "agent")).bincount(minlength=ACTIONS)
    share = 1.0 / ACTIONS
    deviation = (ROWS * share * (1 - share)) ** 0.5
    assert ((count_A - ROWS * share).abs() < 4 * deviation).all()


def test_epsilon_is_the_probability_of_a_random_action() -> None:
    epsilon, value_NA = 0.3, torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0]).expand(ROWS, ACTIONS)
    action_N = epsilon_greedy(value_NA, epsilon, generator(0, "agent"))
    other = epsilon * (ACTIONS - 1) / ACTIONS
    deviation = (ROWS * other * (1 - other)) ** 0.5
    assert abs((action_N != 2).sum().item() - ROWS * other) < 4 * deviation


def test_number_of_draws_does_not_depend_on_epsilon() -> None:
    one, other = generator(0, "agent"), generator(0, "agent")
    epsilon_greedy(torch.zeros(10, ACTIONS), 0.0, one)
    epsilon_greedy(torch.zeros(10, ACTIONS), 1.0, other)
    assert torch.equal(one.get_state(), other.get_state())


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-40, 1e-6])
def test_temperature_near_zero_takes_the_first_of_the_best_actions(temperature: float) -> None:
    value_NA = torch.tensor([[0.0, 2.0, 1.0], [-1e30, -2e30, -1e30], [-3.0, -2.0, -1.0]])
    action_N = boltzmann(value_NA, temperature, generator(0, "agent"))
    assert action_N.dtype == torch.int64
    assert action_N[[0, 2]].tolist() == [1, 2]
    assert action_N[1] != 1
    assert boltzmann(torch.zeros(100, 3), 0.0, generator(0, "agent")).tolist() == [0] * 100


@pytest.mark.parametrize("temperature", [0.25, 1.0, 5.0, 1e9])
def test_action_frequencies_match_a_softmax_of_the_values(temperature: float) -> None:
    value_A = torch.tensor([0.3, -0.2, 1.0, 0.0, 0.9], dtype=torch.float64)
    action_N = boltzmann(value_A.float().expand(ROWS, ACTIONS), temperature, generator(0, "agent"))
    share_A = (value_A / temperature).softmax(0)
    deviation_A = (ROWS * share_A * (1.0 - share_A)).sqrt()
    assert ((action_N.bincount(minlength=ACTIONS) - ROWS * share_A).abs() < 4.0 * deviation_A).all()


def test_action_with_value_minus_infinity_is_never_taken() -> None:
    value_NA = torch.tensor([0.0, -torch.inf, 0.0]).expand(10_000, 3)
    for temperature in (0.0, 1.0, 1e6):
        assert (boltzmann(value_NA, temperature, generator(0, "agent")) != 1).all()


def test_temperature_can_be_a_tensor_and_does_not_change_the_draws() -> None:
    value_NA = torch.randn(100, ACTIONS, generator=generator(1, "values"))
    one, other = generator(0, "agent"), generator(0, "agent")
    assert torch.equal(boltzmann(value_NA, 0.5, one), boltzmann(value_NA, torch.tensor(0.5), other))
    boltzmann(value_NA, 0.0, other)
    boltzmann(value_NA, 9.0, one)
    assert torch.equal(one.get_state(), other.get_state())


def masks(rows: int) -> torch.Tensor:
    """Return masks of which about a third have no valid action."""
    mask_NA = torch.rand(rows, ACTIONS, generator=generator(0, "mask")) < 0.4
    mask_NA[::3] = False
    return mask_NA


def valid_of(mask_A: torch.Tensor) -> list[int]:
    return [a for a in range(len(mask_A)) if mask_A[a]] or list(range(len(mask_A)))


def test_million_masked_draws_are_valid() -> None:
    mask_NA = masks(1_000_000)
    value_NA = torch.randn(1_000_000, ACTIONS, generator=generator(1, "values"))
    allowed_NA = mask_NA | ~mask_NA.any(1, keepdim=True)
    for action_N in (
        random_valid(mask_NA, generator(0, "agent")),
        epsilon_greedy(value_NA, 0.5, generator(0, "agent"), mask_NA),
        boltzmann(value_NA, 0.5, generator(0, "agent"), mask_NA),
        boltzmann(value_NA, 1e9, generator(0, "agent"), mask_NA),
    ):
        assert action_N.dtype == torch.int64
        assert allowed_NA.gather(1, action_N.unsqueeze(1)).all()


def test_random_valid_action_matches_reference() -> None:
    mask_NA = masks(3_000)
    u_N = torch.rand(3_000, generator=generator(0, "agent"), dtype=torch.float64).tolist()
    expected = [(valid := valid_of(mask))[int(u * len(valid))] for u, mask in zip(u_N, mask_NA, strict=True)]
    assert random_valid(mask_NA, generator(0, "agent")).tolist() == expected
    several = random_valid(mask_NA.view(1_000, 3, ACTIONS), generator(0, "agent"))
    assert several.flatten().tolist() == expected


def test_masked_actions_without_exploration_match_reference() -> None:
    mask_NA, value_NA = masks(3_000), torch.randn(3_000, ACTIONS, generator=generator(1, "values"))
    expected = [max(valid_of(m), key=lambda a: float(v[a])) for v, m in zip(value_NA, mask_NA, strict=True)]
    assert epsilon_greedy(value_NA, 0.0, generator(0, "agent"), mask_NA).tolist() == expected
    assert boltzmann(value_NA, 0.0, generator(0, "agent"), mask_NA).tolist() == expected


@pytest.mark.parametrize("temperature", [0.25, 1.0, 5.0])
def test_masked_action_frequencies_match_a_softmax_of_the_valid_values(temperature: float) -> None:
    value_A = torch.tensor([0.3, 4.0, 1.0, 0.0, 9.0], dtype=torch.float64)
    valid = [0, 2, 3]
    mask_NA = torch.tensor([True, False, True, True, False]).expand(ROWS, ACTIONS)
    action_N = boltzmann(value_A.float().expand(ROWS, ACTIONS), temperature, generator(0, "agent"), mask_NA)
    share_A = (value_A[valid] / temperature).softmax(0)
    deviation_A = (ROWS * share_A * (1.0 - share_A)).sqrt()
    assert ((action_N.bincount(minlength=ACTIONS)[valid] - ROWS * share_A).abs() < 4.0 * deviation_A).all()
