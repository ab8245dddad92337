"""What the adapter refuses, and says why."""

from __future__ import annotations

import gymnasium
import pytest
import torch

from rein.envs.cartpole import CartPole
from rein.envs.gridworld import Gridworld
from rein.integrations.gymnasium import GymnasiumEnvironment

MAKERS = {
    "cartpole": lambda: CartPole(3, seed=0),
    "gridworld": lambda: Gridworld(3, seed=0),
    "gymnasium": lambda: GymnasiumEnvironment("CartPole-v1", 3, seed=0),
}


def test_a_factory_that_gives_one_object_twice_is_refused():
    one = gymnasium.make("CartPole-v1")
    with pytest.raises(ValueError, match="gave the same environment twice"):
        GymnasiumEnvironment(lambda: one, num_envs=2)


def test_an_environment_that_is_made_already_is_refused():
    with pytest.raises(TypeError, match="give what makes environments"):
        GymnasiumEnvironment(gymnasium.make("CartPole-v1"), num_envs=2)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("seeds", [torch.tensor([5]), torch.arange(4), torch.ones(3), [1, 2, 3]])
def test_seeds_of_another_number_or_type_are_refused(name, seeds):
    environment = MAKERS[name]()
    environment.reset()
    with pytest.raises(ValueError, match=r"reset_to: expected torch.int64 of shape \(3,\)"):
        environment.reset_to(seeds)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("mask", [torch.tensor([True]), torch.tensor([0, 1, 0])])
def test_masks_of_another_number_or_type_are_refused(name, mask):
    environment = MAKERS[name]()
    environment.reset()
    with pytest.raises(ValueError, match=r"reset_where: expected torch.bool of shape \(3,\)"):
        environment.reset_where(mask)


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_stays_what_it_was_while_the_environment_goes_on(name):
    environment = MAKERS[name]()
    action = torch.zeros(3, dtype=torch.int64)
    environment.reset()
    environment.apply_action(action)
    state = environment.state_dict()
    first = [environment.apply_action(action) for _ in range(12)]
    environment.load_state_dict(state)
    for before in first:
        after = environment.apply_action(action)
        assert torch.equal(before.observation, after.observation)
        assert torch.equal(before.terminated | before.truncated, after.terminated | after.truncated)


def test_the_time_limit_of_a_loaded_state_is_counted_from_where_it_was_saved():
    environment = CartPole(1, seed=0, max_episode_steps=8)
    environment.reset()
    state = environment.state_dict()
    actions = [torch.tensor([k % 2]) for k in range(8)]
    for action in actions[:3]:
        environment.apply_action(action)
    environment.load_state_dict(state)
    assert [bool(environment.apply_action(action).truncated) for action in actions] == [False] * 7 + [True]
