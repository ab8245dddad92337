"""Action masks of Gymnasium environments: entries of the observation, workers, final masks, and empty masks."""

from __future__ import annotations

import functools
import json
import logging
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor

import rein
from rein.envs.gymnasium import GymnasiumEnvironment, GymnasiumVectorEnvironment
from rein.envs.gymnasium.adapter import rebuild
from rein.envs.host.results import _warned
from rein.envs.wrappers.observations import FlattenObservation, FrameStack, observation_history
from rein.networks.heads import check_mask
from rein.ops.random import generator
from rein.spaces import ACTION_MASK
from rein.spaces.masks import check_masks
from rein.testing import EnvironmentContract
from rein.testing.environment_contract import valid_actions
from rein.testing.stateful import copy_state, first_difference
from rein.types import TimeStep, Tree

N = 3
SPACES = {
    "discrete": spaces.Discrete(4, start=2),
    "multi": spaces.MultiDiscrete([2, 3]),
    "binary": spaces.MultiBinary(2),
    "dict": spaces.Dict({"move": spaces.Discrete(3), "size": spaces.Box(-1.0, 1.0, (1,))}),
    "tuple": spaces.Tuple((spaces.Discrete(3), spaces.Box(-1.0, 1.0, (1,)))),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(Worker-|Traceback|Raising the last exception|waiting for a pending call)"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"),
]


class Masked(gymnasium.Env[Any, Any]):
    """Random masks and observations. Refuses invalid actions. The last mask of an episode allows no action."""

    def __init__(self, action: str = "discrete", form: str = "usual", observation: str = "box", empty: int = 0) -> None:
        self.action_space, self.form, self.empty = SPACES[action], form, empty
        box = spaces.Box(-9.0, 9.0, (2,), np.float32)
        self.observation_space = box if observation == "box" else spaces.Dict({"position": box})
        self.sizes = {"discrete": [4], "multi": [2, 3], "binary": [2, 2]}.get(action, [3])

    def observe(self, over: bool = False) -> tuple[Any, dict[str, Any]]:
        parts = [(self.np_random.random(size) < 0.5).astype(np.int8) for size in self.sizes]
        for part in parts:
            part[self.np_random.integers(len(part))] = 1
            part[:] *= not over
        if self.empty and self.steps == self.empty:
            parts[-1][:] = 0
        self.masks = parts
        value = self.np_random.normal(size=2).astype(np.float32)
        observation = value if isinstance(self.observation_space, spaces.Box) else {"position": value}
        mask: Any = tuple(parts) if self.form == "tuple" else np.concatenate(parts)
        if isinstance(self.action_space, spaces.Dict):
            mask = {"move": mask}
        elif isinstance(self.action_space, spaces.Tuple):
            mask = (mask, None)
        if self.form == "absent":
            return observation, {}
        if self.form == "short":
            mask = mask[:3]
        if self.form == "misspelled":
            mask = {"mvoe": mask["move"], "size": None}
        return observation, {"action_mask": mask} if self.form != "first" or not self.steps else {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.length = 0, int(self.np_random.integers(4, 9))
        return self.observe()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), repr(action)
        if isinstance(action, dict | tuple):
            action = action["move"] if isinstance(action, dict) else action[0]
        low = getattr(self.action_space, "start", 0)
        for index, mask in zip(np.ravel(action - np.asarray(low)), self.masks, strict=True):
            assert self.form == "first" or mask[index] or not mask.any(), "invalid action"
        self.steps += 1
        over = self.steps == self.length
        observation, info = self.observe(over)
        return observation, 1.0, over, False, info


def choose(environment: Any, observation: Tree, rng: torch.Generator) -> Tree:
    """Return random valid actions."""

    def draw(space: Any) -> Tree:
        if isinstance(space, spaces.Dict | spaces.Tuple):
            inner = space.spaces if isinstance(space, spaces.Dict) else dict(zip("01", space.spaces, strict=True))
            return {name: draw(part) for name, part in inner.items()}
        if isinstance(space, spaces.Box):
            return torch.rand(environment.num_envs, *space.shape, generator=rng)
        width = () if isinstance(space, spaces.Discrete) else space.shape
        start = int(getattr(space, "start", 0)) if isinstance(space, spaces.Discrete) else 0
        return torch.randint(0, 2, (environment.num_envs, *width), generator=rng) + start

    space = environment.single_action_space
    return valid_actions(draw(space), observation[ACTION_MASK], space)


def rollout(environment: Any, steps: int = 30) -> list[Any]:
    """Return the observations and time steps of random valid actions."""
    observation, rng = environment.reset(), generator(3, "actions")
    seen: list[Any] = [observation]
    for _ in range(steps):
        time_step = environment.apply_action(choose(environment, observation, rng))
        observation = time_step.observation
        seen.append(time_step)
    return seen


@pytest.mark.parametrize("action", SPACES)
def test_masks_fit_the_action_space_and_are_those_of_the_environment(action: str) -> None:
    environment = rein.make(functools.partial(Masked, action), N, 0, action_mask=True)
    space = environment.single_observation_space
    assert isinstance(space, spaces.Dict)
    assert set(space.spaces) == {"observation", "action_mask"}
    check_mask(space["action_mask"], environment.single_action_space)
    environment.reset()
    masks = [np.concatenate(e.unwrapped.masks).tolist() for e in environment._transport.simulators]  # type: ignore[union-attr]
    got = environment._transport.observation[ACTION_MASK]  # type: ignore[union-attr]
    got = next(iter(got.values())) if isinstance(got, dict) else got
    assert got.tolist() == masks
    assert len(rollout(environment)) == 31


def test_environment_with_the_entry_needs_no_option() -> None:
    def make() -> Any:
        env = Masked()
        entries = {"observation": env.observation_space, "action_mask": spaces.MultiBinary(4)}
        return gymnasium.wrappers.TransformObservation(
            env, lambda x: {"observation": x, "action_mask": np.concatenate(env.masks)}, spaces.Dict(entries)
        )

    plain, asked = rein.make(make, N, 0), rein.make(make, N, 0, action_mask=True)
    assert plain.single_observation_space == asked.single_observation_space
    assert first_difference(rollout(plain), rollout(asked)) is None


@pytest.mark.parametrize("action", ["multi", "discrete"])
def test_tuple_of_masks_equals_concatenated_mask(action: str) -> None:
    one, other = (
        rein.make(functools.partial(Masked, action, form), N, 0, action_mask=True) for form in ("usual", "tuple")
    )
    assert first_difference(rollout(one), rollout(other)) is None


def test_step_without_a_mask_allows_all_actions() -> None:
    steps = rollout(rein.make(functools.partial(Masked, form="first"), N, 0, action_mask=True), 3)
    assert steps[1].observation[ACTION_MASK].all()


def test_final_observation_has_the_mask_of_the_last_step() -> None:
    steps = rollout(rein.make(Masked, N, 0, action_mask=True))
    ended = [step for step in steps[1:] if step.terminated.any()]
    assert ended
    for step in ended:
        assert not step.final_observation[ACTION_MASK][step.terminated].any()
        assert step.observation[ACTION_MASK][step.terminated].any(1).all()


@pytest.mark.default_cases(every=2)
@pytest.mark.parametrize("action", SPACES)
@pytest.mark.parametrize("kind", ["processes", "vector"])
def test_processes_and_vector_environments_have_equal_masks(kind: str, action: str) -> None:
    make = functools.partial(Masked, action)
    expected = rollout(rein.make(make, N, 0, action_mask=True))
    if kind == "processes":
        environment = rein.make(make, N, 0, action_mask=True, workers=2)
    else:
        source = SyncVectorEnv([make] * N, autoreset_mode=AutoresetMode.DISABLED)
        environment = rein.make(source, seed=0, action_mask=True)
    got = rollout(environment)
    environment.close()
    assert first_difference(expected, got) is None


@pytest.mark.parametrize("action", ["discrete", "tuple"])
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_final_masks_of_autoreset_modes(mode: AutoresetMode, action: str) -> None:
    source = SyncVectorEnv([functools.partial(Masked, action)] * N, autoreset_mode=mode)
    steps = rollout(rein.make(source, seed=0, action_mask=True), 60)[1:]
    ended = [step for step in steps if step.terminated.any()]
    assert ended
    for step in ended:
        final, now = (x[ACTION_MASK] for x in (step.final_observation, step.observation))
        if action == "tuple":
            final, now = final["0"], now["0"]
        assert not final[step.terminated].any()
        assert now[step.terminated].any(1).all() == (mode is AutoresetMode.SAME_STEP)


def test_environment_without_mask_may_choose_every_action() -> None:
    class Half(Masked):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            observation, info = super().reset(seed=seed)
            return observation, {} if seed is not None and seed % 2 else info

    source = SyncVectorEnv([Half] * 8, autoreset_mode=AutoresetMode.DISABLED)
    environment = rein.make(source, seed=0, action_mask=True)
    mask_NA, odd_N = environment.reset()[ACTION_MASK], environment.episode_seeds % 2 == 1
    assert odd_N.any()
    assert mask_NA[odd_N].all()
    assert not mask_NA[~odd_N].all()


@pytest.mark.parametrize("workers", [None, 2])
@pytest.mark.parametrize(
    ("action", "form", "text"),
    [
        ("discrete", "absent", r"action_mask=True: expected info\['action_mask'\]"),
        ("discrete", "short", r"info.action_mask: expected an action mask of MultiBinary\(4\)"),
        ("dict", "misspelled", r"info.action_mask: expected an action mask of Dict\('move'"),
    ],
)
def test_wrong_mask_is_an_error_of_the_first_reset(action: str, form: str, text: str, workers: int | None) -> None:
    environment = rein.make(functools.partial(Masked, action, form), N, 0, action_mask=True, workers=workers)
    with pytest.raises(rein.errors.EnvironmentContractError, match=text):
        environment.reset()
    environment.close()


def test_missing_mask_of_a_vector_environment_is_an_error() -> None:
    environment = GymnasiumVectorEnvironment("CartPole-v1", N, 0, action_mask=True, vectorization_mode="sync")
    with pytest.raises(rein.errors.EnvironmentContractError, match="action_mask=True"):
        environment.reset()


def test_masks_of_continuous_actions_are_refused() -> None:
    with pytest.raises(ValueError, match="only discrete actions"):
        rein.make("Pendulum-v1", action_mask=True)


@pytest.mark.parametrize("workers", [None, 2])
def test_unused_mask_is_warned_about_once(workers: int | None, caplog: pytest.LogCaptureFixture) -> None:
    _warned.clear()
    for _ in range(2):
        environment = rein.make("Taxi-v4", N, 0, workers=workers)
        environment.reset()
        environment.reset()
        environment.close()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "action_mask=True" in record.message


def test_action_mask_false_omits_the_warning(caplog: pytest.LogCaptureFixture) -> None:
    _warned.clear()
    rein.make("Taxi-v4", N, 0, action_mask=False).reset()
    rein.make("Taxi-v4", N, 0, info={"action_mask": np.ones(6, np.int8)}).reset()
    assert not caplog.records


@pytest.mark.parametrize("action", ["discrete", "multi", "tuple"])
@pytest.mark.parametrize("kind", ["single", "processes", "same_step"])
def test_mask_without_a_valid_action_is_an_error(kind: str, action: str) -> None:
    make = functools.partial(Masked, action, empty=2)
    if kind == "same_step":
        environment = rein.make(SyncVectorEnv([make] * N, autoreset_mode="SameStep"), seed=0, action_mask=True)
    else:
        environment = rein.make(make, N, 0, action_mask=True, workers=2 if kind == "processes" else None)
    with pytest.raises(
        rein.errors.EnvironmentContractError, match=r"observation.action_mask.*, environment \d: expected a valid"
    ):
        rollout(environment)
    environment.close()


class Lists:
    """Environment that returns masks as they are given, with rows that are not valid."""

    num_envs, seed, replayable, device = 2, 0, False, torch.device("cpu")
    single_observation_space = spaces.Dict(
        {"observation": spaces.Box(0.0, 1.0, (1,)), "action_mask": spaces.MultiBinary(2)}
    )
    single_action_space = spaces.Discrete(2)
    config: dict[str, Any] = {}  # noqa: RUF012
    episode_seeds = torch.full((2,), -1)

    def __init__(self, masks: list[list[list[int]]], valid: list[list[bool]]) -> None:
        self.masks, self.valid, self.steps = masks, valid, 0

    def observe(self) -> Tree:
        mask = torch.tensor(self.masks[min(self.steps, len(self.masks) - 1)], dtype=torch.int8)
        return {"observation": torch.zeros(2, 1), "action_mask": mask}

    def reset(self, seed: int | None = None) -> Tree:
        return self.observe()

    def apply_action(self, action: Tree) -> TimeStep:
        valid = torch.tensor(self.valid[min(self.steps, len(self.valid) - 1)])
        self.steps += 1
        nothing = torch.zeros(2, dtype=torch.bool)
        return TimeStep(self.observe(), torch.zeros(2), nothing, nothing, valid=valid)

    def reseed(self, seed: int) -> None: ...

    def close(self) -> None: ...


def test_step_checks_the_masks_of_valid_rows_only() -> None:
    some, none = [1, 0], [0, 0]
    for valid, fails in (([[True, False]], False), ([[True, True]], True)):
        environment = Lists([[some, none]], valid)
        agent = rein.PPO(environment.single_observation_space, environment.single_action_space, seed=0, rollout_steps=4)
        loop = rein.training_loop(agent, environment, epochs=1, iterations=2)
        if not fails:
            loop.run()
            continue
        with pytest.raises(rein.errors.EnvironmentContractError, match=r"observation\.action_mask, environment 1"):
            loop.run()


def test_evaluation_checks_masks() -> None:
    environment = Lists([[[1, 0], [0, 0]]], [[True, True]])
    agent = rein.PPO(environment.single_observation_space, environment.single_action_space, seed=0)
    with pytest.raises(rein.errors.EnvironmentContractError, match="environment 1"):
        rein.evaluate(agent, environment, episodes=2, max_episode_steps=3)


def test_resumed_environment_continues_bit_for_bit() -> None:
    one, other = (rein.make(Masked, N, seed, action_mask=True) for seed in (0, 1))
    observation, rng = one.reset(), generator(3, "actions")
    for _ in range(7):
        observation = one.apply_action(choose(one, observation, rng)).observation
    other.load_state_dict(copy_state(one.state_dict()))
    for _ in range(20):
        action = choose(one, observation, rng)
        steps = one.apply_action(action), other.apply_action(action)
        assert first_difference(*steps) is None
        observation = steps[0].observation


def test_rebuilt_environment_folds_masks() -> None:
    config = json.loads(json.dumps(rein.make("Taxi-v4", 1, 0, action_mask=True).config))
    assert set(rebuild(config, 2).reset()) == {"observation", "action_mask"}
    assert isinstance(rebuild(config | {"action_mask": None}, 2).reset(), Tensor)


def test_wrappers_leave_masks_as_they_are() -> None:
    make = functools.partial(rein.make, functools.partial(Masked, observation="dict"), N, 0, action_mask=True)
    plain = rollout(make())
    for wrap in (FlattenObservation, FrameStack, functools.partial(observation_history, length=3)):
        environment = wrap(make())
        check_mask(environment.single_observation_space["action_mask"], environment.single_action_space)
        for expected, got in zip(plain[1:], rollout(environment)[1:], strict=True):
            for field in ("observation", "final_observation"):
                assert torch.equal(getattr(expected, field)[ACTION_MASK], getattr(got, field)[ACTION_MASK])
    assert set(environment.single_observation_space.spaces) == {"observation", "action_mask"}
    assert environment.single_observation_space["observation"].shape == (3, 2)


@pytest.mark.slow
class TestFlat(EnvironmentContract):
    def make(self, num_envs: int, seed: int | None) -> Any:
        make = functools.partial(Masked, "tuple", observation="dict")
        return observation_history(GymnasiumEnvironment(make, num_envs, seed, action_mask=True), 3)


class TestVector(EnvironmentContract):
    def make(self, num_envs: int, seed: int | None) -> GymnasiumVectorEnvironment:
        source = SyncVectorEnv([Masked] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
        return GymnasiumVectorEnvironment(source, seed=seed, action_mask=True)


def test_worker_gets_arrays_of_shape_empty() -> None:
    class Scalar(Masked):
        def __init__(self) -> None:
            super().__init__("dict")
            self.action_space = spaces.Dict({"move": spaces.Discrete(3), "size": spaces.Box(-1.0, 1.0, ())})

        def step(self, action: Any) -> Any:
            assert isinstance(action["size"], np.ndarray), type(action["size"])
            return super().step(action)

    environment = rein.make(Scalar, N, 0, action_mask=True, workers=2)
    rollout(environment, 3)
    environment.close()


ADDITIVE = [0.0, -np.inf, 0.0, 0.0]  # allows all actions but one, if it is added to logits


class Given(gymnasium.Env[Any, Any]):
    """Environment whose observations or infos have a given mask, from the second step on if `late` is set."""

    action_space = spaces.Discrete(4)

    def __init__(self, mask: Any, where: str, late: bool) -> None:
        self.mask, self.where, self.late = mask, where, late
        position = spaces.Box(0.0, 1.0, (1,))
        masks = spaces.Box(-np.inf, np.inf, (4,))
        self.observation_space: Any = position
        if where == "observation":
            self.observation_space = spaces.Dict({"position": position, "action_mask": masks})

    def returned(self) -> tuple[Any, dict[str, Any]]:
        mask = np.ones(4, np.float32) if self.late and self.steps < 2 else np.asarray(self.mask)
        position = np.zeros(1, np.float32)
        if self.where == "observation":
            return {"position": position, "action_mask": mask.astype(np.float32)}, {}
        return position, {"action_mask": mask}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return self.returned()

    def step(self, action: Any) -> Any:
        self.steps += 1
        observation, info = self.returned()
        return observation, 0.0, False, False, info


@pytest.mark.parametrize("kind", ["single", "vector"])
@pytest.mark.parametrize("where", ["info", "observation"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("mask", [ADDITIVE, [1, np.nan, 0, 0], [1, -1, 1, 1], [0.5, 0.5, 0, 1]])
def test_mask_of_other_numbers_than_0_and_1_is_refused(mask: Any, late: bool, where: str, kind: str) -> None:
    make = functools.partial(Given, mask, where, late)
    source: Any = make if kind == "single" else SyncVectorEnv([make] * 2)
    environment = rein.make(source, 2, 0, action_mask=True)
    if late:
        environment.reset()
        environment.apply_action(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(rein.errors.EnvironmentContractError, match=r"action_mask.*mask == 0"):
        environment.apply_action(torch.zeros(2, dtype=torch.int64)) if late else environment.reset()


def test_masks_of_booleans_and_of_larger_numbers_are_accepted() -> None:
    for mask in ([True, False, True, True], [2, 0, 1, 3], [1.0, 0.0, 1.0, 1.0]):
        environment = rein.make(functools.partial(Given, mask, "info", False), 2, 0, action_mask=True)
        assert environment.reset()[ACTION_MASK].tolist() == [[1, 0, 1, 1]] * 2


class Additive(Lists):
    """Environment of rein whose masks are added to logits."""

    single_observation_space = spaces.Dict(
        {"observation": spaces.Box(0.0, 1.0, (1,)), "action_mask": spaces.Box(-np.inf, np.inf, (2,))}
    )

    def observe(self) -> Tree:
        return {"observation": torch.zeros(2, 1), "action_mask": torch.tensor([[0.0, -torch.inf]] * 2)}


def test_mask_of_a_native_environment_is_refused_in_training_and_evaluation() -> None:
    environment = Additive([], [[True, True]])
    agent = rein.PPO(environment.single_observation_space, environment.single_action_space, seed=0)
    with pytest.raises(rein.errors.EnvironmentContractError, match="mask == 0"):
        rein.train(agent, environment, epochs=1, iterations=2, check_finite=False)
    for use in (
        lambda: rein.train(agent, environment, epochs=1, iterations=2),
        lambda: rein.evaluate(agent, environment, episodes=2),
    ):
        with pytest.raises(rein.errors.NonFiniteError, match="mask == 0"):
            use()


@pytest.mark.parametrize("waits", [False, True])
def test_mask_on_another_device_is_checked_only_if_the_check_may_wait(waits: bool) -> None:
    class OnDevice(Tensor):
        """Tensor that counts as one of a device, and allows copies to the host only if `waits` is set."""

        is_cpu = False  # type: ignore[assignment]

        def numpy(self, *, force: bool = False) -> Any:
            assert force and waits
            return self.as_subclass(Tensor).numpy()

    observation_space = spaces.Dict({"a": spaces.Box(0.0, 1.0, (1,)), "action_mask": spaces.Box(-9.0, 9.0, (2,))})
    observation = {"a": torch.zeros(1, 1), "action_mask": torch.tensor([[0.0, -1.0]]).as_subclass(OnDevice)}
    check = functools.partial(check_masks, observation, observation_space, spaces.Discrete(2), waits=waits)
    if not waits:
        check()
        return
    with pytest.raises(rein.errors.EnvironmentContractError, match="mask == 0"):
        check()
