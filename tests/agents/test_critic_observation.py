"""Critic observations of PPO, A2C and IMPALA: inputs that only the critic receives.

Shapes: N environments.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

import rein
from rein.accelerate.closed_form import has_closed_form
from rein.envs.wrappers import Wrapper
from rein.episodes.evaluation import check_parts
from rein.networks.recurrent import GRU
from rein.testing import AgentContract
from rein.testing.stateful import first_difference
from rein.types import TimeStep, Transition
from tests.envs.masked_grid import MaskedGrid

N = 6
SMALL: dict[str, Any] = {"rollout_steps": 8, "hidden": (16,), "learning_rate": 1e-2, "gamma": 0.9}
CORE = {"core": functools.partial(GRU, features=4)}
each_core = pytest.mark.parametrize("options", [{}, CORE], ids=["feed-forward", "recurrent"])


class HiddenTarget(Wrapper):
    """Masked gridworld whose target only the critic observes."""

    def __init__(self, num_envs: int, seed: int | None, max_episode_steps: int = 7) -> None:
        self.inner = MaskedGrid(num_envs, seed=seed, max_episode_steps=max_episode_steps)

    @property
    def single_observation_space(self) -> spaces.Dict:
        cell = spaces.MultiDiscrete([4, 4])
        mask = self.inner.single_observation_space["action_mask"]
        return spaces.Dict({"cell": cell, "action_mask": mask, "critic_observation": cell})

    @property
    def config(self) -> dict[str, Any]:
        return self.inner.config

    def _begin(self, observation: Any, mask: Tensor | None) -> Any:
        place = observation["observation"]
        mask_NA = observation["action_mask"]
        return {"cell": place[:, :2], "action_mask": mask_NA, "critic_observation": place[:, 2:]}

    def _step(self, action: Tensor, mask: Tensor | None) -> TimeStep:
        time_step = self._step_inner(action, mask)
        seen, final = (self._begin(x, None) for x in (time_step.observation, time_step.final_observation))
        return time_step._replace(observation=seen, final_observation=final)


class TestA2C(AgentContract):
    num_envs, steps = 4, 40
    kind: ClassVar[Any] = rein.A2C
    options: ClassVar[dict[str, Any]] = {"normalize_observation": True}

    def make(self, seed):
        return self.kind(self.environment(1, 0), seed=seed, **SMALL, **self.options)

    def environment(self, num_envs, seed):
        return HiddenTarget(num_envs, seed)


@pytest.mark.slow
class TestIMPALA(TestA2C):
    kind, options = rein.IMPALA, CORE


def start(kind: Any = rein.PPO, **options: Any) -> tuple[Any, Any, Any]:
    environment = HiddenTarget(N, 0)
    return kind(environment, seed=0, **{**SMALL, **options}), environment, environment.reset()


def other_target(observation: Any) -> Any:
    return {**observation, "critic_observation": observation["critic_observation"].flip(0)}


@each_core
def test_critic_depends_on_the_critic_observation_and_actor_does_not(options) -> None:
    agent, _, observation = start(**options)
    one, other = (agent.networks.preprocess(seen) for seen in (observation, other_target(observation)))
    carry = torch.randn(N, agent.networks.carry_size) if options else None
    (pi, value, _), (same, different, _) = (agent.networks.step(x, carry) for x in (one, other))
    assert torch.equal(pi.log_probs, same.log_probs)
    assert not torch.equal(value, different)
    assert torch.equal(agent.networks.policy(one, carry)[0].log_probs, pi.log_probs)
    torch.testing.assert_close(agent.networks.value(one, carry), value)


@each_core
def test_policy_acts_without_critic_observations(options) -> None:
    agent, environment, observation = start(**options)
    rein.train(agent, environment, epochs=2, iterations=8)
    whole, partial = agent.policy(), agent.policy()
    for _ in range(10):
        action, _ = whole.select_action(observation)
        assert torch.equal(action, partial.select_action({k: observation[k] for k in ("cell", "action_mask")})[0])
        observation = environment.apply_action(action).observation


def test_policy_acts_on_the_observation_itself_or_a_dict_of_it() -> None:
    space = spaces.Dict({"position": spaces.Box(-1.0, 1.0, (3,)), "critic_observation": spaces.Box(-1.0, 1.0, (2,))})
    agent = rein.PPO(space, spaces.Discrete(3), seed=0, normalize_observation=True)
    x = torch.randn(N, 3)
    for seen in (x, {"position": x}):
        action, _ = agent.policy().select_action(seen)
        assert torch.equal(action, agent.policy().select_action({"position": x, "critic_observation": x[:, :2]})[0])


def test_policy_is_evaluated_in_an_environment_without_critic_observations() -> None:
    environment = rein.envs.CartPole(2, seed=0)
    part = environment.single_observation_space
    agent = rein.PPO(
        spaces.Dict({"observation": part, "critic_observation": part}), spaces.Discrete(2), hidden=(4,), seed=0
    )
    for space in (part, spaces.Dict({"observation": part})):
        environment.single_observation_space = space
        check_parts(agent.policy(), environment)


def test_value_without_a_critic_observation_raises() -> None:
    agent, _, observation = start()
    del observation["critic_observation"]
    with pytest.raises(ValueError, match="the critic needs the entry 'critic_observation'"):
        agent.select_action(observation)


def test_shared_networks_are_refused() -> None:
    with pytest.raises(ValueError, match="use shared=False"):
        start(shared=True)


@each_core
def test_next_values_use_the_next_critic_observation(options) -> None:
    found = []
    for change in (dict, other_target):
        agent, environment, observation = start(**options)
        for _ in range(SMALL["rollout_steps"]):
            action, extras = agent.select_action(observation)
            now = environment.apply_action(action)
            ends = now.reward, now.terminated, now.truncated, change(now.final_observation), now.valid
            agent.record_observation(Transition(observation, action, *ends, extras))
            observation = now.observation
        found.append(agent.next_values(agent.rollout["value"]))
    used = agent.rollout["truncated"] & ~agent.rollout["terminated"]
    used[-1] = True
    assert not torch.equal(found[0][used], found[1][used])
    assert torch.equal(found[0][~used], found[1][~used])


def test_values_equal_a_reference() -> None:
    agent, _, observation = start(hidden=(8, 5))
    networks = agent.networks
    assert not has_closed_form(networks)
    cell, target = (torch.eye(4)[observation[name]].flatten(1) for name in ("cell", "critic_observation"))
    h = torch.cat((cell, target), 1).double()
    for weight, bias in zip(networks.critic_hidden.weights, networks.critic_hidden.biases, strict=True):
        h = torch.tanh(h @ weight[0].double() + bias[0].double())
    expected = h @ networks.value_head.weight[0].double() + networks.value_head.bias.double()
    torch.testing.assert_close(networks(networks.preprocess(observation))[1], expected.float())


def test_images_are_encoded_once_and_joined_by_the_critic_observation() -> None:
    image = spaces.Box(0, 255, (36, 36, 1), np.uint8)
    space = spaces.Dict({"camera": image, "critic_observation": spaces.Box(-1.0, 1.0, (2,))})
    agent = rein.PPO(space, spaces.Discrete(3), seed=0, hidden=(16,))
    camera = torch.randint(0, 256, (N, 36, 36, 1), dtype=torch.uint8)
    x = agent.networks.preprocess({"camera": camera, "critic_observation": torch.randn(N, 2)})
    other = x._replace(critic=torch.randn(N, 2))
    assert torch.equal(agent.networks(x)[0].log_probs, agent.networks(other)[0].log_probs)
    assert not torch.equal(agent.networks(x)[1], agent.networks(other)[1])


@pytest.mark.slow
def test_critic_learns_from_its_observation() -> None:
    """The reward is a number that only the critic observes."""
    losses = {}
    for hidden in (True, False):
        entries = {"position": spaces.Box(-1.0, 1.0, (2,))}
        if hidden:
            entries["critic_observation"] = spaces.Box(-4.0, 4.0, (1,))
        agent = rein.PPO(spaces.Dict(entries), spaces.Discrete(2), seed=0, **{**SMALL, "gamma": 0.0})
        drawn, no = torch.Generator().manual_seed(0), torch.zeros(32, dtype=torch.bool)
        for _ in range(20 * SMALL["rollout_steps"]):
            reward = torch.randn(32, generator=drawn)
            seen = {"position": torch.zeros(32, 2), "critic_observation": reward.unsqueeze(1)}
            observation = {name: seen[name] for name in entries}
            action, extras = agent.select_action(observation)
            agent.record_observation(Transition(observation, action, reward, ~no, no, observation, ~no, extras))
            metrics = agent.optimize_model()
        losses[hidden] = float(metrics["value_loss"])
    assert losses[True] < 0.1 * losses[False]


def test_networks_of_custom_agents() -> None:
    environment = HiddenTarget(N, 0)
    observation, drawn = environment.reset(), torch.Generator().manual_seed(0)
    space = environment.single_observation_space
    actor = rein.networks.actor(space, environment.single_action_space, generator=drawn)
    critic = rein.networks.critic(space, generator=drawn)
    other = other_target(observation)
    assert torch.equal(actor(observation).entropy(), actor(other).entropy())
    assert not torch.equal(critic(observation), critic(other))
    del other["critic_observation"]
    assert torch.equal(actor(observation).entropy(), actor(other).entropy())


@pytest.mark.default_cases("feed-forward")
@each_core
def test_resumed_run_continues_exactly(options, tmp_path) -> None:
    def loop_to(name: str, exist: str = "error") -> Any:
        agent, environment, _ = start(**options)
        loop = rein.training_loop(agent, environment, rein.HDF5Store(tmp_path / name, exist=exist), iterations=12)
        rein.checkpoint(loop, every=1)
        return agent, loop

    agent, loop = loop_to("whole")
    loop.run(epochs=3)
    _, interrupted = loop_to("parts")
    interrupted.run(epochs=1)
    resumed_agent, resumed = loop_to("parts", "resume")
    rein.resume(resumed)
    resumed.run(epochs=3)
    assert first_difference(agent.state_dict(), resumed_agent.state_dict()) is None
    evaluation = rein.evaluate(rein.load_policy(tmp_path / "parts"), HiddenTarget(4, 1), 8)
    assert evaluation.mean_return < 0.0
