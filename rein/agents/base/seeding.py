"""Seeding an agent that was built without a seed, when a loop gives it one."""

from __future__ import annotations

from typing import Any

from rein.agents.base.policies import share_parameters
from rein.ops.parallel import rank
from rein.ops.random import generator


def seed_anew(agent: Any, seed: int) -> None:
    """Be as if built with `seed`, but for what was loaded: that stays, and in mid-run the streams do too."""
    if not agent.loaded:
        before = agent.networks
        agent._build(seed)
        for old, new in zip(before.parameters(), agent.networks.parameters(), strict=True):
            new.requires_grad_(old.requires_grad)  # what was frozen stays so
        share_parameters(before, agent.networks)
    elif not agent.env_steps:
        agent._root, agent._generator = seed, generator(seed, "agent", rank(), device=agent.device)
    agent.seed = seed
