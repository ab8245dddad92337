"""What the suite for environments acts and checks with.

Shapes: N environments, A one action.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.spaces import Codec
from rein.errors import ReinError
from rein.networks.flatten import children
from rein.ops.trees import map_tree
from rein.testing.stateful import first_difference
from rein.types import Tree

_REFUSALS = (ReinError, RuntimeError, ValueError)


def random_actions(environment: Any, steps: int) -> list[Tree]:
    """So many random actions (N, *A), row i of which does not depend on N."""
    streams = []
    for index in range(environment.num_envs):
        space = copy.deepcopy(environment.single_action_space)
        space.seed(index)
        streams.append([space.sample() for _ in range(steps)])
    codec = Codec("action", environment.single_action_space)
    return [map_tree(lambda x: x.to(environment.device), codec.stack(v)) for v in zip(*streams, strict=True)]


def rows_of(tree: Any, which: Tensor) -> Any:
    """The rows of every tensor in a tree: by their indices, or where a mask (N,) is True."""
    return map_tree(lambda tensor: tensor[which.to(tensor.device)], tree)


def check_same(one: Any, other: Any, which: Tensor, what: str) -> None:
    """AssertionError, which begins with `what`, where two trees differ by a bit in these rows."""
    difference = first_difference(rows_of(one, which), rows_of(other, which))
    assert difference is None, f"{what} differs at {difference}"


def check_bounds(observation: Tree, space: spaces.Space[Any]) -> None:
    """AssertionError where an observation is beyond the bounds of a Box."""
    for key, child in (children(space) or {}).items():
        check_bounds(observation[key], child)
    if isinstance(space, spaces.Box):
        value = observation.cpu().double()
        low, high = (torch.as_tensor(bound).double() for bound in (space.low, space.high))
        slack = 1e-5 * torch.maximum(low.abs(), high.abs()).nan_to_num(posinf=0.0).clamp(min=1.0)
        outside = (value < low - slack) | (value > high + slack)
        assert not outside.any(), f"the observation has {value[outside][0]}, outside of {space}"


def check_refused(call: Callable[[], Any], what: str) -> None:
    """AssertionError unless `call` raises an error that says no."""
    try:
        call()
    except _REFUSALS:
        return
    raise AssertionError(f"{what} raised no error")
