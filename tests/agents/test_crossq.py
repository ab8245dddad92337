"""CrossQ: targets from one pass through the critics, and the statistics of batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium import spaces

import rein
from rein.ops.random import generator
from rein.types import Transition

BOX = spaces.Box(-1.0, 1.0, (2,))
SMALL = {"hidden": (16,), "batch_size": 16, "capacity": 300, "seed": 0}


def filled(terminal: float = 0.5, **options: Any) -> rein.CrossQ:
    """Return an agent with recorded rows. Observations of terminal states are filled with `terminal`."""
    agent, drawn = rein.CrossQ(BOX, BOX, **{**SMALL, **options}), generator(0, "rows")
    for _ in range(10):
        observation, action, after = torch.rand(3, 4, 2, generator=drawn)
        reward, u = torch.rand(2, 4, generator=drawn)
        valid, terminated = torch.ones(4, dtype=torch.bool), u < 0.3
        after = torch.where(terminated.unsqueeze(1), terminal, after)
        agent.record_observation(Transition(observation, action, reward, terminated, ~valid, after, valid, {}))
    return agent


@pytest.mark.parametrize("n_step", [1, 3])
def test_target_and_value_come_from_one_pass_in_training_mode(n_step: int) -> None:
    agent = filled(n_step=n_step)
    sample, _ = agent.sample()
    state = agent.generator.get_state()
    critics, ended = agent.networks.critics, sample.terminated.unsqueeze(1)
    after = torch.where(ended, sample.observation, sample.next_observation)
    noise = torch.randn(2, 16, 2, generator=agent.generator)[0]
    agent.generator.set_state(state)
    with torch.no_grad():
        action, log_prob = agent.next_actions(after, noise)
        scaled = agent.networks.scale.from_action(sample.action)
        critics.train()
        both = critics(torch.cat((sample.observation, after)), torch.cat((scaled, action)))
    value, following = both.double().chunk(2, 1)
    discount = torch.as_tensor(sample.discount).double()
    target = sample.reward + discount * ~sample.terminated * (following.amin(0) - log_prob)  # alpha is 1
    _, error = agent.update_from(sample, None, report=True)
    torch.testing.assert_close(error.double(), (value - target).abs().mean(0), atol=1e-5, rtol=1e-4)


def test_observations_of_terminal_states_are_not_used() -> None:
    learned = []
    for terminal in (0.5, torch.nan):
        agent = filled(terminal)
        agent.learn(4)
        learned.append(agent.networks.state_dict())
    assert all(torch.equal(value, learned[1][name]) for name, value in learned[0].items())


def test_actor_update_does_not_change_the_statistics() -> None:
    """Each update counts one batch, also if the actor learns, and no critic has a target network."""
    agent = filled(actor_frequency=1)
    agent.learn(5)
    assert agent.networks.critics.hidden.batches.item() == 5
    assert not hasattr(agent.networks, "target_critics")
    assert not any(part.training for part in agent.networks.modules())
