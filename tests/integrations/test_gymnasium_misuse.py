"""Tests of error messages of the adapter."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import rein
from rein.envs.cartpole import CartPole
from rein.envs.gridworld import Gridworld
from rein.envs.gymnasium import GymnasiumEnvironment, GymnasiumVectorEnvironment
from rein.errors import EnvironmentContractError
from tests.workers import in_workers

MAKERS = {
    "cartpole": lambda: CartPole(3, seed=0),
    "gridworld": lambda: Gridworld(3, seed=0),
    "gymnasium": lambda: GymnasiumEnvironment("CartPole-v1", 3, seed=0),
}


def test_factory_that_returns_one_object_twice_raises():
    one = gymnasium.make("CartPole-v1")
    with pytest.raises(ValueError, match="returned the same environment twice"):
        GymnasiumEnvironment(lambda: one, num_envs=2)


def test_existing_environment_raises():
    with pytest.raises(TypeError, match="expected an id or a function that makes environments"):
        GymnasiumEnvironment(gymnasium.make("CartPole-v1"), num_envs=2)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("method", "argument", "dtype"),
    [
        ("reset_to", torch.tensor([5]), "int64"),
        ("reset_to", torch.ones(3), "int64"),
        ("reset_to", [1, 2, 3], "int64"),
        ("reset_where", torch.tensor([True]), "bool"),
        ("reset_where", torch.tensor([0, 1, 0]), "bool"),
    ],
)
def test_seeds_and_masks_of_wrong_shape_or_dtype_raise(name, method, argument, dtype):
    environment = MAKERS[name]()
    environment.reset()
    with pytest.raises(ValueError, match=rf"{method}: expected torch.{dtype} of shape \(3,\)"):
        getattr(environment, method)(argument)


@pytest.mark.parametrize("name", MAKERS)
def test_state_dict_does_not_change_in_later_steps(name):
    environment = MAKERS[name]()
    action = torch.zeros(3, dtype=torch.int64)
    environment.reset()
    environment.apply_action(action)
    state = environment.state_dict()
    first = [environment.apply_action(action) for _ in range(12)]
    environment.load_state_dict(state)
    for before in first:
        after = environment.apply_action(action)
        assert torch.equal(before.observation, after.observation)
        assert torch.equal(before.terminated | before.truncated, after.terminated | after.truncated)


NOTHING = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("fails", "place"), [({"reset": 1}, "in its reset"), ({"reset": 2}, "in its reset"), ({"step": 2}, "step 1")]
)
def test_exception_gets_a_note_with_its_place(fails: dict[str, int], place: str) -> None:
    environment = GymnasiumEnvironment(functools.partial(Counted, fails=fails), 2, seed=0)
    with pytest.raises(ZeroDivisionError, match="physics") as error:
        environment.reset()
        for _ in range(3):
            environment.apply_action(NOTHING)
    seed = int(environment.episode_seeds[1])
    assert re.search(rf"in environment 1 of .*Counted.*, episode seed {seed}, {place}$", error.value.__notes__[0])


def test_exception_in_a_replayed_step_gets_a_note() -> None:
    environment, loaded = (GymnasiumEnvironment("CartPole-v1", 2, seed=0) for _ in range(2))
    environment.reset()
    for _ in range(3):
        environment.apply_action(NOTHING)
    loaded._transport.simulators[1] = gymnasium.wrappers.TransformReward(
        loaded._transport.simulators[1], lambda _: 1 / 0
    )
    with pytest.raises(ZeroDivisionError) as error:
        loaded.load_state_dict(environment.state_dict())
    seed = int(environment.episode_seeds[1])
    assert error.value.__notes__ == [
        f"in environment 1 of CartPole-v1, episode seed {seed}, step 0, repeated by the resume"
    ]


ADAPTERS = {
    "one by one": GymnasiumEnvironment,
    "vector": GymnasiumVectorEnvironment,
    "workers": in_workers,
}


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(
    ("info", "text"),
    [
        (["success"], r"info=\['success'\]: give a dictionary of names and default values"),
        ({"mode": "none"}, r"info=\{'mode': 'none'\}: the default value must be a number, a boolean or"),
        ({"episode": {"r": 0.0}}, r"info=\{'episode': .* use a wrapper to flatten nested dictionaries"),
        ({"m": None}, r"info=\{'m': None\}: the default value must be"),
        ({"m": [[1], [2, 3]]}, r"info=\{'m': .*: the default value must be"),
        ({"m": 1j}, r"info=\{'m': 1j\}: the default value must be"),
    ],
)
def test_invalid_info_option_raises_in_the_constructor(adapter: str, info: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        ADAPTERS[adapter]("CartPole-v1", num_envs=2, info=info)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(
    ("num_envs", "error", "text"),
    [
        (2.0, TypeError, "num_envs=2.0: give an integer, 1 or more"),
        ("2", TypeError, "num_envs='2': give an integer, 1 or more"),
        (0, ValueError, "num_envs=0: give 1 or more"),
    ],
)
def test_invalid_num_envs_raises(adapter: str, num_envs: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        ADAPTERS[adapter]("CartPole-v1", num_envs=num_envs)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_num_envs_may_be_a_numpy_integer(adapter: str) -> None:
    environment: Any = ADAPTERS[adapter]("CartPole-v1", num_envs=np.int64(2))
    assert type(environment.num_envs) is int
    assert json.loads(json.dumps(environment.config))["num_envs"] == 2
    environment.close()


def test_num_envs_of_a_vector_environment_may_be_a_numpy_integer() -> None:
    source = SyncVectorEnv([functools.partial(Counted, 0)] * 2, autoreset_mode=AutoresetMode.DISABLED)
    source.num_envs = np.int64(2)  # type: ignore[assignment]  # as some have it
    assert json.loads(json.dumps(GymnasiumVectorEnvironment(source).config))["num_envs"] == 2


SPACES = [  # of environment 0 and of environment 1 to 3
    (spaces.Box(-1, 1, (3,)), spaces.Box(-1, 2, (3,))),
    (spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (4,))),
    (spaces.Discrete(3), spaces.Discrete(4)),
    (spaces.Discrete(3), spaces.Discrete(3, start=1)),
    (spaces.MultiDiscrete([3, 3]), spaces.MultiDiscrete([3, 3], start=[0, 1])),
    (spaces.Dict({"a": spaces.Discrete(2)}), spaces.Dict({"a": spaces.Discrete(3)})),
]


def of_spaces(kind: str, first: Any, other: Any) -> list[Any]:
    made = [Counted(0), Counted(1)]
    for one, space in zip(made, (first, other), strict=True):
        setattr(one, kind, space)
    return made


@pytest.mark.parametrize("pair", SPACES, ids=str)
@pytest.mark.parametrize("kind", ["observation_space", "action_space"])
def test_different_spaces_from_one_factory_raise(pair: Any, kind: str) -> None:
    made = iter(of_spaces(kind, *pair))
    with pytest.raises(ValueError, match=rf"environment 0 has the {kind} .*, environment 1 .*equal spaces"):
        GymnasiumEnvironment(lambda: next(made), 2)


def test_vector_environment_with_different_spaces_raises() -> None:
    makers = [lambda one=one: one for one in of_spaces("observation_space", *SPACES[0])]
    source = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED, observation_mode="different")
    with pytest.raises(ValueError, match="equal spaces"):
        GymnasiumVectorEnvironment(source)


class Counted(gymnasium.Env[Any, Any]):
    """Environment that observes the number of its steps. Environment 1 raises in the step or reset `fails`."""

    observation_space, action_space = spaces.Box(0.0, 99.0, (1,)), spaces.Discrete(2)

    def __init__(self, index: int, fails: Mapping[str, int] = {}) -> None:
        self.number, self.fails, self.steps, self.resets = index, fails, 0, 0

    def meet(self, what: str, count: int) -> None:
        if self.number == 1 and self.fails.get(what) == count:
            raise ZeroDivisionError("physics")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps, self.resets = 0, self.resets + 1
        self.meet("reset", self.resets)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.meet("step", self.steps)
        return np.full(1, self.steps, np.float32), 1.0, self.steps == 3, False, {}


N = 3
ZEROS = torch.zeros(N, dtype=torch.int64)


def by_send(environment: GymnasiumEnvironment) -> None:
    environment.send(ZEROS, range(N))
    environment.receive()


@pytest.mark.parametrize("kind", ["single", "vector"])
@pytest.mark.parametrize("fails", [{"step": 2}, {"reset": 2}])
def test_environments_are_not_stepped_after_an_exception_until_a_reset(fails: dict[str, int], kind: str) -> None:
    make = functools.partial(Counted, fails=fails)
    if kind == "single":
        environment: Any = GymnasiumEnvironment(make, N, 0)
        calls = [lambda: environment.apply_action(ZEROS), lambda: by_send(environment)]
        calls += [
            lambda: environment.apply_action_where(ZEROS, ZEROS == 0),
            lambda: environment.reset_where(ZEROS == 0),
        ]
    else:
        source = SyncVectorEnv([functools.partial(make, index) for index in range(N)], autoreset_mode="Disabled")
        environment = rein.make(source, seed=0)
        calls = [lambda: environment.apply_action(ZEROS)]
    environment.reset()
    with pytest.raises(ZeroDivisionError):
        for _ in range(3):
            environment.apply_action(ZEROS)
    for call in calls:
        with pytest.raises(RuntimeError, match=r"call reset\(\).*ZeroDivisionError: physics"):
            call()
    assert environment.awaits_reset
    assert not environment.reset().any()
    assert environment.apply_action(ZEROS).observation.tolist() == [[1.0]] * N


def test_wrong_action_does_not_end_the_episodes() -> None:
    environment = GymnasiumEnvironment(functools.partial(Counted, fails={}), N, 0)
    environment.reset()
    environment.apply_action(ZEROS)
    with pytest.raises(EnvironmentContractError):
        environment.apply_action(ZEROS[:1])
    assert environment.apply_action(ZEROS).observation.tolist() == [[2.0]] * N


CLOSED: dict[str, Any] = {
    "single": lambda: GymnasiumEnvironment("CartPole-v1", N, 0),
    "workers": lambda: rein.make("CartPole-v1", N, 0, workers=2, mode="threads"),
    "vector": lambda: rein.make(SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * N), seed=0),
    "native": lambda: rein.envs.CartPole(N, seed=0),
    "gridworld": lambda: rein.envs.Gridworld(N, seed=0),
    "self-play": lambda: rein.SelfPlay(rein.envs.TicTacToe(), N, seed=0),
}


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("kind", CLOSED)
def test_closed_environment_raises(kind: str, begun: bool) -> None:
    environment = CLOSED[kind]()
    if begun:
        environment.reset()
        environment.apply_action(ZEROS)
    environment.close()
    for call in (environment.reset, lambda: environment.apply_action(ZEROS)):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    if hasattr(environment, "reset_where"):
        with pytest.raises(RuntimeError, match="closed"):
            environment.reset_where(ZEROS == 0)
