"""Short runs of recipes: options, command line, numbers of steps and updates, and seeds."""

from __future__ import annotations

import re
import sys
from typing import Any, NamedTuple

import pytest

import rein
from rein.cli import main
from rein.cli.catalog import find
from rein.ops.random import stream_seed
from rein.recipes.pong_dqn import pong_dqn
from rein.recipes.tasks import CORES
from rein.replay.frames import FrameReplay, PrioritizedFrameReplay
from rein.testing.stateful import first_difference

ON_POLICY = {"num_envs": 4, "iterations": 8, "minibatches": 2, "update_epochs": 3}
WORLDS = {"worlds": 2, "agents": 3, "iterations": 8, "minibatches": 2, "update_epochs": 3, "epochs": 3}
OFF_POLICY = {"num_envs": 2, "iterations": 10, "batch_size": 8, "hidden": (8,), "learning_starts": 20}
OFF_POLICY |= {"update_to_data": 0.5}
FRAMES = {"num_envs": 2, "iterations": 8, "learning_starts": 16, "batch_size": 4, "capacity": 40, "train_frequency": 4}
FRAMES |= {"update_to_data": 0.25}
MEMORY = {"num_envs": 4, "iterations": 8, "epochs": 3, "learning_starts": 20, "train_frequency": 4}
MEMORY |= {"update_to_data": 0.25, "core": "gru", "burn_in": 2}


class Case(NamedTuple):
    """Options of three short epochs, the clocks at their end, and further options of the agent."""

    options: dict[str, Any]
    env_steps: int
    updates: int
    more: dict[str, Any]


VALUE = {"n_step": 3, "target_frequency": 9, "prioritized": True}
CASES = {
    **dict.fromkeys(
        ["acrobot", "pendulum-ppo", "mountaincar", "memory-ppo", "lunarlander"],
        Case(ON_POLICY | {"epochs": 3}, 96, 3 * 2 * 3, {"gae_lambda": 0.25}),
    ),
    **dict.fromkeys(
        ["halfcheetah-ppo", "pong"], Case(ON_POLICY | {"env_steps": 96}, 96, 3 * 2 * 3, {"gae_lambda": 0.25})
    ),
    "navigation": Case(WORLDS, 3 * 6 * 8, 3 * 2 * 3, {"gae_lambda": 0.25}),
    **dict.fromkeys(
        ["cartpole-dqn", "gridworld-dqn", "pendulum-sac", "pendulum-td3", "pendulum-ddpg", "turtleworld-sac"],
        Case(OFF_POLICY | {"epochs": 3}, 60, 20, {}),
    ),
    "halfcheetah-sac": Case(OFF_POLICY | {"env_steps": 60}, 60, 20, {}),
    "lunarlander-dqn": Case(FRAMES | {"epochs": 3, "evaluate_every": 0}, 48, (48 - 16) // 4, VALUE),
    "pong-dqn": Case(FRAMES | {"env_steps": 48}, 48, (48 - 16) // 4, VALUE),
    "memory-dqn": Case(MEMORY, 96, (96 - 20) // 4, {"sequence_length": 7, "batch_size": 9, "tau": 0.25}),
}
WITHOUT_FRAMES = [name for name in CASES if not name.startswith("pong")]


@pytest.mark.default_cases(*WITHOUT_FRAMES)
@pytest.mark.parametrize("name", CASES)
def test_run_of_the_command_line_has_its_steps_and_updates(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options, env_steps, updates, _ = CASES[name]
    values = {f"--{key.replace('_', '-')}": "8" if key == "hidden" else str(value) for key, value in options.items()}
    main(["train", name, "--quiet", *(word for pair in values.items() for word in pair)])
    epochs = rein.open_run(f"runs/{name}").epochs
    assert epochs["number"].tolist() == [1, 2, 3]
    assert (epochs["clocks"]["env_steps"][-1], epochs["clocks"]["updates"][-1]) == (env_steps, updates)


@pytest.mark.default_cases(*WITHOUT_FRAMES, "pong-dqn")
@pytest.mark.parametrize("name", CASES)
def test_agent_uses_the_options_of_the_recipe(name):
    case = CASES[name]
    given = case.options | case.more | {"gamma": 0.5, "seed": 7}
    config = find(name)(**given, learning_rate=0.125).parts["agent"].config
    names = (config.keys() & given.keys()) - {"core"}
    expected = {key: list(value) if key == "hidden" else value for key, value in given.items() if key in names}
    assert {key: config[key] for key in expected} == expected
    assert {"gamma", "seed", *case.more} <= expected.keys() and len(expected) >= 5
    assert "0.125" in str(config["learning_rate"])
    if "rollout_steps" in config:
        assert config["rollout_steps"] == 8


@pytest.mark.parametrize("name", ["lunarlander-dqn", "pong-dqn"])
def test_epsilon_falls_over_env_steps(name):
    config = find(name)(**CASES[name].options, epsilon=0.375, epsilon_env_steps=77).parts["agent"].config
    assert "0.375" in str(config["epsilon"]) and "77" in str(config["epsilon"])


SEEDED = {name: CASES[name].options for name in ("acrobot", "pendulum-ppo", "mountaincar", "memory-ppo", "memory-dqn")}
SEEDED |= {"navigation": WORLDS, "gridworld": {"epochs": 5, "num_envs": 8}, "taxi": {"epochs": 5, "num_envs": 8}}


@pytest.mark.default_cases("acrobot", "memory-dqn", "gridworld")
@pytest.mark.parametrize("name", SEEDED)
def test_results_depend_only_on_the_seed(name):
    def trained(seed: int) -> object:
        loop = find(name)(seed=seed, **SEEDED[name])
        loop.run()
        return loop.parts["agent"].state_dict()

    assert first_difference(trained(1), trained(1)) is None
    assert first_difference(trained(1), trained(2)) is not None


@pytest.mark.parametrize("name", ["gridworld", "taxi", "mountaincar", "memory-dqn"])
def test_evaluation_environment_has_a_different_seed(name):
    parts = find(name)(seed=5, num_envs=2).parts
    assert parts["environment"].seed == 5
    assert parts["evaluation_environment"].seed == stream_seed(5, "evaluation")


@pytest.mark.parametrize("name", ["halfcheetah-ppo", pytest.param("pong", marks=pytest.mark.slow)])
def test_learning_rate_decreases_to_0_at_the_last_epoch(name):
    agent = find(name)(**CASES[name].options).parts["agent"]
    assert agent.learning_rate(env_steps=95, updates=0) > 0.0
    assert agent.learning_rate(env_steps=96, updates=0) == 0.0


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("name", ["memory-ppo", "memory-dqn"])
def test_core_is_selected_by_name(name, core):
    agent = find(name)(core=core).parts["agent"]
    cores = {type(module) for module in agent.networks.modules()} & {*CORES.values()}
    assert cores == {CORES[core]} - {None}


@pytest.mark.parametrize("name", ["memory-ppo", "memory-dqn"])
def test_unknown_core_is_rejected(name):
    with pytest.raises(ValueError, match=r"core='rnn': use one of lstm, gru, mingru, none"):
        find(name)(core="rnn")


@pytest.mark.parametrize(
    ("name", "module", "line"),
    [
        ("lunarlander", "Box2D", 'LunarLander-v3 needs Box2D: pip install "gymnasium[box2d]"'),
        ("halfcheetah-ppo", "mujoco", 'HalfCheetah-v5 needs MuJoCo: pip install "gymnasium[mujoco]"'),
        ("pong", "ale_py", 'ALE/Pong-v5 needs ale-py: pip install "gymnasium[atari]" opencv-python-headless'),
    ],
)
def test_missing_dependency_error_names_the_extra(name, module, line, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    extra = line.partition("gymnasium[")[2].partition("]")[0]
    for loaded in [key for key in sys.modules if key.startswith(f"gymnasium.envs.{extra}")]:
        monkeypatch.delitem(sys.modules, loaded)
    with pytest.raises(ImportError, match=f"^{re.escape(line)}$"):
        find(name)()


@pytest.mark.slow
def test_pong_observes_four_grayscale_frames():
    for size, options in ((42, {}), (84, {"size": 84})):
        environment = find("pong")(num_envs=2, **options).parts["environment"]
        assert environment.reset().shape == (2, 4, size, size)
        assert environment.single_action_space.n == 6


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("prioritized", [False, True])
def test_pong_stores_each_frame_once(prioritized):
    loop = pong_dqn(**CASES["pong-dqn"].options, prioritized=prioritized)
    loop.run()
    replay = loop.parts["agent"].replay
    assert type(replay) is (PrioritizedFrameReplay if prioritized else FrameReplay)
    assert replay.frames.shape == (84, 84)
    assert replay.frames._ids == 0  # no complete stacks, since no episode has ended yet


def test_navigation_is_evaluated_replayed_and_resumed_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = [word for key, value in WORLDS.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    main(["train", "navigation", "--quiet", "--early-leave", "--max-episode-steps", "6", *flags])
    main(["evaluate", "runs/navigation", "--episodes", "4"])
    assert "episodes  6" in capsys.readouterr().out  # two worlds
    with pytest.raises(SystemExit) as ended:
        main(["replay", "runs/navigation", "--episode", "0", "--video", "world.mp4"])
    assert ended.value.code == 0
    assert "agree bit by bit" in capsys.readouterr().out
    main(["resume", "runs/navigation", "--epochs", "4", "--quiet"])
    assert "192 env steps" in capsys.readouterr().out
