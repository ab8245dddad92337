"""Behaviour of all replay agents: number of updates, effects of options, and recorded rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.agents.base.action_noise import AdaptiveExploration, GaussianNoise, OrnsteinUhlenbeck
from rein.envs import SimulatedEnvironment
from rein.envs.wrappers.observations import observation_history
from rein.ops.random import generator
from rein.schedules import linear
from rein.testing.stateful import copy_state, first_difference
from rein.types import Transition

SMALL = {"hidden": (8,), "batch_size": 8, "capacity": 500, "learning_starts": 0, "seed": 0}
CONTINUOUS = [rein.SAC, rein.TD3, rein.DDPG]
KINDS = [*CONTINUOUS, rein.DQN]
BOX = spaces.Box(-1.0, 1.0, (2,))


def made(kind, action_space=None, observation_space=BOX, **options):
    action_space = action_space or (spaces.Discrete(3) if kind is rein.DQN else BOX)
    return kind(observation_space, action_space, **{**SMALL, **options})


def transition(agent, num_envs, step, **changes):
    """Return a random transition with an action of the agent."""
    drawn = generator(0, "rows", step)
    observation, after = torch.rand(2, num_envs, 2, generator=drawn)
    no = torch.zeros(num_envs, dtype=torch.bool)
    reward = torch.randn(num_envs, generator=drawn)
    action, extras = agent.select_action(observation)
    return Transition(observation, action, reward, no, no, after, ~no, dict(extras))._replace(**changes)


def fed(agent, steps, num_envs=1, first=0, **changes):
    """Record `steps` random steps with updates in between. Returns the number of updates after each step."""
    counts = []
    for step in range(first, first + steps):
        agent.record_observation(transition(agent, num_envs, step, **changes))
        agent.optimize_model()
        counts.append(agent.updates)
    return counts


def parameters(agent):
    return dict(agent.networks.state_dict())


COUNTS = [  # options, num_envs, updates after each of the first steps
    ({}, 1, [1, 2, 3, 4]),
    ({}, 8, [8, 16, 24, 32]),
    ({"learning_starts": 2}, 1, [0, 0, 1, 2, 3]),
    ({"learning_starts": 16}, 8, [0, 0, 8, 16]),
    ({"learning_starts": 10}, 8, [0, 6, 14]),
    ({"update_to_data": 0.5}, 1, [0, 1, 1, 2, 2, 3]),
    ({"update_to_data": 0.1}, 1, [*[0] * 9, *[1] * 10, *[2] * 10, 3]),
    ({"update_to_data": 2.0}, 1, [2, 4, 6]),
    ({"update_to_data": 0.25}, 8, [2, 4, 6]),
    ({"update_to_data": 0.3}, 1, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]),
    ({"train_frequency": 4}, 1, [0, 0, 0, 4, 4, 4, 4, 8]),
    ({"train_frequency": 4, "update_to_data": 0.25}, 1, [0, 0, 0, 1, 1, 1, 1, 2]),
    ({"train_frequency": 16}, 8, [0, 16, 16, 32]),
    ({"train_frequency": 12}, 8, [0, 16, 16, 32]),
    ({"train_frequency": 4, "learning_starts": 3}, 1, [0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 8]),
    ({"train_frequency": 16, "update_to_data": 0.125, "learning_starts": 8}, 8, [0, 0, 2, 2, 4]),
]


@pytest.mark.parametrize(("options", "num_envs", "expected"), COUNTS, ids=str)
def test_number_of_updates_follows_the_options(options, num_envs, expected):
    assert fed(made(rein.DQN, **options), len(expected), num_envs) == expected


@pytest.mark.parametrize("kind", CONTINUOUS)
def test_all_agents_count_updates_equally(kind):
    assert fed(made(kind, learning_starts=8, update_to_data=0.5), 4, 4) == [0, 0, 2, 4]


@pytest.mark.parametrize("options", [{}, {"train_frequency": 4}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_skipped_rounds_of_updates_are_not_repeated(kind, options):
    agent, no = made(kind, **options), torch.zeros(4, dtype=torch.bool)
    assert fed(agent, 50, 4, valid=no) == [0] * 50
    assert fed(agent, 2, 4, first=50, terminated=~no) == [4, 8]


def test_actions_before_learning_starts_are_uniform():
    agent = made(
        rein.SAC, spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([5.0, 0.5], np.float32)), learning_starts=100
    )
    agent.record_observation(transition(agent, 4000, 0, reward=torch.zeros(4000)))
    action = agent.replay.columns["action"][0]
    for drawn, low, high in ((action[:, 0], -2.0, 5.0), (action[:, 1], 0.0, 0.5)):
        share = torch.histc(drawn, 7, low, high) / 4000
        assert torch.all((share - 1 / 7).abs() < 0.03)
    assert action.corrcoef().isfinite().any() and abs(torch.corrcoef(action.T)[0, 1]) < 0.06


BEGIN = {"learning_rate": 3e-3, "target_frequency": 2, "priority_alpha": 0.6}
EFFECTS = {
    "learning_rate": 1e-3,
    "gamma": 0.5,
    "capacity": 12,
    "batch_size": 7,
    "learning_starts": 3,
    "update_to_data": 0.5,
    "train_frequency": 5,
    "n_step": 3,
    "tau": 0.1,
    "target_frequency": 3,
    "prioritized": True,
    "hidden": (9,),
    "normalize_observation": True,
    "max_grad_norm": 0.01,
    "optimizer": torch.optim.SGD,
    "seed": 1,
}


@pytest.mark.default_cases(every=5)
@pytest.mark.parametrize("option", EFFECTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_option_has_an_effect(kind, option):
    given = {**BEGIN, "prioritized": option.startswith("priority")}
    one, other = made(kind, **given), made(kind, **{**given, option: EFFECTS[option]})
    for agent in (one, other):
        fed(agent, 30)
    assert first_difference(parameters(one), parameters(other)) is not None


@pytest.mark.parametrize("option", ["priority_alpha", "priority_beta"])
def test_every_priority_option_has_an_effect(option):
    value = {"priority_alpha": 0.9, "priority_beta": linear(0.4, 1.0, env_steps=20)}
    one, other = made(rein.DQN, prioritized=True), made(rein.DQN, prioritized=True, **{option: value[option]})
    for agent in (one, other):
        fed(agent, 30)
    assert first_difference(parameters(one), parameters(other)) is not None


@pytest.mark.parametrize("kind", CONTINUOUS)
def test_activation_is_used(kind):
    for activation in ("relu", "tanh", "silu", "gelu"):
        agent = made(kind, activation=activation)
        fed(agent, 3)
        assert agent.networks.actor.hidden.activation == agent.networks.critics.hidden.activation == activation


@pytest.mark.parametrize("kind", KINDS)
def test_memmap_storage_does_not_change_results(kind):
    one, other = made(kind), made(kind, storage="memmap")
    for agent in (one, other):
        fed(agent, 30)
    assert first_difference(parameters(one), parameters(other)) is None


@pytest.mark.default_cases("SAC-3", "TD3-1", "DDPG-3", "DQN-1")
@pytest.mark.parametrize("micro_batch", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_change_rounding_only(kind, micro_batch):
    plain = {"optimizer": torch.optim.SGD, "learning_rate": 0.05, "prioritized": True}
    whole, parts = (made(kind, micro_batch=rows, **plain) for rows in (None, micro_batch))
    for agent in (whole, parts):
        fed(agent, 20)
    assert whole.updates == parts.updates == 20
    for (name, one), other in zip(parameters(whole).items(), parameters(parts).values(), strict=True):
        torch.testing.assert_close(other, one, rtol=2e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_changes_rounding_only(kind):
    one, other = made(kind, learning_rate=1e-3), made(kind, learning_rate=1e-3, precision="bfloat16")
    for agent in (one, other):
        fed(agent, 10)
    assert first_difference(parameters(one), parameters(other)) is not None
    for first, second in zip(parameters(one).values(), parameters(other).values(), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=2.5e-2)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("kind", [*KINDS, rein.AWAC, rein.IQL])
def test_networks_without_hidden_layers_learn(kind, activation, precision):
    before, agent = (made(kind, hidden=(), activation=activation, precision=precision) for _ in range(2))
    fed(agent, 10)
    assert agent.updates == 10
    assert first_difference(parameters(before), parameters(agent)) is not None
    assert all(torch.isfinite(parameter).all() for parameter in parameters(agent).values())


@pytest.mark.parametrize("updates", [2.0, 2])
def test_learn_accepts_whole_floats(updates):
    agent = made(rein.DQN)
    fed(agent, 10)
    agent.learn(updates)
    assert agent.updates == 12


@pytest.mark.parametrize("kind", [rein.SAC, rein.DiscreteSAC, rein.TD3, rein.DDPG, rein.AWAC, rein.IQL])
def test_grad_norm_of_an_actor_critic_is_that_of_the_critics(kind, monkeypatch):
    agent, norms = made(kind, spaces.Discrete(3) if kind is rein.DiscreteSAC else BOX), []
    step = agent.learners["critics"].step

    def spy(*arguments, **options):
        metrics = step(*arguments, **options)
        norms.append(float(metrics["grad_norm"]))
        return metrics

    monkeypatch.setattr(agent.learners["critics"], "step", spy)
    agent.record_observation(transition(agent, 1, 0))
    agent.record_observation(transition(agent, 1, 1))
    metrics = [agent.learn(1) for _ in range(4)]
    assert [float(each["grad_norm"]) for each in metrics] == norms


@pytest.mark.parametrize("kind", KINDS)
def test_guard_can_skip_all_updates(kind):
    calls = []

    def guard(metrics, gradients):
        calls.append(sorted(metrics))
        return False

    agent, untouched = made(kind, guard=guard), parameters(made(kind))
    fed(agent, 10)
    assert first_difference(untouched, parameters(agent)) is None
    assert agent.updates == 10 and len(calls) >= 10 and all("grad_norm" in metrics for metrics in calls)


@pytest.mark.parametrize("kind", KINDS)
def test_targets_follow_by_tau(kind):
    def targets(agent):
        return {name: value.clone() for name, value in parameters(agent).items() if name.startswith("target")}

    fixed = made(kind, tau=0.0)
    before = targets(fixed)
    fed(fixed, 10)
    assert first_difference(before, targets(fixed)) is None
    copies = made(kind, tau=1.0, target_frequency=5)
    learned = fed(copies, 10) and parameters(copies)
    for name, value in targets(copies).items():
        source = name.replace("target_", "") if kind is not rein.DQN else name.replace("target.", "online.")
        assert torch.equal(value, learned[source]), name
    initial = targets(copies)
    fed(copies, 4, first=10)
    assert first_difference(initial, targets(copies)) is None
    fed(copies, 1, first=14)
    assert first_difference(initial, targets(copies)) is not None


class Counting(SimulatedEnvironment):
    """Observes the number of the step. The reward is 10 times the action plus the number of the step."""

    single_observation_space = spaces.Box(0.0, 1e6, (1,))
    single_action_space = spaces.Box(-2.0, 5.0, (1,))
    initial_range = ((0.0, 0.0),)

    def __init__(self, num_envs: int = 2, seed: int = 0) -> None:
        super().__init__(num_envs, seed=seed, max_episode_steps=6)

    def dynamics(self, state_SN, action):
        after = state_SN + 1.0
        return after, 10.0 * action[:, 0] + state_SN[0], after[0] == 4.0


@pytest.mark.parametrize("history", [0, 3])
@pytest.mark.parametrize("kind", CONTINUOUS)
def test_recorded_transitions_are_consistent(kind, history):
    """Rows contain (s_t, a_t, r_t, s_t+1). The last entry of an observation history is s_t."""
    environment = Counting() if not history else observation_history(Counting(), history)
    agent = kind(environment.single_observation_space, environment.single_action_space, **SMALL)
    rein.train(agent, environment, epochs=3, iterations=9)
    kept = {name: value.flatten(0, 1) for name, value in agent.replay.columns.items()}
    assert len(kept["reward"]) == 27 * 2
    for action, reward, before, after, terminated in zip(
        *(kept[name] for name in ("action", "reward", "observation", "next_observation", "terminated")), strict=True
    ):
        time = float(before.flatten()[-1])
        torch.testing.assert_close(reward, 10.0 * action[0] + time)
        assert float(after.flatten()[-1]) == time + 1.0
        assert bool(terminated) == (time == 3.0)
        if history:
            assert before.flatten().tolist() == [max(0.0, time - back) for back in (2, 1, 0)]
            assert after.flatten().tolist() == [max(0.0, time + 1 - back) for back in (2, 1, 0)]


@pytest.mark.parametrize("kind", CONTINUOUS)
def test_actions_are_scaled_to_the_bounds(kind):
    low, high = np.array([[-2.0, 100.0], [0.0, -1e-3]], np.float32), np.array([[5.0, 101.0], [8.0, 1e-3]], np.float32)
    agent = made(kind, spaces.Box(low, high))
    x = torch.tensor([[-1.0, -1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, -1.0, -1.0]])
    scale = agent.networks.scale
    action = scale.to_action(x)
    middle = (low + high) / 2
    torch.testing.assert_close(action[0], torch.tensor(np.stack([low[0], high[1]])))
    torch.testing.assert_close(action[1], torch.tensor(middle))
    torch.testing.assert_close(action[2], torch.tensor(np.stack([high[0], low[1]])))
    torch.testing.assert_close(scale.from_action(action), x, atol=1e-4, rtol=0)
    chosen = agent.select_action(torch.rand(50, 2))[0]
    assert all(agent.action_space.contains(row.numpy()) for row in chosen)


@pytest.mark.parametrize("kind", KINDS)
def test_reset_outside_a_step_cuts_n_step_returns(kind):
    agent = made(kind, n_step=3, learning_starts=100)
    for step in range(6):
        if step == 3:
            agent.observe_reset(torch.zeros(2, 2), torch.tensor([True, False]))
        agent.record_observation(transition(agent, 2, step, reward=torch.full((2,), 10.0**step)))
    taken = agent.replay.take(torch.arange(12), n_step=3, gamma=1.0).reward.view(6, 2).T.tolist()
    assert taken[0] == [111.0, 110.0, 100.0, 111000.0, 110000.0, 100000.0]
    assert taken[1] == [111.0, 1110.0, 11100.0, 111000.0, 110000.0, 100000.0]


@pytest.mark.parametrize("kind", KINDS)
def test_new_terminated_transitions_have_the_usual_priority(kind):
    agent = made(kind, prioritized=True, learning_starts=1000)
    for step in range(10):
        agent.record_observation(transition(agent, 4, step, terminated=torch.arange(4) == step % 4))
    sample = agent.replay.sample(4000, generator(0, "test"))
    assert 0.22 < sample.terminated.double().mean() < 0.28


@pytest.mark.parametrize("kind", KINDS)
def test_priorities_are_absolute_errors(kind):
    """Learned rows have priority `|error|^alpha`. The target of a terminated row is its reward."""
    agent = made(kind, prioritized=True, priority_alpha=1.0, batch_size=400, tau=0.0, learning_rate=0.0)
    agent.record_observation(
        transition(agent, 4, 0, reward=torch.tensor([0.0, 50.0, 100.0, 1000.0]), terminated=torch.ones(4) > 0)
    )
    agent.learn(1)
    priority = agent.replay.priorities[torch.arange(4)]
    torch.testing.assert_close(
        priority, torch.tensor([0.0, 50.0, 100.0, 1000.0], dtype=torch.float64), atol=5.0, rtol=0
    )


@pytest.mark.parametrize(
    "noise", [GaussianNoise, lambda sigma: OrnsteinUhlenbeck(sigma=sigma)], ids=["gaussian", "walk"]
)
@pytest.mark.parametrize("kind", [rein.TD3, rein.DDPG])
def test_noise_adapts_from_the_start(kind, noise):
    """The noise adapts from the second ended episode."""
    agent = made(kind, noise=noise(AdaptiveExploration(0.1, low=0.001, high=0.2, up=1.5, down=0.5)))
    scale = []
    for step in range(4):
        fed(agent, 1, 1, step, reward=torch.zeros(1), truncated=torch.ones(1) > 0)
        scale.append(agent.noise.amount())
    assert scale == pytest.approx([0.1, 0.15, 0.2, 0.2])


def test_epsilon_adapts_from_the_start():
    agent = made(rein.DQN, epsilon=AdaptiveExploration(0.5, up=1.5, down=0.5))
    fed(agent, 2, 1, reward=torch.zeros(1), terminated=torch.ones(1) > 0)
    assert agent.exploration() == pytest.approx(0.75)


@pytest.mark.parametrize("kind", [rein.TD3, rein.DDPG])
def test_noise_is_copied_per_agent(kind):
    noise = OrnsteinUhlenbeck()
    one, other = (made(kind, noise=noise) for _ in range(2))
    fed(one, 5)
    assert one.noise is not other.noise and noise.state_dict()["state"] is None


@pytest.mark.parametrize("name", ["batchsize", "critcs", "rollout_steps"])
@pytest.mark.parametrize("kind", KINDS)
def test_unknown_option_is_rejected(kind, name):
    near = {"batchsize": "batch_size", "critcs": "(huber|critics?)", "rollout_steps": ".*"}[name]
    message = f"{kind.__name__}: there is no option {name}(; did you mean {near}\\?|\\. Its options are .*gamma)"
    with pytest.raises(TypeError, match=message):
        made(kind, **{name: 3})


@pytest.mark.parametrize("kind", CONTINUOUS)
@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(2),
        spaces.Box(-np.inf, np.inf, (2,)),
        spaces.Box(np.float32([0, 0]), np.float32([0, 1])),
        spaces.Box(-3e38, 3e38, (2,)),
        spaces.Box(0.1, 0.1 + 1e-12, (2,), np.float64),
    ],
    ids=str,
)
def test_continuous_actions_need_bounds(kind, space):
    with pytest.raises(ValueError, match="continuous actions need a Box with finite bounds"):
        made(kind, space)


@pytest.mark.parametrize("kind", KINDS)
def test_observation_statistics_are_saved(kind):
    agent = made(kind, normalize_observation=True)
    fed(agent, 20, 2)
    assert agent.networks.preprocess.normalizer.rows == 40
    other = made(kind, normalize_observation=True)
    other.load_state_dict(copy_state(agent.state_dict()))
    assert first_difference(agent.state_dict(), other.state_dict()) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by the compiler
def test_compiled_training_changes_rounding_only(kind):
    one, other = (made(kind, compile=compile, learning_rate=1e-3) for compile in (False, True))
    for agent in (one, other):
        fed(agent, 10)
    for (name, first), second in zip(parameters(one).items(), parameters(other).values(), strict=True):
        torch.testing.assert_close(second, first, rtol=1e-3, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_loss_accepts_module_coefficients(kind, monkeypatch):
    """The coefficients of an actor loss contain critics, which cannot be converted to tensors."""
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    one, other = made(kind), made(kind, compile=True)
    for agent in (one, other):
        fed(agent, 5)
    torch.testing.assert_close(parameters(one), parameters(other), rtol=1e-4, atol=1e-6)
