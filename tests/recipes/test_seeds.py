"""Seeds of evaluation environments, and optimal returns."""

from __future__ import annotations

import pytest

from rein.recipes.gridworld_q_learning import gridworld
from rein.recipes.tasks import optimal_return
from rein.recipes.taxi import taxi


@pytest.mark.parametrize("recipe", [gridworld, taxi])
@pytest.mark.parametrize("seed", [0, 5])
def test_evaluation_environment_has_a_different_seed(recipe, seed):
    parts = recipe(seed=seed, num_envs=2).parts
    assert parts["environment"].seed == seed
    assert parts["evaluation_environment"].seed != seed
    again = recipe(seed=seed, num_envs=2).parts["evaluation_environment"].seed
    assert parts["evaluation_environment"].seed == again


def test_optimal_return_is_the_mean_over_initial_positions():
    assert optimal_return(2, 4) == pytest.approx(-11.2)  # 6, 5, 4, 5, 6 steps: -(15 + 10 + 6 + 10 + 15) / 5
    assert optimal_return(0, 0) == pytest.approx(-(0 + 0 + 1 + 3 + 6) / 5)
