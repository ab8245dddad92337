"""Options out of range are rejected with their names."""

from __future__ import annotations

import math
from typing import Any

import pytest
from gymnasium import spaces

import rein

CONTINUOUS = (rein.SAC, rein.TD3, rein.AWAC, rein.IQL)
FALLING, RISING = rein.schedules.linear(0.1, -0.1, updates=5), rein.schedules.linear(2.0, 0.0, env_steps=10)
INVALID: dict[Any, list[tuple[str, list[Any]]]] = {
    rein.PPO: [
        *[("gamma", [None, "0.9", True, 1.1, math.nan, 1j]), ("learning_rate", [-1.0]), ("clip", [-0.1])],
        *[("max_grad_norm", [-1.0, math.nan]), ("value_coefficient", [-1.0]), ("value_clip", [0.0])],
        *[("entropy_coefficient", [FALLING]), ("minibatches", [0]), ("update_epochs", [0]), ("rollout_steps", [0])],
        *[("threads", [0]), ("micro_batch", [0]), ("precision", ["float16"])],
    ],
    rein.PQN: [
        *[("update_epochs", [0]), ("rollout_steps", [0]), ("minibatches", [0]), ("q_lambda", [1.5])],
        *[("gamma", [-0.1]), ("epsilon", [RISING]), ("precision", ["float8"])],
    ],
    rein.QLearning: [("learning_rate", [-0.1, 1.1]), ("gamma", [1.5, math.nan]), ("epsilon", [-0.1])],
    rein.DQN: [
        *[("capacity", [0]), ("batch_size", [0, 10**9]), ("train_frequency", [0]), ("n_step", [0])],
        *[("target_frequency", [0]), ("gamma", [1.1, -0.1]), ("tau", [1.5, -0.1]), ("update_to_data", [0.0])],
        *[("learning_starts", [-1]), ("learning_rate", [-1.0]), ("max_grad_norm", [0.0]), ("seed", [-1])],
        *[("priority_alpha", [2.0]), ("priority_beta", [-1.0]), ("epsilon", [1.5, -0.5, FALLING])],
        *[("temperature", [-2.0]), ("huber", [0.0, -1.0])],
    ],
    rein.RecurrentDQN: [
        *[("sequence_length", [0, 2.5]), ("burn_in", [-1, 1.5]), ("epsilon", [1.5]), ("huber", [0.0])],
        ("value_rescaling", [1]),
    ],
    rein.IQN: [
        *[("quantiles", [0, 2.5]), ("target_quantiles", [0]), ("action_quantiles", [0]), ("cosines", [0])],
        *[("risk", [0.0, -1.0, 1.5, math.nan]), ("huber", [0.0, math.inf, None]), ("epsilon", [1.5])],
    ],
    rein.Rainbow: [("atoms", [1]), ("value_min", [math.nan]), ("noise_std", [-0.1])],
    rein.SAC: [
        *[("critics", [0]), ("actor_frequency", [0, 1.5]), ("initial_temperature", [0.0, math.inf])],
        *[("temperature", [0.0, -1.0, "auto"]), ("capacity", [math.nan, True]), ("batch_size", [2.5])],
        *[("target_frequency", [1.5]), ("target_entropy", [math.nan, "auto"]), ("hidden", [(0,), 64])],
        *[("update_to_data", [None, math.inf]), ("learning_starts", [-1])],
        *[("target_subset", [0]), ("demonstration_fraction", [-0.1, 1.0])],
    ],
    rein.DiscreteSAC: [("target_entropy", [math.nan, "auto"])],
    rein.TQC: [("quantiles", [1]), ("dropped_quantiles", [-1])],
    rein.TD3: [("critics", [0]), ("actor_frequency", [0]), ("target_noise", [-0.1]), ("target_noise_clip", [-0.1])],
    rein.AWAC: [("temperature", [0.0]), ("weights", ["linear"]), ("max_weight", [0.0]), ("critics", [0])],
    rein.IQL: [
        *[("expectile", [1.0, 0.0]), ("inverse_temperature", [-1.0]), ("max_weight", [0.0]), ("critics", [0])],
    ],
}
CASES = [(kind, name, value) for kind, rows in INVALID.items() for name, values in rows for value in values]


@pytest.mark.parametrize(("kind", "name", "value"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_option_out_of_range_is_rejected(kind: Any, name: str, value: Any) -> None:
    box = spaces.Box(-1.0, 1.0, (2,))
    observation = spaces.Discrete(2) if kind is rein.QLearning else box
    with pytest.raises(ValueError, match=rf"{kind.__name__}.*{name}"):
        kind(observation, box if kind in CONTINUOUS else spaces.Discrete(2), **{name: value})
