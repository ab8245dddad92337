"""Representation of agents."""

from __future__ import annotations

import pytest

import rein

CARTPOLE, PENDULUM = rein.envs.CartPole(1), rein.envs.Pendulum(1)


@pytest.mark.parametrize(
    ("kind", "env"),
    [
        (rein.PPO, CARTPOLE),
        (rein.PQN, CARTPOLE),
        (rein.DQN, CARTPOLE),
        (rein.RecurrentDQN, CARTPOLE),
        (rein.SAC, PENDULUM),
        (rein.QLearning, rein.envs.Gridworld(1)),
    ],
)
def test_defaults_are_not_shown(kind, env) -> None:
    assert repr(kind(env)) == f"{kind.__name__}()"


def test_options_that_differ_from_their_defaults_are_shown() -> None:
    agent = rein.PPO(CARTPOLE, gamma=0.9, hidden=(8, 8), seed=3)
    assert repr(agent) == "PPO(seed=3, gamma=0.9, hidden=(8, 8))"


def test_policy_repr_shows_the_agent_and_names_of_other_libraries_suggest_predict() -> None:
    agent = rein.PPO(CARTPOLE)
    policy = agent.policy()
    assert repr(policy) == "AgentPolicy(PPO(), explore=False)"
    with pytest.raises(AttributeError, match=r"predict\(observation\)"):
        _ = policy.get_action  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"policy\(\)\.predict"):
        _ = agent.predict  # type: ignore[attr-defined]


def test_positional_option_is_rejected() -> None:
    with pytest.raises(TypeError, match="keyword"):
        rein.PPO(CARTPOLE, 3e-4)
