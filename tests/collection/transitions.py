"""Comparison of stored transitions with a plain loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rein.envs.gymnasium.adapter import GymnasiumEnvironment


def check_transitions(run: Any, env_id: str) -> int:
    """Check that the stored transitions equal those of a plain loop with the same actions. Return their number."""
    plain, transitions = GymnasiumEnvironment(env_id, 1), 0
    for number in run.episodes["id"]:
        episode = run.episode(number)
        observation = plain.reset_to(torch.tensor([episode.seed]))
        for step in range(episode.length):
            assert np.array_equal(observation[0], episode.fields["observation"][step])
            time_step = plain.apply_action(torch.tensor(episode.fields["action"][step])[None])
            assert time_step.reward[0] == float(episode.fields["reward"][step])
            assert bool(time_step.terminated[0]) == (episode.terminated and step == episode.length - 1)
            observation = time_step.final_observation
        transitions += episode.length
    return transitions
