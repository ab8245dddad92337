"""Tasks that several recipes share."""

from __future__ import annotations

import functools
from typing import Any

from gymnasium.wrappers import AtariPreprocessing

from rein.envs.gymnasium.adapter import GymnasiumEnvironment, make_one
from rein.envs.wrappers.observations import FrameStack
from rein.handlers.evaluate_every import evaluate_every
from rein.handlers.record_solved import record_solved
from rein.loop import Loop
from rein.networks.recurrent import GRU, LSTM, MinimalGRU
from rein.recipes.recipe import Builder

CORES = {"lstm": LSTM, "gru": GRU, "mingru": MinimalGRU, "none": None}


def optimal_return(target_x: int, target_y: int) -> float:
    """Compute the best mean return on the 5 x 5 Gridworld.

    It is the mean of -(d - 1) - ... - 1 - 0 over the distances d from the five initial positions.
    """
    distances = [target_y + abs(target_x - x) for x in range(5)]
    return -sum(d * (d - 1) / 2 for d in distances) / len(distances)


def gridworld_loop(
    build: Builder, target: tuple[int, int], *, steps: int, every: int, stop: bool, episodic: bool = False, **test: Any
) -> Loop:
    """Build a loop on the Gridworld that is solved within 0.5 of the best return in episodes of at most `steps` steps.

    `test` are options of the environment in which the policy is evaluated every `every` epochs.
    """
    environment = build.environment(possible_targets=[target])
    agent = build.agent(environment)
    loop = build.loop(agent, environment, episodic=episodic)
    test_environment = build.evaluation_environment(200, possible_targets=[target], **test)
    evaluate_every(loop, agent.policy(), test_environment, episodes=200, max_episode_steps=steps, every=every)
    record_solved(loop, "evaluation_return", at_least=optimal_return(*target) - 0.5, stop=stop)
    return loop


def pong_screens(num_envs: int = 8, seed: int | None = None, *, size: int = 84) -> FrameStack:
    """Create Pong environments that observe the last four frames.

    Args:
        size: width and height of the screen in pixels; 84 in Mnih et al. (2015), 42 takes a quarter of the time.
    """
    return FrameStack(GymnasiumEnvironment(screen, num_envs, seed, size=size), 4)


def screen(size: int) -> Any:
    """Create Pong as in Mnih et al. (2015): every fourth frame, maximum of two frames, grayscale, `size` x `size`."""
    # the wrapper reads the emulator directly, so choose the cheapest observation for Gymnasium: grayscale
    raw = make_one("ALE/Pong-v5", {"frameskip": 1, "repeat_action_probability": 0.0, "obs_type": "grayscale"})
    return AtariPreprocessing(raw, screen_size=size)


def core_factory(core: str, features: int) -> Any:
    """Return the factory of a recurrent core by name, or None for "none". Raises ValueError for unknown names."""
    if core not in CORES:
        raise ValueError(f"core={core!r}: use one of {', '.join(CORES)}")
    kind = CORES[core]
    return None if kind is None else functools.partial(kind, features=features)
