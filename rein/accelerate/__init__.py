"""Faster ways to compute the same results. You can skip this package when you read the algorithms.

Nothing imports it: `rein.accelerators` loads it, and finds an accelerator by the kinds below. Results agree up to
rounding.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rein.accelerators import register

logger = logging.getLogger("rein")


@register
def layers(activation: str) -> Callable[..., Any] | None:
    """Return a function of (inputs, parameters) that evaluates the layers of a `Stack` without gradients."""
    from rein.accelerate.fused_layers import FUSED, fused

    return functools.partial(fused, activation) if activation in FUSED else None


@register
def learner(agent: Any) -> Callable[..., Any]:
    """Return the class of the learners of an agent, with its threads and compilation."""
    from rein.accelerate.fast_learner import FastLearner

    return functools.partial(FastLearner, threads=agent.threads, compile=agent.compile)


@register
def update(agent: Any) -> Callable[..., Any] | None:
    """Return a faster `update` of a replay agent."""
    from rein.accelerate.products import with_fast_products

    return with_fast_products(agent)


@register
def rollout_program(loop: Any, agent: Any, environment: Any, rows: Any, finite: Any, host_work: Sequence[Any]) -> Any:
    """Return the steps of a loop whose rollouts are programs, with `compile=True` on GPUs.

    Returns None if an entry of `host_work` is set, which needs the host in each step.
    """
    from rein.accelerate.compiled import has_graphs
    from rein.accelerate.rollout_ahead import RolloutAhead, can_run_ahead

    if any(host_work) or rows.derive is not None or not has_graphs(torch.device(agent.device)):
        return None
    return RolloutAhead(loop, agent, environment, rows, finite) if can_run_ahead(agent, environment) else None


@register
def rollout_update(agent: Any) -> Callable[..., Any] | None:
    """Return the update of an on-policy agent with a full rollout as one program, with `compile=True` on GPUs."""
    from rein.accelerate.compiled import has_graphs
    from rein.accelerate.update_program import UpdateProgram, has_program

    return UpdateProgram(agent) if has_graphs(agent.device) and has_program(agent) else None


@register
def graph(function: Callable[..., Any], device: torch.device) -> Callable[..., Any] | None:
    """Return a small function as a CUDA graph. On the CPU, compiling it does not pay off."""
    from rein.accelerate.compiled import compiled, has_graphs

    return compiled(function, device) if has_graphs(device) else None


@register
def step(function: Callable[..., Any], inputs: Any) -> Callable[..., Any]:
    """Return the step of a simulated environment, compiled for inputs of these shapes."""
    from rein.accelerate.compiled import compiled_for

    return compiled_for(function, inputs)


@register
def agents(kind: type) -> Any:
    """Return the class that computes the learners of a `Population` together, if they are of exactly this class."""
    from rein.accelerate.stacked import on_policy_agents, replay_agents

    return {**on_policy_agents.ENGINES, **replay_agents.ENGINES}.get(kind)


@register
@functools.cache
def sum_tree() -> Any:
    """Return the functions of `rein.replay.prioritized`, compiled by numba. Importing it takes half a second."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        return importlib.import_module("rein.accelerate.compiled_tree")
    except ImportError as error:  # numba does not import with a newer numpy than it supports
        logger.warning("prioritized replay uses torch, because the installed numba cannot be imported: %s", error)
        return None
