"""On-policy recipes: options, command line, and learning."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from rein.cli import main
from rein.cli.catalog import find
from rein.episodes import evaluate
from rein.ops.random import stream_seed
from rein.recipes.acrobot_ppo import acrobot
from rein.recipes.halfcheetah_ppo import halfcheetah_ppo
from rein.recipes.lunarlander import lunarlander
from rein.recipes.memory_ppo import memory_ppo
from rein.recipes.mountaincar import mountaincar
from rein.recipes.pendulum_ppo import pendulum_ppo
from rein.recipes.pong import pong
from rein.recipes.tasks import CORES
from rein.testing.stateful import first_difference

NATIVE: list[Any] = [acrobot, pendulum_ppo, mountaincar, memory_ppo]
RECIPES: list[Any] = [*NATIVE, lunarlander, halfcheetah_ppo, pong]
SMALL = {"num_envs": 4, "iterations": 8, "minibatches": 2, "update_epochs": 3}
STEPS = 3 * 4 * 8  # env steps of three epochs


def small(recipe: Any) -> dict[str, int]:
    """Return options for three short epochs."""
    return SMALL | ({"env_steps": STEPS} if recipe in (halfcheetah_ppo, pong) else {"epochs": 3})


@pytest.mark.default_cases("acrobot", "pendulum_ppo", "mountaincar", "memory_ppo", "lunarlander", "halfcheetah_ppo")
@pytest.mark.parametrize("recipe", RECIPES)
def test_each_epoch_is_one_rollout(recipe):
    state = recipe(**small(recipe)).run()
    assert (state.clocks.env_steps, state.clocks.updates) == (3 * 4 * 8, 3 * 2 * 3)


@pytest.mark.default_cases("acrobot", "pendulum_ppo", "mountaincar", "memory_ppo", "lunarlander", "halfcheetah_ppo")
@pytest.mark.parametrize("recipe", RECIPES)
def test_agent_uses_the_options_of_the_recipe(recipe):
    config = recipe(**small(recipe), gamma=0.5, gae_lambda=0.25, learning_rate=0.125, seed=7).parts["agent"].config
    names = ("gamma", "gae_lambda", "minibatches", "update_epochs", "rollout_steps", "seed")
    assert [config[name] for name in names] == [0.5, 0.25, 2, 3, 8, 7]
    assert "0.125" in str(config["learning_rate"])


@pytest.mark.default_cases("acrobot", "pendulum_ppo", "mountaincar", "memory_ppo", "lunarlander", "halfcheetah_ppo")
@pytest.mark.parametrize("recipe", RECIPES)
def test_options_are_command_line_flags(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = recipe.__name__.replace("_", "-")
    assert find(name) is recipe
    flags = [word for key, value in small(recipe).items() for word in (f"--{key.replace('_', '-')}", str(value))]
    main(["train", name, "--quiet", *flags])
    assert "96 env steps" in capsys.readouterr().out
    assert list(tmp_path.glob(f"runs/{name}/trajectories/*.h5"))


@pytest.mark.default_cases("acrobot")
@pytest.mark.parametrize("recipe", NATIVE)
def test_results_depend_only_on_the_seed(recipe):
    def trained(seed: int) -> object:
        loop = recipe(seed=seed, **small(recipe))
        loop.run()
        return loop.parts["agent"].state_dict()

    assert first_difference(trained(1), trained(1)) is None
    assert first_difference(trained(1), trained(2)) is not None


@pytest.mark.parametrize("recipe", [halfcheetah_ppo, pong])
def test_learning_rate_decreases_to_0_at_the_last_epoch(recipe):
    agent = recipe(**small(recipe)).parts["agent"]
    steps = STEPS
    assert agent.learning_rate(env_steps=0, updates=0) > 0.0
    assert agent.learning_rate(env_steps=steps - 1, updates=0) > 0.0
    assert agent.learning_rate(env_steps=steps, updates=0) == 0.0


def test_mountaincar_evaluates_with_a_different_seed():
    parts = mountaincar(seed=5, num_envs=2).parts
    assert parts["environment"].seed == 5
    assert parts["evaluation_environment"].seed == stream_seed(5, "evaluation")


@pytest.mark.default_cases("mingru")
@pytest.mark.parametrize("core", ["lstm", "gru", "mingru"])
def test_memory_ppo_solves_its_task(core):
    loop = memory_ppo(core=core, cues=2, delay=2)
    assert loop.run().reason == "solved"
    environment = type(loop.parts["environment"])(100, 2, 2, seed=1)
    assert evaluate(loop.parts["agent"].policy(), environment, 100).mean_return >= 0.95


@pytest.mark.slow
def test_return_stays_at_chance_without_core():
    state = memory_ppo(core="none", epochs=30).run()
    assert state.status == "completed"
    assert 0.1 < state.metrics["episode_return_100"] < 0.45  # chance is 1/4


@pytest.mark.parametrize("core", CORES)
def test_core_is_selected_by_name(core):
    agent = memory_ppo(core=core).parts["agent"]
    kinds = {type(part) for part in agent.networks.cores}
    assert kinds == (set() if CORES[core] is None else {CORES[core]})


def test_unknown_core_is_rejected():
    with pytest.raises(ValueError, match=r"core='rnn': use one of lstm, gru, mingru, none"):
        memory_ppo(core="rnn")


@pytest.mark.parametrize(
    ("recipe", "module", "line"),
    [
        (lunarlander, "Box2D", 'LunarLander-v3 needs Box2D: pip install "gymnasium[box2d]"'),
        (halfcheetah_ppo, "mujoco", 'HalfCheetah-v5 needs MuJoCo: pip install "gymnasium[mujoco]"'),
        (pong, "ale_py", 'ALE/Pong-v5 needs ale-py: pip install "gymnasium[atari]" opencv-python-headless'),
    ],
)
def test_missing_dependency_error_names_the_extra(recipe, module, line, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    extra = line.partition("gymnasium[")[2].partition("]")[0]
    for loaded in [key for key in sys.modules if key.startswith(f"gymnasium.envs.{extra}")]:
        monkeypatch.delitem(sys.modules, loaded)
    with pytest.raises(ImportError, match=f"^{re.escape(line)}$"):
        recipe()


@pytest.mark.slow
def test_pong_observes_four_grayscale_frames():
    for size, options in ((42, {}), (84, {"size": 84})):
        environment = pong(num_envs=2, **options).parts["environment"]
        assert environment.reset().shape == (2, 4, size, size)
        assert environment.single_action_space.n == 6


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("recipe", [acrobot, pendulum_ppo, mountaincar, lunarlander])
def test_recipe_solves_its_task(recipe, seed):
    assert recipe(seed=seed).run().reason == "solved"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("core", ["lstm", "gru", "mingru"])
def test_memory_is_solved(core, seed):
    assert memory_ppo(core=core, seed=seed).run().reason == "solved"
