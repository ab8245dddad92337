from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rein.agents.awac import AWAC
from rein.agents.ddpg import DDPG
from rein.agents.discrete_sac import DiscreteSAC
from rein.agents.iql import IQL
from rein.agents.q_learning import QLearning
from rein.agents.sac import SAC
from rein.agents.td3 import TD3
from rein.envs.cartpole import CartPole
from rein.envs.gridworld import Gridworld
from rein.envs.pendulum import Pendulum
from rein.handlers.monitor import monitor, reduce_learning_rate
from rein.loop import Loop
from rein.schedules import linear

NAN = math.nan


def make(values: Sequence[float]) -> Loop:
    """Return a loop with one iteration per epoch, whose metric `loss` takes these values."""
    loop = Loop(lambda state: None, epochs=len(values), iterations=1)
    loop.metric("loss", lambda state: values[state.epoch - 1], reduce="last")
    return loop


def monitored(values: Sequence[float], **options: Any) -> tuple[Loop, list[int]]:
    """Return the loop and a list that collects the epochs in which the action is called."""
    loop, called = make(values), []
    monitor(loop, "loss", lambda state: called.append(state.epoch), **{"mode": "min", **options})
    return loop, called


def called_in(values: Sequence[float], **options: Any) -> list[int]:
    loop, called = monitored(values, **options)
    loop.run()
    return called


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
@pytest.mark.parametrize("patience", [0, 1, 2, 5])
def test_action_repeats_after_patience_plus_one_while_worsening(mode: str, sign: int, patience: int) -> None:
    again = patience + 1
    assert called_in([sign * n for n in range(20)], patience=patience, mode=mode) == [*range(1 + again, 21, again)]


def test_function_as_mode_decides_what_improves() -> None:
    def closer_to_one(value: float, best: float) -> bool:
        return abs(value - 1.0) < abs(best - 1.0)

    loop, called = monitored([3.0, 0.0, NAN, 2.5, 0.9, 5.0, -5.0], mode=closer_to_one, patience=1)
    loop.run()
    assert called == [4, 7]
    assert "closer_to_one" in loop.parts["monitor/loss"].config["mode"]


def test_best_value_is_kept_after_the_action() -> None:
    assert called_in([1.0, 9.0, 8.0, 7.0, 6.0, 0.5, 9.0, 9.0], patience=1) == [3, 5, 8]


VALUES = [5.0, 6.0, 4.0, NAN, 4.5, 4.5, 4.5, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("saved_at", range(1, 11))
def test_resumed_run_acts_at_the_same_epochs(saved_at: int) -> None:
    whole = called_in(VALUES, patience=1)
    assert whole == [5, 7, 10]
    (first, before), (second, after) = monitored(VALUES, patience=1), monitored(VALUES, patience=1)
    first.run(epochs=saved_at)
    second.load_state_dict(copied(first.state_dict()))
    second.run()
    assert before + after == whole


def test_action_can_halt_the_loop() -> None:
    loop = make([1.0] * 9)
    monitor(loop, "loss", lambda state: state.halt_loop("a plateau"), mode="min", patience=1)
    final = loop.run()
    assert (final.epoch, final.reason) == (3, "a plateau")


def test_callback_that_is_not_callable_and_invalid_options_raise() -> None:
    with pytest.raises(ValueError, match="mode= gives the direction"):
        monitored([1.0], min_delta=-0.1)
    with pytest.raises(TypeError, match="a callback must be a function of the state, got str"):
        monitor(make([1.0]), "loss", "halt", mode="min")  # type: ignore[arg-type]  # the mistake


def sgd(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates])


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def agent_of(learning_rate: Any = 0.5) -> QLearning:
    environment = Gridworld(num_envs=2, seed=0)
    return QLearning(
        environment.single_observation_space, environment.single_action_space, learning_rate=learning_rate, seed=0
    )


def test_rates_of_an_optimizer_are_reduced() -> None:
    optimizer = sgd(10.0)
    loop, seen = make([float(n) for n in range(7)]), []
    reduce_learning_rate(loop, optimizer, "loss", mode="min", factor=0.5, patience=2)
    loop.epoch_ended(lambda state: seen.extend(rates_of(optimizer)))
    loop.run()
    assert seen == [10.0, 10.0, 10.0, 5.0, 5.0, 5.0, 2.5]


def test_parameter_groups_keep_their_rates_above_the_minimum() -> None:
    optimizer, loop = sgd(1.0, 0.3, 0.01), make([0.0] * 5)
    reduce_learning_rate(loop, optimizer, "loss", mode="min", factor=0.5, patience=0, minimum=0.2)
    loop.run()
    assert rates_of(optimizer) == [0.2, 0.2, 0.01]  # a rate below the minimum is not changed
    assert loop.parts["reduce_learning_rate/loss/rate"].reduced == 3


@pytest.mark.parametrize(
    ("kind", "world", "other_rates"),
    [
        (DDPG, Pendulum, ["actor_learning_rate"]),
        (TD3, Pendulum, ["actor_learning_rate"]),
        (AWAC, Pendulum, ["actor_learning_rate"]),
        (IQL, Pendulum, ["actor_learning_rate"]),
        (SAC, Pendulum, ["actor_learning_rate", "temperature_learning_rate"]),
        (DiscreteSAC, CartPole, ["actor_learning_rate", "temperature_learning_rate"]),
    ],
)
def test_all_learning_rates_of_an_agent_are_reduced_and_resumed(kind: Any, world: Any, other_rates: list[str]) -> None:
    def build() -> tuple[Loop, Any]:
        environment, rates = world(num_envs=1, seed=0), dict.fromkeys(other_rates, 0.2)
        spaces = environment.single_observation_space, environment.single_action_space
        agent = kind(*spaces, capacity=1_000, hidden=(4,), learning_rate=0.4, seed=0, **rates)
        loop = make([0.0] * 3)
        reduce_learning_rate(loop, agent, "loss", mode="min", factor=0.5, patience=0)
        return loop, agent

    (first, agent), (second, other) = build(), build()
    first.run(epochs=2)
    second.load_state_dict(copied(first.state_dict()))
    second.run(epochs=2)
    for reduced in (agent, other):
        assert reduced.learning_rate() == 0.2
        assert [getattr(reduced, name)() for name in other_rates] == [0.1] * len(other_rates)


def test_actor_rate_that_follows_learning_rate_is_reduced_once() -> None:
    environment = Pendulum(num_envs=1, seed=0)
    agent = DDPG(
        environment.single_observation_space, environment.single_action_space, capacity=1_000, learning_rate=0.4
    )
    loop = make([0.0] * 2)
    reduce_learning_rate(loop, agent, "loss", mode="min", factor=0.5, patience=0)
    loop.run()
    assert agent.learning_rate() == 0.2
    assert agent.actor_learning_rate is None


@pytest.mark.parametrize("saved_at", range(1, 8))
@pytest.mark.parametrize("kind", ["agent", "optimizer"])
def test_resumed_run_uses_the_reduced_rate(kind: str, saved_at: int) -> None:
    def build() -> tuple[Loop, list[float]]:
        loop, seen = make(VALUES), []
        agent, optimizer = agent_of(), sgd(0.5)
        of = agent if kind == "agent" else optimizer
        reduce_learning_rate(loop, of, "loss", mode="min", factor=0.5, patience=1)
        now = (lambda: agent.learning_rate()) if kind == "agent" else (lambda: rates_of(optimizer)[0])
        loop.epoch_started(lambda state: seen.append(now()))
        return loop, seen

    whole, expected = build()
    whole.run()
    assert expected == [0.5] * 5 + [0.25] * 2 + [0.125] * 3 + [0.0625]
    (first, before), (second, after) = build(), build()
    first.run(epochs=saved_at)
    second.load_state_dict(copied(first.state_dict()))
    assert second.state_dict()["parts"] == first.state_dict()["parts"]  # also before it runs
    second.run()
    assert before + after == expected


def test_unreduced_rate_is_not_restored() -> None:
    first, agent = make([1.0, 0.5, 0.4]), agent_of(0.2)
    reduce_learning_rate(first, agent_of(0.1), "loss", mode="min")
    first.run(epochs=1)
    second = make([1.0, 0.5, 0.4])
    reduce_learning_rate(second, agent, "loss", mode="min")
    second.load_state_dict(copied(first.state_dict()))
    second.run()
    assert agent.learning_rate() == 0.2


def test_schedules_and_objects_without_a_rate_are_rejected() -> None:
    with pytest.raises(TypeError, match=r"QLearning\.learning_rate already follows a schedule over updates"):
        reduce_learning_rate(make([1.0]), agent_of(linear(0.5, 0.1, updates=10)), "loss", mode="min")
    environment = Pendulum(num_envs=1, seed=0)
    spaces = environment.single_observation_space, environment.single_action_space
    falling = DDPG(*spaces, capacity=1_000, actor_learning_rate=linear(0.5, 0.1, updates=10))
    with pytest.raises(TypeError, match=r"DDPG\.actor_learning_rate already follows a schedule"):
        reduce_learning_rate(make([1.0]), falling, "loss", mode="min")
    with pytest.raises(TypeError, match="pass an agent with a learning_rate, or an optimizer"):
        reduce_learning_rate(make([1.0]), Gridworld(num_envs=1), "loss", mode="min")


@pytest.mark.parametrize("options", [{"factor": 1.0}, {"factor": 0.0}, {"minimum": -1.0}, {"minimum": NAN}])
def test_invalid_factor_and_minimum_raise(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"reduce_learning_rate\("):
        reduce_learning_rate(make([1.0]), sgd(1.0), "loss", **{"mode": "min", **options})


def test_loading_another_number_of_parameter_groups_raises() -> None:
    first, second = make([0.0] * 4), make([0.0] * 4)
    reduce_learning_rate(first, sgd(1.0), "loss", mode="min", patience=0)
    reduce_learning_rate(second, sgd(1.0, 2.0), "loss", mode="min", patience=0)
    first.run()
    with pytest.raises(ValueError, match=r"1 learning rates.*earlier versions"):
        second.load_state_dict(copied(first.state_dict()))
