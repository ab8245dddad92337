"""Unusual uses of agents: seeds, loaded states, assigned options, and error messages."""

from __future__ import annotations

import json
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.errors import CheckpointError
from rein.schedules import Schedule
from rein.testing.stateful import check_plain, copy_state, first_difference
from rein.types import Transition

SMALL: dict[str, Any] = {"hidden": (8,), "batch_size": 8, "learning_starts": 8, "capacity": 100}
BOX = spaces.Box(-1.0, 1.0, (1,), np.float32)


def made(kind: Any, environment: Any, **options: Any) -> Any:
    known = {} if kind in (rein.PPO, rein.PQN) else SMALL
    given = environment.single_observation_space, environment.single_action_space
    return kind(*given, **{**known, **options})


def rows(count: int, first: int = 0) -> Transition:
    """Return transitions of one episode. Observations count steps, rewards are 1."""
    observation = torch.arange(first, first + count, dtype=torch.float32).unsqueeze(1)
    no = torch.zeros(count, dtype=torch.bool)
    return Transition(observation, torch.zeros(count, 1), torch.ones(count), no, no, observation + 1.0, ~no, {})


@pytest.mark.parametrize("kind", [rein.PPO, rein.PQN, rein.DQN, rein.SAC])
def test_policy_created_before_seeding_follows_the_agent(kind) -> None:
    make = rein.envs.Pendulum if kind is rein.SAC else rein.envs.CartPole
    environment = make(num_envs=2, seed=0)
    agent = made(kind, environment)
    policy = agent.policy()
    rein.train(agent, environment, env_steps=128, seed=0)
    assert agent.updates
    observation = make(num_envs=5, seed=1).reset()
    assert torch.equal(policy.select_action(observation)[0], agent.policy().select_action(observation)[0])


LEARNERS = [rein.PPO, rein.PQN, rein.DQN, rein.SAC, rein.QLearning]
WORLDS: dict[Any, Any] = {rein.SAC: rein.envs.Pendulum, rein.QLearning: rein.envs.Gridworld}


def fresh(kind: Any, **options: Any) -> tuple[Any, Any]:
    """Return an agent and its environment, without seeds."""
    environment = WORLDS.get(kind, rein.envs.CartPole)(num_envs=2)
    spaces_of = environment.single_observation_space, environment.single_action_space
    return kind(*spaces_of, **(options if kind is rein.QLearning else made_options(kind) | options)), environment


def made_options(kind: Any) -> dict[str, Any]:
    return SMALL if kind in (rein.DQN, rein.SAC) else {"rollout_steps": 16, "hidden": (8,)}


def learned(agent: Any) -> dict[str, Any]:
    return (
        {"table": agent.table.clone()} if isinstance(agent, rein.QLearning) else copy_state(agent.networks.state_dict())
    )


@pytest.mark.parametrize("kind", LEARNERS)
def test_loaded_agent_without_seed_continues_training(kind, tmp_path) -> None:
    agent, environment = fresh(kind)
    rein.train(agent, environment, env_steps=64)
    rein.save(agent, tmp_path / "agent.h5")
    rein.load(agent, tmp_path / "agent.h5")
    other, environment = fresh(kind)
    rein.load(other, tmp_path / "agent.h5")
    rein.training_loop(other, environment, seed=3)
    assert first_difference(learned(agent), learned(other)) is None
    assert torch.equal(agent.state_dict()["generator"], other.state_dict()["generator"])
    rein.train(other, environment, env_steps=64)
    assert other.env_steps == 128


@pytest.mark.parametrize("kind", LEARNERS)
def test_loaded_weights_are_kept_when_the_seed_is_set(kind, tmp_path) -> None:
    """The seed then determines the rest of the run."""
    first, environment = fresh(kind)
    rein.train(first, environment, env_steps=64)
    rein.save(first, tmp_path / "agent.h5")
    ended = []
    for _ in range(2):
        agent, environment = fresh(kind)
        rein.load(agent, tmp_path / "agent.h5", only="table" if kind is rein.QLearning else "networks")
        loop = rein.training_loop(agent, environment, seed=3, iterations=32)
        assert agent.seed == 3
        assert first_difference(learned(first), learned(agent)) is None
        loop.run()
        ended.append(learned(agent))
    assert first_difference(*ended) is None
    assert first_difference(learned(first), ended[0]) is not None


@pytest.mark.parametrize("kind", LEARNERS)
def test_failed_load_does_not_change_the_agent(kind, tmp_path) -> None:
    (tmp_path / "other.h5").write_bytes(b"")
    rein.save(fresh(rein.PPO if kind is rein.SAC else rein.SAC)[0], tmp_path / "other.h5")
    ended = []
    for fails in (False, True):
        agent, environment = fresh(kind)
        if fails:
            with pytest.raises(CheckpointError):
                rein.load(agent, tmp_path / "other.h5", strict=False)
        rein.train(agent, environment, env_steps=64, seed=3)
        ended.append(learned(agent))
    assert first_difference(*ended) is None


def test_load_keeps_the_seed(tmp_path) -> None:
    rein.save(fresh(rein.PPO, seed=0)[0], tmp_path / "agent.h5")
    agent, _ = fresh(rein.PPO, seed=1)
    rein.load(agent, tmp_path / "agent.h5")
    assert agent.config["seed"] == agent.seed == 1


def test_class_attribute_hiding_an_option_is_rejected() -> None:
    class Mixin:
        gamma = 0.5

    with pytest.raises(TypeError, match="gamma hides an option of NetworkAgent"):
        type("Mixed", (Mixin, rein.PPO), {})
    with pytest.raises(TypeError, match="gamma hides an option of QLearning"):
        type("Mine", (rein.QLearning,), {"gamma": 0.5})


def test_option_is_missing_before_construction() -> None:
    class Early(rein.PPO):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.before = getattr(self, "gamma", "none")
            super().__init__(*arguments, **options)

    environment = rein.envs.CartPole(1)
    agent = Early(environment.single_observation_space, environment.single_action_space)
    assert (agent.before, agent.gamma) == ("none", 0.99)


@pytest.mark.parametrize("kind", [rein.PPO, rein.PQN])
def test_assigned_gamma_reaches_the_reward_normalizer(kind) -> None:
    agent, environment = fresh(kind, normalize_reward=True)
    agent.gamma = 0.5
    rein.train(agent, environment, env_steps=64, seed=0)
    assert agent.reward_normalizer.gamma == 0.5


ADJUSTED: list[tuple[Any, str, Any, Any]] = [
    (rein.PPO, "gamma", 0.5, 1.5),
    (rein.PPO, "learning_rate", 5e-4, -1.0),
    (rein.PPO, "gae_lambda", 0.5, "1"),
    (rein.PPO, "update_epochs", 2, 0.1),
    (rein.PPO, "minibatches", 2, 0),
    (rein.PPO, "value_clip", 0.2, -1.0),
    (rein.PPO, "target_kl", None, float("nan")),
    (rein.PPO, "normalize_advantage", False, "no"),
    (rein.PPO, "segments", None, 3),
    (rein.A2C, "gae_lambda", 0.5, 2.0),
    (rein.IMPALA, "rho_clip", 2.0, 0.0),
    (rein.PQN, "q_lambda", 0.5, 2.0),
    (rein.PQN, "epsilon", 0.3, 1.1),
    (rein.PQN, "update_epochs", 2, 0),
    (rein.QLearning, "gamma", 0.5, -0.1),
    (rein.DQN, "gamma", 0.5, 1.1),
    (rein.DQN, "batch_size", 4, 0.5),
]


@pytest.mark.parametrize(("kind", "name", "value", "invalid"), ADJUSTED)
def test_assigned_options_are_checked_and_keep_the_config(kind, name, value, invalid) -> None:
    """The config must not change, since resuming compares it with the checkpoint."""
    environment = rein.envs.Gridworld(2) if kind is rein.QLearning else rein.envs.CartPole(2)
    agent = kind(environment.single_observation_space, environment.single_action_space, seed=0)
    before = agent.config
    with pytest.raises(ValueError, match=rf"{kind.__name__}\({name}="):
        setattr(agent, name, invalid)
    setattr(agent, name, value)
    now = getattr(agent, name)
    assert (now(env_steps=0) if isinstance(now, Schedule) else now) == value
    assert name in before and agent.config == before


FIXED = {
    rein.PQN: ["hidden", "rollout_steps", "max_grad_norm", "layer_norm", "precision"],
    rein.DQN: ["epsilon", "tau", "update_to_data", "learning_starts"],
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in FIXED.items() for name in names])
def test_fixed_options_cannot_be_assigned(kind, name) -> None:
    with pytest.raises(AttributeError, match=rf"{kind.__name__}.{name} cannot be changed after the agent is built"):
        setattr(kind(rein.envs.CartPole(2)), name, 0.5)


NUMPYS = {"gamma": np.float32(0.9), "learning_rate": np.float32(1e-3), "seed": np.int64(3)}
REPLAYS = {
    "capacity": np.int64(50),
    "tau": np.float64(0.5),
    "update_to_data": np.float32(0.5),
    "huber": np.float32(2.0),
}


@pytest.mark.parametrize("kind", [rein.QLearning, rein.PPO, rein.PQN, rein.DQN])
def test_numpy_numbers_are_accepted_and_saved_as_json(kind) -> None:
    environment = rein.envs.Gridworld(2) if kind is rein.QLearning else rein.envs.CartPole(2)
    spaces_of = environment.single_observation_space, environment.single_action_space
    numbers = {**NUMPYS, **(SMALL | REPLAYS if kind is rein.DQN else {})}
    agent = kind(*spaces_of, **numbers)
    written = json.loads(json.dumps(agent.config))
    assert written["gamma"] == pytest.approx(0.9) and written["learning_rate"] == pytest.approx(1e-3)
    rein.train(agent, environment, env_steps=128, iterations=32)
    assert agent.updates
    check_plain(agent.state_dict())  # checkpoints can store it


@pytest.mark.parametrize(("kind", "space"), [(rein.SAC, BOX), (rein.DiscreteSAC, spaces.Discrete(2))])
def test_target_entropy_accepts_numpy_numbers(kind, space) -> None:
    assert kind(BOX, space, target_entropy=np.float32(0.5)).config["target_entropy"] == 0.5


@pytest.mark.parametrize("sizes", [[1] * 20, [7, 7, 6], [20], [0, 20, 0]])
def test_n_step_returns_continue_across_chunks(sizes) -> None:
    agent = rein.IQL(spaces.Box(-np.inf, np.inf, (1,)), BOX, **SMALL, seed=0)
    firsts = np.cumsum([0, *sizes])
    assert rein.fill_replay(agent, [rows(size, int(first)) for size, first in zip(sizes, firsts, strict=False)]) == 20
    found = agent.replay.take(torch.arange(20), n_step=3, gamma=1.0).reward
    assert found.tolist() == [3.0] * 18 + [2.0, 1.0]


def test_unrelated_chunks_are_cut_at_the_boundary() -> None:
    agent = rein.IQL(spaces.Box(-np.inf, np.inf, (1,)), BOX, **SMALL, seed=0)
    rein.fill_replay(agent, [rows(3), rows(3, first=50)])
    assert agent.replay.take(torch.arange(6), n_step=9, gamma=1.0).reward.tolist() == [3, 2, 1, 3, 2, 1]


@pytest.mark.parametrize("kind", [rein.RecurrentDQN, rein.DQN])
def test_fill_rejects_unsupported_replays(kind) -> None:
    images = spaces.Box(0, 255, (2, 40, 40), np.uint8)
    observed, options = (images, {"frame_stack": 2}) if kind is rein.DQN else (spaces.Box(-1, 1, (1,)), {})
    agent = kind(observed, spaces.Discrete(2), **SMALL, **options, seed=0)
    with pytest.raises(ValueError, match="fill"):
        rein.fill_replay(agent, [rows(5)])


def test_actor_metrics_are_reported_with_delayed_updates() -> None:
    environment = rein.envs.Pendulum(num_envs=4, seed=0)
    agent = made(rein.SAC, environment, actor_frequency=2, seed=0)
    final = rein.train(agent, environment, env_steps=80, iterations=20, seed=0)
    assert np.isfinite([final.metrics["actor_loss"], final.metrics["entropy"]]).all()


def test_agent_with_recorded_transitions_cannot_be_reseeded() -> None:
    environment = rein.envs.Pendulum(num_envs=1, seed=0)
    agent = made(rein.SAC, environment)
    agent.replay.append(
        Transition(torch.zeros(1, 3), torch.zeros(1, 1), *rows(1)[2:5], torch.zeros(1, 3), *rows(1)[6:])
    )
    with pytest.raises(RuntimeError, match="1 recorded transitions"):
        rein.train(agent, environment, env_steps=5, seed=0)


def test_changed_num_envs_is_rejected() -> None:
    agent = made(rein.SAC, rein.envs.Pendulum(1), seed=0)
    rein.train(agent, rein.envs.Pendulum(4, seed=0), env_steps=40, seed=0)
    with pytest.raises(ValueError, match="rows of 4 environments, not 2"):
        rein.train(agent, rein.envs.Pendulum(2, seed=0), env_steps=40, seed=0)


def test_whole_numbers_can_be_floats() -> None:
    agent = made(rein.SAC, rein.envs.Pendulum(1), capacity=1e3, batch_size=8.0, seed=0)
    assert (agent.config["capacity"], agent.config["batch_size"]) == (1000, 8)


@pytest.mark.parametrize("space", [spaces.Box(-1, 1, ()), spaces.Box(-1, 1, (0,)), spaces.Box(0, 3, (2,), np.int64)])
def test_unsupported_box_action_spaces_are_rejected(space) -> None:
    with pytest.raises(ValueError, match="action space"):
        rein.SAC(spaces.Box(-1, 1, (2,)), space)


def test_state_of_other_options_is_rejected_without_changes() -> None:
    environment = rein.envs.Pendulum(1, seed=0)
    agent = made(rein.SAC, environment, seed=0)
    rein.train(agent, environment, env_steps=20, seed=0)
    before = agent.networks.actor.head.weight.clone()
    for options in ({"prioritized": True}, {"temperature": 0.1}, {"hidden": (9,)}):
        other = made(rein.SAC, rein.envs.Pendulum(1), seed=1, **options)
        rein.train(other, rein.envs.Pendulum(1, seed=0), env_steps=20, seed=0)
        with pytest.raises(ValueError, match=r"state"):
            agent.load_state_dict(other.state_dict())
        assert torch.equal(before, agent.networks.actor.head.weight)
        assert len(agent.replay) == 20


def test_temperature_is_reported_instead_of_epsilon() -> None:
    environment = rein.envs.CartPole(2, seed=0)
    agent = made(rein.DQN, environment, temperature=2.0, seed=0)
    final = rein.train(agent, environment, env_steps=40, seed=0)
    assert final.metrics["temperature"] == 2.0
    assert "epsilon" not in final.metrics


def test_priority_beta_above_1_is_rejected() -> None:
    environment = rein.envs.CartPole(num_envs=2, seed=0)
    with pytest.raises(ValueError, match=r"DQN\(priority_beta=1.5\): give a number from 0 to 1"):
        made(rein.DQN, environment, prioritized=True, priority_beta=1.5)
    agent = made(rein.DQN, environment, prioritized=True)
    with pytest.raises(ValueError, match="give a number from 0 to 1"):
        agent.priority_beta = 1.5


@pytest.mark.parametrize("kind", [rein.PPO, rein.PQN, rein.DQN, rein.SAC])
def test_unavailable_device_is_rejected(kind: Any) -> None:
    environment = rein.envs.Pendulum(num_envs=2, seed=0) if kind is rein.SAC else rein.envs.CartPole(num_envs=2, seed=0)
    with pytest.raises(ValueError, match='device="xpu": torch finds no such device'):
        made(kind, environment, device="xpu")


HUGE = spaces.Discrete(2**40)


@pytest.mark.parametrize(("kind", "spaces_of"), [(rein.PPO, (BOX, HUGE)), (rein.DQN, (HUGE, spaces.Discrete(2)))])
def test_networks_that_do_not_fit_into_memory_name_the_space(kind, spaces_of) -> None:
    with pytest.raises(MemoryError, match=r"Discrete\(1099511627776\)"):
        kind(*spaces_of)


BIG_ENDIAN = spaces.Box(-1.0, 1.0, (3,), np.dtype(">f4"))


@pytest.mark.parametrize(
    ("kind", "spaces_of"),
    [
        (rein.PPO, (BIG_ENDIAN, spaces.Discrete(2))),
        (rein.PPO, (BOX, BIG_ENDIAN)),
        (rein.PPO, (BOX, spaces.Dict(a=BIG_ENDIAN))),
        (rein.SAC, (BOX, BIG_ENDIAN)),
        (GymnasiumEnvironment, (BIG_ENDIAN, spaces.Discrete(2))),
        (GymnasiumEnvironment, (BOX, BIG_ENDIAN)),
    ],
)
def test_space_in_another_byte_order_is_named(kind, spaces_of) -> None:
    class Still(gymnasium.Env):
        observation_space, action_space = spaces_of

    with pytest.raises(TypeError, match=r"Box\(-1.0, 1.0, \(3,\), >f4\).*byte order"):
        kind(Still) if kind is GymnasiumEnvironment else kind(*spaces_of)
