"""Rollouts as programs: results, events and saved states equal those of ordinary steps."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rein
import rein.accelerate
from rein import accelerators
from rein.accelerate import compiled
from rein.accelerate.rollout_ahead import RolloutAhead
from rein.envs import Acrobot, CartPole, Gridworld, MountainCar, Navigation, Pendulum
from rein.networks.recurrent import GRU
from rein.ops.trees import leaves
from rein.schedules import linear
from tests.captures import Repeated, Traced

T = 4  # steps of a rollout
MAKE: dict[str, Any] = {
    "CartPole": functools.partial(CartPole, 3, max_episode_steps=6),
    "Pendulum": functools.partial(Pendulum, 3, max_episode_steps=5),
    "Acrobot": functools.partial(Acrobot, 3, max_episode_steps=5),
    "MountainCar": functools.partial(MountainCar, 3, max_episode_steps=5),
    "Gridworld": functools.partial(Gridworld, 3, max_episode_steps=5),
    "Navigation": functools.partial(Navigation, 2, 2, early_leave=True, max_episode_steps=5),
}


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs on the CPU, without a compiler."""
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setitem(compiled.CAPTURES, "cpu", Repeated())


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[RolloutAhead]:
    """The parts of the loops that run ahead."""
    created: list[RolloutAhead] = []
    original = accelerators._finders["rollout_program"]

    def find(*arguments: Any) -> Any:
        if (part := original(*arguments)) is not None:
            created.append(part)
        return part

    monkeypatch.setitem(accelerators._finders, "rollout_program", find)
    return created


def loop_of(name: str = "CartPole", kind: Any = rein.PPO, store: Any = None, **options: Any) -> rein.Loop:
    more = {} if kind is rein.A2C else {"minibatches": 2, "update_epochs": 1}
    environment = MAKE[name](seed=0)
    settings: dict[str, Any] = {"rollout_steps": T, "hidden": (8,), "compile": True, "seed": 0, **more, **options}
    return rein.training_loop(kind(environment, **settings), environment, store, iterations=2 * T, seed=0)


def ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(accelerators._finders, "rollout_program", lambda *arguments: None)


def result_of(loop: rein.Loop) -> dict[str, Any]:
    """Return the saved state without the time."""
    state = loop.state_dict()
    del state["clocks"]["seconds"], state["times"], state["epoch_began"]
    state["parts"].pop("store", None)  # compared by its trajectories
    for record in state["history"]:
        del record["seconds"]
    return state


def assert_same(one: Any, other: Any) -> None:
    pairs = list(zip(leaves(one), leaves(other), strict=True))
    assert len(pairs) > 10
    for (path, a), (other_path, b) in pairs:
        assert path == other_path
        if isinstance(a, torch.Tensor):
            assert torch.equal(torch.nan_to_num(a, 0.125), torch.nan_to_num(b, 0.125)), path
        else:
            np.testing.assert_array_equal(a, b, path)


@pytest.mark.default_cases("PPO-CartPole", "A2C-Pendulum", "PPO-Navigation")
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("kind", [rein.PPO, rein.A2C], ids=["PPO", "A2C"])
def test_run_with_programs_equals_ordinary_run(
    name: str, kind: Any, ahead: list[RolloutAhead], monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained() -> tuple[Any, Any]:
        store = rein.MemoryStore()
        loop = loop_of(name, kind, store)
        loop.run(epochs=4)
        return result_of(loop), [(each.fields, each.episodes, each.next_observation) for each in store.trajectories]

    state, trajectories = trained()
    assert ahead[0].rollouts == 7  # all but the first
    ordinary(monkeypatch)
    expected, expected_trajectories = trained()
    assert_same(state, expected)
    for one, other in zip(trajectories, expected_trajectories, strict=True):
        assert_same(one, other)


SCHEDULES: dict[str, Any] = {"learning_rate": linear(1e-2, 1e-3, env_steps=100)}
CLIPS: dict[str, Any] = {"clip": linear(0.3, 0.1, updates=20), "entropy_coefficient": linear(0.1, 0.01, updates=20)}


def replayed(name: str, kind: Any, capture: Any, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Train and return the parameters: programs are replayed in the last three of five rollouts."""
    monkeypatch.setitem(compiled.CAPTURES, "cpu", capture)
    loop = loop_of(name, kind, **SCHEDULES, **(CLIPS if kind is rein.PPO else {}))
    loop.run(epochs=6, iterations=T)
    assert capture.replays > 6
    return [*loop.parts["agent"].networks.parameters()]


@pytest.mark.default_cases("PPO-CartPole")
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("kind", [rein.PPO, rein.A2C], ids=["PPO", "A2C"])
def test_replays_of_recorded_operations_equal_the_functions(
    name: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = replayed(name, kind, Repeated(), monkeypatch)
    for one, other in zip(replayed(name, kind, Traced(), monkeypatch), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by the compiler
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("kind", [rein.PPO, rein.A2C], ids=["PPO", "A2C"])
def test_compiled_steps_are_close_to_the_functions(name: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = replayed(name, kind, Repeated(), monkeypatch)
    monkeypatch.setattr(compiled, "FUSED", {"cpu"})
    for one, other in zip(replayed(name, kind, Repeated(), monkeypatch), expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-4)


def test_events_and_visible_values_equal_those_of_ordinary_steps(
    ahead: list[RolloutAhead], monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen() -> list[Any]:
        loop, lines = loop_of(), []
        for name in ("epoch_started", "iteration_started", "iteration_completed", "epoch_completed", "epoch_ended"):
            loop.event(name).attach(lambda state, name=name: lines.append((name, state.clocks.as_dict()["episodes"])))

        @loop.iteration_completed
        def read(state: rein.State) -> None:
            step = state.step_state
            values = step.transition.reward, step.action, step.observation, step.time_step.terminated, step.extras
            lines.append([leaf.tolist() for _, leaf in leaves(values)])
            lines.append((state.clocks.env_steps, state.clocks.updates, sorted(step.metrics)))

        loop.run(epochs=3)
        return lines

    lines = seen()
    assert ahead[0].rollouts == 5
    ordinary(monkeypatch)
    assert lines == seen()


@pytest.mark.parametrize("halt", ["epoch", "loop"])
@pytest.mark.parametrize("t", range(T))
def test_halt_within_a_rollout(t: int, halt: str, ahead: list[RolloutAhead], monkeypatch: pytest.MonkeyPatch) -> None:
    def halted() -> Any:
        loop = loop_of()

        @loop.iteration_completed(once=3 * T + t + 1)
        def stop(state: rein.State) -> None:
            state.halt_epoch() if halt == "epoch" else state.halt_loop()

        loop.run(epochs=3)
        if halt == "loop":
            loop.run(epochs=3)
        return result_of(loop)

    state = halted()
    assert ahead[0].rollouts >= 3
    ordinary(monkeypatch)
    assert_same(state, halted())


@pytest.mark.parametrize("t", range(T))
def test_save_and_resume_within_a_rollout(
    t: int, ahead: list[RolloutAhead], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Any] = []
    loop = loop_of()

    @loop.iteration_completed(once=2 * T + t + 1)
    def save(state: rein.State) -> None:
        state.request(lambda state: saved.append(torch.load(written(loop, tmp_path), weights_only=True)))

    loop.run(epochs=3)
    resumed = loop_of()
    resumed.load_state_dict(saved[0])
    resumed.run(epochs=3)
    assert all(part.rollouts for part in ahead)
    ordinary(monkeypatch)
    plain = loop_of()
    plain.run(epochs=3)
    for one in (loop, resumed):
        assert_same(result_of(plain)["parts"], result_of(one)["parts"])


def written(loop: rein.Loop, folder: Path) -> Path:
    torch.save(loop.state_dict(), folder / "state.pt")
    return folder / "state.pt"


def load_parameters(agent: Any) -> None:
    with torch.no_grad():
        for parameter in agent.networks.parameters():
            parameter.mul_(0.5)


@pytest.mark.parametrize(
    "change",
    [load_parameters, lambda agent: setattr(agent, "entropy_coefficient", 0.1), lambda agent: agent.policy()],
    ids=["parameters", "option", "nothing"],
)
@pytest.mark.parametrize("t", range(T))
def test_change_within_a_rollout(
    t: int, change: Any, ahead: list[RolloutAhead], monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed() -> Any:
        loop = loop_of()
        loop.iteration_completed(once=2 * T + t + 1)(lambda state: change(loop.parts["agent"]) and None)
        loop.run(epochs=3)
        return result_of(loop)

    state = changed()
    assert ahead[0].rollouts == 5
    ordinary(monkeypatch)
    assert_same(state, changed())


def test_rollout_that_an_epoch_would_cut_is_an_ordinary_one(ahead: list[RolloutAhead]) -> None:
    loop = loop_of()
    loop.run(epochs=4, iterations=T + 2)
    assert 1 <= ahead[0].rollouts <= 4


HANDLED = ("action_selected", "action_applied", "observation_recorded", "model_optimized", "trajectory_persisted")


@pytest.mark.parametrize("name", [*HANDLED, "episodes_completed"])
def test_handler_of_each_step_needs_ordinary_steps(name: str, ahead: list[RolloutAhead]) -> None:
    loop, seen = loop_of(), []
    loop.event(name).attach(lambda state: seen.append(state.iteration))
    loop.run(epochs=2)
    assert ahead[0].rollouts == 0
    assert seen


def test_handler_that_is_attached_within_a_rollout_sees_all_further_steps(ahead: list[RolloutAhead]) -> None:
    loop, seen = loop_of(), []

    @loop.iteration_completed(once=T + 2)
    def attach(state: rein.State) -> None:
        loop.action_applied(lambda state: seen.append(state.iteration))

    loop.run(epochs=1)
    assert ahead[0].rollouts == 1
    assert seen == list(range(T + 2, 2 * T))


OPTIONS: dict[str, Any] = {
    "state_to_trajectory": {"store": rein.MemoryStore(), "state_to_trajectory": lambda state: {}},
    "strict": {"strict": True},
    "debug": {"debug": True},
    "episodic": {"episodic": True},
}
AGENT: dict[str, Any] = {
    "target_kl": {"target_kl": 1.0},
    "segments": {"segments": rein.agents.PrioritizedSegments()},
    "guard": {"guard": lambda metrics, gradients: True},
    "core": {"core": functools.partial(GRU, features=8)},
    "compile=False": {"compile": False},
}


@pytest.mark.parametrize("name", [*OPTIONS, *AGENT, "wrapper", "host", "hook", "on_gradients", "subclass"])
def test_work_on_the_host_needs_ordinary_steps(name: str, ahead: list[RolloutAhead]) -> None:
    class Watched(CartPole):
        def watch(self, observation: torch.Tensor) -> None:
            pass

    environment: Any = Watched(3, seed=0) if name == "subclass" else CartPole(3, seed=0)
    if name == "host":
        environment = rein.make("CartPole-v1", 3, seed=0)
    if name == "wrapper":
        environment = rein.envs.wrappers.TimeLimit(environment, 5)
    settings = {"rollout_steps": T, "hidden": (8,), "compile": True, "seed": 0, "minibatches": 2}
    agent = rein.PPO(environment, **{**settings, **AGENT.get(name, {})})
    if name == "hook":
        agent.networks.register_forward_hook(lambda *arguments: None)
    if name == "on_gradients":
        agent.learners["networks"].on_gradients = lambda parameters, gradients: None
    rein.training_loop(agent, environment, **OPTIONS.get(name, {})).run(epochs=2, iterations=2 * T)
    assert sum(part.rollouts for part in ahead) == 0


def test_learners_in_several_processes_need_ordinary_steps(ahead: list[RolloutAhead]) -> None:
    loop = loop_of()
    loop.run(epochs=1)
    assert ahead[0]._is_plain()
    loop.parts["agent"].learners["networks"].processes = 2
    assert not ahead[0]._is_plain()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by the compiler
@pytest.mark.parametrize("name", ["cartpole", "acrobot", "pendulum_ppo", "navigation"])
def test_default_recipes_run_ahead(name: str, ahead: list[RolloutAhead]) -> None:
    getattr(rein.recipes, name)(None, seed=0, epochs=2, compile=True).run()
    assert ahead[0].rollouts > 0
