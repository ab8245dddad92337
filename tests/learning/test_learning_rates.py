"""Learning rates of optimizers, actor and temperature, and their schedules."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import rein
from rein.envs.probes import Corridor
from rein.schedules import linear
from rein.testing.stateful import copy_state, first_difference

REPLAY: dict[str, Any] = {"hidden": (8,), "batch_size": 8, "capacity": 200, "learning_starts": 0}
WITH_ACTORS = [rein.SAC, rein.DiscreteSAC, rein.TD3, rein.DDPG, rein.AWAC, rein.IQL]
DISCRETE = (rein.DQN, rein.PPO, rein.PQN, rein.DiscreteSAC)


def made(kind: Any, **options: Any) -> tuple[Any, Corridor]:
    environment = Corridor(2, length=3, continuous=kind not in DISCRETE, seed=0, max_episode_steps=8)
    spaces_of = environment.single_observation_space, environment.single_action_space
    known = {"rollout_steps": 4, "hidden": (8,)} if kind in (rein.PPO, rein.PQN) else REPLAY
    return kind(*spaces_of, **{**known, "seed": 0, **options}), environment


def rates(agent: Any) -> dict[str, float]:
    return {name: learner.optimizer.param_groups[0]["lr"] for name, learner in agent.learners.items()}


@pytest.mark.parametrize("kind", [rein.DQN, rein.PPO, rein.PQN, rein.SAC])
def test_optimizer_with_another_learning_rate_is_rejected(kind: Any) -> None:
    """The agent would replace this learning rate at every update."""
    message = "learning_rate=0.002 would replace its learning rate of 0.1 at every update: give learning_rate=0.1"
    with pytest.raises(ValueError, match=message):
        made(kind, learning_rate=2e-3, optimizer=functools.partial(torch.optim.AdamW, lr=0.1))


def test_optimizer_with_the_same_learning_rate_is_accepted() -> None:
    """The value can be within the bounds of a schedule, or missing in the parameter groups."""
    given = functools.partial(torch.optim.AdamW, lr=3e-4)
    made(rein.PPO, learning_rate=linear(0.0, 3e-4, env_steps=1000), optimizer=given)
    made(rein.SAC, learning_rate=3e-4, actor_learning_rate=1e-4, optimizer=given)

    class WithoutLearningRate(torch.optim.SGD):
        def __init__(self, parameters: Iterable[Tensor], lr: float = 1e-3) -> None:
            super().__init__(parameters, lr)
            for group in self.param_groups:
                del group["lr"]

    agent, environment = made(rein.DQN, optimizer=WithoutLearningRate)
    rein.train(agent, environment, epochs=1, iterations=8, seed=0)
    assert rates(agent) == {"values": 1e-3}


def test_learning_rate_of_a_parameter_group_is_rejected() -> None:
    def groups(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        first, *others = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": others}])

    with pytest.raises(ValueError, match=r"would replace its learning rate of 0.5"):
        made(rein.DQN, optimizer=groups)


def test_error_names_actor_learning_rate() -> None:
    given = iter([1e-2, 1e-4])
    with pytest.raises(ValueError, match=r"of 0.0001 at every update: give actor_learning_rate=0.0001"):
        made(rein.DDPG, learning_rate=1e-2, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=next(given)))


class OptimizerWithoutDefault(torch.optim.SGD):
    """Optimizer without a default learning rate in its signature."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)


FACTORIES: dict[str, Any] = {
    "without a rate": functools.partial(torch.optim.RMSprop, alpha=0.9),
    "with the agent's": functools.partial(torch.optim.SGD, lr=5e-2),
    "with the agent's in a tensor": functools.partial(torch.optim.Adam, lr=torch.tensor(5e-2)),
    "with its class's default": functools.partial(torch.optim.Adam, lr=1e-3),
    "of a class that does not say": functools.partial(OptimizerWithoutDefault, lr=0.3),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_optimizers_use_the_agents_learning_rate(name: str) -> None:
    schedule = linear(5e-2, 5e-3, env_steps=16)
    agent, environment = made(rein.DQN, learning_rate=schedule, optimizer=FACTORIES[name])
    rein.train(agent, environment, env_steps=32)
    assert rates(agent) == {"values": 5e-3}


def test_learning_rate_can_be_assigned_before_the_seed_is_set() -> None:
    agent, environment = made(
        rein.DDPG, learning_rate=0.1, optimizer=functools.partial(torch.optim.SGD, lr=0.1), seed=None
    )
    agent.learning_rate = 0.2
    rein.train(agent, environment, env_steps=4, seed=3)
    assert rates(agent) == {"critics": 0.2, "actor": 0.2}


@pytest.mark.parametrize("kind", [rein.SAC, rein.DiscreteSAC])
def test_temperature_learning_rate_applies_to_the_temperature_only(kind: Any) -> None:
    agent, environment = made(kind, learning_rate=1e-3, temperature_learning_rate=3e-2)
    rein.train(agent, environment, env_steps=8)
    assert rates(agent) == {"critics": 1e-3, "actor": 1e-3, "temperature": 3e-2}
    with pytest.raises(
        ValueError, match=rf"{kind.__name__}\(temperature=0.2, .* is not learned; give only one of the two"
    ):
        made(kind, temperature=0.2, temperature_learning_rate=1e-3)


@pytest.mark.parametrize("kind", WITH_ACTORS)
def test_learning_rates_follow_separate_schedules(kind: Any) -> None:
    schedules = {
        "learning_rate": linear(1e-2, 1e-3, env_steps=16),
        "actor_learning_rate": linear(1e-2, 0.0, updates=8),
    }
    agent, environment = made(kind, **schedules)
    rein.train(agent, environment, env_steps=32)
    assert agent.updates == 32
    assert rates(agent) == {name: 0.0 if name == "actor" else 1e-3 for name in agent.learners}
    before = copy_state(agent.networks.state_dict())
    rein.train(agent, environment, env_steps=8)
    after = agent.networks.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("actor"))
    assert not all(torch.equal(before[name], after[name]) for name in before if name.startswith("critics"))


@pytest.mark.parametrize("kind", WITH_ACTORS)
def test_actor_learning_rate_can_be_assigned_during_a_run(kind: Any) -> None:
    schedule = linear(1e-3, 1e-4, updates=100)
    agent, environment = made(kind, learning_rate=1e-3, actor_learning_rate=schedule)
    config = agent.config
    assert json.loads(json.dumps(config))["actor_learning_rate"] == schedule.config
    for value, expected in ((5e-4, 5e-4), (None, 1e-3), (linear(1e-2, 1e-3, env_steps=2), 1e-3)):
        agent.actor_learning_rate = value
        rein.train(agent, environment, env_steps=4)
        assert rates(agent)["actor"] == expected
    for invalid, kind_of_error in ((-1.0, ValueError), ("fast", TypeError)):
        with pytest.raises(kind_of_error, match=rf"{kind.__name__}\(actor_learning_rate="):
            agent.actor_learning_rate = invalid
    assert agent.config == config


def test_agent_without_actor_rejects_actor_learning_rate() -> None:
    with pytest.raises(TypeError, match="DQN: there is no option actor_learning_rate"):
        made(rein.DQN, actor_learning_rate=1e-3)


@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW], ids=["rein's Adam", "torch's"])
def test_resumed_run_continues_learning_rate_schedules(optimizer: Any) -> None:
    rate: dict[str, Any] = {
        "optimizer": optimizer,
        "actor_learning_rate": linear(1e-2, 1e-3, updates=30),
        "temperature_learning_rate": linear(5e-2, 1e-3, env_steps=30),
    }
    whole, first, second = (rein.training_loop(*made(rein.SAC, **rate), iterations=4) for _ in range(3))
    whole.run(epochs=4)
    first.run(epochs=2)
    second.load_state_dict(copy_state(first.state_dict()))
    second.run(epochs=4)
    assert first_difference(whole.state_dict()["parts"]["agent"], second.state_dict()["parts"]["agent"]) is None


def test_metrics_contain_the_learning_rates_at_the_end_of_each_epoch() -> None:
    agent, environment = made(rein.SAC, learning_rate=linear(1e-2, 0.0, env_steps=32), actor_learning_rate=2e-4)
    history = rein.training_loop(agent, environment, iterations=4).run(epochs=4).history
    assert [record.metrics["learning_rate"] for record in history] == pytest.approx([7.5e-3, 5e-3, 2.5e-3, 0.0])
    assert [record.metrics["actor_learning_rate"] for record in history] == [2e-4] * 4
    assert "temperature_learning_rate" not in history[-1].metrics


def test_metric_is_the_rate_before_it_is_reduced_at_the_end_of_the_epoch() -> None:
    agent, environment = made(rein.PPO, learning_rate=1e-2)
    loop = rein.training_loop(agent, environment, iterations=4)
    rein.handlers.reduce_learning_rate(loop, agent, "learning_rate", mode="max", patience=0, factor=0.5)
    history = loop.run(epochs=3).history
    assert [record.metrics["learning_rate"] for record in history] == pytest.approx([1e-2, 1e-2, 5e-3])


def test_offline_loop_reports_the_learning_rate() -> None:
    agent, environment = made(rein.IQL, learning_rate=1e-3)
    rein.train(agent, environment, env_steps=20)
    final = rein.offline_loop(agent, iterations=2).run(epochs=1)
    assert final.metrics["learning_rate"] == 1e-3 and "actor_learning_rate" not in final.metrics


@pytest.mark.parametrize("options", [{}, {"state_dependent_std": True}, {"squash": True, "state_dependent_std": True}])
def test_log_std_is_the_mean_log_standard_deviation_of_the_policy(options: dict[str, Any]) -> None:
    environment = Corridor(2, length=3, continuous=True, seed=0, max_episode_steps=8)
    agent = rein.PPO(environment, log_std=-0.7, learning_rate=0.0, rollout_steps=4, seed=0, **options)
    final = rein.training_loop(agent, environment, iterations=4).run(epochs=1)
    assert final.metrics["log_std"] == pytest.approx(-0.7, abs=0.05)  # the network adds little at the beginning
    assert "log_std" not in made(rein.PPO)[0].reports


def test_error_of_muon_explains_stacked_parameters() -> None:
    with pytest.raises(ValueError, match="Muon only supports 2D parameters") as caught:
        made(rein.PPO, optimizer=torch.optim.Muon)
    assert "ActorCritic have the shapes (2, 1, 8)" in caught.value.__notes__[0]
    assert "stacked along a leading axis" in caught.value.__notes__[0]
