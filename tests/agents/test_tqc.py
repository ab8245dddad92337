"""TQC: targets, and limits of the number of dropped quantiles."""

from __future__ import annotations

import pytest
import torch
from gymnasium import spaces

import rein
from rein.ops.random import generator
from rein.types import Transition

BOX = spaces.Box(-1.0, 1.0, (2,))
SMALL = {"hidden": (16,), "batch_size": 16, "capacity": 300, "quantiles": 4, "critics": 3, "seed": 0}


def filled(**options: object) -> rein.TQC:
    agent, drawn = rein.TQC(BOX, BOX, **{**SMALL, **options}), generator(0, "rows")
    for _ in range(10):
        observation, action, after = torch.rand(3, 4, 2, generator=drawn)
        reward, u = torch.rand(2, 4, generator=drawn)
        valid = torch.ones(4, dtype=torch.bool)
        agent.record_observation(Transition(observation, action, reward, u < 0.3, ~valid, after, valid, {}))
    return agent


@pytest.mark.parametrize("n_step", [1, 3])
def test_targets_are_the_smallest_quantiles_of_all_target_critics(n_step: int) -> None:
    agent = filled(dropped_quantiles=1, n_step=n_step)
    sample, _ = agent.sample()
    noise = torch.randn(16, 2, generator=generator(0, "noise"))
    next_value = agent.next_values(sample.next_observation, noise, torch.tensor(0.3))
    target = agent.target(sample, next_value).double()
    assert target.shape == (16, 9)
    with torch.no_grad():
        distribution = agent.networks.actor.distribution(sample.next_observation)
        before_tanh = distribution.sample_from(noise)
        log_prob = distribution.log_prob(before_tanh).double()
        quantiles = agent.networks.target_critics(sample.next_observation, before_tanh.tanh()).double()
    for b in range(16):
        kept = sorted(quantiles[:, b].flatten().tolist())[:9]
        discount = sample.discount if n_step == 1 else float(sample.discount[b])
        for found, value in zip(target[b].tolist(), kept, strict=True):
            following = 0.0 if sample.terminated[b] else discount * (value - 0.3 * float(log_prob[b]))
            assert found == pytest.approx(float(sample.reward[b]) + following, abs=1e-5)


def test_dropping_all_quantiles_raises() -> None:
    with pytest.raises(ValueError, match="dropped_quantiles"):
        filled(dropped_quantiles=4)
