"""A simulation steps the same by rows, by masks and compiled; what it returns is its own; what ends begins anew.

Shapes: S numbers of a state, N environments, T steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.simulation import Moved, Physics, Simulation, transposed
from rein.errors import EnvironmentContractError
from rein.ops.random import episode_seeds, integers, uniform
from rein.ops.trees import leaves
from rein.testing.stateful import copy_state, first_difference
from rein.types import TimeStep

N = 37


def drift(state_2N: Tensor, push_N: Tensor) -> Moved:
    """A place that drifts with a velocity and ends beyond 1; pushed, it drifts faster."""
    place_N, velocity_N = state_2N.unbind()
    velocity_N = velocity_N + 0.1 * push_N
    place_N = place_N + velocity_N
    return Moved(torch.stack((place_N, velocity_N)), 2.0 * push_N, place_N.abs() > 1.0)


def squares(state_2N: Tensor) -> Tensor:
    return torch.cat((state_2N, state_2N.square()[:1]))


def slide(state_2N: Tensor, action_N1: Tensor) -> Moved:
    return drift(state_2N, action_N1[:, 0].clamp(-1.0, 1.0))


STARTS = ((-0.5, 0.5), (-0.2, 0.2))
DRIFT = Physics(drift, STARTS, controls=(-1.0, 0.0, 1.0))
SEEN = DRIFT._replace(observe=squares)
SLIDE = Physics(slide, STARTS)
every_physics = pytest.mark.parametrize("physics", [DRIFT, SEEN, SLIDE], ids=["state", "observed", "continuous"])


def simulation(physics: Physics = DRIFT, num_envs: int = N, *, compile: bool = False, **options: Any) -> Simulation:
    space = spaces.Box(-1.0, 1.0, (1,)) if physics.controls is None else spaces.Discrete(3)
    given: dict[str, Any] = {"seed": 3, "max_episode_steps": 20, "device": "cpu"} | options
    return Simulation("Drift", physics, space, num_envs=num_envs, compile=compile, **given)


def by_masks(physics: Physics, num_envs: int = N, **options: Any) -> Simulation:
    """As on a device on which to look who ended would be to wait for it."""
    made = simulation(physics, num_envs, **options)
    made._by_rows = made._seeds._on_host = False
    return made


def actions(physics: Physics, steps: int, num_envs: int = N) -> Iterator[Tensor]:
    row_N = torch.arange(num_envs)
    for k in range(steps):
        yield integers(row_N, k, 3) if physics.controls else 3.0 * uniform(row_N, k)[:, None] - 1.5


def played(made: Simulation, steps: int = 300) -> list[Any]:
    """Everything that can be seen of it, step by step."""
    seen: list[Any] = [made.reset(), made.episode_seeds]
    for action in actions(made._physics, steps, made.num_envs):
        seen += [made.apply_action(action), made.episode_seeds, copy_state(made.state_dict())]
    return seen


@every_physics
def test_masks_give_what_rows_give(physics: Physics) -> None:
    assert first_difference(played(simulation(physics)), played(by_masks(physics))) is None


@every_physics
def test_what_is_compiled_is_the_step_by_masks(physics: Physics, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiler, which not every machine has: what it is given is run as it is."""
    monkeypatch.setattr("torch._inductor.compile", lambda graph, inputs: graph)
    assert first_difference(played(simulation(physics, compile=True)), played(simulation(physics))) is None


@every_physics
@pytest.mark.parametrize("make", [simulation, by_masks])
def test_what_is_returned_shares_no_memory(physics: Physics, make: Callable[..., Simulation]) -> None:
    assert_nothing_is_shared(make(physics))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of torch's own compiler about torch
@every_physics
def test_what_compiled_code_returns_shares_no_memory(physics: Physics) -> None:
    assert_nothing_is_shared(simulation(physics, compile=True))


def assert_nothing_is_shared(made: Simulation) -> None:
    kept: list[Tensor] = [made.reset()]
    for action in actions(made._physics, 50):
        kept += [leaf for _, leaf in leaves(made.apply_action(action))]
        owned = [leaf for _, leaf in leaves(made.state_dict()) if isinstance(leaf, Tensor)]
        places = [leaf.untyped_storage().data_ptr() for leaf in kept]
        assert len(set(places)) == len(kept)
        assert set(places).isdisjoint(leaf.untyped_storage().data_ptr() for leaf in owned)
        assert all(leaf.is_contiguous() for leaf in kept)


@every_physics
def test_an_environment_among_many_is_the_same_alone(physics: Physics) -> None:
    """Vectorized arithmetic must not depend on the place in the vector."""
    many = played(simulation(physics, 1003))
    for count in (1, 2, 5, 64):
        few = played(simulation(physics, count))
        for one, other in zip(few, many, strict=True):
            for (path, a), (_, b) in zip(leaves(one), leaves(other), strict=True):
                if isinstance(a, Tensor):
                    assert torch.equal(a, b[:, :count] if path == "state" else b[:count]), path


@pytest.mark.parametrize("make", [simulation, by_masks])
def test_every_episode_begins_as_its_seed_says(make: Callable[..., Simulation]) -> None:
    """Beyond what is worked out ahead: here every step ends every episode."""
    made, fresh, row_N = make(SEEN, max_episode_steps=1), simulation(SEEN), torch.arange(N)
    made.reset()
    for k, action in enumerate(actions(SEEN, 300), start=1):
        time_step = made.apply_action(action)
        assert torch.equal(made.episode_seeds, episode_seeds(3, row_N, torch.full_like(row_N, k)))
        assert torch.equal(time_step.observation, fresh.reset_to(made.episode_seeds))


@pytest.mark.parametrize("make", [simulation, by_masks])
def test_termination_and_the_clock_are_told_apart_and_may_coincide(make: Callable[..., Simulation]) -> None:
    made = make(DRIFT, 4, max_episode_steps=3)
    made.reset()
    state_2N = torch.tensor([[0.0, 0.0, 0.95, 0.95], [0.0, 0.0, 0.1, 0.1]])
    steps_N = torch.tensor([0, 2, 0, 2])
    made.load_state_dict(made.state_dict() | {"state": state_2N, "steps": steps_N})
    time_step = made.apply_action(torch.ones(4, dtype=torch.int64))
    assert time_step.terminated.tolist() == [False, False, True, True]
    assert time_step.truncated.tolist() == [False, True, False, True]
    moved_N4 = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.05, 0.1], [1.05, 0.1]])
    assert torch.allclose(time_step.final_observation, moved_N4)
    began_N = torch.tensor([False, True, True, True])
    assert torch.equal((time_step.observation != time_step.final_observation).any(1), began_N)
    assert (time_step.observation[began_N, 0].abs() <= 0.5).all()
    assert made.state_dict()["steps"].tolist() == [1, 0, 0, 0]


def played_in_parts(made: Simulation, steps: int = 60) -> list[Any]:
    """The same steps taken in two parts, with resets of some in between."""
    seen: list[Any] = [made.reset()]
    mask_N = torch.arange(made.num_envs) % 3 == 0
    for k, action in enumerate(actions(made._physics, steps, made.num_envs)):
        seen += [made.apply_action(action, mask_N), made.apply_action(action, ~mask_N), made.episode_seeds]
        seen += [made.reset_where(mask_N)] if k % 7 == 0 else []
        seen.append(copy_state(made.state_dict()))
    return seen


@every_physics
def test_steps_and_resets_of_some_are_the_same_by_masks(physics: Physics, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = played_in_parts(simulation(physics))
    assert first_difference(expected, played_in_parts(by_masks(physics))) is None
    monkeypatch.setattr("torch._inductor.compile", lambda graph, inputs: graph)
    assert first_difference(expected, played_in_parts(simulation(physics, compile=True))) is None


@pytest.mark.parametrize("make", [simulation, by_masks])
def test_who_is_not_stepped_neither_moves_nor_ends_though_its_clock_has_run_out(
    make: Callable[..., Simulation],
) -> None:
    made = make(DRIFT, 2, max_episode_steps=3)
    made.reset()
    made.load_state_dict(made.state_dict() | {"steps": torch.tensor([5, 0])})  # as of one with a later limit
    before = copy_state(made.state_dict())
    time_step = made.apply_action(torch.ones(2, dtype=torch.int64), torch.tensor([False, True]))
    assert time_step.valid.tolist() == [False, True]
    assert not time_step.truncated.any()
    after = made.state_dict()
    assert after["steps"].tolist() == [5, 1]
    assert (after["state"] == before["state"]).all(0).tolist() == [True, False]


def test_before_the_first_reset_there_is_nothing_to_reset_in_part() -> None:
    with pytest.raises(RuntimeError, match=r"Drift.reset_where: call reset\(\) first"):
        simulation().reset_where(torch.ones(N, dtype=torch.bool))


def test_an_action_with_a_gradient_leaves_none_behind() -> None:
    made = simulation(SLIDE)
    made.reset()
    time_step = made.apply_action(torch.zeros(N, 1, requires_grad=True))
    assert not any(leaf.requires_grad for _, leaf in leaves(time_step))
    assert not made.state_dict()["state"].requires_grad


def test_an_action_of_another_precision_is_taken_for_what_it_says() -> None:
    for physics, precise, other in ((SLIDE, torch.float32, torch.float64), (DRIFT, torch.int64, torch.int32)):
        steps: list[TimeStep] = []
        for dtype in (precise, other):
            made = simulation(physics)
            made.reset()
            steps.append(made.apply_action(next(actions(physics, 1)).to(precise).to(dtype)))
        assert first_difference(*steps) is None


def test_an_action_that_there_is_not_is_refused_in_any_step() -> None:
    made = simulation()
    made.reset()
    made.apply_action(torch.zeros(N, dtype=torch.int64))
    before = made.state_dict()["state"].clone()
    for wrong in (-1, 3, 0.5):
        with pytest.raises(EnvironmentContractError, match="action"):
            made.apply_action(torch.full((N,), wrong))
    assert torch.equal(made.state_dict()["state"], before)


def test_transposed_is_contiguous_and_the_same() -> None:
    for shape in ((4, 1), (1, 5), (3, 10_000)):
        state_SN = torch.arange(shape[0] * shape[1]).reshape(shape)
        state_NS = transposed(state_SN)
        assert state_NS.is_contiguous()
        assert torch.equal(state_NS, state_SN.T)
