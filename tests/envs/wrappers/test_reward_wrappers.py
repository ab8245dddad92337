"""Tests of ScaleReward, ClipReward and SignReward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rein
from rein.envs.wrappers.rewards import ClipReward, ScaleReward, SignReward
from rein.testing.stateful import first_difference

CASES: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "scale": (lambda environment: ScaleReward(environment, -0.25), lambda reward: reward * -0.25),
    "clip": (ClipReward, lambda reward: reward.clamp(-1, 1)),
    "clip to a range": (lambda environment: ClipReward(environment, 0, 2.5), lambda reward: reward.clamp(0, 2.5)),
    "sign": (SignReward, torch.sign),
}


@pytest.mark.parametrize(("wrap", "function"), CASES.values(), ids=CASES)
def test_wrapper_changes_only_the_reward(
    clockwork: Any, wrap: Callable[[Any], Any], function: Callable[[Tensor], Tensor]
) -> None:
    plain, wrapped = clockwork(4), wrap(clockwork(4))
    assert torch.equal(plain.reset(), wrapped.reset())
    rewards = []
    for _ in range(20):
        one, other = (environment.apply_action(torch.ones(4, 2) / 8) for environment in (plain, wrapped))
        assert torch.equal(function(one.reward), other.reward)
        assert first_difference(one._replace(reward=None), other._replace(reward=None)) is None
        rewards.append(one.reward)
    reward = torch.cat(rewards)
    assert (reward < -1).any() and (reward > 2.5).any()


def test_statistics_use_rewards_of_wrappers_but_not_of_handlers(scripted: Any, listening: Any) -> None:
    """A handler of `action_applied` changes the reward of the agent, but not that of the statistics."""
    wrapped, shaped = ClipReward(scripted([3, 3])), scripted([3, 3])  # rewards 1, 2, 3
    agents = [listening(wrapped), listening(shaped)]
    loops = [rein.training_loop(*pair, epochs=1, iterations=3) for pair in zip(agents, (wrapped, shaped), strict=True)]

    @loops[1].event("action_applied")
    def clip(state: Any) -> None:
        known = state.step_state
        reward = known.transition.reward.clamp(-1, 1)
        state.step_state = known._replace(transition=known.transition._replace(reward=reward))

    returns = [loop.run().history[-1].metrics["episode_return"] for loop in loops]
    learned = [torch.stack([t.reward for t in agent.transitions]) for agent in agents]
    assert torch.equal(*learned)
    assert returns == [3.0, 6.0]


def test_bounds_in_wrong_order_raise(clockwork: Any) -> None:
    with pytest.raises(ValueError, match=r"ClipReward\(low=1, high=-1\)"):
        ClipReward(clockwork(1), 1, -1)
