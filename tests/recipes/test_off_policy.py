"""Off-policy recipes: options, command line, and learning."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from rein.cli import main
from rein.cli.catalog import find
from rein.recipes.cartpole_dqn import cartpole_dqn
from rein.recipes.gridworld_dqn import gridworld_dqn
from rein.recipes.halfcheetah_sac import halfcheetah_sac
from rein.recipes.pendulum_ddpg import pendulum_ddpg
from rein.recipes.pendulum_sac import pendulum_sac
from rein.recipes.pendulum_td3 import pendulum_td3
from rein.recipes.turtleworld_sac import turtleworld_sac

SMALL = {"num_envs": 2, "iterations": 10, "batch_size": 8, "hidden": (8,), "learning_starts": 20, "update_to_data": 0.5}
NATIVE: list[Any] = [cartpole_dqn, gridworld_dqn, pendulum_sac, pendulum_td3, pendulum_ddpg, turtleworld_sac]
RECIPES: list[Any] = [*NATIVE, halfcheetah_sac]


def small(recipe: Any) -> dict[str, Any]:
    """Return options for three short epochs."""
    return SMALL | ({"env_steps": 60} if recipe is halfcheetah_sac else {"epochs": 3})


@pytest.mark.parametrize("recipe", RECIPES)
def test_updates_begin_after_learning_starts(recipe) -> None:
    loop = recipe(**small(recipe))
    state = loop.run()
    assert (state.clocks.env_steps, state.clocks.updates) == (60, 20)
    assert len(loop.parts["agent"].replay) == 60


@pytest.mark.parametrize("recipe", RECIPES)
def test_agent_uses_the_options_of_the_recipe(recipe) -> None:
    config = recipe(**small(recipe) | {"gamma": 0.5, "learning_rate": 0.125, "seed": 7}).parts["agent"].config
    names = ("gamma", "learning_rate", "seed", "batch_size", "hidden", "learning_starts", "update_to_data")
    assert [config[name] for name in names] == [0.5, 0.125, 7, 8, [8], 20, 0.5]


@pytest.mark.default_cases("cartpole_dqn", "gridworld_dqn", "pendulum_sac", "pendulum_td3")
@pytest.mark.parametrize("recipe", RECIPES)
def test_options_are_command_line_flags(recipe, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    name = recipe.__name__.replace("_", "-")
    assert find(name) is recipe
    words = {key: "8" if key == "hidden" else str(value) for key, value in small(recipe).items()}
    main(
        ["train", name, "--quiet", *(w for key, value in words.items() for w in (f"--{key.replace('_', '-')}", value))]
    )
    assert "60 env steps" in capsys.readouterr().out
    assert list(tmp_path.glob(f"runs/{name}/trajectories/*.h5"))


@pytest.mark.default_cases("gridworld_dqn")
@pytest.mark.parametrize("recipe", [gridworld_dqn, turtleworld_sac])
def test_recipe_solves_its_task(recipe) -> None:
    final = recipe(seed=0).run()
    assert final.memory["solved"]["value"] >= final.memory["solved"]["at_least"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [pendulum_sac, pendulum_td3, functools.partial(pendulum_ddpg, seed=1), cartpole_dqn])
def test_slow_recipe_solves_its_task(recipe) -> None:
    assert "solved" in recipe().run().memory
