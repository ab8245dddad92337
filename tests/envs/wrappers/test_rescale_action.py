"""Tests of RescaleAction."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from rein.envs.gridworld import Gridworld
from rein.envs.wrappers.actions import RescaleAction

BOUND = st.floats(-1e6, 1e6, width=32)


def echo(low: Any, high: Any) -> SimpleNamespace:
    """Return a stub environment whose `apply_action` returns the action."""
    space = spaces.Box(np.float32(low), np.float32(high))
    return SimpleNamespace(single_action_space=space, device=torch.device("cpu"), apply_action=lambda action: action)


@given(st.lists(st.tuples(BOUND, BOUND), min_size=1, max_size=4))
def test_ends_are_exact_and_values_stay_in_bounds(bounds: list[tuple[float, float]]) -> None:
    low, high = np.float32([min(b) for b in bounds]), np.float32([max(b) for b in bounds])
    environment: Any = RescaleAction(echo(low, high))  # type: ignore[arg-type]  # a stub
    for end, bound in ((-1.0, low), (1.0, high)):
        assert environment.apply_action(torch.full((2, len(bounds)), end)).tolist() == [bound.tolist()] * 2
    for share in torch.linspace(-1, 1, 41):
        action = environment.apply_action(share.expand(1, len(bounds)))[0]
        assert environment.inner.single_action_space.contains(action.numpy())


def test_rescaling_is_linear_also_out_of_bounds() -> None:
    environment: Any = RescaleAction(echo([-2, 0], [2, 5]))  # type: ignore[arg-type]  # a stub
    scaled = environment.apply_action(torch.tensor([[0.0, 0.0], [-0.5, 0.5], [2.0, -3.0]]))
    assert scaled.tolist() == [[0.0, 2.5], [-1.0, 3.75], [4.0, -5.0]]


def test_unbounded_or_discrete_actions_raise() -> None:
    with pytest.raises(ValueError, match="have no bounds"):
        RescaleAction(echo([-np.inf, 0], [np.inf, 1]))  # type: ignore[arg-type]  # a stub
    with pytest.raises(ValueError, match="bounds too far apart for float32"):
        RescaleAction(echo([-3e38, 0], [3e38, 1]))  # type: ignore[arg-type]  # a stub
    with pytest.raises(TypeError, match=r"RescaleAction: actions in Discrete\(4\)"):
        RescaleAction(Gridworld())
