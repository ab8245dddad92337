"""Code that recipes share."""

from __future__ import annotations

from typing import Any

from gymnasium.wrappers import AtariPreprocessing

from rein.envs.gymnasium.adapter import make


def optimal_return(target_x: int, target_y: int) -> float:
    """Compute the mean over the five starts of the best return: -(d - 1) - ... - 1 - 0 from d steps away."""
    distances = [target_y + abs(target_x - x) for x in range(5)]
    return -sum(d * (d - 1) / 2 for d in distances) / len(distances)


def screen(size: int = 84) -> Any:
    """Make Pong as DQN saw it (Mnih et al. 2015): every fourth frame, max of two frames, `size` x `size` in grey."""
    # the wrapper reads the emulator itself; grey is the cheapest observation that Gymnasium returns besides
    raw = make("ALE/Pong-v5", {"frameskip": 1, "repeat_action_probability": 0.0, "obs_type": "grayscale"})
    return AtariPreprocessing(raw, screen_size=size)
