"""A2C: contract tests, probe environments, and equivalence with one policy-gradient step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rein
from rein.envs.probes import Bandit

SMALL: dict[str, Any] = {"rollout_steps": 5, "hidden": (16,), "learning_rate": 1e-2, "gamma": 0.9}


def fitted(environment: Any, kind: Any = rein.A2C, **options: Any) -> Any:
    return kind(environment.single_observation_space, environment.single_action_space, **{**SMALL, **options})


@pytest.mark.parametrize("normalize", [False, True])
def test_update_equals_first_ppo_update(normalize: bool) -> None:
    """At a ratio of 1, the gradients of the clipped surrogate and of A log pi are equal."""
    agents = []
    for kind, options in ((rein.A2C, {}), (rein.PPO, {"update_epochs": 1, "minibatches": 1})):
        environment = rein.envs.Gridworld(8, seed=0, max_episode_steps=9)
        same = {"gae_lambda": 0.9, "normalize_advantage": normalize, "entropy_coefficient": 0.01}
        agent = fitted(environment, kind, seed=0, **same, **options)
        initial = [p.detach().clone() for p in agent.networks.parameters()]
        rein.train(agent, environment, epochs=1, iterations=5)
        assert agent.updates == 1
        assert any(not torch.equal(p, q) for p, q in zip(agent.networks.parameters(), initial, strict=True))
        agents.append(agent)
    for one, other in zip(*(agent.networks.parameters() for agent in agents), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def test_defaults_match_the_paper() -> None:
    environment = Bandit(1, seed=0)
    spaces = environment.single_observation_space, environment.single_action_space
    assert {name: rein.A2C(*spaces).config[name] for name in ("learning_rate", "rollout_steps", "gae_lambda")} == {
        "learning_rate": 7e-4,
        "rollout_steps": 5,
        "gae_lambda": 1.0,
    }
    assert rein.A2C(*spaces, rollout_steps=7).config["rollout_steps"] == 7
