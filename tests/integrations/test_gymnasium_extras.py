"""Tests of the adapter with Atari, MuJoCo and Box2D, which need the extras `atari`, `mujoco` and `box2d`."""

from __future__ import annotations

import re
import sys
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from rein.envs.gymnasium import GymnasiumEnvironment, GymnasiumVectorEnvironment
from rein.testing import EnvironmentContract
from rein.testing.environment_contract import random_actions
from rein.testing.stateful import copy_state, first_difference


def pong(**options: Any) -> Any:
    """Pong with the usual preprocessing: frame skip 4, maximum of two frames, 84 x 84 grey, 4 stacked frames."""
    import ale_py

    gymnasium.register_envs(ale_py)
    single = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0, **options)
    return FrameStackObservation(AtariPreprocessing(single), 4)


@pytest.mark.slow
class TestLunarLander(EnvironmentContract):
    def make(self, num_envs: int, seed: int | None) -> GymnasiumEnvironment:
        return GymnasiumEnvironment("LunarLander-v3", num_envs, seed)


@pytest.mark.default_cases("HalfCheetah-v5-1100")
@pytest.mark.parametrize(("source", "steps"), [("HalfCheetah-v5", 1100), ("ALE/Pong-v5", 150), (pong, 150)])
def test_resumed_run_continues_bit_for_bit(source: Any, steps: int) -> None:
    environment, loaded = (GymnasiumEnvironment(source, 2, seed) for seed in (3, 4))
    actions = random_actions(environment, steps + 50)
    environment.reset()
    for action in actions[:steps]:
        environment.apply_action(action)
    loaded.load_state_dict(copy_state(environment.state_dict()))
    assert torch.equal(environment.episode_seeds, loaded.episode_seeds)
    for action in actions[steps:]:
        assert first_difference(environment.apply_action(action), loaded.apply_action(action)) is None


def steps_of(environment: GymnasiumVectorEnvironment, steps: int) -> list[list[Any]]:
    """Return the valid transitions of each environment. Actions depend on the number of previous transitions."""
    count, observation = environment.num_envs, environment.reset()
    taken: list[list[Any]] = [[] for _ in range(count)]
    for _ in range(steps):
        action = torch.tensor([(index + 5 * len(before)) % 6 for index, before in enumerate(taken)])
        time_step = environment.apply_action(action)
        for index in time_step.valid.nonzero().flatten().tolist():
            shown = (time_step.reward, time_step.terminated, time_step.truncated, time_step.final_observation)
            taken[index].append([observation[index], *(part[index] for part in shown)])
        observation = time_step.observation
    return taken


@pytest.mark.slow
def test_ale_py_vector_environments_match_in_every_reset_mode() -> None:
    options: Any = {"num_envs": 3, "seed": 5, "max_num_frames_per_episode": 120, "img_height": 42, "img_width": 42}
    next_step, same_step = (
        steps_of(GymnasiumVectorEnvironment("ALE/Pong-v5", autoreset_mode=mode, **options), 100)
        for mode in ("NextStep", "SameStep")
    )
    for one, other in zip(next_step, same_step, strict=True):
        assert len(other) == 100
        assert sum(bool(truncated) for *_, truncated, _ in one) == 100 - len(one) == 3
        assert first_difference(one, other[: len(one)]) is None


@pytest.mark.parametrize("adapter", [GymnasiumEnvironment, GymnasiumVectorEnvironment])
@pytest.mark.parametrize(
    ("name", "module", "package", "extra", "more"),
    [
        ("ALE/Pong-v5", "ale_py", "ale-py", "atari", " opencv-python-headless"),
        ("HalfCheetah-v5", "mujoco", "MuJoCo", "mujoco", ""),
        ("LunarLander-v3", "Box2D", "Box2D", "box2d", ""),
    ],
)
def test_missing_extra_raises_with_install_instructions(
    adapter: Any, name: str, module: str, package: str, extra: str, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for loaded in [key for key in sys.modules if key.startswith(f"gymnasium.envs.{extra}")]:
        monkeypatch.delitem(sys.modules, loaded)
    line = re.escape(f'{name} needs {package}: pip install "gymnasium[{extra}]"{more}')
    with pytest.raises(ImportError, match=f"^{line}$"):
        adapter(name)


def test_factory_with_missing_extra_raises_with_install_instructions() -> None:
    def lander() -> Any:
        raise gymnasium.error.DependencyNotInstalled('Box2D is not there, `pip install "gymnasium[box2d]"`')

    with pytest.raises(ImportError, match=r'lander needs Box2D: pip install "gymnasium\[box2d\]"$'):
        GymnasiumEnvironment(lander)


def test_other_missing_package_raises_the_error_of_gymnasium() -> None:
    def film() -> Any:
        raise gymnasium.error.DependencyNotInstalled('MoviePy is missing, run `pip install "gymnasium[other]"`')

    with pytest.raises(gymnasium.error.DependencyNotInstalled, match="MoviePy is missing"):
        GymnasiumEnvironment(film)
