"""DQN recipes on Gymnasium environments: options, command line, and learning."""

from __future__ import annotations

from typing import Any

import pytest

from rein.cli import main
from rein.cli.catalog import find
from rein.recipes.lunarlander_dqn import lunarlander_dqn
from rein.recipes.pong_dqn import pong_dqn
from rein.replay.frames import FrameReplay, PrioritizedFrameReplay

RECIPES: list[Any] = [lunarlander_dqn, pong_dqn]
SMALL = {"num_envs": 2, "iterations": 8, "learning_starts": 16, "batch_size": 4, "capacity": 40, "train_frequency": 4}


def small(recipe: Any) -> dict[str, Any]:
    """Return options for three short epochs, with updates in the last two."""
    length = {"env_steps": 48} if recipe is pong_dqn else {"epochs": 3, "evaluate_every": 0}
    return SMALL | length | {"update_to_data": 0.25}


@pytest.mark.default_cases("lunarlander_dqn")
@pytest.mark.parametrize("recipe", RECIPES)
def test_updates_follow_train_frequency(recipe):
    state = recipe(**small(recipe)).run()
    assert (state.epoch, state.clocks.env_steps, state.clocks.updates) == (3, 48, (48 - 16) // 4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_agent_uses_the_options_of_the_recipe(recipe):
    given = {"gamma": 0.5, "learning_rate": 0.125, "n_step": 3, "target_frequency": 9, "prioritized": True, "seed": 7}
    config = recipe(**small(recipe), **given, epsilon=0.375, epsilon_env_steps=77).parts["agent"].config
    assert {name: config[name] for name in given} == given
    assert {name: config[name] for name in SMALL.keys() - {"num_envs", "iterations"}}.items() <= SMALL.items()
    assert "0.375" in str(config["epsilon"])
    assert "77" in str(config["epsilon"])


@pytest.mark.default_cases("lunarlander_dqn")
@pytest.mark.parametrize("recipe", RECIPES)
def test_options_are_command_line_flags(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = recipe.__name__.replace("_", "-")
    assert find(name) is recipe
    flags = [word for key, value in small(recipe).items() for word in (f"--{key.replace('_', '-')}", str(value))]
    main(["train", name, "--quiet", *flags])
    assert "48 env steps" in capsys.readouterr().out


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("prioritized", [False, True])
def test_pong_stores_each_frame_once(prioritized):
    loop = pong_dqn(**small(pong_dqn), prioritized=prioritized)
    loop.run()
    replay = loop.parts["agent"].replay
    assert type(replay) is (PrioritizedFrameReplay if prioritized else FrameReplay)
    assert replay.frames.shape == (84, 84)
    assert replay.frames._ids == 0  # no complete stacks, since no episode has ended yet
