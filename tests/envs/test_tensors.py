"""Adapter for vector environments of torch tensors."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

import rein
from rein.testing import EnvironmentContract
from tests import programs

N = 4


class Counter:
    """Simulator whose state is a clock per environment. Like Isaac Lab, it returns its buffers and reuses them.

    Even clocks at the start terminate at 7, odd ones are truncated at 6. `final` is the source of final observations.
    """

    single_action_space = spaces.Box(-1.0, 1.0, (2,))

    def __init__(
        self, num_envs: int = N, final: str = "step", group: str | None = None, device: str = "cpu", **config: Any
    ) -> None:
        box = spaces.Box(-100.0, 100.0, (3,))
        self.single_observation_space = box if group is None else spaces.Dict({group: box, "critic": box})
        self.num_envs, self.device, self.final, self.group = num_envs, device, final, group
        if final == "step":
            config["auto_reset"] = False
        if final == "info":
            config["compute_final_obs"] = True
        self.cfg = SimpleNamespace(**config)
        self.reward, self.observation = torch.zeros(num_envs, device=device), torch.zeros(num_envs, 3, device=device)
        self.terminated = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self.truncated = self.terminated.clone()
        self.closed, self.action = 0, None

    def reset(self, *, seed: int | None = None, env_ids: Tensor | None = None) -> tuple[Any, dict[str, Any]]:
        if env_ids is None:
            self.generator = torch.Generator(self.device).manual_seed(seed or 0)
            self.clock, self.offset = torch.zeros(2, self.num_envs, device=self.device)
            env_ids = torch.arange(self.num_envs, device=self.device)
        self._begin(torch.zeros_like(self.terminated).index_fill(0, env_ids, True))
        return self._observe(), {}

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        self.action = action
        self.clock += 1.0
        self.reward[:] = self.clock
        even = self.offset < 50.0
        torch.logical_and(even, self.clock >= 7.0, out=self.terminated)
        torch.logical_and(~even, self.clock >= 6.0, out=self.truncated)
        info = {}
        if self.final == "info":
            info["final_obs"] = self._observe().clone() if self.group is None else dict(self._observe())
        if self.final != "step":
            self._begin(self.terminated | self.truncated)
        action.zero_()
        return self._observe(), self.reward, self.terminated, self.truncated, info

    def close(self) -> None:
        self.closed += 1

    def _begin(self, mask: Tensor) -> None:
        drawn = torch.rand(self.num_envs, generator=self.generator, device=self.device) * 90.0
        self.offset = torch.where(mask, drawn, self.offset)
        self.clock = torch.where(mask, 0.0, self.clock)

    def _observe(self) -> Any:
        values = torch.stack([self.clock, self.offset, self.clock], 1)
        if self.group is not None:
            return {self.group: values, "critic": values + 1.0}
        self.observation.copy_(values)
        return self.observation


SOURCES = ("step", "info", "previous")


def adapted(final: str, num_envs: int = N, seed: int | None = 0, **options: Any) -> rein.TensorEnvironment:
    chosen = {"final_observation": "previous"} if final == "previous" else {}
    return rein.TensorEnvironment(Counter(num_envs, final, **options), seed, **chosen)


class TestStep(EnvironmentContract):
    def make(self, num_envs: int, seed: int | None) -> Any:
        return adapted("step", num_envs, seed)


class TestInfo(EnvironmentContract):
    def make(self, num_envs: int, seed: int | None) -> Any:
        return adapted("info", num_envs, seed)


class TestPrevious(EnvironmentContract):
    def make(self, num_envs: int, seed: int | None) -> Any:
        return adapted("previous", num_envs, seed)


@pytest.mark.parametrize(("source", "last"), [("step", 1.0), ("info", 1.0), ("previous", 0.0)])
def test_final_observation_precedes_reset(source: str, last: float) -> None:
    environment = adapted(source)
    environment.reset()
    ends = 0
    for _ in range(30):
        time_step = environment.apply_action(torch.zeros(N, 2))
        ended = time_step.terminated | time_step.truncated
        ends += int(ended.sum())
        clock = torch.where(time_step.terminated, 7.0, 6.0)[ended]
        assert torch.equal(time_step.final_observation[ended, 0], clock - (1.0 - last))
        assert not time_step.observation[ended, 0].any()
    assert ends > N


@pytest.mark.parametrize("group", ["policy", "actor"])
def test_observation_groups_become_reserved_entries(group: str) -> None:
    environment = adapted("info", group=group)
    assert set(environment.single_observation_space.spaces) == {"observation", "critic_observation"}
    observation = environment.reset()
    assert torch.equal(observation["critic_observation"], observation["observation"] + 1.0)
    time_step = environment.apply_action(torch.zeros(N, 2))
    assert set(time_step.final_observation) == {"observation", "critic_observation"}


def test_single_group_is_the_observation() -> None:
    env = Counter(group="policy")
    env.single_observation_space = spaces.Dict({"policy": env.single_observation_space["policy"]})
    environment = rein.TensorEnvironment(env, 0)
    assert isinstance(environment.single_observation_space, spaces.Box)
    assert environment.reset().shape == (N, 3)


def test_finite_horizon_terminates() -> None:
    environment = rein.TensorEnvironment(Counter(final="none", is_finite_horizon=True), 0)
    assert environment.final_observation == "previous"
    environment.reset()
    steps = [environment.apply_action(torch.zeros(N, 2)) for _ in range(7)]
    assert not any(step.truncated.any() for step in steps)
    assert all((steps[5].terminated | steps[6].terminated).tolist())


class WholeReset(Counter):
    """Simulator that cannot reset single environments."""

    def reset(self, *, seed: int | None = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed)


@pytest.mark.parametrize(
    ("env", "options", "error", "message"),
    [
        (Counter(final="none"), {}, ValueError, "does not declare a final observation"),
        (Counter(final="none", auto_reset=True), {}, ValueError, "set cfg.auto_reset=False"),
        (Counter(final="none", compute_final_obs=False), {}, ValueError, "set cfg.compute_final_obs=True"),
        (Counter(), {"final_observation": "last"}, ValueError, 'give "step", "info" or "previous"'),
        (Counter, {}, TypeError, "got the class Counter; pass an instance"),
        (SimpleNamespace(num_envs=4, reset=print, step=print), {}, TypeError, "lacks device, single_observation_space"),
        (WholeReset(), {}, TypeError, "reset must have an argument env_ids"),
    ],
)
def test_environment_that_does_not_fit_is_refused(env: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        rein.TensorEnvironment(env, **options)


@pytest.mark.parametrize(
    ("position", "change", "message"),
    [
        (0, Tensor.numpy, "return observation as a tensor, got ndarray"),
        (1, Tensor.numpy, "return reward as a tensor, got ndarray"),
        (2, Tensor.float, "return terminated as a bool tensor, got torch.float32"),
    ],
)
def test_step_without_tensors_of_the_right_kind_raises(position: int, change: Any, message: str) -> None:
    class Wrong(Counter):
        def step(self, action: Tensor) -> Any:
            returned: list[Any] = [*super().step(action)]
            returned[position] = change(returned[position])
            return tuple(returned)

    environment = rein.TensorEnvironment(Wrong(), 0)
    environment.reset()
    with pytest.raises(rein.errors.EnvironmentContractError, match=message):
        environment.apply_action(torch.zeros(N, 2))


def test_values_of_the_first_action_are_checked() -> None:
    environment = adapted("step")
    environment.reset()
    with pytest.raises(rein.errors.EnvironmentContractError, match="expected finite numbers"):
        environment.apply_action(torch.full((N, 2), torch.nan))


def test_missing_final_observation_raises_on_the_host() -> None:
    environment = rein.TensorEnvironment(Counter(final="none"), 0, final_observation="info")
    environment.reset()
    with pytest.raises(rein.errors.EnvironmentContractError, match="info has no entry final_obs"):
        for _ in range(7):
            environment.apply_action(torch.zeros(N, 2))


class ManiSkill(Counter):
    """ManiSkill's vector environment: `final_observation` exists only in steps in which an episode ends."""

    ignore_terminations = False

    def __init__(self, auto_reset: bool) -> None:
        super().__init__(final="none")
        self.auto_reset = auto_reset

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed, env_ids=None if options is None else options["env_idx"])

    def step(self, action: Tensor) -> Any:
        begin, self._begin = self._begin, lambda mask: None  # type: ignore[method-assign]
        observation, reward, terminated, truncated, info = super().step(action)
        self._begin = begin  # type: ignore[method-assign]
        ended = terminated | truncated
        if self.auto_reset and ended.any():
            info["final_observation"] = observation.clone()
            self._begin(ended)
            observation = self._observe()
        return observation, reward, terminated, truncated, info


@pytest.mark.parametrize(("auto_reset", "source"), [(True, "info"), (False, "step")])
def test_maniskill(auto_reset: bool, source: str) -> None:
    environment, other = rein.TensorEnvironment(ManiSkill(auto_reset), 0), adapted("step")
    assert environment.final_observation == source
    assert torch.equal(environment.reset(), other.reset())
    for _ in range(20):
        time_steps = [adapter.apply_action(torch.zeros(N, 2)) for adapter in (environment, other)]
        assert all(torch.equal(one, same) for one, same in zip(time_steps[0][:6], time_steps[1][:6], strict=True))


def test_close_reaches_the_environment_once() -> None:
    environment = adapted("step")
    environment.close()
    environment.close()
    assert environment.env.closed == 1


def test_environment_is_not_stepped_after_an_exception_or_its_end() -> None:
    class Breaks(Counter):
        def step(self, action: Tensor) -> Any:
            if (self.clock == 2.0).all():
                raise ZeroDivisionError("physics")
            return super().step(action)

    environment, action = rein.TensorEnvironment(Breaks(), 0), torch.zeros(N, 2)
    environment.reset()
    with pytest.raises(ZeroDivisionError):
        for _ in range(3):
            environment.apply_action(action)
    with pytest.raises(RuntimeError, match=r"call reset\(\).*ZeroDivisionError: physics"):
        environment.apply_action(action)
    environment.reset()
    environment.apply_action(action)
    environment.close()
    for call in (environment.reset, lambda: environment.apply_action(action)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


ON_A_DEVICE = """
import json, sys, torch
sys.path[:0] = [{training!r}, {here!r}]
from stand_in_device import NAME, stand_in, waits
from test_tensors import N, SOURCES, adapted

report = {{}}
with stand_in():
    for source in SOURCES:
        environment = adapted(source, group="policy", device=NAME)
        environment.reset()
        action = torch.zeros(N, 2, device=NAME)
        waits.clear()
        for _ in range(20):
            time_step = environment.apply_action(action)
        report[source] = {{name: count for name, count in waits.items() if count}}
        assert time_step.final_observation["critic_observation"].device.type == NAME
print(json.dumps(report))
"""


def test_step_on_a_device_copies_nothing_to_the_host() -> None:
    here = Path(__file__).parent
    program = ON_A_DEVICE.format(training=str(here.parent / "training"), here=str(here))
    report = json.loads(programs.run("-c", program).stdout.splitlines()[-1])
    assert report == {"step": {"aten::nonzero": 20}, "info": {}, "previous": {}}  # reset(env_ids=) takes indices
