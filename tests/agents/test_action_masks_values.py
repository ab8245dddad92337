"""Action masks of agents that learn action values: exploration, greedy actions, targets, and a masked gridworld.

Shapes: T steps in time, N environments, B rows, A actions.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

import rein
from rein.agents.base.action_noise import random_action
from rein.agents.base.learner import Batch
from rein.agents.discrete_sac import actor_loss
from rein.episodes.random_policy import RandomPolicy
from rein.networks.encoder import Inputs
from rein.ops.random import generator
from rein.ops.trees import map_tree
from rein.schedules import linear
from rein.spaces import mask_of
from rein.testing.stateful import first_difference
from tests.envs.masked_grid import MaskedGrid

A, ROWS = 5, 20_000
SPACE = spaces.Dict(
    {"observation": spaces.Box(-1.0, 1.0, (3,), np.float32), "action_mask": spaces.Box(0, 1, (A,), np.int8)}
)
ACTIONS = spaces.Discrete(A, start=2)
SMALL: dict[str, Any] = {"hidden": (16,), "batch_size": 16, "capacity": 400, "learning_starts": 16, "gamma": 0.9}
ROLLOUT: dict[str, Any] = {"hidden": (16,), "rollout_steps": 4, "minibatches": 2, "update_epochs": 2, "gamma": 0.9}

AGENTS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "DQN": (rein.DQN, {**SMALL, "update_to_data": 0.25}),
    "DQN with extensions": (
        rein.DQN,
        {**SMALL, "update_to_data": 0.25, "dueling": True, "n_step": 3, "prioritized": True, "temperature": 0.3},
    ),
    "DQN without double Q-learning": (rein.DQN, {**SMALL, "update_to_data": 0.25, "double": False, "layer_norm": True}),
    "IQN": (rein.IQN, {**SMALL, "update_to_data": 0.25, "cosines": 8, "action_quantiles": 4}),
    "RecurrentDQN": (rein.RecurrentDQN, {**SMALL, "update_to_data": 0.25, "sequence_length": 4, "burn_in": 2}),
    "PQN": (rein.PQN, ROLLOUT),
    "QLearning": (rein.QLearning, {"gamma": 0.9}),
    "DiscreteSAC": (rein.DiscreteSAC, {**SMALL, "update_to_data": 0.25}),
}
CORE = functools.partial(rein.networks.GRU, features=8)
NORMALIZED = {**ROLLOUT, "normalize_observation": True, "normalize_reward": True}
WITH_POLICIES = {"PPO": (rein.PPO, NORMALIZED), "recurrent PPO": (rein.PPO, {**ROLLOUT, "core": CORE})}


def built(name: str, environment: Any, seed: int | None = 0, **options: Any) -> Any:
    kind, given = (AGENTS | WITH_POLICIES)[name]
    return kind(environment, seed=seed, **{**given, **options})


def masked_rows(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return observations of which each has 1 to A valid actions."""
    mask_NA = torch.rand(rows, A, generator=generator) < 0.4
    mask_NA[torch.arange(rows), torch.randint(A, (rows,), generator=generator)] = True
    return {"observation": torch.randn(rows, 3, generator=generator), "action_mask": mask_NA.to(torch.int8)}


def are_valid(action: Tensor, observation: dict[str, Tensor]) -> bool:
    index_N1 = (action - ACTIONS.start).unsqueeze(1)
    return bool(observation["action_mask"].gather(1, index_N1).all())


NETWORK_AGENTS = [name for name in AGENTS if name != "QLearning"]


@pytest.mark.parametrize("name", NETWORK_AGENTS)
def test_agents_never_take_invalid_actions(name: str) -> None:
    kind, options = AGENTS[name]
    agent = kind(SPACE, ACTIONS, seed=0, **options)
    agent.env_steps = agent.updates = 100_000  # after the warm-up
    exploring, greedy = agent.policy(deterministic=False), agent.policy()
    epsilon_greedy = agent.policy(epsilon=1.0) if hasattr(agent, "choose") else exploring
    seen = generator(0, "seen")
    observation = masked_rows(ROWS, seen)
    for actor in (agent, exploring, greedy, epsilon_greedy):
        assert are_valid(actor.select_action(observation)[0], observation)


def test_table_never_takes_invalid_actions() -> None:
    space = spaces.Dict({"observation": spaces.MultiDiscrete([3, 2]), "action_mask": spaces.MultiBinary(A)})
    agent, seen = rein.QLearning(space, ACTIONS, seed=0, epsilon=0.5), generator(0, "seen")
    state = torch.stack([torch.randint(n, (ROWS,), generator=seen) for n in (3, 2)], 1)
    observation = {**masked_rows(ROWS, seen), "observation": state}
    for actor in (agent, agent.policy(), agent.policy(epsilon=1.0)):
        assert are_valid(actor.select_action(observation)[0], observation)


def test_warm_up_is_uniform_over_valid_actions() -> None:
    mask = torch.tensor([0, 1, 0, 1, 1], dtype=torch.int8).expand(1_000_000, A)
    action = random_action(ACTIONS, {"observation": torch.zeros(1_000_000, 3), "action_mask": mask}, generator(0, "x"))
    count_A = (action - ACTIONS.start).bincount(minlength=A)
    assert count_A[[0, 2]].sum() == 0
    assert ((count_A[[1, 3, 4]] - 1e6 / 3).abs() < 4.0 * math.sqrt(1e6 * 2 / 9)).all()


def test_random_policy_draws_valid_choices_of_every_space() -> None:
    parts = {
        "one": spaces.Discrete(3, start=-1),
        "many": spaces.MultiDiscrete([2, 4], start=[5, 0]),
        "binary": spaces.MultiBinary(2),
        "integer": spaces.Box(-1, 1, (1, 2), np.int32),
        "free": spaces.Discrete(4),
        "continuous": spaces.Box(-1.0, 1.0, (2,), np.float32),
    }
    masks = {  # each number is valid or not for all rows
        "one": [0, 1, 1],
        "many": [1, 0, 0, 1, 0, 1],
        "binary": [0, 1, 1, 1],
        "integer": [1, 0, 1, 0, 1, 0],
    }
    mask = {name: torch.tensor(row).expand(ROWS, -1) for name, row in masks.items()}
    observation = {"observation": torch.zeros(ROWS, 3), "action_mask": mask}
    action, _ = RandomPolicy(spaces.Dict(parts), 0).select_action(observation)
    found = {name: sorted({tuple(row) for row in x.reshape(ROWS, -1).tolist()}) for name, x in action.items()}
    assert found["one"] == [(0,), (1,)]
    assert found["many"] == [(5, 1), (5, 3)]
    assert found["binary"] == [(1, 0), (1, 1)]
    assert found["integer"] == [(-1, 0), (1, 0)]
    assert found["free"] == [(0,), (1,), (2,), (3,)]
    free = RandomPolicy(spaces.Dict(parts), 0).select_action({"observation": torch.zeros(4, 3)})[0]
    assert {name: (x.shape[1:], x.dtype) for name, x in action.items()} == {
        name: (x.shape[1:], x.dtype) for name, x in free.items()
    }


def reference_max(value_BA: Tensor, mask_BA: Tensor, of: Tensor | None = None) -> list[float]:
    """Return the value, in float64, of the best valid action by `of`, or of the best action if no action is valid."""
    found = []
    value_BA, key_BA = value_BA.detach().double(), (value_BA if of is None else of).detach()
    for row, valid, key in zip(value_BA, mask_BA, key_BA, strict=True):
        allowed = [a for a in range(len(row)) if valid[a]] or list(range(len(row)))
        found.append(float(row[max(allowed, key=lambda a: (float(key[a]), -a))]))
    return found


def with_rows_without_valid_action(observation: dict[str, Tensor]) -> dict[str, Tensor]:
    mask = observation["action_mask"].clone()
    mask[::7] = 0
    return {**observation, "action_mask": mask}


@pytest.mark.default_cases("False-False", "True-True")
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dueling", [False, True])
def test_dqn_target_matches_reference(double: bool, dueling: bool) -> None:
    agent, sample = _with_sample(rein.DQN, double=double, dueling=dueling, hidden=(8,))
    networks = agent.networks
    x = networks.preprocess(sample.next_observation).features
    online, target, mask = networks.online(x), networks.target(x), mask_of(sample.next_observation)
    assert not torch.equal(reference_argmax(online, mask), reference_argmax(target, mask))
    best = reference_max(target, mask, online if double else None)
    reward, ended = sample.reward.tolist(), sample.terminated.tolist()
    expected = [r + (0.0 if end else 0.9 * v) for r, end, v in zip(reward, ended, best, strict=True)]
    batch = agent.batch(sample)
    assert batch.target.tolist() == pytest.approx(expected, rel=1e-5)
    assert batch.target.abs().max() < 100.0
    assert isinstance(batch.features, Tensor)  # the loss of a recorded action does not depend on the mask


def reference_argmax(value_BA: Tensor, mask_BA: Tensor) -> Tensor:
    return torch.where(mask_BA | ~mask_BA.any(1, keepdim=True), value_BA, -torch.inf).argmax(1)


def _with_sample(kind: Any, **options: Any) -> tuple[Any, Any]:
    """Return an agent whose target network differs, and a sample in which some rows have no valid action."""
    environment = MaskedGrid(8, seed=0)
    agent = kind(environment, seed=0, **{**SMALL, "learning_rate": 1e-2, "learning_starts": 32, **options})
    rein.train(agent, environment, env_steps=320)
    sample = agent.replay.sample(64, generator(0, "test"), gamma=0.9)
    return agent, sample._replace(next_observation=with_rows_without_valid_action(sample.next_observation))


@pytest.mark.parametrize("double", [False, True])
def test_iqn_target_matches_reference(double: bool) -> None:
    agent, sample = _with_sample(rein.IQN, double=double, drawn_levels=False, cosines=8)
    networks, x = agent.networks, sample.next_observation["observation"]
    features = networks.preprocess(sample.next_observation).features
    level = torch.tensor([0.5 / 8 + k / 8 for k in range(8)]).expand(len(x), -1)
    quantile = networks.target.quantiles(features, level)
    values = (networks.online if double else networks.target)(features)
    best = reference_argmax(values, mask_of(sample.next_observation))
    target = agent.batch(sample).target
    for b in range(len(x)):
        value = 0.0 if sample.terminated[b] else 0.9 * quantile[b, :, best[b]]
        torch.testing.assert_close(target[b], (sample.reward[b] + value).expand(8))


@pytest.mark.parametrize("double", [False, True])
def test_recurrent_target_matches_reference(double: bool) -> None:
    environment = MaskedGrid(8, seed=0)
    agent = built("RecurrentDQN", environment, double=double, burn_in=0)
    rein.train(agent, environment, env_steps=320)
    clips, _ = agent.sample()
    after = clips.next_observation
    mask = after["action_mask"].clone()
    mask[:, ::7] = 0
    clips = clips._replace(next_observation={**after, "action_mask": mask})
    batch = agent.batch(clips)
    seen = torch.cat((clips.observation["observation"][:1], after["observation"]))
    online, target = agent.networks.online, agent.networks.target
    both = []
    for network in (online, target):
        carry, values = clips.begin["carry"], []
        for x in seen:
            value, carry = network.step(online.preprocess({"observation": x, "action_mask": mask[0]}).features, carry)
            values.append(value)
        both.append(torch.stack(values[1:]).detach())
    for t in range(len(mask)):
        best = reference_max(both[1][t], mask[t], both[0][t] if double else None)
        for b in range(mask.shape[1]):
            if clips.valid[t, b]:
                expected = float(clips.reward[t, b]) + (0.0 if clips.terminated[t, b] else 0.9 * best[b])
                assert float(batch.target[t, b]) == pytest.approx(expected, rel=1e-4)


def test_pqn_targets_match_reference() -> None:
    environment = MaskedGrid(4, seed=0, max_episode_steps=3)
    agent = built("PQN", environment, rollout_steps=6, q_lambda=0.7)
    agent.optimize_model = dict
    rein.train(agent, environment, env_steps=24)
    rollout = agent.rollout

    def value_of(observation: dict[str, Tensor]) -> list[list[float]]:
        flat = map_tree(lambda x: x.flatten(0, 1), observation)
        best = reference_max(agent.networks(agent.networks.preprocess(flat).features), mask_of(flat))
        return torch.tensor(best, dtype=torch.float64).view(6, 4).tolist()

    after = value_of(rollout["next_observation"])
    expected = torch.zeros(6, 4, dtype=torch.float64)
    for n in range(4):
        for t in reversed(range(6)):
            terminated, truncated = bool(rollout["terminated"][t, n]), bool(rollout["truncated"][t, n])
            reward = float(rollout["reward"][t, n])
            if terminated:
                expected[t, n] = reward
            elif truncated or t == 5:
                expected[t, n] = reward + 0.9 * after[t][n]
            else:
                expected[t, n] = reward + 0.9 * (0.3 * after[t][n] + 0.7 * expected[t + 1, n])
    torch.testing.assert_close(agent.batch(rollout).target, expected.flatten().float())


def test_q_learning_target_matches_reference() -> None:
    environment = MaskedGrid(1, seed=0)
    agent = rein.QLearning(environment, seed=0, gamma=0.9, learning_rate=0.5)
    observation = environment.reset()
    action, extras = agent.select_action(observation)
    step = environment.apply_action(action)
    before = agent.table.double().clone()
    end = torch.zeros(1, dtype=torch.bool)
    after = step.final_observation
    transition = rein.types.Transition(observation, action, step.reward, end, end, after, step.valid, extras)
    agent.record_observation(transition)
    agent.optimize_model()
    row, next_row = (int((o["observation"][0] * torch.tensor([64, 16, 4, 1])).sum()) for o in (observation, after))
    (best,) = reference_max(before[next_row : next_row + 1], mask_of(after))
    expected = before[row, action] + 0.5 * (step.reward + 0.9 * best - before[row, action])
    torch.testing.assert_close(agent.table[row, action].double(), expected)


def test_discrete_sac_losses_match_reference() -> None:
    agent, sample = _with_sample(rein.DiscreteSAC)
    networks, alpha = agent.networks, torch.tensor(3.0)  # 3 times the lowest logit overflows
    x, next_x = networks.preprocess(sample.observation), networks.preprocess(sample.next_observation)
    target = agent.target(sample, agent._next_values(next_x, alpha))
    expected = []
    for b in range(64):
        value = _soft_value(networks, networks.target_critics, next_x, b, 3.0)
        expected.append(float(sample.reward[b]) + (0.0 if sample.terminated[b] else 0.9 * value))
    assert target.tolist() == pytest.approx(expected, rel=1e-4)
    loss, metrics = actor_loss(networks.actor, Batch(x), (networks.critics, alpha))
    by_hand = [-_soft_value(networks, networks.critics, x, b, 3.0) for b in range(64)]
    assert float(loss.detach()) == pytest.approx(sum(by_hand) / 64, rel=1e-4)
    assert all(math.isfinite(float(value.sum())) for value in metrics.values())
    gradients = torch.autograd.grad(loss, [*networks.actor.parameters()])
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def _soft_value(networks: Any, critics: Any, x: Inputs, b: int, alpha: float) -> float:
    actor = networks.actor
    logits = actor.head.linear(actor.hidden(x.features)[0])[b].detach().double()
    least = critics(x).detach().amin(0)[b].double()
    valid = [a for a in range(len(logits)) if x.action_mask[b, a]] or list(range(len(logits)))
    weights = [math.exp(float(logits[a])) for a in valid]
    shares = [weight / sum(weights) for weight in weights]
    return sum(p * (float(least[a]) - alpha * math.log(p)) for p, a in zip(shares, valid, strict=True))


def test_q_network_masks_values() -> None:
    network = rein.networks.q_network(SPACE, ACTIONS, generator=generator(0, "networks"))
    observation = masked_rows(1_000, generator(0, "rows"))
    value = network(observation)
    assert value.isfinite().all()
    assert are_valid(value.argmax(1) + ACTIONS.start, observation)
    free = network({"observation": observation["observation"]})
    assert torch.equal(value[mask_of(observation)], free[mask_of(observation)])


def test_frame_stack_requires_observations_without_masks() -> None:
    with pytest.raises(ValueError, match="Dict, Tuple and scalar observations have no stack axis"):
        rein.DQN(SPACE, ACTIONS, frame_stack=3)


def test_target_entropy_refers_to_the_valid_actions_of_each_state() -> None:
    environment = MaskedGrid(1, seed=0)
    agent = built("DiscreteSAC", environment)
    mask = torch.zeros(3, 12, dtype=torch.bool)
    mask[0, :1], mask[1, :4] = True, True  # 1, 4, and no valid action
    expected = (0.0 + 0.5 * math.log(4) + 0.5 * math.log(12)) / 3
    assert float(agent._target_entropy_of(mask)) == pytest.approx(expected)
    assert built("DiscreteSAC", environment, target_entropy=0.2)._target_entropy_of(mask) == 0.2


def test_recorded_invalid_action_gives_finite_loss() -> None:
    """Data of other programs may contain actions that the mask does not allow."""
    for name in NETWORK_AGENTS:
        environment = MaskedGrid(8, seed=0)
        agent = built(name, environment)
        observation = environment.reset()
        for _ in range(20):
            action = torch.zeros(8, dtype=torch.int64)
            step = environment.apply_action(action)
            ends = step.reward, step.terminated, step.truncated, step.final_observation, step.valid
            agent.record_observation(rein.types.Transition(observation, action, *ends, {}))
            for value in agent.optimize_model().values():
                assert abs(float(value)) < 1e6
            observation = step.observation


SOLVING: dict[str, tuple[dict[str, Any], int]] = {}
OFF_POLICY = {"batch_size": 128, "learning_starts": 500, "update_to_data": 1 / 16, "tau": 0.02, "capacity": 20_000}
EPSILON = {"epsilon": linear(1.0, 0.05, env_steps=6_000)}
NETWORK = {"hidden": (64, 64), "learning_rate": 1e-3}
SOLVING["DQN"] = {**OFF_POLICY, **EPSILON, **NETWORK}, 10_000
SOLVING["IQN"] = {**OFF_POLICY, **EPSILON, **NETWORK, "action_quantiles": 8, "quantiles": 4}, 20_000
SOLVING["RecurrentDQN"] = {**OFF_POLICY, **EPSILON, **NETWORK, "hidden": (64,), "batch_size": 64}, 12_000
SOLVING["RecurrentDQN"][0].update(core=functools.partial(rein.networks.MinimalGRU, features=32), burn_in=0)
SOLVING["PQN"] = {**EPSILON, **NETWORK, "rollout_steps": 8, "minibatches": 4, "update_epochs": 4}, 14_000
SOLVING["QLearning"] = {"learning_rate": 0.3, "epsilon": 0.2}, 10_000
SOLVING["DiscreteSAC"] = {**OFF_POLICY, **NETWORK, "initial_temperature": 0.1}, 10_000


@pytest.mark.default_cases("DQN", "QLearning")
@pytest.mark.parametrize("name", SOLVING)
def test_solves_masked_gridworld(name: str) -> None:
    options, env_steps = SOLVING[name]
    environment, later = MaskedGrid(16, seed=0), MaskedGrid(64, seed=1)
    agent = built(name, environment, **options)
    rein.train(agent, environment, env_steps=env_steps)
    found = rein.evaluate(agent, later, episodes=300).mean_return
    assert found > environment.optimal_return - 0.5
    assert environment.invalid_actions == later.invalid_actions == 0


@pytest.mark.default_cases("DQN", "IQN", "QLearning", "PQN", "PPO")
@pytest.mark.parametrize("name", [*AGENTS, *WITH_POLICIES])
def test_resumed_run_equals_uninterrupted_run(name: str, tmp_path: Path) -> None:
    def made() -> rein.Loop:
        environment = MaskedGrid(4, seed=0, max_episode_steps=5)
        return rein.training_loop(built(name, environment), environment, iterations=30)

    whole, half, again = made(), made(), made()
    whole.run(epochs=2)
    rein.checkpoint(half, rein.Checkpoints(tmp_path))
    half.run(epochs=1)
    rein.resume(again, tmp_path)
    again.run(epochs=2)
    states = [loop.parts["agent"].state_dict() for loop in (whole, again)]
    assert first_difference(*states) is None
