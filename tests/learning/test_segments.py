"""Prioritized sampling of whole sequences: probabilities, importance weights, and revised advantages."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
from torch import Tensor

import rein
from rein.agents.base.learner import Batch
from rein.agents.base.on_policy import Trace
from rein.agents.base.segments import PrioritizedSegments, SegmentSampler, draw_without_replacement, priorities
from rein.agents.ppo import PPO
from rein.envs.gridworld import Gridworld
from rein.envs.probes import Bandit, Corridor, Memory, Reach
from rein.networks.actor_critic import ActorCritic
from rein.networks.recurrent import GRU
from rein.ops.random import generator
from rein.ops.returns import gae
from rein.schedules import linear

T, N = 7, 6
DISCOUNTS = {"gamma": 0.9, "lambda_": 0.8}
CORES: dict[str, Any] = {"feed-forward": None, "recurrent": functools.partial(GRU, features=8)}
each_core = pytest.mark.parametrize("core", CORES.values(), ids=CORES)
SMALL = {"rollout_steps": 8, "update_epochs": 2, "minibatches": 2, "hidden": (16,)}


def fitted(environment: Any, **options: Any) -> PPO:
    return PPO(environment.single_observation_space, environment.single_action_space, **{**SMALL, **options})


class ExampleRollout:
    """Random rollout in the spaces of a Gridworld, with episode ends and invalid rows."""

    def __init__(self, core: Any = None, segments: PrioritizedSegments | None = None, seed: int = 0) -> None:
        stream, space = generator(seed, "rollout"), Gridworld(1)
        networks = ActorCritic(
            space.single_observation_space,
            space.single_action_space,
            generator(seed, "networks"),
            hidden=(8,),
            core=core,
        )
        for parameter in networks.parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=stream)
        self.networks, self.recurrent = networks, core is not None
        self.features = torch.randn(T, N, networks.preprocess.features, generator=stream)
        self.terminated, self.truncated, invalid = (torch.rand(3, T, N, generator=stream) < 0.15).unbind()
        self.valid, self.reset = ~invalid, torch.rand(T, N, generator=stream) < 0.2
        self.carry = torch.randn(N, networks.carry_size, generator=stream)
        self.action = torch.randint(4, (T, N), generator=stream)
        self.reward, self.bootstrap = torch.randn(2, T, N, generator=stream).unbind()
        self.log_prob, self.value = self.look()
        values = self.value, self.next_value(self.value)
        self.trace = Trace(self.reward, self.terminated, self.truncated, *values, self.valid)
        advantage = gae(*self.trace, **DISCOUNTS)
        shaped = (lambda x: x) if self.recurrent else (lambda x: x.flatten(0, 1))
        columns = {
            "features": self.features,
            "sample": self.action,
            "log_prob": self.log_prob,
            "value": self.value,
            "advantage": advantage,
            "target": advantage + self.value,
            "valid": self.valid,
        }
        recurrent_columns = {"reset": self.reset, "carry": self.carry} if self.recurrent else {}
        self.batch = Batch(**{name: shaped(column) for name, column in columns.items()}, **recurrent_columns)
        self.sequences = SegmentSampler(
            segments or PrioritizedSegments(), networks, self.batch, self.trace, **DISCOUNTS
        )

    def look(self) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            if self.recurrent:
                distribution, value = self.networks.sequence(self.features, self.carry, self.reset)
                return distribution.log_prob(self.action), value
            distribution, value = self.networks(self.features.flatten(0, 1))
            return distribution.log_prob(self.action.flatten()).view(T, N), value.view(T, N)

    def next_value(self, value: Tensor) -> Tensor:
        cut = self.truncated.clone()
        cut[-1] = True
        return torch.where(cut, self.bootstrap, value.roll(-1, 0))

    def change(self, size: float = 0.2) -> None:
        for k, parameter in enumerate(self.networks.parameters()):
            parameter.data += size * torch.randn(parameter.shape, generator=generator(k, "change"))

    def revise(self, *environments: int) -> None:
        index = torch.tensor(environments)
        self.sequences.revise(index, self.sequences.rows(index))


def corrected(x: ExampleRollout, rho_clip: float, c_clip: float) -> tuple[Tensor, Tensor]:
    """Compute V-trace advantages and targets row by row. Advantages omit the factor rho of their row."""
    log_prob, value = (column.double() for column in x.look())
    ratio, next_value = (log_prob - x.log_prob).exp(), x.next_value(value)
    advantage, target = torch.zeros(T, N).double(), torch.zeros(T, N).double()
    gamma, lambda_ = DISCOUNTS["gamma"], DISCOUNTS["lambda_"]
    for n in range(N):
        beyond = 0.0  # D of the next row
        for t in range(T - 1, -1, -1):
            if not x.valid[t, n]:
                beyond = 0.0
                continue
            ends = x.terminated[t, n] or x.truncated[t, n] or t == T - 1 or not x.valid[t + 1, n]
            carried = 0.0 if ends else gamma * lambda_ * beyond
            delta = x.reward[t, n] + gamma * next_value[t, n] * ~x.terminated[t, n] - value[t, n]
            rho, c = min(rho_clip, float(ratio[t, n])), min(c_clip, float(ratio[t, n]))
            beyond = float(rho * delta + c * carried)
            advantage[t, n], target[t, n] = delta + carried, value[t, n] + beyond
    return advantage, target


@each_core
@pytest.mark.parametrize("clips", [(1.0, 1.0), (0.7, 0.4), (float("inf"), 1.3)])
def test_revised_advantages_match_vtrace(core: Any, clips: tuple[float, float]) -> None:
    x = ExampleRollout(core, PrioritizedSegments(rho_clip=clips[0], c_clip=clips[1]))
    x.change()
    x.revise(4, 1, 3)
    advantage, target = (result.float() for result in corrected(x, *clips))
    untouched = ExampleRollout(core).sequences
    for n in range(N):
        expected = (advantage, target) if n in (4, 1, 3) else (untouched.advantage_TN, untouched.target_TN)
        torch.testing.assert_close(x.sequences.advantage_TN[:, n], expected[0][:, n], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(x.sequences.target_TN[:, n], expected[1][:, n], rtol=1e-3, atol=1e-4)


@each_core
def test_revising_does_not_change_the_rollout(core: Any) -> None:
    x = ExampleRollout(core)
    before = [column if column is None else column.clone() for column in (*x.batch, *x.trace)]
    x.change()
    x.revise(*range(N))
    for column, kept in zip((*x.batch, *x.trace), before, strict=True):
        assert (column is None and kept is None) or torch.equal(column, kept)


@each_core
def test_rows_are_whole_sequences_in_time_order(core: Any) -> None:
    x = ExampleRollout(core)
    x.change()
    x.revise(*range(N))
    index = torch.tensor([5, 0, 2])
    drawn = x.sequences.rows(index)
    shape = (T, 3, -1)
    for mine, theirs in (
        (drawn.features, x.features),
        (drawn.sample, x.action),
        (drawn.log_prob, x.log_prob),
        (drawn.value, x.value),
        (drawn.advantage, x.sequences.advantage_TN),
        (drawn.target, x.sequences.target_TN),
        (drawn.valid, x.valid),
    ):
        assert torch.equal(mine.reshape(shape), theirs[:, index].reshape(shape))
    if x.recurrent:
        assert torch.equal(drawn.carry, x.carry[index])
        assert torch.equal(drawn.reset, x.reset[:, index])


def test_invalid_rows_have_no_advantage_or_priority() -> None:
    x, other = ExampleRollout(), ExampleRollout()
    hidden = ~other.valid
    other.log_prob.masked_fill_(hidden, float("nan"))
    other.reward.masked_fill_(hidden, float("nan"))
    other.batch.log_prob.view(T, N).masked_fill_(hidden, float("nan"))
    for mine in (x, other):
        mine.change()
        mine.revise(*range(N))
    assert torch.equal(x.sequences.advantage_TN, other.sequences.advantage_TN)
    assert not x.sequences.advantage_TN[hidden].any()


def test_priorities_are_powers_of_summed_absolute_advantages() -> None:
    advantage = torch.tensor([[1.0, -3.0, 0.0], [-1.0, 5.0, 0.0]])
    torch.testing.assert_close(priorities(advantage, 0.5), torch.tensor([0.5, 1.0, 1e-6]))
    assert priorities(advantage, 0.0).tolist() == [1.0, 1.0, 1.0]
    assert len(priorities(torch.zeros(2, 3), 0.8).unique()) == 1


RATES = torch.tensor([1.0, 0.5, 0.25, 0.125, 0.125])


def draw_many(count: int, times: int = 20_000) -> list[tuple[Tensor, Tensor]]:
    stream = generator(0, "agent")
    return [draw_without_replacement(RATES, count, stream) for _ in range(times)]


def test_draws_are_proportional_to_remaining_rates() -> None:
    times = 20_000
    first, second = torch.stack([index for index, _ in draw_many(2, times)]).unbind(1)
    share = RATES / RATES.sum()
    assert (first != second).all()
    assert ((first.bincount(minlength=5) / times - share).abs() < 4.0 * (share * (1 - share) / times).sqrt()).all()
    after = second[first == 0].bincount(minlength=5)[1:]
    left = RATES[1:] / RATES[1:].sum()
    assert ((after / after.sum() - left).abs() < 4.0 * (left * (1 - left) / after.sum()).sqrt()).all()


@pytest.mark.default_cases("2")
@pytest.mark.parametrize("count", [1, 2, 4])
def test_inverse_probability_estimates_are_unbiased(count: int) -> None:
    """The mean of 1 / probability over all draws, with 0 for items that were not drawn, is 1 for each item."""
    found = draw_many(count)
    counted = torch.stack([torch.zeros(5).scatter(0, index, 1.0 / chance) for index, chance in found])
    assert ((counted.mean(0) - 1.0).abs() < 4.0 * counted.std(0) / len(found) ** 0.5).all()


def test_drawing_all_items_has_probability_1() -> None:
    index, chance = draw_without_replacement(RATES, 5, generator(0, "agent"))
    assert index.sort().values.tolist() == list(range(5))
    assert chance.tolist() == [1.0] * 5


def weights(segments: PrioritizedSegments, count: int = 3) -> list[tuple[Batch, Tensor]]:
    x = ExampleRollout(segments=segments)
    return list(x.sequences.minibatches(count, generator(1, "agent"), {"env_steps": 0, "updates": 0}))


@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 0.0), (0.0, 1.0), (0.8, 0.0)])
def test_alpha_0_or_beta_0_gives_equal_weights(alpha: float, beta: float) -> None:
    found = weights(PrioritizedSegments(alpha, beta))
    assert len(found) == 3
    for drawn, weight in found:
        assert drawn.value.shape == weight.shape == (T * 2,)
        torch.testing.assert_close(weight, torch.ones(T * 2))


def test_importance_weights_decrease_with_priority_and_have_mean_1() -> None:
    spreads = []
    for beta in (0.5, 1.0, linear(1.0, 0.0, updates=100)):
        found = weights(PrioritizedSegments(2.0, beta))
        for drawn, weight in found[:1]:
            priority, weight_S = drawn.advantage.view(T, 2).abs().sum(0), weight.view(T, 2)[0]
            assert (priority[0] - priority[1]) * (weight_S[0] - weight_S[1]) < 0
        assert all(weight.mean() == pytest.approx(1.0) for _, weight in found)
        spreads.append(float(found[0][1].std()))
    assert 0.0 < spreads[0] < spreads[1] == spreads[2]


def test_alpha_0_samples_uniformly() -> None:
    x, taken, times = ExampleRollout(segments=PrioritizedSegments(alpha=0.0)), torch.zeros(N), 3_000
    stream, first = generator(2, "agent"), x.features[0, :, 0]
    for _ in range(times):
        drawn, _ = next(x.sequences.minibatches(2, stream, {"env_steps": 0, "updates": 0}))
        taken += (drawn.features.view(T, 3, -1)[0, :, 0, None] == first).sum(0)
    assert ((taken / times - 0.5).abs() < 4.0 * 0.5 / times**0.5).all()


@each_core
def test_only_drawn_sequences_are_revised(core: Any) -> None:
    x, untouched = ExampleRollout(core), ExampleRollout(core).sequences.advantage_TN
    steps = x.sequences.minibatches(3, generator(1, "agent"), {"env_steps": 0, "updates": 0})
    drawn, _ = next(steps)
    x.change()
    assert torch.equal(x.sequences.advantage_TN, untouched)
    next(steps)
    expected, taken = corrected(x, 1.0, 1.0)[0].float(), []
    for n in range(N):
        taken.append(bool((drawn.log_prob.view(T, 2) == x.log_prob[:, n, None]).all(0).any()))
        column = expected[:, n] if taken[n] else untouched[:, n]
        torch.testing.assert_close(x.sequences.advantage_TN[:, n], column, rtol=1e-3, atol=1e-4)
    assert sum(taken) == 2


def learned(environment: Any, epochs: int = 1, **options: Any) -> PPO:
    agent = fitted(environment, seed=0, **options)
    rein.train(agent, environment, epochs=epochs, iterations=8)
    return agent


@each_core
@pytest.mark.parametrize("normalize_advantage", [False, True])
def test_drawing_all_sequences_equals_plain_ppo(core: Any, normalize_advantage: bool) -> None:
    """Items drawn with probability 1 need no correction, for all alpha and beta."""
    agents = [
        learned(
            Gridworld(num_envs=8, seed=0, max_episode_steps=5),
            core=core,
            epochs=1,
            minibatches=1,
            normalize_advantage=normalize_advantage,
            segments=segments,
        )
        for segments in (None, PrioritizedSegments(alpha=1.3, beta=0.9))
    ]
    for one, other in zip(*(agent.networks.parameters() for agent in agents), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-5)


def test_importance_weights_affect_the_update() -> None:
    """The first update draws the same sequences for all beta, so only weights differ; with alpha = 0 they are equal."""

    def parameters(alpha: float, beta: float) -> Tensor:
        environment, segments = Reach(num_envs=8, seed=0), PrioritizedSegments(alpha, beta)
        agent = learned(environment, epochs=1, minibatches=2, max_grad_norm=None, guard=only_first(), segments=segments)
        return torch.cat([parameter.detach().flatten() for parameter in agent.networks.parameters()])

    assert not torch.equal(parameters(1.0, 0.0), parameters(1.0, 1.0))
    torch.testing.assert_close(parameters(0.0, 0.0), parameters(0.0, 1.0))


def only_first() -> Any:
    """Return a guard that allows a single update."""
    calls: list[None] = []
    return lambda metrics, gradients: (calls.append(None), len(calls) == 1)[1]


def test_number_of_updates_is_passes_times_minibatches() -> None:
    agent = fitted(
        Gridworld(num_envs=7, seed=0), seed=0, update_epochs=3, minibatches=2, segments=PrioritizedSegments()
    )
    rein.train(agent, Gridworld(num_envs=7, seed=0, max_episode_steps=9), epochs=1, iterations=16)
    assert agent.updates == 2 * 3 * 2


PROBE = {
    "rollout_steps": 16,
    "update_epochs": 4,
    "minibatches": 4,
    "hidden": (32,),
    "learning_rate": 1e-2,
    "gamma": 0.9,
}


@pytest.mark.default_cases("bandit")
@pytest.mark.parametrize(
    ("make", "epochs", "options"),
    [
        (Bandit, 60, {}),
        (functools.partial(Corridor, continuous=True), 80, {"squash": "ball", "state_dependent_std": True}),
        (functools.partial(Memory, delay=1), 40, {"core": functools.partial(GRU, features=16)}),
    ],
    ids=["bandit", "corridor", "memory"],
)
def test_solves_probe(make: Any, epochs: int, options: dict[str, Any]) -> None:
    environment, segments = make(64, seed=0), PrioritizedSegments(beta=linear(0.2, 1.0, updates=1_000))
    agent = fitted(environment, seed=0, segments=segments, **{**PROBE, **options})
    rein.train(agent, environment, epochs=epochs, iterations=16)
    reached = rein.evaluate(agent.policy(), make(64, seed=1), 256).mean_return
    assert reached >= 0.95 * environment.optimal_return


def test_config_is_complete_json() -> None:
    segments = PrioritizedSegments(0.5, linear(0.2, 1.0, updates=10), c_clip=float("inf"))
    config = fitted(Gridworld(1), segments=segments, reward_smoothing=0.3, squash="ball").config
    assert config["segments"] == segments.config
    again = PrioritizedSegments(**{**segments.config, "c_clip": float(segments.config["c_clip"])})
    assert again == segments
    assert fitted(Gridworld(1)).config["segments"] is None
    json.dumps(config, allow_nan=False)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: PrioritizedSegments(alpha=-0.1), "alpha=-0.1: give a finite number"),
        (lambda: PrioritizedSegments(alpha=float("nan")), "alpha=nan"),
        (lambda: PrioritizedSegments(beta=1.5), "beta: the values range from 1.5 to 1.5"),
        (lambda: PrioritizedSegments(beta=linear(0.0, 2.0, updates=9)), "range from 0.0 to 2.0"),
        (lambda: PrioritizedSegments(rho_clip=0.0), "rho_clip=0.0: give a positive number"),
        (lambda: PrioritizedSegments(c_clip=float("nan")), "c_clip=nan"),
        (lambda: fitted(Gridworld(1), reward_smoothing=1.2), r"PPO\(reward_smoothing=1.2\): give a number from 0"),
        (
            lambda: learned(Gridworld(num_envs=3, seed=0), minibatches=4, segments=PrioritizedSegments()),
            "at least 4 environments, got 3",
        ),
    ],
)
def test_invalid_options_are_rejected(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def smoothed(decay: float) -> list[Tensor]:
    environment = Corridor(8, seed=0)
    return [
        parameter.detach() for parameter in learned(environment, epochs=4, reward_smoothing=decay).networks.parameters()
    ]


def test_smoothed_rewards_affect_learning_only() -> None:
    raw, smooth = smoothed(0.0), smoothed(0.9)
    assert any(not torch.equal(one, other) for one, other in zip(raw, smooth, strict=True))
    agent, environment = fitted(Corridor(8, seed=0), seed=0, reward_smoothing=0.9), Corridor(8, seed=0)
    state = rein.train(agent, environment, epochs=4, iterations=40)
    assert 0.0 <= state.metrics["episode_return"] <= 1.0
