"""Tests of GymnasiumEnvironment."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from rein.envs.gymnasium import GymnasiumEnvironment, GymnasiumVectorEnvironment
from rein.errors import EnvironmentContractError
from rein.ops.random import episode_seeds
from rein.ops.trees import map_tree
from rein.spaces.conversion import BatchCodec, Codec
from rein.testing import EnvironmentContract, StatefulContract
from rein.testing.stateful import copy_state, first_difference

N = 3


class Scripted(gymnasium.Env[Any, Any]):
    """Environment with seeded random observations and episodes of `length` steps, which logs its calls in `diary`."""

    def __init__(self, observation_space: Any, action_space: Any = None, length: int = 3, **faults: Any) -> None:
        self.observation_space = copy.deepcopy(observation_space)
        self.action_space = action_space or spaces.Discrete(2)
        self.length = length
        self.faults = faults
        self.diary: list[Any] = []
        self.render_mode = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.steps = 0
        self.diary.append(("reset", seed))
        return self.observation_space.sample(), {"since": 0}

    def step(self, action: Any) -> Any:
        self.diary.append(("step", action))
        self.steps += 1
        result = {
            "observation": self.observation_space.sample(),
            "reward": float(self.steps),
            "terminated": self.steps == self.length,
            "truncated": False,
            "info": {"since": self.steps} if self.steps > 1 else {},
        } | self.faults
        return tuple(value() if callable(value) else value for value in result.values())


def scripted(space: Any, num_envs: int = N, seed: int | None = 0, action_space: Any = None, **more: Any) -> Any:
    """Build an adapter around scripted environments."""
    options = {name: more.pop(name) for name in ("info", "replayable") if name in more}
    return GymnasiumEnvironment(lambda: Scripted(space, action_space, **more), num_envs, seed, **options)


NESTED = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (2, 2), np.uint8),
        "body": spaces.Tuple([spaces.Box(-1.0, 1.0, (2,), np.float64), spaces.Discrete(3), spaces.MultiBinary(4)]),
        "goal": spaces.MultiDiscrete([3, 4]),
    }
)


class TestCartPole(EnvironmentContract):
    different_starts = EnvironmentContract.num_envs

    def make(self, num_envs: int, seed: int | None) -> GymnasiumEnvironment:
        return GymnasiumEnvironment("CartPole-v1", num_envs, seed)


class TestPendulum(EnvironmentContract):
    steps = 60

    def make(self, num_envs: int, seed: int | None) -> GymnasiumEnvironment:
        return GymnasiumEnvironment("Pendulum-v1", num_envs, seed, max_episode_steps=25)


class TestNested(EnvironmentContract):
    """Both spaces are nested. Actions have no effect, but must round-trip and be restored on resume."""

    steps = 20

    def make(self, num_envs: int, seed: int | None) -> GymnasiumEnvironment:
        return scripted(NESTED, num_envs, seed, action_space=NESTED, length=6)


class TestNotReplayable(EnvironmentContract):
    def make(self, num_envs: int, seed: int | None) -> GymnasiumEnvironment:
        return GymnasiumEnvironment("CartPole-v1", num_envs, seed, replayable=False)


class TestCartPoleState(StatefulContract):
    def make(self) -> GymnasiumEnvironment:
        return GymnasiumEnvironment("CartPole-v1", N, 5)

    def step(self, part: Any) -> Any:
        if int(part.episode_seeds[0]) < 0:
            part.reset()
        return part.apply_action(part.episode_seeds % 2)


@pytest.mark.default_cases("CartPole-v1-300", "Taxi-v4-450", "LunarLander-v3-400")
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("CartPole-v1", 300),
        ("Taxi-v4", 450),
        ("HalfCheetah-v5", 2010),
        ("LunarLander-v3", 400),
    ],
)
def test_episodes_equal_those_of_single_seeded_environments(name: str, steps: int) -> None:
    count = 2
    environment = GymnasiumEnvironment(name, count, seed=3)
    observation = environment.reset()
    space, codec = environment.single_action_space, Codec("action", environment.single_action_space)
    space.seed(0)
    singles = [gymnasium.make(name) for _ in range(count)]
    expected = [
        single.reset(seed=int(seed))[0] for single, seed in zip(singles, environment.episode_seeds, strict=True)
    ]
    ends_N = torch.zeros(count, dtype=torch.int64)
    for _ in range(steps):
        assert all(same(row, value) for row, value in zip(observation, expected, strict=True))
        actions = [space.sample() for _ in range(count)]
        time_step = environment.apply_action(codec.stack(actions))
        observation = time_step.observation
        ends_N += time_step.terminated | time_step.truncated
        seed_N = episode_seeds(3, torch.arange(count), ends_N).tolist()
        for index, single in enumerate(singles):
            expected[index], reward, terminated, truncated, _ = single.step(actions[index])
            assert same(time_step.final_observation[index], expected[index])
            assert time_step.reward[index] == np.float32(reward)
            assert (bool(time_step.terminated[index]), bool(time_step.truncated[index])) == (terminated, truncated)
            if terminated or truncated:
                expected[index], _ = single.reset(seed=seed_N[index])
    assert (ends_N > 1).all()


def same(row: torch.Tensor, value: Any) -> bool:
    """Return whether a row equals the value after conversion from float64 to float32."""
    return np.array_equal(row.numpy(), np.asarray(value).astype(row.numpy().dtype))


@pytest.mark.parametrize(
    ("space", "wrapper"),
    [
        (spaces.Text(4), "FlattenObservation"),
        (spaces.Dict(x=spaces.OneOf([spaces.Discrete(2), spaces.Text(4)])), "FlattenObservation"),
        (spaces.Sequence(spaces.Discrete(3)), "TransformObservation"),
        (spaces.Graph(spaces.Discrete(3), None), "TransformObservation"),
    ],
)
def test_unsupported_space_raises_in_the_constructor_with_advice(space: spaces.Space[Any], wrapper: str) -> None:
    with pytest.raises(TypeError, match=rf"not a tensor.*{wrapper}"):
        scripted(space)


@pytest.mark.parametrize(("low", "high"), [(-0.1, 0.1), (0.1, 0.3), (-0.1, 1.0)])
def test_bounds_rounded_to_float32_become_exact_float64_bounds(low: float, high: float) -> None:
    space = spaces.Box(low, high, (4,), np.float64)
    near_low, near_high = torch.tensor([low, high], dtype=torch.float32)
    within = [near_low.nextafter(near_high), near_high.nextafter(near_low)]
    action = torch.stack([near_low, *within, near_high]).expand(2, 4)
    values = Codec("action", space).split(action, 2)
    assert all(space.contains(value) for value in values)
    assert values[1].tolist() == [low, *(x.item() for x in within), high]  # other values do not change
    assert np.array_equal(BatchCodec("action", space, batch_space(space, 2), 2).arrays(action), np.stack(values))
    assert torch.equal(Codec("action", space).stack(values), action)  # the stored action is that of the agent


@pytest.mark.parametrize(
    ("low", "high", "action"), [(0.1, 0.1 + 1e-12, 0.1), (-1e300, 1e300, 3e38), (-1e-60, 1.0, 0.0)]
)
def test_actions_stay_in_bounds_that_float32_cannot_represent(low: float, high: float, action: float) -> None:
    space = spaces.Box(low, high, (1,), np.float64)
    assert space.contains(Codec("action", space).split(torch.tensor([[action]]), 1)[0])


@pytest.mark.parametrize("reward", [2, np.float64(2.0), np.float32(2.0), np.int32(2), np.array(2.0), True])
def test_rewards_of_any_dtype_become_float32(reward: Any) -> None:
    environment = scripted(spaces.Discrete(2), reward=reward)
    environment.reset()
    time_step = environment.apply_action(torch.zeros(N, dtype=torch.int64))
    assert time_step.reward.dtype is torch.float32
    assert time_step.reward.tolist() == [float(reward)] * N


def test_only_requested_infos_are_returned() -> None:
    action = torch.zeros(N, dtype=torch.int64)
    plain, requesting = scripted(spaces.Discrete(2)), scripted(spaces.Discrete(2), info={"since": -1, "mass": 0.5})
    plain.reset()
    requesting.reset()
    assert plain.apply_action(action).info.keys() == {"is_success"}
    first, second = requesting.apply_action(action).info, requesting.apply_action(action).info
    assert first["since"].tolist() == [-1] * N  # the default
    assert second["since"].tolist() == [2] * N
    assert first["mass"].dtype is torch.float32


def test_action_mask_of_taxi_can_be_requested() -> None:
    environment = GymnasiumEnvironment("Taxi-v4", N, 0, info={"action_mask": np.zeros(6, np.int8)})
    environment.reset()
    mask = environment.apply_action(torch.zeros(N, dtype=torch.int64)).info["action_mask"]
    assert mask.shape == (N, 6)
    assert mask.any(1).all()


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (torch.tensor([0, 1, 2]), r"action, environment 2: expected a value of Discrete\(2\), got 2"),
        (torch.zeros(N), "action: expected integers"),
        (torch.zeros(N + 1, dtype=torch.int64), r"action: expected a tensor of shape \(3,\)"),
    ],
)
def test_wrong_actions_raise_in_the_first_step(action: torch.Tensor, text: str) -> None:
    environment = GymnasiumEnvironment("CartPole-v1", N, 0)
    environment.reset()
    with pytest.raises(EnvironmentContractError, match=text):
        environment.apply_action(action)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("CartPol-v1", "did you mean CartPole-v"),
        ("taxi", "did you mean Taxi-v4"),
        ("Taxi-v99", "did you mean Taxi-v4"),
        ("zzzzzzzzzzzz", "pprint_registry"),
        ("nobodys/Zzzzzzz-v5", "Namespace nobodys not found"),  # not similar to any id
    ],
)
def test_unknown_id_raises_with_similar_ids(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"unknown environment '{name}'; .*{hint}"):
        GymnasiumEnvironment(name)


class Motor(gymnasium.Env[Any, Any]):
    """Environment that modifies the arrays of its action and removes its parts. It observes its position."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,))
    action_space = spaces.Dict(
        {
            "force": spaces.Box(-1.0, 1.0, (2,), np.float64),
            "more": spaces.Tuple([spaces.Box(-1, 1, ()), spaces.MultiDiscrete([3, 4])]),
        }
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = self.np_random.uniform(size=2)
        return self.place, {}

    def step(self, action: Any) -> Any:
        force, (lift, gear) = action.pop("force"), action.pop("more")
        force *= 0.5
        lift *= 0.5
        gear[...] = 0
        self.place = self.place + force + lift
        return self.place, 0.0, False, False, {}


def test_environment_that_modifies_its_action_is_restored() -> None:
    environment, loaded, again = (GymnasiumEnvironment(Motor, N, 2) for _ in range(3))
    codec, space = Codec("action", Motor.action_space), copy.deepcopy(Motor.action_space)
    space.seed(0)
    given = [codec.stack([space.sample() for _ in range(N)]) for _ in range(4)]
    before = copy.deepcopy(given)
    environment.reset()
    for action in given:
        environment.apply_action(action)
    state = environment.state_dict()
    assert first_difference(given, before) is None
    for index, taken in enumerate(state["actions"]):
        of_this = [map_tree(lambda x, index=index: x[index], action) for action in given]
        assert first_difference(taken, map_tree(lambda *x: torch.stack(x), *of_this)) is None
    loaded.load_state_dict(state)
    again.load_state_dict(loaded.state_dict())  # a replayed state can be saved again
    assert first_difference(again.state_dict(), state) is None
    steps = [each.apply_action(given[0]) for each in (environment, loaded, again)]
    assert all(first_difference(steps[0], step) is None for step in steps[1:])


@pytest.mark.parametrize(
    ("adapter", "options"), [(GymnasiumEnvironment, {"replayable": False}), (GymnasiumVectorEnvironment, {})]
)
def test_environment_that_is_not_replayable_warns_and_begins_other_episodes(
    adapter: Any, options: Any, caplog: pytest.LogCaptureFixture
) -> None:
    environment, loaded = (adapter("CartPole-v1", N, 7, **options) for _ in range(2))
    first = environment.reset()
    assert not environment.awaits_reset
    with caplog.at_level(logging.WARNING):
        loaded.load_state_dict(copy_state(environment.state_dict()))
    assert "CartPole-v1 is not replayable: open episodes are lost" in caplog.text
    assert loaded.awaits_reset
    with pytest.raises(RuntimeError, match=r"call reset\(\)"):
        loaded.apply_action(torch.zeros(N, dtype=torch.int64))
    second = loaded.reset()
    assert not torch.equal(second, first)
    assert torch.equal(second, environment.reset())
    with pytest.raises(ValueError, match="index"):
        adapter("CartPole-v1", N + 1).load_state_dict(environment.state_dict())


def test_failed_replay_raises() -> None:
    environment, other = (GymnasiumEnvironment("CartPole-v1", N, 2, **kw) for kw in ({}, {"sutton_barto_reward": True}))
    environment.reset()
    for _ in range(3):
        environment.apply_action(torch.zeros(N, dtype=torch.int64))
    other.load_state_dict(environment.state_dict())  # a different reward does not matter
    other._transport.simulators[1].unwrapped.gravity = 1.0  # type: ignore[attr-defined]  # CartPole's
    with pytest.raises(EnvironmentContractError, match="did not reproduce observation of environment 1"):
        other.load_state_dict(environment.state_dict())


@pytest.mark.parametrize("adapter", [GymnasiumEnvironment, GymnasiumVectorEnvironment])
def test_render_returns_a_frame_of_one_environment(adapter: Any) -> None:
    environment = adapter("CartPole-v1", 2, 0, render_mode="rgb_array")
    environment.reset()
    frames = [environment.render(index) for index in (0, 1)]
    assert all(frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3 for frame in frames)
    assert not np.array_equal(*frames)
    environment.close()
    with pytest.raises(ValueError, match="render_mode='rgb_array'"):
        adapter("CartPole-v1", 2).render()


def test_human_render_mode_opens_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    environment = GymnasiumEnvironment("CartPole-v1", num_envs=1, seed=0, render_mode="human")
    environment.reset()
    environment.apply_action(torch.ones(1, dtype=torch.int64))
    assert environment._transport.simulators[0].unwrapped.screen is not None  # type: ignore[attr-defined]  # CartPole's window
    environment.close()


def test_close_closes_every_environment_once() -> None:
    closed: list[int] = []

    class Closing(Scripted):
        def close(self) -> None:
            closed.append(id(self))

    environment = GymnasiumEnvironment(lambda: Closing(spaces.Discrete(2)), N)
    environment.close()
    environment.close()
    assert len(set(closed)) == len(closed) == N


def test_config_contains_the_constructor_options() -> None:
    environment = GymnasiumEnvironment("CartPole-v1", 2, 7, info={"mass": 1.0}, max_episode_steps=9)
    assert json.loads(json.dumps(environment.config)) == {
        "id": "CartPole-v1",
        "num_envs": 2,
        "seed": 7,
        "info": {"mass": 1.0},
        "action_mask": None,
        "replayable": True,
        "make_kwargs": {"max_episode_steps": 9},
    }


@pytest.mark.parametrize("source", [lambda: gymnasium.make("CartPole-v1"), gymnasium.spec("CartPole-v1"), "CartPole"])
def test_factory_spec_and_unversioned_id_give_equal_episodes(source: Callable[[], Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gymnasium.logger, "warn", lambda *_, **__: None)  # with the version that Gymnasium chose
        environments = [GymnasiumEnvironment(x, N, 1) for x in (source, "CartPole-v1")]
    assert torch.equal(*(environment.reset() for environment in environments))
    steps = [environment.apply_action(torch.zeros(N, dtype=torch.int64)) for environment in environments]
    assert map_tree(torch.equal, *steps)


def test_bounds_beyond_int64_raise() -> None:
    with pytest.raises(TypeError, match="torch does not support uint64"):
        Codec("observation", spaces.Box(0, 2**64 - 1, (2,), np.uint64))
    small = Codec("observation", spaces.Box(0, 2**40, (2,), np.uint64)).stack([np.array([1, 2**40], np.uint64)])
    assert small.tolist() == [[1, 2**40]]
