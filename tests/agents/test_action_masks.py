"""Action masks of PPO, A2C, IMPALA and BC: distributions, updates, and a masked gridworld.

Shapes: T steps, N environments, B rows, L choices of all integers of an action.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

import rein
from rein.accelerate.closed_form import has_closed_form, policy_gradient
from rein.agents.base.learner import Batch
from rein.agents.base.on_policy import Coefficients, policy_loss
from rein.networks.actor_critic import ActorCritic
from rein.networks.encoder import Inputs
from rein.networks.heads import DiscreteHead, ProductHead, action_head
from rein.networks.recurrent import GRU
from rein.ops.trees import leaves, map_tree
from rein.testing import AgentContract
from rein.training.offline import fill_replay
from rein.types import Transition
from tests.envs.masked_grid import MaskedGrid

ROWS = 40
RECURRENT = {"core": functools.partial(GRU, features=32)}
SPACES: dict[str, spaces.Space[Any]] = {
    "choice": spaces.Discrete(5, start=2),
    "choices": spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[0, 1], [-1, 0]]),
    "bits": spaces.MultiBinary(3),
    "integers": spaces.Box(np.array([-2, 0]), np.array([1, 6]), dtype=np.int64),
    "hybrid": spaces.Dict(move=spaces.Discrete(4), amount=spaces.Box(-1.0, 1.0, (2,)), free=spaces.Discrete(2)),
    "nested": spaces.Tuple([spaces.Discrete(3), spaces.Dict(grip=spaces.MultiBinary(2), arm=spaces.Box(-1.0, 1.0))]),
}
UNRESTRICTED = ("free", "amount", "arm")  # components without a mask
each_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)


def masks_of(head: Any, drawn: torch.Generator, rows: int = ROWS) -> Any:
    """Return random masks (B, L) with at least one valid choice of each integer, or a dictionary of them."""
    if isinstance(head, ProductHead):
        named = zip(head.names, head.heads, strict=True)
        return {name: masks_of(part, drawn, rows) for name, part in named if name not in UNRESTRICTED}
    parts = []
    for size in head.sizes:
        part = torch.rand(rows, size, generator=drawn) < 0.4
        part[torch.arange(rows), torch.randint(size, (rows,), generator=drawn)] = True
        parts.append(part)
    return torch.cat(parts, 1)


def reference(head: Any, x: Tensor, mask: Any, sample: Any) -> tuple[Tensor, Tensor]:
    """Return the log probabilities of samples and the entropies (B,): one categorical over valid choices at a time."""
    if isinstance(head, ProductHead):
        parts = [
            reference(part, x, mask.get(name), sample[name]) for name, part in zip(head.names, head.heads, strict=True)
        ]
        return sum(log_prob for log_prob, _ in parts), sum(entropy for _, entropy in parts)  # type: ignore[return-value]
    if not isinstance(head, DiscreteHead):
        distribution = head(x)
        return distribution.log_prob(sample), distribution.entropy()
    logits, log_probs, entropies = head.linear(x), [], []
    mask = torch.ones_like(logits, dtype=torch.bool) if mask is None else mask
    for row, chosen in enumerate(sample.reshape(len(x), -1)):
        start, log_prob, entropy = 0, 0.0, 0.0
        for size, choice in zip(head.sizes, chosen, strict=True):
            valid = mask[row, start : start + size].nonzero().flatten()
            smaller = torch.distributions.Categorical(logits=logits[row, start + valid])
            log_prob = log_prob + smaller.log_prob((valid == choice).nonzero()[0, 0])
            entropy = entropy + smaller.entropy()
            start += size
        log_probs.append(log_prob)
        entropies.append(entropy)
    return torch.stack(log_probs), torch.stack(entropies)  # type: ignore[arg-type]  # each has at least one integer


def head_and_masks(space: spaces.Space[Any], rows: int = ROWS) -> tuple[Any, Tensor, Any]:
    drawn = torch.Generator().manual_seed(0)
    head = action_head(6, space, drawn, gain=2.0).double()
    return head, torch.randn(rows, 6, generator=drawn, dtype=torch.float64), masks_of(head, drawn, rows)


def chosen(mask: Any, sample: Any, sizes: Any) -> Tensor:
    """Return whether each integer of samples is valid, (B, K)."""
    places = torch.tensor([0, *sizes[:-1]]).cumsum(0)
    return mask.gather(1, sample.reshape(len(mask), -1) + places)


@each_space
def test_log_prob_and_entropy_equal_those_of_smaller_categoricals(space) -> None:
    head, x, mask = head_and_masks(space)
    distribution = head(x, mask)
    for sample in (distribution.sample(torch.Generator().manual_seed(1)), distribution.mode()):
        log_prob, entropy = reference(head, x, mask, sample)
        torch.testing.assert_close(distribution.log_prob(sample), log_prob)
        torch.testing.assert_close(distribution.entropy(), entropy)


def test_integer_without_valid_choices_is_uniform_over_its_own_choices() -> None:
    head, x, mask = head_and_masks(spaces.MultiDiscrete([2, 4]))
    distribution = head(x, torch.zeros_like(mask))
    torch.testing.assert_close(distribution.log_probs[:, 0, :2].exp(), torch.full((ROWS, 2), 0.5, dtype=torch.float64))
    assert (distribution.log_probs[:, 0, 2:].exp() == 0.0).all()


def batch_of(networks: ActorCritic) -> Batch:
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 3, generator=drawn, dtype=torch.float64)
    inputs = Inputs(x, masks_of(networks.policy_head, drawn))
    with torch.no_grad():
        distribution, value = networks(inputs)
        sample = distribution.sample(drawn)
        moved = distribution.log_prob(sample) + 0.3 * torch.randn(ROWS, generator=drawn, dtype=torch.float64)
    advantage, target = torch.randn(2, ROWS, generator=drawn, dtype=torch.float64)
    return Batch(inputs, sample=sample, log_prob=moved, value=value, advantage=advantage, target=target)


def networks_of(space: spaces.Space[Any]) -> ActorCritic:
    networks = ActorCritic(spaces.Box(-1.0, 1.0, (3,)), space, torch.Generator().manual_seed(0), hidden=(16, 8))
    with torch.no_grad():
        for name, parameter in networks.policy_head.named_parameters():
            if "weight" in name:
                parameter.mul_(50.0)
    return networks.double()


@each_space
def test_masked_update_equals_a_reference(space) -> None:
    networks, coefficients = networks_of(space), Coefficients(0.2, 0.5, 0.01)
    batch = batch_of(networks)
    loss, _ = policy_loss(networks, batch, coefficients)
    x, mask, _ = batch.features
    actor, critic = networks.hidden(x)
    log_prob, entropy = reference(networks.policy_head, actor, mask, batch.sample)
    ratio = (log_prob - batch.log_prob).exp()
    surrogate = -torch.minimum(ratio * batch.advantage, ratio.clamp(0.8, 1.2) * batch.advantage)
    error = networks.value_head(critic).squeeze(-1) - batch.target
    expected = (surrogate + 0.25 * error.square() - 0.01 * entropy).mean()
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(loss, [*networks.parameters()])
    wanted = torch.autograd.grad(expected, [*networks.parameters()])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("clip", [0.2, None])
def test_closed_form_equals_autograd(clip: float | None) -> None:
    networks, coefficients = networks_of(spaces.Discrete(5)), Coefficients(clip, 0.5, 0.01)
    batch = batch_of(networks)
    batch.features.action_mask[0] = False  # a row without a valid action
    assert has_closed_form(networks)
    loss, metrics = policy_loss(networks, batch, coefficients)
    expected = torch.autograd.grad(loss, [*networks.parameters()])
    found, reported = policy_gradient(networks, batch, coefficients, None, report=True)  # type: ignore[misc]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
    assert reported == metrics


class _IgnoresMasks(rein.PPO):
    def select_action(self, observation):
        return super().select_action({**observation, "action_mask": torch.ones_like(observation["action_mask"])})


def test_contract_fails_for_an_agent_that_ignores_masks() -> None:
    class Ignoring(AgentContract):
        def make(self, seed):
            return _IgnoresMasks(self.environment(1, 0), seed=seed)

        def environment(self, num_envs, seed):
            return MaskedGrid(num_envs, seed=seed, max_episode_steps=7)

    with pytest.raises(AssertionError, match="the action mask does not allow the action"):
        Ignoring().test_actions_are_in_action_space()


def test_bc_imitates_masked_actions() -> None:
    environment = MaskedGrid(512, seed=0)
    agent, observation = rein.BC(environment, hidden=(32,), learning_rate=1e-2, seed=0), environment.reset()
    action, rows = observation["action_mask"].argmax(1), torch.zeros(512)
    transition = Transition(observation, action, rows, rows > 0, rows > 0, observation, rows == 0, {})
    fill_replay(agent, [transition])
    agent.learn(200)
    assert (agent.policy().select_action(observation)[0] == action).float().mean() > 0.95
    exploring = agent.policy(deterministic=False)
    for _ in range(20):
        action, _ = exploring.select_action(observation)
        assert observation["action_mask"].gather(1, action.unsqueeze(1)).all()


def test_bc_refuses_recorded_actions_that_are_not_valid() -> None:
    environment = MaskedGrid(512, seed=0)
    agent, observation = rein.BC(environment, seed=0), environment.reset()
    action, rows = observation["action_mask"].argmin(1), torch.zeros(512)
    fill_replay(agent, [Transition(observation, action, rows, rows > 0, rows > 0, observation, rows == 0, {})])
    with pytest.raises(ValueError, match="not valid according to their action_mask"):
        agent.learn(1)


SOLVERS: dict[str, Any] = {
    "PPO": (rein.PPO, {"rollout_steps": 16}, 12),
    "recurrent PPO": (rein.PPO, {"rollout_steps": 16, **RECURRENT}, 10),
    "A2C": (rein.A2C, {"normalize_advantage": True}, 24),
    "IMPALA": (rein.IMPALA, {"rollout_steps": 4, "learning_rate": 5e-3}, 28),
}


@pytest.mark.default_cases("PPO")
@pytest.mark.parametrize("name", SOLVERS)
def test_solves_masked_grid_without_invalid_actions(name: str) -> None:
    kind, options, epochs = SOLVERS[name]
    environment = MaskedGrid(64, seed=0)
    common = {"gamma": 0.9, "learning_rate": 3e-3, "entropy_coefficient": 0.01}
    agent = kind(environment, seed=0, **{**common, **options})
    rein.train(agent, environment, epochs=epochs, iterations=32)
    assert environment.invalid_actions == 0
    test = MaskedGrid(256, seed=1)
    assert rein.evaluate(agent, test, 512).mean_return > test.optimal_return - 0.25
    assert test.invalid_actions == 0


def recorded(action: Tensor, agent: rein.PPO, observation: Any) -> None:
    rows, no = len(action), torch.zeros(len(action), dtype=torch.bool)
    ends = torch.zeros(rows), no, no, observation, ~no
    agent.record_observation(Transition(observation, action, *ends, {}))


def test_action_of_another_program_is_evaluated_with_the_mask() -> None:
    environment = MaskedGrid(8, seed=0)
    agent, observation = rein.PPO(environment, seed=0), environment.reset()
    action = observation["action_mask"].argmax(1)
    recorded(action, agent, observation)
    distribution, _ = agent.networks(agent.networks.preprocess(observation))
    torch.testing.assert_close(agent.rollout["log_prob"][0], distribution.log_prob(action).detach())


def test_invalid_action_of_another_program_is_refused() -> None:
    environment = MaskedGrid(8, seed=0)
    agent, observation = rein.PPO(environment, seed=0), environment.reset()
    action = observation["action_mask"].argmax(1)
    action[3] = observation["action_mask"][3].argmin()
    with pytest.raises(ValueError, match="environment 3 is not valid"):
        recorded(action, agent, observation)


def test_masks_of_sequences_follow_the_observations() -> None:
    environment = MaskedGrid(8, seed=0)
    agent = rein.PPO(environment, seed=0, rollout_steps=6, **RECURRENT)
    observation = environment.reset()
    for _ in range(5):
        action, extras = agent.select_action(observation)
        now = environment.apply_action(action)
        ends = now.reward, now.terminated, now.truncated, now.final_observation, now.valid
        agent.record_observation(Transition(observation, action, *ends, extras))
        observation = now.observation
    zeros_TN = torch.zeros_like(agent.rollout["reward"])
    batch = agent.batch(zeros_TN, zeros_TN, None)
    assert torch.equal(batch.features.action_mask, agent.rollout["observation"]["action_mask"] != 0)
    distribution, _ = agent.networks.distribution_and_value(batch.features, batch.carry, batch.reset)
    torch.testing.assert_close(distribution.log_prob(batch.sample), batch.log_prob)
    part = batch.rows(torch.tensor([3, 1]))
    assert torch.equal(part.features.action_mask, batch.features.action_mask[:, [3, 1]])


@pytest.mark.parametrize("name", ["hybrid", "nested", "choices"])
def test_agents_learn_with_masks_of_every_action_space(name: str) -> None:
    space, drawn = SPACES[name], torch.Generator().manual_seed(0)
    head = action_head(1, space, drawn)
    mask = masks_of(head, drawn, 4)

    def space_of(tree: Any) -> spaces.Space[Any]:
        if isinstance(tree, Tensor):
            return spaces.MultiBinary(tree.shape[1])
        return spaces.Dict({key: space_of(part) for key, part in tree.items()})

    observed = spaces.Dict({"position": spaces.Box(-1.0, 1.0, (2,)), "action_mask": space_of(mask)})
    for kind, options in ((rein.PPO, {}), (rein.PPO, RECURRENT), (rein.A2C, {}), (rein.IMPALA, {})):
        agent = kind(observed, space, seed=0, rollout_steps=4, hidden=(8,), **options)
        for _ in range(8):
            observation = {"position": torch.randn(4, 2, generator=drawn), "action_mask": mask}
            action, extras = agent.select_action(observation)
            no = torch.zeros(4, dtype=torch.bool)
            ends = torch.randn(4, generator=drawn), no, no, observation, ~no
            agent.record_observation(Transition(observation, action, *ends, extras))
            metrics = agent.optimize_model()
        assert metrics
        assert all(bool(value.isfinite()) for value in metrics.values())
        agent.policy().select_action(observation)
    assert all(leaf.dtype in (torch.int64, torch.float32) for _, leaf in leaves(map_tree(lambda x: x, action)))


def test_custom_agents_get_masks_from_the_actor_network() -> None:
    environment = MaskedGrid(512, seed=0)
    actor = rein.networks.actor(
        environment.single_observation_space,
        environment.single_action_space,
        generator=torch.Generator().manual_seed(0),
    )
    observation = environment.reset()
    distribution = actor(observation)
    for action in (distribution.mode(), distribution.sample(torch.Generator().manual_seed(1))):
        assert observation["action_mask"].gather(1, action.unsqueeze(1)).all()
        assert (distribution.log_prob(action) > -10.0).all()
    assert (distribution.log_prob(observation["action_mask"].argmin(1)).exp() == 0.0).all()
