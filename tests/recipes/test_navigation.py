"""The recipe of Navigation: options, command line, and learning."""

from __future__ import annotations

from typing import Any

import pytest

import rein
from rein.cli import main
from rein.recipes.navigation_ppo import navigation
from rein.testing.stateful import first_difference

SMALL: dict[str, Any] = {"worlds": 2, "agents": 3, "iterations": 8, "minibatches": 2, "update_epochs": 3, "epochs": 3}


def test_each_epoch_is_one_rollout() -> None:
    state = navigation(**SMALL).run()
    assert (state.clocks.env_steps, state.clocks.updates) == (3 * 6 * 8, 3 * 2 * 3)


def test_results_depend_only_on_the_seed() -> None:
    def trained(seed: int) -> object:
        loop = navigation(seed=seed, **SMALL)
        loop.run()
        return loop.parts["agent"].state_dict()

    assert first_difference(trained(1), trained(1)) is None
    assert first_difference(trained(1), trained(2)) is not None


def test_run_is_stored_evaluated_and_replayed_from_the_command_line(
    tmp_path: Any, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = [word for key, value in SMALL.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    main(["train", "navigation", "--quiet", "--early-leave", "--max-episode-steps", "6", *flags])
    assert "144 env steps" in capsys.readouterr().out
    main(["evaluate", "runs/navigation", "--episodes", "4"])
    assert "episodes  6" in capsys.readouterr().out  # two worlds
    with pytest.raises(SystemExit) as ended:
        main(["replay", "runs/navigation", "--episode", "0", "--video", "world.mp4"])
    assert ended.value.code == 0
    assert "agree bit by bit" in capsys.readouterr().out
    main(["resume", "runs/navigation", "--epochs", "4", "--quiet"])
    assert "192 env steps" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("early_leave", [False, True])
def test_shared_policy_solves_navigation(early_leave: bool) -> None:
    loop = navigation(early_leave=early_leave)
    assert loop.run().reason == "solved"
    environment = rein.envs.Navigation(32, early_leave=early_leave, seed=1)
    result = rein.evaluate(loop.parts["agent"], environment, 128)
    assert result.terminated.double().mean() > 0.85
    assert result.mean_return > 1.8  # moving straight to the target gives 1.65


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_navigation_is_solved(seed: int) -> None:
    assert navigation(seed=seed).run().reason == "solved"
