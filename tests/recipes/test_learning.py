"""Recipes solve their tasks."""

from __future__ import annotations

import pytest

import rein
from rein.cli.catalog import find
from rein.episodes import evaluate
from rein.recipes.gridworld_q_learning import gridworld
from rein.recipes.tasks import optimal_return


@pytest.mark.parametrize("target", [(2, 4), (0, 0), (4, 1)])
def test_gridworld_finds_shortest_paths(target):
    state = gridworld(target_x=target[0], target_y=target[1]).run()
    assert state.memory["solved"]["value"] >= optimal_return(*target) - 0.5


def test_optimal_return_is_the_mean_over_initial_positions():
    assert optimal_return(2, 4) == pytest.approx(-11.2)  # 6, 5, 4, 5, 6 steps: -(15 + 10 + 6 + 10 + 15) / 5
    assert optimal_return(0, 0) == pytest.approx(-(0 + 0 + 1 + 3 + 6) / 5)


def test_run_without_stopping_still_records_solved():
    state = gridworld(epochs=60, stop_when_solved=False).run()
    assert (state.epoch, state.status) == (60, "completed")
    assert state.memory["solved"]["env_steps"] < state.clocks.env_steps


@pytest.mark.parametrize(
    ("name", "options", "task"),
    [
        ("memory-dqn", {}, (4, 8)),
        ("memory-ppo", {"core": "mingru", "cues": 2, "delay": 2}, (2, 2)),
        pytest.param("memory-ppo", {"core": "lstm", "cues": 2, "delay": 2}, (2, 2), marks=pytest.mark.slow),
        pytest.param("memory-ppo", {"core": "gru", "cues": 2, "delay": 2}, (2, 2), marks=pytest.mark.slow),
    ],
)
def test_memory_task_is_solved_with_a_core(name, options, task):
    loop = find(name)(**options)
    assert loop.run().reason == "solved"
    environment = type(loop.parts["environment"])(100, *task, seed=1)
    assert evaluate(loop.parts["agent"].policy(), environment, 100).mean_return >= 0.95


@pytest.mark.parametrize(
    ("name", "epochs", "metric"),
    [
        ("memory-dqn", 10, "evaluation_return"),
        pytest.param("memory-ppo", 30, "episode_return_100", marks=pytest.mark.slow),
    ],
)
def test_return_stays_at_chance_without_core(name, epochs, metric):
    state = find(name)(core="none", epochs=epochs).run()
    assert state.status == "completed"
    assert 0.1 < state.metrics[metric] < 0.45  # chance is 1/4


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gridworld-dqn", {"seed": 0}),
        pytest.param("turtleworld-sac", {"seed": 0}, marks=pytest.mark.slow),
        *(
            pytest.param(name, options, marks=pytest.mark.slow)
            for name, options in {"pendulum-sac": {}, "pendulum-td3": {}, "pendulum-ddpg": {"seed": 1}}.items()
        ),
        pytest.param("cartpole-dqn", {}, marks=pytest.mark.slow),
    ],
)
def test_off_policy_recipe_solves_its_task(name, options):
    final = find(name)(**options).run()
    assert final.memory["solved"]["value"] >= final.memory["solved"]["at_least"]


SEEDS = {**dict.fromkeys(["acrobot", "pendulum-ppo", "mountaincar", "lunarlander", "navigation"], 3), "cartpole": 5}
SOLVED = [(name, {}, seed) for name, seeds in SEEDS.items() for seed in range(seeds)]
SOLVED += [
    (name, {"core": core}, seed)
    for name, seeds in (("memory-ppo", 3), ("memory-dqn", 5))
    for core in ("lstm", "gru", "mingru")
    for seed in range(seeds)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "seed"), SOLVED)
def test_recipe_solves_its_task(name, options, seed):
    state = find(name)(seed=seed, **options).run()
    assert state.reason == "solved"
    if name == "cartpole":
        # rounding differs between processors: seeds 1, 3 and 4 have taken 155,648 to 196,608 env steps on some of them
        assert state.clocks.env_steps <= 250_000


@pytest.mark.slow
def test_taxi_reaches_a_greedy_return_of_7():
    state = find("taxi")().run()
    assert state.reason == "solved"
    assert state.memory["solved"]["value"] >= 7.0
    assert state.clocks.env_steps <= 100_000


@pytest.mark.slow
@pytest.mark.parametrize("early_leave", [False, True])
def test_shared_policy_solves_navigation(early_leave: bool) -> None:
    loop = find("navigation")(early_leave=early_leave)
    assert loop.run().reason == "solved"
    environment = rein.envs.Navigation(32, early_leave=early_leave, seed=1)
    result = rein.evaluate(loop.parts["agent"], environment, 128)
    assert result.terminated.double().mean() > 0.85
    assert result.mean_return > 1.8  # moving straight to the target gives 1.65
