"""Recurrent agents: learning reproduces the outputs recorded while acting, and resets clear the carry.

Shapes: T steps of a rollout, N environments, C features of a carry.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import rein
from rein.envs.probes import Memory, Reach
from rein.networks.recurrent import GRU, LSTM, MinimalGRU
from rein.ops.random import generator
from rein.replay.rollout import Rollout
from tests.agents.steps import drive

CORES = {kind.__name__: functools.partial(kind, features=6) for kind in (LSTM, GRU, MinimalGRU)}
CORES["two layers"] = functools.partial(MinimalGRU, features=6, layers=2)
SMALL: dict[str, Any] = {"rollout_steps": 8, "hidden": (8,)}
N = 6


class RecordingPPO(rein.PPO):
    """Records pairs of actual and expected tensors for every rollout."""

    def update(self, rollout: Rollout) -> dict[str, Tensor]:
        zeros_TN = torch.zeros_like(rollout["reward"])
        with torch.no_grad():
            batch = self.batch(zeros_TN, zeros_TN, None)
            distribution, value_TN = self.networks.distribution_and_value(batch.features, batch.carry, batch.reset)
            self.recorded.append(
                {
                    "log_prob": (rollout["log_prob"].clone(), distribution.log_prob(batch.sample)),
                    "value": (rollout["value"].clone(), value_TN),
                    "next_value": (self.next_values(rollout["value"]), self.expected_next_values(rollout, batch)),
                    "reset": (rollout["reset"].clone(), self.expected_resets(rollout)),
                }
            )
        return super().update(rollout)

    def expected_next_values(self, rollout: Rollout, batch: Any) -> Tensor:
        """Return the values of next observations, computed step by step with the carry after each step."""
        carry, found = batch.carry, []
        for t in range(rollout.steps):
            _, _, carry = self.networks.step(batch.features[t], torch.where(batch.reset[t][:, None], 0.0, carry))
            next_value_N = self.networks.value(self.networks.preprocess(rollout["next_observation"][t]), carry)
            cut_N = rollout["truncated"][t] & rollout["valid"][t] & ~rollout["terminated"][t]
            last = t + 1 == rollout.steps
            found.append(next_value_N if last else torch.where(cut_N, next_value_N, rollout["value"][t + 1]))
        return torch.stack(found)

    def expected_resets(self, rollout: Rollout) -> Tensor:
        """Return True for the first step, and for steps after an episode end or an invalid row."""
        over_TN = rollout["terminated"] | rollout["truncated"] | ~rollout["valid"]
        first_N = self.over_N if self.recorded else torch.ones_like(over_TN[0])
        self.over_N = over_TN[-1].clone()
        return torch.cat([first_N[None], over_TN[:-1]])

    recorded: list[dict[str, tuple[Tensor, Tensor]]]


def recording_agent(environment: Any, **options: Any) -> RecordingPPO:
    spaces = environment.single_observation_space, environment.single_action_space
    common: dict[str, Any] = {**SMALL, "update_epochs": 2, "minibatches": 2, "learning_rate": 1e-2}
    agent = RecordingPPO(*spaces, seed=0, **{**common, **options})
    agent.recorded = []
    return agent


@pytest.mark.default_cases(every=3)
@pytest.mark.parametrize("options", [{}, {"normalize_observation": True, "shared": True}])
@pytest.mark.parametrize("make", [Memory, Reach])
@pytest.mark.parametrize("core", CORES)
def test_recorded_outputs_match_recomputed_sequences(core: str, make: Any, options: dict[str, Any]) -> None:
    agent = recording_agent(make(1, seed=0), core=CORES[core], **options)
    drive(agent, 5 * 8)
    assert len(agent.recorded) == 5
    assert sum(int(recorded["reset"][0].sum()) for recorded in agent.recorded) > N
    for recorded in agent.recorded:
        for name in ("log_prob", "value", "next_value"):
            torch.testing.assert_close(*recorded[name], atol=1e-6, rtol=1e-5, msg=name)


def test_carry_is_reset_at_episode_starts() -> None:
    agent = recording_agent(Memory(1, seed=0), core=CORES["GRU"])
    drive(agent, 3 * 8)
    for recorded in agent.recorded:
        mine, expected = recorded["reset"]
        outside = mine & ~expected  # resets between two rollouts do not end a row
        assert not (expected & ~mine).any() and not outside[1:].any()


def test_recorded_outputs_match_in_episodic_epochs() -> None:
    """Rows after an episode end are invalid, and the last step of the epoch truncates open episodes."""
    environment = rein.envs.Gridworld(8, seed=0, max_episode_steps=9)
    agent = recording_agent(environment, core=CORES["LSTM"])
    rein.train(agent, environment, epochs=8, iterations=7, episodic=True)
    assert len(agent.recorded) >= 4
    for recorded in agent.recorded:
        for name in ("log_prob", "value", "next_value"):
            torch.testing.assert_close(*recorded[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("core", CORES)
def test_reset_clears_the_carry(core: str) -> None:
    """An episode end, an invalid row and a reset outside a step clear the carry. Environment 3 keeps its carry."""
    no, yes = torch.zeros(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)
    recorded = []
    for past in (-1.0, 1.0):
        agent = recording_agent(Reach(1, seed=0), core=CORES[core], rollout_steps=100)
        observation = torch.full((4, agent.observation_space.shape[0]), past)
        for t in range(3):
            action, extras = agent.select_action(observation)
            ended, valid = no.clone(), yes.clone()
            if t == 2:
                ended[0], valid[1] = True, False
            row = (observation, action, torch.zeros(4), ended, no, observation, valid, extras)
            agent.record_observation(rein.Transition(*row))
        agent.observe_reset(observation, torch.tensor([False, False, True, False]))
        recorded.append(agent.select_action(torch.zeros_like(observation))[1]["value"])
    same = recorded[0] == recorded[1]
    assert same.tolist() == [True, True, True, False]


def test_policy_has_a_separate_carry_per_environment() -> None:
    agent = recording_agent(Memory(1, seed=0), core=CORES["LSTM"])
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


def test_policy_rejects_state_of_the_other_kind() -> None:
    agent = recording_agent(Memory(1, seed=0), core=CORES["LSTM"])
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


@pytest.mark.default_cases("MinimalGRU")
@pytest.mark.parametrize("kind", [LSTM, MinimalGRU])
def test_ppo_with_core_solves_memory_task(kind: Any) -> None:
    assert recalled(rein.PPO, functools.partial(kind, features=16), 20, update_epochs=4, minibatches=2) >= 0.95


def test_ppo_without_core_stays_at_chance() -> None:
    assert abs(recalled(rein.PPO, None, 20, update_epochs=4, minibatches=2) - 0.5) < 0.15


@pytest.mark.slow
@pytest.mark.parametrize("kind", [rein.A2C, rein.IMPALA])
def test_a2c_and_impala_solve_memory_task(kind: Any) -> None:
    assert recalled(kind, functools.partial(MinimalGRU, features=16), 60, learning_rate=2e-2) >= 0.95
