"""Agents whose policies are exported in tests, by agent and name."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

import rein
from rein.networks.recurrent import GRU, LSTM, MinimalGRU
from rein.spaces import children
from rein.spaces.conversion import layout
from rein.types import Tree

VECTOR = spaces.Box(-2.0, 2.0, (4,), np.float32)
IMAGE = spaces.Box(0, 255, (48, 48, 3), np.uint8)
MIXED = spaces.Dict(
    {
        "pose": spaces.Box(-1.0, 1.0, (3,), np.float32),
        "door": spaces.Discrete(3, start=1),
        "cell": spaces.MultiDiscrete([2, 3]),
        "keys": spaces.MultiBinary(2),
    }
)
VISION = spaces.Dict({"camera": IMAGE, "pose": VECTOR})
CRITIC = spaces.Dict({"observation": VECTOR, "critic_observation": spaces.Box(-1.0, 1.0, (5,), np.float32)})
OBSERVATIONS = {
    "vector": VECTOR,
    "float64": spaces.Box(-np.inf, np.inf, (3,), np.float64),
    "image": IMAGE,
    "small image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "frames": spaces.Box(0, 255, (4, 40, 40), np.uint8),
    "dict": MIXED,
    "dict with image": VISION,
    "tuple": spaces.Tuple([VECTOR, spaces.Discrete(4)]),
    "discrete": spaces.Discrete(5, start=1),
    "multi-discrete": spaces.MultiDiscrete([3, 4]),
}
THREE, SHIFTED = spaces.Discrete(3), spaces.Discrete(4, start=2)
BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 5.0], np.float32))
TABLE = spaces.MultiDiscrete(np.array([[3, 4], [2, 2]]), start=np.array([[1, 1], [0, 0]]))
SQUARE = spaces.Box(-1.0, 1.0, (2, 2), np.float32)
HYBRID = spaces.Dict({"gear": spaces.Discrete(3, start=1), "steer": BOX})


def masked(sizes: int, observation: spaces.Space[Any] = VECTOR) -> spaces.Dict:
    return spaces.Dict({"action_mask": spaces.MultiBinary(sizes), "observation": observation})


Case = tuple[spaces.Space[Any], spaces.Space[Any], dict[str, Any]]
NORMAL = {"normalize_observation": True}
ON_POLICY: dict[str, Case] = {
    **{name: (space, THREE, {"hidden": (16, 16)}) for name, space in OBSERVATIONS.items()},
    "normalized": (MIXED, THREE, NORMAL),
    "normalized with image": (VISION, THREE, NORMAL),
    "shared": (VECTOR, SHIFTED, {"shared": True, "activation": "silu"}),
    "box": (VECTOR, BOX, {}),
    "state-dependent std": (VECTOR, SQUARE, {"state_dependent_std": True, "activation": "gelu"}),
    "squashed": (VECTOR, BOX, {"squash": True}),
    "ball": (VECTOR, SQUARE, {"squash": "ball"}),
    "multi-discrete action": (VECTOR, TABLE, {}),
    "multi-binary": (VECTOR, spaces.MultiBinary(3), {}),
    "integers": (VECTOR, spaces.Box(-1, 3, (2,), np.int64), {}),
    "hybrid": (VECTOR, HYBRID, {}),
    "tuple action": (MIXED, spaces.Tuple([THREE, BOX]), NORMAL),
    "masked": (masked(3), THREE, NORMAL),
    "masked multi-discrete": (masked(7), spaces.MultiDiscrete([3, 4]), {}),
    "masked dict": (masked(4, MIXED), SHIFTED, {}),
    "masked hybrid": (
        spaces.Dict({"action_mask": spaces.Dict({"gear": spaces.MultiBinary(3)}), "a": VECTOR, "b": VECTOR}),
        HYBRID,
        {},
    ),
    "critic observation": (CRITIC, THREE, NORMAL),
    "LSTM": (VECTOR, THREE, {"core": functools.partial(LSTM, features=8)}),
    "minimal GRU": (VECTOR, BOX, {"core": functools.partial(MinimalGRU, features=8, layers=2)}),
    "masked LSTM": (masked(3), THREE, {"core": functools.partial(LSTM, features=8, layers=2), **NORMAL}),
    "image GRU": (IMAGE, BOX, {"core": functools.partial(GRU, features=8), "shared": True}),
    "critic observation GRU": (CRITIC, THREE, {"core": functools.partial(GRU, features=8, layers=2)}),
}
FEW = ("hybrid", "LSTM")
VALUES: dict[str, Case] = {
    **{name: (space, THREE, {}) for name, space in OBSERVATIONS.items()},
    "normalized": (MIXED, SHIFTED, NORMAL),
    "masked": (masked(4), SHIFTED, {}),
    "masked dict": (masked(3, MIXED), THREE, NORMAL),
}
DUELING: dict[str, Case] = {"dueling": (VECTOR, SHIFTED, {"dueling": True})}
CONTINUOUS: dict[str, Case] = {
    **{name: (OBSERVATIONS[name], BOX, {}) for name in ("vector", "dict", "tuple", "small image", "discrete")},
    "normalized": (MIXED, SQUARE, NORMAL),
}
WITH_CRITIC: dict[str, Case] = {**CONTINUOUS, "critic observation": (CRITIC, BOX, {})}
DISCRETE_ACTOR: dict[str, Case] = {
    **{name: (OBSERVATIONS[name], SHIFTED, {}) for name in ("vector", "dict", "tuple", "small image", "discrete")},
    "masked": (masked(4), SHIFTED, NORMAL),
    "masked dict": (masked(3, MIXED), THREE, {}),
}
SOME_VALUES = {name: VALUES[name] for name in ("dict", "image", "masked")}
SOME_ACTORS = {name: WITH_CRITIC[name] for name in ("normalized", "critic observation")}
GRU_CORE = {"core": functools.partial(GRU, features=8, layers=2)}
CASES: dict[str, dict[str, Case]] = {
    "PPO": ON_POLICY,
    "A2C": {name: ON_POLICY[name] for name in FEW},
    "IMPALA": {name: ON_POLICY[name] for name in FEW},
    "PQN": {**SOME_VALUES, **DUELING, "without layer norm": (VECTOR, THREE, {"layer_norm": False})},
    "DQN": {**VALUES, **DUELING, "layer norm": (VECTOR, THREE, {"layer_norm": True, "double": False})},
    "RecurrentDQN": {**SOME_VALUES, **DUELING, "GRU": (VECTOR, SHIFTED, GRU_CORE)},
    "IQN": {**SOME_VALUES, "risk-averse": (VECTOR, SHIFTED, {"risk": 0.3, "hidden": (16,)})},
    "Rainbow": {**SOME_VALUES, "one head": (VECTOR, SHIFTED, {"dueling": False, "hidden": ()})},
    "QLearning": {
        "discrete": (spaces.Discrete(50, start=3), SHIFTED, {}),
        "multi-discrete": (spaces.MultiDiscrete([5, 6]), THREE, {}),
        "masked": (masked(3, spaces.Discrete(50)), THREE, {}),
    },
    "SAC": WITH_CRITIC,
    "DiscreteSAC": {**DISCRETE_ACTOR, "critic observation": (CRITIC, THREE, {})},
    "TQC": SOME_ACTORS,
    "CrossQ": SOME_ACTORS,
    "TD3": SOME_ACTORS,
    "DDPG": SOME_ACTORS,
    "AWAC": SOME_ACTORS,
    "IQL": SOME_ACTORS,
    "BC": {
        **CONTINUOUS,
        **{f"discrete {name}": case for name, case in DISCRETE_ACTOR.items()},
        "image": (IMAGE, THREE, {}),
        "deterministic": (VECTOR, BOX, {"stochastic": False}),
    },
}


def built(agent: str, case: str) -> Any:
    """Return an agent with random weights of ordinary size and, if it normalizes, with statistics."""
    observation_space, action_space, options = CASES[agent][case]
    kind = getattr(rein, agent)
    if "capacity" in kind.__init__.__annotations__:
        options = {**options, "capacity": 100, "batch_size": 8}
    built = kind(observation_space, action_space, seed=0, **options)
    generator = torch.Generator().manual_seed(1)
    networks: Any = getattr(built, "networks", nn.Module())
    with torch.no_grad():
        for parameter in networks.parameters():
            scale = 0.3 if parameter.ndim < 2 else parameter[0].numel() ** -0.5
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)
    if options.get("normalize_observation"):
        networks.preprocess.update(sampled(observation_space, 50, seed=2))
    return built


def sampled(space: spaces.Space[Any], rows: int, seed: int) -> Tree:
    """Return observations (rows, ...) of a space, as rein's environments return them."""
    space.seed(seed)
    return _stacked(space, [space.sample() for _ in range(rows)])


def _stacked(space: spaces.Space[Any], values: list[Any]) -> Tree:
    inner = children(space)
    if inner is None:
        return torch.from_numpy(np.stack(values).astype(layout(space)[1]))
    keys = list(inner) if isinstance(space, spaces.Dict) else range(len(inner))
    return {name: _stacked(inner[name], [v[key] for v in values]) for name, key in zip(inner, keys, strict=True)}


def flat(observation: Tree, name: str = "observation") -> dict[str, Tensor]:
    """Return an observation without reserved entries as inputs of an ONNX model."""
    if isinstance(observation, Tensor):
        return {name: observation}
    return {key: x for entry, part in observation.items() for key, x in flat(part, f"{name}.{entry}").items()}
