"""IMPALA: contract tests and learning from off-policy data.

Shapes: N environments.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

import rein
from rein.envs import SimulatedEnvironment
from rein.envs.probes import Reach
from rein.ops.random import generator
from rein.ops.returns import vtrace

SMALL: dict[str, Any] = {"rollout_steps": 8, "hidden": (16,), "learning_rate": 1e-2, "gamma": 0.9}


def fitted(environment: Any, kind: Any = rein.IMPALA, **options: Any) -> Any:
    return kind(environment.single_observation_space, environment.single_action_space, **{**SMALL, **options})


class Trap(SimulatedEnvironment):
    """Two-step task: action 0 ends the episode with a prize, action 1 opens a door to a state that pays 1 for action 1.

    Behind the door, a uniform policy gets 1/2, which is less than the prize, and the optimal policy gets 1. An agent
    that evaluates states under the uniform policy takes the prize.
    """

    single_observation_space = spaces.Box(0.0, 1.0, (2,))
    single_action_space = spaces.Discrete(2)
    initial_range = ((0.0, 0.0),)

    def __init__(self, num_envs: int = 16, seed: int | None = None, prize: float = 0.7) -> None:
        self.prize = prize
        super().__init__(num_envs, seed=seed)

    def observe(self, state_SN: Tensor) -> Tensor:
        return torch.cat([1.0 - state_SN, state_SN])

    def dynamics(self, state_SN: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        behind_N, one_N = state_SN[0] == 1.0, action == 1
        reward_N = torch.where(behind_N, one_N.float(), torch.where(one_N, 0.0, self.prize))
        return torch.ones_like(state_SN), reward_N, behind_N | ~one_N


OFF_POLICY = {"rollout_steps": 16, "learning_rate": 2e-2, "entropy_coefficient": 0.02}


def learn_from_uniform(agent: Any, environment: Any, steps: int, log_prob: float | None) -> None:
    """Train on uniformly random actions, recorded with `log_prob` or without extras."""
    stream, observation = generator(0, "behaviour"), environment.reset()
    for _ in range(steps):
        action = torch.randint(2, (environment.num_envs,), generator=stream)
        extras = {} if log_prob is None else {"log_prob": torch.full((environment.num_envs,), log_prob)}
        now = environment.apply_action(action)
        ends = now.reward, now.terminated, now.truncated, now.final_observation, now.valid
        agent.record_observation(rein.Transition(observation, action, *ends, extras))
        agent.optimize_model()
        observation = now.observation


def reached(agent: Any, environment: Any) -> float:
    return rein.evaluate(agent.policy(), environment, 64).mean_return


@pytest.mark.slow
def test_learns_the_optimal_policy_from_uniform_data() -> None:
    environment = Trap(32, seed=0)
    agent = fitted(environment, seed=0, **OFF_POLICY)
    learn_from_uniform(agent, environment, 16 * 80, math.log(0.5))
    assert reached(agent, Trap(64, seed=1)) == 1.0
    value_N = agent.networks.value(torch.eye(2))
    torch.testing.assert_close(value_N, torch.tensor([0.9, 1.0]), atol=0.1, rtol=0)  # values of the learned policy


def test_data_without_log_prob_is_treated_as_on_policy() -> None:
    environment = Trap(32, seed=0)
    agent = fitted(environment, seed=0, **OFF_POLICY)
    learn_from_uniform(agent, environment, 16 * 80, None)
    assert reached(agent, Trap(64, seed=1)) == pytest.approx(0.7)
    value_N = agent.networks.value(torch.eye(2))
    assert value_N[1].item() == pytest.approx(0.5, abs=0.1)  # value of the behaviour policy


@pytest.mark.slow
def test_learns_from_a_policy_several_updates_old() -> None:
    environment = Trap(32, seed=0)
    agent, actor = (fitted(environment, seed=0, **OFF_POLICY) for _ in range(2))
    observation = environment.reset()
    for step in range(16 * 60):
        if step % (16 * 6) == 0:
            actor.networks.load_state_dict(agent.networks.state_dict())
        action, extras = actor.select_action(observation)
        now = environment.apply_action(action)
        ends = now.reward, now.terminated, now.truncated, now.final_observation, now.valid
        agent.record_observation(rein.Transition(observation, action, *ends, {"log_prob": extras["log_prob"]}))
        agent.optimize_model()
        observation = now.observation
    assert agent.updates == 60
    assert reached(agent, Trap(64, seed=1)) == 1.0


@pytest.mark.parametrize("kind", [rein.IMPALA, rein.PPO])
@pytest.mark.parametrize("space", [spaces.Discrete(3, start=5), spaces.Box(-1.0, 2.0, (2,), np.float32)], ids=str)
@pytest.mark.parametrize("more", [{"log_prob": torch.full((4,), -1.25)}, {"mine": torch.zeros(4)}], ids=list)
@pytest.mark.parametrize("how", ["merged", "copied", "in_place"])
def test_extras_of_a_replaced_action_are_dropped(kind, space, more, how) -> None:
    """A program that replaces an action may keep the agent's extras and add to them."""
    agent = kind(spaces.Box(-1.0, 1.0, (3,), np.float32), space, rollout_steps=2, seed=0)
    observation, never = torch.zeros(4, 3), torch.zeros(4, dtype=torch.bool)
    action, extras = agent.select_action(observation)
    if isinstance(space, spaces.Discrete):
        taken = (action - 5 + 1) % 3 + 5
    else:
        taken = torch.tensor([0.5, 1.75]).expand(4, 2).clone()
    ends = torch.zeros(4), never, never, observation, ~never
    copied = {name: value.double() if value.is_floating_point() else value.clone() for name, value in extras.items()}
    given = {"merged": {**extras, **more}, "copied": {**copied, **more}, "in_place": extras}[how]
    if how == "in_place":
        given.update(more)
    agent.record_observation(rein.Transition(observation, taken, *ends, given))
    kept = agent.rollout
    distribution, _ = agent.networks(agent.networks.preprocess(observation))
    sample = (kept["sample"] if "sample" in kept else kept["action"])[0]
    assert torch.allclose(agent.networks.policy_head.to_action(distribution, sample), taken, atol=1e-5)
    expected = more["log_prob"] if "log_prob" in more else distribution.log_prob(sample)
    assert torch.allclose(kept["log_prob"][0], expected, atol=1e-5)


class RecordingIMPALA(rein.IMPALA):
    """Records the targets and advantages of each pass, and V-trace computed with the same networks."""

    found: list[tuple[Tensor, Tensor]]

    def _corrected(self, rollout: Any, reward_TN: Tensor, valid_TN: Tensor | None) -> Any:
        batch = super()._corrected(rollout, reward_TN, valid_TN)
        shape = reward_TN.shape
        with torch.no_grad():
            distribution, value_B = self.networks(self.networks.preprocess(rollout.flat("observation")))
            next_value_B = self.networks.value(self.networks.preprocess(rollout.flat("next_observation")))
        expected = vtrace(
            distribution.log_prob(rollout.flat("action")).view(shape) - rollout["log_prob"],
            reward_TN,
            rollout["terminated"],
            rollout["truncated"],
            value_B.view(shape),
            next_value_B.view(shape),
            gamma=self.gamma,
            lambda_=0.9,
            rho_clip=1.5,
            c_clip=1.2,
        )
        self.found += [(batch.target, expected.target.flatten()), (batch.advantage, expected.advantage.flatten())]
        return batch


def test_every_pass_recomputes_vtrace_with_current_networks() -> None:
    environment = rein.envs.Gridworld(8, seed=0, max_episode_steps=9)
    bounds = {"vtrace_lambda": 0.9, "rho_clip": 1.5, "c_clip": 1.2}
    agent = fitted(environment, RecordingIMPALA, seed=0, update_epochs=3, **bounds)
    agent.found = []
    rein.train(agent, environment, epochs=1, iterations=16)
    assert len(agent.found) == 2 * 3 * 2
    for mine, expected in agent.found:
        torch.testing.assert_close(mine, expected, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(agent.found[0][0], agent.found[2][0])


@pytest.mark.parametrize(
    "make", [lambda: rein.envs.Gridworld(8, seed=0, max_episode_steps=9), lambda: Reach(8, seed=0)]
)
def test_first_update_on_policy_equals_a2c(make: Any) -> None:
    agents = []
    for kind, options in ((rein.IMPALA, {}), (rein.A2C, {"gae_lambda": 1.0})):
        environment = make()
        agent = fitted(environment, kind, seed=0, entropy_coefficient=0.01, **options)
        initial = [p.detach().clone() for p in agent.networks.parameters()]
        rein.train(agent, environment, epochs=1, iterations=8)
        assert agent.updates == 1
        assert any(not torch.equal(p, q) for p, q in zip(agent.networks.parameters(), initial, strict=True))
        agents.append(agent)
    for one, other in zip(*(agent.networks.parameters() for agent in agents), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)
