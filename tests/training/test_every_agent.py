"""Tests of all agents under torch's global settings and with non-finite data."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.agents.a2c import A2C
from rein.agents.awac import AWAC
from rein.agents.bc import BC
from rein.agents.ddpg import DDPG
from rein.agents.discrete_sac import DiscreteSAC
from rein.agents.dqn import DQN
from rein.agents.impala import IMPALA
from rein.agents.iql import IQL
from rein.agents.iqn import IQN
from rein.agents.ppo import PPO
from rein.agents.pqn import PQN
from rein.agents.q_learning import QLearning
from rein.agents.recurrent_dqn import RecurrentDQN
from rein.agents.sac import SAC
from rein.agents.td3 import TD3
from rein.envs.cartpole import CartPole
from rein.envs.gridworld import Gridworld
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.envs.pendulum import Pendulum
from rein.episodes.finite import FiniteData
from rein.episodes.random_policy import RandomPolicy
from rein.errors import NonFiniteError
from rein.loop.state import State
from rein.networks.recurrent import GRU
from rein.ops.trees import read_together
from rein.testing.stateful import first_difference

ON_POLICY = {"rollout_steps": 8, "hidden": (8,)}
REPLAY = {"hidden": (8,), "batch_size": 8, "learning_starts": 16, "capacity": 200, "train_frequency": 4}

AGENTS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "PPO": (PPO, {**ON_POLICY, "update_epochs": 2, "minibatches": 2, "normalize_observation": True}, CartPole),
    "PPO continuous": (PPO, {**ON_POLICY, "update_epochs": 2, "minibatches": 2, "normalize_reward": True}, Pendulum),
    "PPO recurrent": (
        PPO,
        {**ON_POLICY, "update_epochs": 1, "minibatches": 2, "core": functools.partial(GRU, features=4)},
        CartPole,
    ),
    "A2C": (A2C, ON_POLICY, CartPole),
    "IMPALA": (IMPALA, ON_POLICY, CartPole),
    "PQN": (PQN, {**ON_POLICY, "update_epochs": 1, "minibatches": 2}, CartPole),
    "DQN": (DQN, {**REPLAY, "prioritized": True, "n_step": 3}, CartPole),
    "IQN": (IQN, REPLAY, CartPole),
    "RecurrentDQN": (RecurrentDQN, {**REPLAY, "sequence_length": 4, "burn_in": 2}, CartPole),
    "DiscreteSAC": (DiscreteSAC, REPLAY, CartPole),
    "SAC": (SAC, REPLAY, Pendulum),
    "TD3": (TD3, REPLAY, Pendulum),
    "DDPG": (DDPG, REPLAY, Pendulum),
    "IQL": (IQL, REPLAY, Pendulum),
    "AWAC": (AWAC, REPLAY, Pendulum),
    "BC": (BC, REPLAY, Pendulum),
    "QLearning": (QLearning, {}, Gridworld),
}
each_agent = pytest.mark.parametrize("name", AGENTS)


def build(name: str, change: Callable[[Any], Any] = lambda environment: environment) -> tuple[Any, Any]:
    kind, options, environment_kind = AGENTS[name]
    environment = change(environment_kind(num_envs=4, seed=1))
    return kind(environment.single_observation_space, environment.single_action_space, seed=0, **options), environment


def learned(agent: Any) -> dict[str, torch.Tensor]:
    return {"table": agent.table} if isinstance(agent, QLearning) else dict(agent.networks.named_parameters())


def train(agent: Any, environment: Any, **options: Any) -> dict[str, torch.Tensor]:
    rein.train(agent, environment, epochs=2, iterations=16, **options)
    return learned(agent)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SETTINGS: dict[str, Callable[[], Any]] = {
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
}


@pytest.mark.default_cases(every=5)
@each_agent
@pytest.mark.parametrize("setting", SETTINGS)
def test_global_torch_defaults_do_not_change_training(name: str, setting: str) -> None:
    expected = train(*build(name))
    with SETTINGS[setting]():
        agent, environment = build(name)
        found = train(agent, environment)
        result = rein.evaluate(agent.policy(), environment, 4, max_episode_steps=20)
        assert result.episode_return.dtype is torch.float64 and result.episode_return.device.type == "cpu"
    assert first_difference(expected, found) is None


@pytest.mark.default_cases("PPO", "A2C", "TD3", "QLearning", "PPO recurrent")
@each_agent
def test_parts_built_in_inference_mode_can_be_trained(name: str) -> None:
    expected = train(*build(name))
    with torch.inference_mode():
        agent, environment = build(name)
    assert first_difference(expected, train(agent, environment)) is None
    with torch.inference_mode():
        rein.evaluate(agent.policy(deterministic=False), environment, 4, max_episode_steps=20)
    train(agent, environment)


def test_training_in_inference_mode_raises() -> None:
    agent, environment = build("PPO")
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        train(agent, environment)


@pytest.mark.default_cases(every=7)
@each_agent
@pytest.mark.parametrize("setting", ["float64", "meta", "inference"])
def test_load_agent_under_global_settings(name: str, setting: str, tmp_path: Any) -> None:
    agent, environment = build(name)
    rein.train(agent, environment, epochs=1, iterations=16)
    rein.save(agent, tmp_path / "agent.h5")
    with torch.inference_mode() if setting == "inference" else SETTINGS[setting]():
        loaded = rein.load_agent(tmp_path / "agent.h5")
    assert first_difference(dict(learned(agent)), dict(learned(loaded))) is None
    train(loaded, environment)


def broken(field: str, value: float, at: int) -> Callable[[Any], Any]:
    """Return a function that sets a field of environment 2 to `value` in step `at`."""

    def change(environment: Any) -> Any:
        steps, apply_action = 0, environment.apply_action

        def apply(action: Any) -> Any:
            nonlocal steps
            steps += 1
            step = apply_action(action)
            if steps - 1 == at:
                fields = ("observation", "final_observation") if field == "observation" else (field,)
                for name in fields:
                    changed = getattr(step, name).clone()
                    changed[2] = value
                    step = step._replace(**{name: changed})
            return step

        environment.apply_action = apply
        return environment

    return change


FAULTS = [("reward", torch.nan, 0), ("reward", torch.inf, 19), ("reward", -torch.inf, 0)]
FAULTS += [("observation", torch.nan, 0), ("observation", torch.nan, 19)]


@pytest.mark.default_cases(every=5)
@each_agent
@pytest.mark.parametrize(("field", "value", "at"), FAULTS)
def test_non_finite_data_raises_before_learning(name: str, field: str, value: float, at: int) -> None:
    if name == "QLearning" and field == "observation":
        pytest.skip("its observations are integers")
    agent, environment = build(name, broken(field, value, at))
    epoch, iteration = divmod(at, 16)
    place = f"epoch {epoch + 1}, iteration {iteration}, vector step {at}"
    with pytest.raises(NonFiniteError, match=rf"{field} of environment 2 is {value}.*{place}.*guard_data"):
        train(agent, environment)
    assert all(bool(value.isfinite().all()) for value in learned(agent).values())


class Samples(gymnasium.Env[Any, Any]):
    """Environment with sampled observations and episodes of five steps."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.steps += 1
        return self.observation_space.sample(), 1.0, self.steps == 5, False, {}


@pytest.mark.default_cases(every=4)
@pytest.mark.parametrize("name", ["PPO", "DQN", "QLearning"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("kind", ["Discrete", "MultiDiscrete"])
def test_integer_spaces_may_be_unsigned(name: str, dtype: Any, kind: str) -> None:
    """The values exceed the range of uint8."""

    def make() -> Samples:
        discrete = spaces.Discrete(100, start=dtype(150), dtype=dtype)
        several = spaces.MultiDiscrete([3, 100], dtype=dtype, start=np.array([0, 150], dtype))
        return Samples(discrete if kind == "Discrete" else several, spaces.Discrete(3, start=dtype(1), dtype=dtype))

    agent_kind, options, _ = AGENTS[name]
    options = {key: value for key, value in options.items() if key != "normalize_observation"}
    environment = GymnasiumEnvironment(make, num_envs=3, seed=0)
    agent = agent_kind(environment.single_observation_space, environment.single_action_space, seed=0, **options)
    train(agent, environment)
    assert agent.updates
    rein.evaluate(agent.policy(), environment, 3)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_a_float64_reward_beyond_float32_counts_as_infinite() -> None:
    class Huge(Samples):
        def step(self, action: Any) -> Any:
            observation, _, *rest = super().step(action)
            return observation, 1e300 if self.steps == 3 else 1.0, *rest

    box = spaces.Box(-1.0, 1.0, (2,))
    environment = GymnasiumEnvironment(lambda: Huge(box, spaces.Discrete(2)), num_envs=2, seed=0)
    agent = PPO(environment.single_observation_space, environment.single_action_space, seed=0, **ON_POLICY)
    with pytest.raises(NonFiniteError, match="reward of environment 0 is inf"):
        train(agent, environment)


def test_invalid_rows_may_have_any_values() -> None:
    """The observation of an invalid row is checked when a valid step begins with it."""

    def hide(environment: Any, until: int) -> Any:
        steps, apply_action = 0, environment.apply_action

        def apply(action: Any) -> Any:
            nonlocal steps
            steps += 1
            step = apply_action(action)
            if steps > until:
                return step
            hidden_N = torch.arange(environment.num_envs) == 1
            blank = torch.where(hidden_N[:, None], torch.nan, step.observation)
            step = step._replace(observation=blank, final_observation=blank)
            return step._replace(reward=torch.where(hidden_N, torch.nan, step.reward), valid=~hidden_N)

        environment.apply_action = apply
        return environment

    agent, environment = build("DQN", lambda inner: hide(inner, 32))
    train(agent, environment)
    assert all(bool(value.isfinite().all()) for value in learned(agent).values())
    agent, environment = build("DQN", lambda inner: hide(inner, 8))
    with pytest.raises(NonFiniteError, match=r"observation of environment 1 is nan.*vector step 8\b"):
        train(agent, environment)


@pytest.mark.parametrize("name", ["PPO", "DQN"])
def test_non_finite_reward_of_handler_raises(name: str) -> None:
    agent, environment = build(name)
    loop = rein.training_loop(agent, environment, epochs=1, iterations=16)

    @loop.action_applied
    def shape(state: Any) -> None:
        known = state.step_state
        reward = torch.full_like(known.transition.reward, -1.0).log()
        state.step_state = known._replace(transition=known.transition._replace(reward=reward))

    with pytest.raises(NonFiniteError, match=r"reward.* of environment 0 is nan"):
        loop.run()


def test_nan_in_reset_observation_raises() -> None:
    agent, environment = build("PPO")
    reset = environment.reset
    environment.reset = lambda seed=None: reset(seed) * torch.nan
    with pytest.raises(NonFiniteError, match=r"observation of environment 0 is nan .* after a reset"):
        train(agent, environment)


@pytest.mark.default_cases(every=2)
@each_agent
def test_non_finite_loss_or_gradient_raises_before_update(name: str) -> None:
    """The data is finite, but one parameter is not, as after a too large update."""
    if name == "QLearning":
        pytest.skip("it has no gradient")
    agent, environment = build(name)
    train(agent, environment)
    parameter = next(iter(dict(next(iter(agent.learners.values())).networks.named_parameters()).values()))
    with torch.no_grad():
        parameter[...] = torch.nan
    bad = parameter.numel()
    with pytest.raises((NonFiniteError, ValueError, RuntimeError)) as raised:
        agent.learn(1) if hasattr(agent, "learn") else train(agent, environment)
    if raised.type is NonFiniteError:
        assert "was not applied" in str(raised.value) or "of environment" in str(raised.value)
    assert sum(int((~value.isfinite()).sum()) for value in learned(agent).values()) == bad


def test_parameters_are_checked_at_end_of_epoch() -> None:
    agent, environment = build("QLearning")
    loop = rein.training_loop(agent, environment, epochs=3, iterations=16)

    @loop.iteration_completed(once=20)
    def set_infinite(state: Any) -> None:
        agent.table[0, 0] = torch.inf

    with pytest.raises(NonFiniteError, match="parameter table of QLearning"):
        loop.run()
    assert loop.state.epoch == 2


def test_non_finite_offline_update_raises(tmp_path: Any) -> None:
    agent, environment = build("SAC")
    train(agent, environment)
    with torch.no_grad():
        next(agent.networks.critics.parameters())[...] = torch.inf
    with pytest.raises(NonFiniteError, match="Critics was not applied"):
        rein.offline_loop(agent, epochs=1, iterations=2).run()


@pytest.mark.parametrize("fault", ["reward", "observation"])
def test_evaluation_of_non_finite_data_raises(fault: str) -> None:
    agent, environment = build("PPO", broken(fault, torch.nan, 3))
    with pytest.raises(NonFiniteError, match=f"{fault} of environment 2"):
        rein.evaluate(agent.policy(), environment, 4)


def test_random_policy_accepts_nan_observations() -> None:
    _, environment = build("PPO", broken("observation", torch.nan, 3))
    policy = RandomPolicy(environment.single_action_space, seed=0)
    assert rein.evaluate(policy, environment, 4).episode_return.isfinite().all()


@pytest.mark.parametrize("check_finite", [True, False])
@pytest.mark.parametrize("kind", [PPO, DQN])
def test_check_finite_option_disables_checks(kind: Any, check_finite: bool) -> None:
    agent, environment = build(kind.__name__, broken("reward", torch.nan, 19))
    expected = pytest.raises(NonFiniteError) if check_finite else contextlib.nullcontext()
    with (
        expected,
        contextlib.suppress(ValueError, RuntimeError),
    ):  # agents with NaN parameters may fail to act
        train(agent, environment, check_finite=check_finite)
    assert check_finite == all(bool(value.isfinite().all()) for value in learned(agent).values())


def test_accumulated_flags_are_read_at_end_of_epoch() -> None:
    """On a GPU, a check of each step would wait for the device."""
    _, environment = build("DQN")
    observation, state, finite = environment.reset(), State(), FiniteData()
    step = environment.apply_action(torch.zeros(4, dtype=torch.int64))
    hidden = torch.tensor([True, False, True, True])
    for reward, valid, found in [
        (step.reward, step.valid, False),
        (torch.full((4,), torch.inf), torch.zeros(4, dtype=torch.bool), False),
        (torch.tensor([1.0, torch.inf, 3e38, 1.0]), hidden, False),
        (torch.tensor([1.0, 3e38, -torch.inf, 1.0]), hidden, True),
    ]:
        finite._accumulate(reward, observation * 3e38, valid)
        with pytest.raises(NonFiniteError, match="environment 2") if found else contextlib.nullcontext():
            read_together(finite.reads(state))
