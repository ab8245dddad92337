"""Tests of GymnasiumVectorEnvironment: construction, seeds, resume and error messages."""

from __future__ import annotations

import itertools
import json
import logging
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from rein.envs.gymnasium import GymnasiumEnvironment, GymnasiumVectorEnvironment
from rein.errors import EnvironmentContractError
from rein.testing import EnvironmentContract
from rein.testing.environment_contract import random_actions
from rein.testing.stateful import copy_state, first_difference

N = 3
NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
ZEROS = torch.zeros(N, dtype=torch.int64)


class TestNative(EnvironmentContract):
    different_starts = EnvironmentContract.num_envs

    def make(self, num_envs: int, seed: int | None) -> GymnasiumVectorEnvironment:
        return GymnasiumVectorEnvironment("CartPole-v1", num_envs, seed)


class TestSameStep(EnvironmentContract):
    steps = 60

    def make(self, num_envs: int, seed: int | None) -> GymnasiumVectorEnvironment:
        return GymnasiumVectorEnvironment("Taxi-v4", num_envs, seed, autoreset_mode=SAME_STEP, max_episode_steps=25)


class TestDisabled(EnvironmentContract):
    different_starts = EnvironmentContract.num_envs

    def make(self, num_envs: int, seed: int | None) -> GymnasiumVectorEnvironment:
        options: Any = {"vectorization_mode": "sync", "autoreset_mode": DISABLED}
        return GymnasiumVectorEnvironment("CartPole-v1", num_envs, seed, **options)


class Nested(gymnasium.Env[Any, Any]):
    """Environment with nested spaces, random observations and episodes of three steps. Actions set the reward."""

    observation_space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (2, 2), np.uint8),
            "body": spaces.Tuple([spaces.Box(-1.0, 1.0, (2,), np.float64), spaces.Discrete(3), spaces.MultiBinary(4)]),
        }
    )
    action_space = spaces.Tuple(
        [
            spaces.Discrete(3),
            spaces.Dict({"force": spaces.Box(-1.0, 1.0, (2,), np.float64)}),
            spaces.MultiDiscrete([3, 4]),
        ]
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        first, second, third = action
        self.steps += 1
        reward = np.int64(100 * first + third.sum()) + second["force"].sum()
        return self.observation_space.sample(), reward, self.steps == 3, False, {}


class Faulty(VectorEnv[Any, Any, Any]):
    """Vector environment that returns the given results, and declares a reset mode only in `metadata`."""

    def __init__(self, metadata: dict[str, Any] | None = None, reset: Any = None, **faults: Any) -> None:
        self.num_envs = N
        self.single_observation_space, self.single_action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, N)
        self.action_space = batch_space(self.single_action_space, N)
        if metadata is not None:
            self.metadata = metadata
        self.faults, self.first, self.resets = faults, reset, []

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.resets.append((seed, options))
        return np.zeros((N, 2), np.float32) if self.first is None else self.first, {}

    def step(self, actions: Any) -> Any:
        result = {
            "observation": np.zeros((N, 2), np.float32),
            "reward": np.zeros(N),
            "terminated": np.zeros(N, bool),
            "truncated": np.zeros(N, bool),
            "info": {},
        } | self.faults
        return tuple(result.values())


def rollout(environment: Any, steps: int) -> list[Any]:
    start = environment.reset()
    return [start, *(environment.apply_action(action) for action in random_actions(environment, steps))]


def test_disabled_mode_equals_the_adapter_bit_for_bit() -> None:
    vector = SyncVectorEnv([Nested] * N, autoreset_mode=DISABLED)
    one, other = GymnasiumEnvironment(Nested, N, 4), GymnasiumVectorEnvironment(vector, seed=4)
    assert first_difference(rollout(one, 60), rollout(other, 60)) is None
    assert torch.equal(one.episode_seeds, other.episode_seeds)


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_nested_spaces_are_reset_in_every_autoreset_mode(mode: AutoresetMode) -> None:
    environment = GymnasiumVectorEnvironment(SyncVectorEnv([Nested] * N, autoreset_mode=mode), seed=4)
    steps = rollout(environment, 8)[1:]
    ended = [t for t, step in enumerate(steps) if step.terminated.all()]
    assert ended == ([2, 6] if mode is NEXT_STEP else [2, 5])
    for step, following in itertools.pairwise(steps):
        same = first_difference(step.final_observation, step.observation) is None
        assert same == (mode is NEXT_STEP or not step.terminated.any())
        assert following.valid.all() == (mode is SAME_STEP or not step.terminated.any())


@pytest.mark.default_cases("CartPole-v1", "Taxi-v4")
@pytest.mark.parametrize("source", ["CartPole-v1", "Taxi-v4", "ALE/Pong-v5"])
def test_episodes_depend_on_the_seed_only(source: str) -> None:
    one, same, other = (rollout(GymnasiumVectorEnvironment(source, N, seed), 40) for seed in (7, 7, 8))
    assert first_difference(one, same) is None
    assert first_difference(one, other) is not None


@pytest.mark.default_cases("Pendulum-v1")
@pytest.mark.parametrize("source", ["Pendulum-v1", "ALE/Pong-v5"])
def test_seeded_environments_do_not_depend_on_num_envs(source: str) -> None:
    few, many = (rollout(GymnasiumVectorEnvironment(source, count, 7), 25)[-1].observation for count in (2, 4))
    assert torch.equal(few, many[:2])
    assert len(many.flatten(1).unique(dim=0)) == 4


def test_second_reset_begins_other_episodes() -> None:
    environment = GymnasiumVectorEnvironment("CartPole-v1", N, 7)
    first, second = environment.reset(), environment.reset()
    assert not torch.equal(first, second)
    assert torch.equal(environment.reset(seed=7), first)


def test_resume_warns_and_begins_other_episodes(caplog: pytest.LogCaptureFixture) -> None:
    environment, loaded = (GymnasiumVectorEnvironment("CartPole-v1", N, 7) for _ in range(2))
    first = environment.reset()
    assert not environment.awaits_reset
    with caplog.at_level(logging.WARNING):
        loaded.load_state_dict(copy_state(environment.state_dict()))
    assert "CartPole-v1 is not replayable: open episodes are lost" in caplog.text
    assert loaded.awaits_reset
    with pytest.raises(RuntimeError, match=r"call reset\(\)"):
        loaded.apply_action(ZEROS)
    assert not torch.equal(loaded.reset(), first)
    with pytest.raises(ValueError, match="index"):
        GymnasiumVectorEnvironment("CartPole-v1", N + 1).load_state_dict(environment.state_dict())


def test_episode_seeds_are_unknown_with_autoreset() -> None:
    for mode in (NEXT_STEP, SAME_STEP):
        environment = GymnasiumVectorEnvironment("Taxi-v4", N, 0, autoreset_mode=mode)
        environment.reset()
        assert environment.episode_seeds.tolist() == [-1] * N


def test_custom_source_gets_one_seed_and_separate_masks() -> None:
    ends = np.array([False, True, False])
    source = Faulty({"autoreset_mode": DISABLED}, terminated=ends)
    environment = GymnasiumVectorEnvironment(source, seed=0)
    environment.reset()
    environment.apply_action(ZEROS)
    environment.apply_action(ZEROS)
    (seed, options), *resets = source.resets
    assert type(seed) is int
    assert options is None
    for seed, options in resets:
        assert seed is None
        assert options["reset_mask"].tolist() == ends.tolist()
    assert resets[0][1] is not resets[1][1]
    assert environment.episode_seeds.tolist() == [-1] * N


@pytest.mark.parametrize(
    ("options", "made", "mode"),
    [
        ({}, "CartPoleVectorEnv", NEXT_STEP),
        ({"autoreset_mode": NEXT_STEP}, "CartPoleVectorEnv", NEXT_STEP),
        ({"vectorization_mode": "sync"}, "SyncVectorEnv", NEXT_STEP),
        ({"vectorization_mode": "sync", "autoreset_mode": "SameStep"}, "SyncVectorEnv", SAME_STEP),
        ({"vectorization_mode": "sync", "autoreset_mode": DISABLED}, "SyncVectorEnv", DISABLED),
    ],
)
def test_id_is_made_with_the_requested_mode(options: Any, made: str, mode: Any) -> None:
    environment = GymnasiumVectorEnvironment("CartPole-v1", 2, 0, **options)
    assert type(environment._transport._environment.unwrapped).__name__ == made
    assert environment.config["autoreset_mode"] == mode.value
    assert json.loads(json.dumps(environment.config))["num_envs"] == 2


@pytest.mark.parametrize("mode", AutoresetMode)
def test_mode_can_be_given_by_name_or_value(mode: AutoresetMode) -> None:
    for value in (mode, mode.name, mode.name.lower(), mode.value, mode.value.lower()):
        environment = GymnasiumVectorEnvironment("Taxi-v4", 2, 0, autoreset_mode=value)
        assert environment.config["autoreset_mode"] == mode.value


@pytest.mark.parametrize("value", ["never", "", "AutoresetMode", 1, True])
def test_invalid_mode_raises_with_the_choices(value: Any) -> None:
    with pytest.raises(ValueError, match="give one of NEXT_STEP, SAME_STEP, DISABLED"):
        GymnasiumVectorEnvironment("Taxi-v4", 2, 0, autoreset_mode=value)


@pytest.mark.parametrize("mode", [SAME_STEP, DISABLED])
def test_fixed_mode_of_a_vector_entry_point_raises_for_other_modes(mode: Any) -> None:
    text = f"={mode.name}: .*CartPole-v1 has no option autoreset_mode, and its mode is NEXT_STEP; give vectorization_"
    with pytest.raises(ValueError, match=text):
        GymnasiumVectorEnvironment("CartPole-v1", 2, 0, autoreset_mode=mode.name)


def test_ale_py_vector_environments_accept_a_mode_and_options() -> None:
    options: Any = {"autoreset_mode": SAME_STEP, "img_height": 42, "img_width": 42, "stack_num": 2}
    environment = GymnasiumVectorEnvironment("ALE/Pong-v5", 2, 0, **options)
    assert environment.reset().shape == (2, 2, 42, 42)
    assert environment.config["autoreset_mode"] == "SameStep"


def test_mode_comes_from_metadata_attribute_or_option() -> None:
    class Says(Faulty):
        autoreset_mode = SAME_STEP

    class Wraps(gymnasium.vector.VectorWrapper):
        pass

    spoken = [
        GymnasiumVectorEnvironment(Faulty({"autoreset_mode": DISABLED})),
        GymnasiumVectorEnvironment(Faulty({"autoreset_mode": "Disabled"})),
        GymnasiumVectorEnvironment(Wraps(Faulty({"autoreset_mode": DISABLED}))),
        GymnasiumVectorEnvironment(Faulty({}), autoreset_mode=DISABLED),
        GymnasiumVectorEnvironment(Faulty(), autoreset_mode="Disabled"),
    ]
    assert [environment.config["autoreset_mode"] for environment in spoken] == ["Disabled"] * 5
    assert GymnasiumVectorEnvironment(Says({})).config["autoreset_mode"] == "SameStep"


def test_undeclared_mode_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VectorEnv.metadata, "autoreset_mode", SAME_STEP)  # ale-py modifies this shared default
    for source in (Faulty(), Faulty({})):
        with pytest.raises(ValueError, match=r"does not declare metadata.*give autoreset_mode=.*NEXT_STEP.*DISABLED"):
            GymnasiumVectorEnvironment(source)


def single() -> Any:
    return gymnasium.make("CartPole-v1")


@pytest.mark.parametrize(
    ("source", "options", "error", "text"),
    [
        (single, {}, TypeError, "is not a gymnasium.vector.VectorEnv; use GymnasiumEnvironment"),
        (
            lambda: Faulty({"autoreset_mode": DISABLED}),
            {"autoreset_mode": SAME_STEP},
            ValueError,
            "the mode of .* is AutoresetMode.D",
        ),
        (lambda: Faulty({"autoreset_mode": DISABLED}), {"num_envs": 9}, ValueError, "num_envs=9: .* has 3"),
        (lambda: Faulty({"autoreset_mode": DISABLED}), {"gravity": 9}, TypeError, "takes no options; remove gravity"),
        (lambda: "Taxi-v99", {}, ValueError, "did you mean Taxi-v4"),
    ],
)
def test_invalid_source_or_options_raise_in_the_constructor(source: Any, options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        GymnasiumVectorEnvironment(source(), **options)


def test_next_step_mode_without_shared_memory_raises() -> None:
    source = AsyncVectorEnv([single], shared_memory=False)
    with pytest.raises(ValueError, match=r"shared_memory=False does not work with AutoresetMode.NEXT_STEP"):
        GymnasiumVectorEnvironment(source)
    source.close()


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (
            {"observation": np.zeros((N, 3), np.float32)},
            r"observation: expected float32 of shape \(3, 2\), got float32",
        ),
        ({"observation": None}, r"observation: expected float32 of shape \(3, 2\), got None"),
        ({"reward": np.zeros((N, 1))}, r"reward: expected float32 of shape \(3,\), got float64 of shape \(3, 1\)"),
        ({"terminated": np.zeros(N)}, r"terminated: expected bool of shape \(3,\), got float64 of shape \(3,\)"),
        ({"truncated": False}, r"truncated: expected bool of shape \(3,\), got False"),
        ({"info": None}, "info: expected a dictionary from step, got None"),
        ({"terminated": np.ones(N, bool)}, "info.final_obs: .*Faulty.* must return it in the step"),
        (
            {"terminated": np.ones(N, bool), "info": {"final_obs": np.full(N, None)}},
            r"info.final_obs, row 0: expected float32 of shape \(2,\), got None",
        ),
    ],
)
def test_wrong_results_raise(fault: dict[str, Any], text: str) -> None:
    environment = GymnasiumVectorEnvironment(Faulty({"autoreset_mode": SAME_STEP}, **fault), seed=0)
    environment.reset()
    with pytest.raises(EnvironmentContractError, match=text):
        environment.apply_action(ZEROS)


def test_incomplete_results_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Faulty({"autoreset_mode": DISABLED})
    environment = GymnasiumVectorEnvironment(source, seed=0)
    environment.reset()
    for method, expected in (("step", r"\(observation, reward, .*, info\)"), ("reset", r"\(observation, info\)")):
        monkeypatch.setattr(source, method, lambda *_, **__: np.zeros((4, 2), np.float32))
        with pytest.raises(
            EnvironmentContractError, match=rf"Faulty.*: expected {expected} from {method}, got array\("
        ):
            environment.reset() if method == "reset" else environment.apply_action(ZEROS)


def test_missing_part_of_a_nested_observation_raises() -> None:
    source = SyncVectorEnv([Nested] * N, autoreset_mode=SAME_STEP)
    environment = GymnasiumVectorEnvironment(source, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "reset", lambda **_: ({"camera": np.zeros((N, 2, 2), np.uint8)}, {}))
        with pytest.raises(EnvironmentContractError, match=r"observation: expected .* each of body, camera.*'body'"):
            environment.reset()


def test_action_of_wrong_shape_or_range_raises() -> None:
    environment = GymnasiumVectorEnvironment("CartPole-v1", N, 0)
    environment.reset()
    with pytest.raises(
        EnvironmentContractError, match=r"action, environment 0: expected a value of Discrete\(2\), got 2"
    ):
        environment.apply_action(ZEROS + 2)
    environment.apply_action(ZEROS)
    with pytest.raises(EnvironmentContractError, match=r"action: expected a tensor of shape \(3,\), got \(3, 1\)"):
        environment.apply_action(ZEROS[:, None])


def test_close_closes_the_source_once() -> None:
    closed = []

    class Closing(Faulty):
        def close(self, **kwargs: Any) -> None:
            closed.append(self)

    environment = GymnasiumVectorEnvironment(Closing({"autoreset_mode": DISABLED}))
    environment.close()
    environment.close()
    assert len(closed) == 1
