"""DQN with hindsight reaches goals that DQN alone never reaches."""

from __future__ import annotations

from typing import Any

import pytest

import rein
from rein.envs.probes import BitFlip


@pytest.mark.slow
def test_goals_of_twenty_bits_are_reached_with_hindsight_only() -> None:
    """Without hindsight, no goal is reached in 500,000 steps either."""

    def success_rate(env_steps: int, **options: Any) -> float:
        env = BitFlip(16, seed=0)
        agent = rein.DQN(
            env,
            hidden=(256,),
            gamma=0.95,
            tau=0.05,
            epsilon=0.1,
            train_frequency=16,
            update_to_data=0.25,
            capacity=200_000,
            seed=0,
            **options,
        )
        rein.train(agent, env, env_steps=env_steps, seed=0)
        return rein.evaluate(agent, BitFlip(200, seed=1), episodes=200).success_rate

    hindsight = rein.replay.Hindsight(BitFlip.compute_reward, compute_terminated=BitFlip.compute_terminated)
    assert success_rate(41_000, hindsight=hindsight) >= 0.95
    assert success_rate(41_000) == 0.0
