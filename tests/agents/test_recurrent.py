"""Agents with a memory: what they said while acting is what they learn from, and nothing crosses a reset.

Shapes: T steps of a rollout, N environments, C numbers of a carry.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import rein
from rein.agents.a2c import A2C
from rein.agents.impala import IMPALA
from rein.agents.ppo import PPO
from rein.envs.gridworld import Gridworld
from rein.envs.probes import Memory, Reach
from rein.networks.recurrent import GRU, LSTM, MinimalGRU
from rein.ops.random import generator
from rein.replay.rollout import Rollout
from rein.schedules import linear
from rein.testing import AgentContract
from rein.testing.stateful import copy_state, first_difference

CORES = {kind.__name__: functools.partial(kind, features=6) for kind in (LSTM, GRU, MinimalGRU)}
CORES["two layers"] = functools.partial(MinimalGRU, features=6, layers=2)
SMALL: dict[str, Any] = {"rollout_steps": 8, "hidden": (8,)}
N = 6


class _Recurrent(AgentContract):
    """Of 4 environments whose episodes end at different times; saved after 7 steps of 8, amid most of them."""

    num_envs, steps = 4, 32
    kind: Any = PPO
    options: ClassVar[dict[str, Any]]

    def make(self, seed):
        environment = self.environment(1, 0)
        spaces = environment.single_observation_space, environment.single_action_space
        return self.kind(*spaces, seed=seed, **{**SMALL, **self.options})

    def environment(self, num_envs, seed):
        return Gridworld(num_envs=num_envs, seed=seed, max_episode_steps=9)

    def _acts(self, policy):
        policy.reset()  # or it would act by what it remembers of the last time
        return super()._acts(policy)


class TestLSTM(_Recurrent):
    options: ClassVar[dict[str, Any]] = {
        "core": CORES["LSTM"],
        "update_epochs": 2,
        "minibatches": 2,
        "normalize_reward": True,
    }


class TestGRU(_Recurrent):
    options: ClassVar[dict[str, Any]] = {
        "core": CORES["GRU"],
        "update_epochs": 2,
        "minibatches": 2,
        "normalize_observation": True,
    }


class TestMinimalGRU(_Recurrent):
    options: ClassVar[dict[str, Any]] = {
        "core": CORES["MinimalGRU"],
        "update_epochs": 2,
        "minibatches": 1,
        "shared": True,
    }


class TestTwoLayers(_Recurrent):
    options: ClassVar[dict[str, Any]] = {"core": CORES["two layers"], "update_epochs": 2, "minibatches": 2}


class TestRecurrentA2C(_Recurrent):
    kind = A2C
    options: ClassVar[dict[str, Any]] = {
        "core": CORES["MinimalGRU"],
        "learning_rate": linear(1e-3, 0.0, env_steps=1000),
    }


class TestRecurrentIMPALA(_Recurrent):
    kind = IMPALA
    options: ClassVar[dict[str, Any]] = {"core": CORES["LSTM"], "update_epochs": 2, "minibatches": 2}


class Watched(PPO):
    """Keeps, of every rollout that it learns from, what is to be compared."""

    def update(self, rollout: Rollout) -> dict[str, Tensor]:
        zeros_TN = torch.zeros_like(rollout["reward"])
        with torch.no_grad():
            batch = self.batch(zeros_TN, zeros_TN, None)
            distribution, value_TN = self.networks.look(batch.features, batch.carry, batch.reset)
            self.said.append(
                {
                    "log_prob": (rollout["log_prob"].clone(), distribution.log_prob(batch.sample)),
                    "value": (rollout["value"].clone(), value_TN),
                    "next_value": (self.next_values(rollout["value"]), self.true_next_values(rollout, batch)),
                    "reset": (rollout["reset"].clone(), self.true_resets(rollout)),
                }
            )
        return super().update(rollout)

    def true_next_values(self, rollout: Rollout, batch: Any) -> Tensor:
        """Step by step: the value of the next observation with the carry after this one."""
        carry, found = batch.carry, []
        for t in range(rollout.steps):
            _, _, carry = self.networks.step(batch.features[t], torch.where(batch.reset[t][:, None], 0.0, carry))
            next_value_N = self.networks.value(self.networks.preprocess(rollout["next_observation"][t]), carry)
            cut_N = rollout["truncated"][t] & rollout["valid"][t] & ~rollout["terminated"][t]
            last = t + 1 == rollout.steps
            found.append(next_value_N if last else torch.where(cut_N, next_value_N, rollout["value"][t + 1]))
        return torch.stack(found)

    def true_resets(self, rollout: Rollout) -> Tensor:
        """Everywhere at first, then where the row before was the last of its episode, or none at all."""
        over_TN = rollout["terminated"] | rollout["truncated"] | ~rollout["valid"]
        first_N = self.over_N if self.said else torch.ones_like(over_TN[0])
        self.over_N = over_TN[-1].clone()
        return torch.cat([first_N[None], over_TN[:-1]])

    said: list[dict[str, tuple[Tensor, Tensor]]]


def watched(environment: Any, **options: Any) -> Watched:
    spaces = environment.single_observation_space, environment.single_action_space
    common: dict[str, Any] = {**SMALL, "update_epochs": 2, "minibatches": 2, "learning_rate": 1e-2}
    agent = Watched(*spaces, seed=0, **{**common, **options})
    agent.said = []
    return agent


def drive(agent: Any, steps: int, seed: int = 0) -> None:
    """Through a stream with everything that may happen: ends of both kinds, both at once, rows that are no data, and
    resets from outside."""
    stream = generator(seed, "stream")
    flat = agent.observation_space.shape[0]

    def some(share: float) -> Tensor:
        return torch.rand(N, generator=stream) < share

    observation = torch.rand(N, flat, generator=stream)
    for t in range(steps):
        action, extras = agent.select_action(observation)
        valid_N = ~some(0.1)
        terminated_N, truncated_N = some(0.1) & valid_N, some(0.15) & valid_N
        after, reward_N = torch.rand(N, flat, generator=stream), torch.rand(N, generator=stream)
        row = (observation, action, reward_N, terminated_N, truncated_N, after, valid_N, extras)
        agent.record_observation(rein.Transition(*row))
        agent.optimize_model()
        observation = torch.where((terminated_N | truncated_N)[:, None], torch.rand(N, flat, generator=stream), after)
        if t % 5 == 3:
            mask_N = some(0.3)
            observation = torch.where(mask_N[:, None], torch.rand(N, flat, generator=stream), observation)
            agent.observe_reset(observation, mask_N)


@pytest.mark.parametrize("options", [{}, {"normalize_observation": True, "shared": True}])
@pytest.mark.parametrize("make", [Memory, Reach])
@pytest.mark.parametrize("core", CORES)
def test_what_was_said_while_acting_is_what_is_learned_from(core: str, make: Any, options: dict[str, Any]) -> None:
    agent = watched(make(1, seed=0), core=CORES[core], **options)
    drive(agent, 5 * 8)
    assert len(agent.said) == 5
    assert sum(int(said["reset"][0].sum()) for said in agent.said) > N
    for said in agent.said:
        for name in ("log_prob", "value", "next_value"):
            torch.testing.assert_close(*said[name], atol=1e-6, rtol=1e-5, msg=name)


def test_memory_begins_anew_where_an_episode_does() -> None:
    agent = watched(Memory(1, seed=0), core=CORES["GRU"])
    drive(agent, 3 * 8)
    for said in agent.said:
        mine, expected = said["reset"]
        outside = mine & ~expected  # a reset that came between two rollouts is no end in a row
        assert not (expected & ~mine).any() and not outside[1:].any()


def test_it_is_true_of_episodic_epochs_too() -> None:
    """Rows after an environment's own end are no data, and the epoch's last step cuts what is open."""
    environment = Gridworld(8, seed=0, max_episode_steps=9)
    agent = watched(environment, core=CORES["LSTM"])
    rein.train(agent, environment, epochs=8, iterations=7, episodic=True)
    assert len(agent.said) >= 4
    for said in agent.said:
        for name in ("log_prob", "value", "next_value"):
            torch.testing.assert_close(*said[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("core", CORES)
def test_the_first_update_of_every_round_sees_a_ratio_of_one(core: str) -> None:
    asked = []

    def guard(metrics, gradients):
        asked.append({name: float(metrics[name]) for name in ("ratio", "approx_kl")})
        return True

    drive(watched(Memory(1, seed=0), core=CORES[core], guard=guard, minibatches=1, target_kl=1e9), 4 * 8)
    for first in asked[::2]:
        assert first == pytest.approx({"ratio": 1.0, "approx_kl": 0.0}, abs=1e-5)
    assert any(second["approx_kl"] > 1e-6 for second in asked[1::2])


@pytest.mark.parametrize("core", CORES)
def test_what_was_seen_before_a_reset_is_forgotten(core: str) -> None:
    """An end, a row that is no data, and a reset from outside alike; an environment without remembers."""
    no, yes = torch.zeros(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)
    said = []
    for past in (-1.0, 1.0):
        agent = watched(Reach(1, seed=0), core=CORES[core], rollout_steps=100)
        observation = torch.full((4, agent.observation_space.shape[0]), past)
        for t in range(3):
            action, extras = agent.select_action(observation)
            ended, valid = no.clone(), yes.clone()
            if t == 2:
                ended[0], valid[1] = True, False
            row = (observation, action, torch.zeros(4), ended, no, observation, valid, extras)
            agent.record_observation(rein.Transition(*row))
        agent.observe_reset(observation, torch.tensor([False, False, True, False]))
        said.append(agent.select_action(torch.zeros_like(observation))[1]["value"])
    same = said[0] == said[1]
    assert same.tolist() == [True, True, True, False]


def run(**options: Any) -> Any:
    """An agent after three rounds in a stream with rows that are no data."""
    agent = watched(Memory(1, seed=0), **{"core": CORES["LSTM"], "minibatches": 1, "learning_rate": 1e-3, **options})
    drive(agent, 3 * 8)
    return agent.networks


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("micro_batch", [1, 16, 40])
def test_micro_batches_of_sequences_change_nothing_but_rounding(core: str, micro_batch: int) -> None:
    whole, parts = run(core=CORES[core]), run(core=CORES[core], micro_batch=micro_batch)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_threads_change_nothing_at_all() -> None:
    alone, *together = (dict(run(micro_batch=16, threads=threads).state_dict()) for threads in (1, 2, 3))
    assert all(first_difference(alone, other) is None for other in together)


@pytest.mark.parametrize("core", CORES)
def test_half_precision_learns_nearly_the_same(core: str) -> None:
    exact, rough = run(core=CORES[core]), run(core=CORES[core], precision="bfloat16")
    for one, other in zip(exact.parameters(), rough.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=3e-3)


def test_evaluating_in_between_changes_nothing() -> None:
    """Neither parameters nor memory, statistics or the next action."""
    states = []
    for evaluates in (False, True):
        environment = Memory(8, seed=0)
        agent = watched(environment, core=CORES["LSTM"], normalize_observation=True, normalize_reward=True)
        loop = rein.training_loop(agent, environment, epochs=4, iterations=7)
        if evaluates:

            @loop.iteration_completed(every=5)
            def look(state: Any, agent: Any = agent) -> None:
                for deterministic in (True, False):
                    rein.evaluate(agent.policy(deterministic), Memory(3, seed=1), 3)

        loop.run()
        states.append(copy_state(agent.state_dict()))
    assert first_difference(*states) is None


def test_a_policy_has_a_memory_of_its_own_for_each_environment() -> None:
    agent = watched(Memory(1, seed=0), core=CORES["LSTM"])
    policy, other = agent.policy(), agent.policy()
    x = torch.rand(4, 3, generator=generator(0, "rows"))
    policy.select_action(x)
    policy.reset(torch.tensor([True, False, False, True]))
    kept = policy.state_dict()["carry"]
    assert [bool(row.any()) for row in kept] == [False, True, True, False]
    assert other.state_dict()["carry"] is None
    other.load_state_dict(policy.state_dict())
    policy.select_action(x)
    assert torch.equal(other.state_dict()["carry"], kept)
    policy.reset()
    assert policy.state_dict()["carry"] is None


def test_a_policy_refuses_the_state_of_the_other_kind() -> None:
    agent = watched(Memory(1, seed=0), core=CORES["LSTM"])
    greedy, exploring = agent.policy(True), agent.policy(False)
    for one, other in ((greedy, exploring), (exploring, greedy)):
        with pytest.raises(ValueError, match="the generator in the state"):
            one.load_state_dict(other.state_dict())


MEMORY = {"rollout_steps": 16, "hidden": (16,), "learning_rate": 1e-2, "gamma": 0.9, "entropy_coefficient": 0.01}


def recalled(kind: Any, core: Any, rounds: int, **options: Any) -> float:
    environment = Memory(16, delay=2, seed=0)
    spaces = environment.single_observation_space, environment.single_action_space
    agent = kind(*spaces, seed=0, core=core, **{**MEMORY, **options})
    rein.train(agent, environment, epochs=rounds, iterations=16)
    return rein.evaluate(agent.policy(), Memory(128, delay=2, seed=1), 128).mean_return


@pytest.mark.parametrize("kind", [LSTM, MinimalGRU])
def test_with_a_core_it_remembers(kind: Any) -> None:
    assert recalled(PPO, functools.partial(kind, features=16), 20, update_epochs=4, minibatches=2) >= 0.95


def test_without_a_core_it_is_at_chance() -> None:
    assert abs(recalled(PPO, None, 20, update_epochs=4, minibatches=2) - 0.5) < 0.15


@pytest.mark.parametrize("kind", [A2C, IMPALA])
def test_with_one_update_a_rollout_it_remembers_too(kind: Any) -> None:
    assert recalled(kind, functools.partial(MinimalGRU, features=16), 60, learning_rate=2e-2) >= 0.95
