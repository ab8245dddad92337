"""SimulatedEnvironment: steps by rows, by masks and compiled give the same results.

Shapes: S numbers of a state, N environments, T steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.simulation import SimulatedEnvironment, transposed
from rein.errors import EnvironmentContractError
from rein.ops.random import episode_seeds, integers, uniform
from rein.ops.trees import leaves
from rein.testing.stateful import copy_state, first_difference
from rein.types import TimeStep

N = 37


class Drift(SimulatedEnvironment):
    """A point that moves with a velocity, which actions change. The episode ends beyond 1."""

    single_observation_space = spaces.Box(-2.0, 2.0, (2,))
    single_action_space: spaces.Space[Any] = spaces.Discrete(3)
    initial_range = ((-0.5, 0.5), (-0.2, 0.2))
    action_values: Sequence[float] | None = (-1.0, 0.0, 1.0)

    def dynamics(self, state_2N: Tensor, push_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        place_N, velocity_N = state_2N.unbind()
        velocity_N = velocity_N + 0.1 * push_N
        place_N = place_N + velocity_N
        return torch.stack((place_N, velocity_N)), 2.0 * push_N, place_N.abs() > 1.0


class SeenDrift(Drift):
    """Also observes the square of the position."""

    single_observation_space = spaces.Box(-2.0, 2.0, (3,))

    def observe(self, state_2N: Tensor) -> Tensor:
        return torch.cat((state_2N, state_2N.square()[:1]))


class Slide(Drift):
    """Continuous actions."""

    single_action_space = spaces.Box(-1.0, 1.0, (1,))
    action_values = None

    def dynamics(self, state_2N: Tensor, action_N1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().dynamics(state_2N, action_N1[:, 0].clamp(-1.0, 1.0))


Kind = type[Drift]
every_kind = pytest.mark.parametrize("kind", [Drift, SeenDrift, Slide], ids=["state", "observed", "continuous"])


def simulation(kind: Kind = Drift, num_envs: int = N, **options: Any) -> Drift:
    return kind(num_envs, **{"seed": 3, "max_episode_steps": 20, **options})


def by_masks(kind: Kind, num_envs: int = N, **options: Any) -> Drift:
    """Return a simulation in the mode for devices, where checking for ended episodes would wait."""
    made = simulation(kind, num_envs, **options)
    made._by_rows = made._seeds._on_host = False
    return made


def actions(kind: Kind, steps: int, num_envs: int = N) -> Iterator[Tensor]:
    row_N = torch.arange(num_envs)
    for k in range(steps):
        yield integers(row_N, k, 3) if kind.action_values else 3.0 * uniform(row_N, k)[:, None] - 1.5


def played(made: Drift, steps: int = 300) -> list[Any]:
    """Return all visible results of each step."""
    seen: list[Any] = [made.reset(), made.episode_seeds]
    for action in actions(type(made), steps, made.num_envs):
        seen += [made.apply_action(action), made.episode_seeds, copy_state(made.state_dict())]
    return seen


@every_kind
def test_masked_steps_equal_steps_by_rows(kind: Kind) -> None:
    assert first_difference(played(simulation(kind)), played(by_masks(kind))) is None


@every_kind
def test_compiled_step_equals_masked_step(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the graph without the compiler, which not every machine has."""
    monkeypatch.setattr("torch._inductor.compile", lambda graph, inputs: graph)
    assert first_difference(played(simulation(kind, compile=True)), played(simulation(kind))) is None


@every_kind
@pytest.mark.parametrize("make", [simulation, by_masks])
def test_returned_tensors_share_no_memory(kind: Kind, make: Callable[..., Drift]) -> None:
    assert_no_shared_memory(make(kind))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # from torch's compiler
@every_kind
def test_tensors_returned_by_compiled_code_share_no_memory(kind: Kind) -> None:
    assert_no_shared_memory(simulation(kind, compile=True))


def assert_no_shared_memory(made: Drift) -> None:
    kept: list[Tensor] = [made.reset()]
    for action in actions(type(made), 50):
        kept += [leaf for _, leaf in leaves(made.apply_action(action))]
        owned = [leaf for _, leaf in leaves(made.state_dict()) if isinstance(leaf, Tensor)]
        places = [leaf.untyped_storage().data_ptr() for leaf in kept]
        assert len(set(places)) == len(kept)
        assert set(places).isdisjoint(leaf.untyped_storage().data_ptr() for leaf in owned)
        assert all(leaf.is_contiguous() for leaf in kept)


@every_kind
def test_results_do_not_depend_on_the_number_of_environments(kind: Kind) -> None:
    """Vectorized arithmetic must not depend on the position in the vector."""
    many = played(simulation(kind, 1003))
    for count in (1, 2, 5, 64):
        few = played(simulation(kind, count))
        for one, other in zip(few, many, strict=True):
            for (path, a), (_, b) in zip(leaves(one), leaves(other), strict=True):
                if isinstance(a, Tensor):
                    assert torch.equal(a, b[:, :count] if path == "state" else b[:count]), path


@pytest.mark.parametrize("make", [simulation, by_masks])
def test_seed_determines_the_initial_state(make: Callable[..., Drift]) -> None:
    """Each step ends every episode, so that more seeds are used than computed in advance."""
    made, fresh, row_N = make(SeenDrift, max_episode_steps=1), simulation(SeenDrift), torch.arange(N)
    made.reset()
    for k, action in enumerate(actions(SeenDrift, 300), start=1):
        time_step = made.apply_action(action)
        assert torch.equal(made.episode_seeds, episode_seeds(3, row_N, torch.full_like(row_N, k)))
        assert torch.equal(time_step.observation, fresh.reset_to(made.episode_seeds))


@pytest.mark.parametrize("make", [simulation, by_masks])
def test_termination_and_time_limit_are_separate(make: Callable[..., Drift]) -> None:
    made = make(Drift, 4, max_episode_steps=3)
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


def played_in_parts(made: Drift, steps: int = 60) -> list[Any]:
    """Return the results of the same steps in two parts, with partial resets in between."""
    seen: list[Any] = [made.reset()]
    mask_N = torch.arange(made.num_envs) % 3 == 0
    for k, action in enumerate(actions(type(made), steps, made.num_envs)):
        seen += [made.apply_action_where(action, mask_N), made.apply_action_where(action, ~mask_N), made.episode_seeds]
        seen += [made.reset_where(mask_N)] if k % 7 == 0 else []
        seen.append(copy_state(made.state_dict()))
    return seen


@every_kind
def test_partial_steps_and_resets_by_masks(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = played_in_parts(simulation(kind))
    assert first_difference(expected, played_in_parts(by_masks(kind))) is None
    monkeypatch.setattr("torch._inductor.compile", lambda graph, inputs: graph)
    assert first_difference(expected, played_in_parts(simulation(kind, compile=True))) is None


@pytest.mark.parametrize("make", [simulation, by_masks])
def test_skipped_environments_do_not_move_or_end(
    make: Callable[..., Drift],
) -> None:
    made = make(Drift, 2, max_episode_steps=3)
    made.reset()
    made.load_state_dict(made.state_dict() | {"steps": torch.tensor([5, 0])})  # as if the limit had been higher
    before = copy_state(made.state_dict())
    time_step = made.apply_action_where(torch.ones(2, dtype=torch.int64), torch.tensor([False, True]))
    assert time_step.valid.tolist() == [False, True]
    assert not time_step.truncated.any()
    after = made.state_dict()
    assert after["steps"].tolist() == [5, 1]
    assert (after["state"] == before["state"]).all(0).tolist() == [True, False]


class Faulty(Drift):
    """Returns states as rows."""

    def dynamics(self, state_2N: Tensor, push_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state_2N, *rest = super().dynamics(state_2N, push_N)
        return state_2N.T, *rest  # type: ignore[return-value]


def test_wrong_result_of_dynamics_raises_in_the_first_step() -> None:
    made = simulation(Faulty)
    made.reset()
    with pytest.raises(
        EnvironmentContractError, match=r"Faulty.dynamics: expected state .* \(2, 37\), got .* \(37, 2\)"
    ):
        made.apply_action(torch.zeros(N, dtype=torch.int64))


def test_render_without_draw_raises() -> None:
    with pytest.raises(NotImplementedError, match="Drift does not render; define draw"):
        simulation().render()


class Windy(Drift):
    """Has an option before those of the base class."""

    def __init__(self, wind: Any = (1.0, 2.0), **options: Any) -> None:
        self.wind = wind
        super().__init__(**options)


class Forgetful(Drift):
    """Does not store its option."""

    def __init__(self, num_envs: int = 1, wind: float = 0.0) -> None:
        super().__init__(num_envs)


def test_config_is_collected_from_attributes() -> None:
    base = {"num_envs": 2, "seed": 0, "max_episode_steps": None, "device": "cpu", "compile": False}
    assert Windy(num_envs=2, seed=0).config == {"wind": [1.0, 2.0], **base}
    assert Windy(**Windy(num_envs=2, seed=0).config).config == {"wind": [1.0, 2.0], **base}
    with pytest.raises(TypeError, match=r"Forgetful: keep the options \['wind'\] as attributes"):
        _ = Forgetful().config
    with pytest.raises(TypeError, match="num_envs"):
        Windy(n_envs=3)


def test_reset_where_before_reset_raises() -> None:
    with pytest.raises(RuntimeError, match=r"Drift: call reset\(\) before reset_where"):
        simulation().reset_where(torch.ones(N, dtype=torch.bool))


def test_action_with_gradient_builds_no_graph() -> None:
    made = simulation(Slide)
    made.reset()
    time_step = made.apply_action(torch.zeros(N, 1, requires_grad=True))
    assert not any(leaf.requires_grad for _, leaf in leaves(time_step))
    assert not made.state_dict()["state"].requires_grad


def test_action_of_another_precision_is_converted() -> None:
    for kind, precise, other in ((Slide, torch.float32, torch.float64), (Drift, torch.int64, torch.int32)):
        steps: list[TimeStep] = []
        for dtype in (precise, other):
            made = simulation(kind)
            made.reset()
            steps.append(made.apply_action(next(actions(kind, 1)).to(precise).to(dtype)))
        assert first_difference(*steps) is None


def test_invalid_action_raises_in_any_step() -> None:
    made = simulation()
    made.reset()
    made.apply_action(torch.zeros(N, dtype=torch.int64))
    before = made.state_dict()["state"].clone()
    for wrong in (-1, 3, 0.5):
        with pytest.raises(EnvironmentContractError, match="action"):
            made.apply_action(torch.full((N,), wrong))
    assert torch.equal(made.state_dict()["state"], before)


def test_transposed_is_contiguous() -> None:
    for shape in ((4, 1), (1, 5), (3, 10_000)):
        state_SN = torch.arange(shape[0] * shape[1]).reshape(shape)
        state_NS = transposed(state_SN)
        assert state_NS.is_contiguous()
        assert torch.equal(state_NS, state_SN.T)
