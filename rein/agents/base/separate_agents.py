"""Agents of a population that act and learn one after the other.

Shapes: S learners, N environments of a learner, R = S * N rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rein.ops.trees import leaves, map_tree
from rein.types import Transition, Tree


class SeparateAgents:
    """S agents, each with its part of the rows. Base class of agents that are computed together."""

    common: Sequence[str] = ()  # options whose values must stay the same for all agents

    def __init__(self, agents: Sequence[Any]) -> None:
        self.agents = list(agents)
        self.device = torch.device(agents[0].device)
        # action and extras of all rows, and those of each agent
        self._selected: tuple[Any, Mapping[str, Any], list[Any]] = None, {}, []

    def select_action(self, observation: Tree) -> tuple[Tree, dict[str, Tree]]:
        """Return the exploring actions (R, ...) of all agents, and the tensors to record with them."""
        parts = zip(self.agents, split(observation, len(self.agents)), strict=True)
        chosen = [agent.select_action(part) for agent, part in parts]
        action = joined([mine for mine, _ in chosen])
        extras = {name: joined([more[name] for _, more in chosen]) for name in chosen[0][1]}
        self._selected = action, extras, chosen
        return action, extras

    def record_observation(self, transition: Transition) -> None:
        """Give each agent the transitions of its rows."""
        (action, extras, chosen), self._selected = self._selected, (None, {}, [])
        selected = action is not None and transition.action is action
        added = {name: x for name, x in transition.extras.items() if x is not extras.get(name)}
        transition = transition._replace(action=None if selected else transition.action, extras=added)
        for number, (agent, part) in enumerate(zip(self.agents, split(transition, len(self.agents)), strict=True)):
            mine, more = chosen[number] if chosen else (None, {})
            known = {name: x for name, x in more.items() if name in extras and name not in added}
            part = part._replace(extras={**known, **part.extras})
            agent.record_observation(part._replace(action=mine) if selected else part)

    def observe_reset(self, observation: Tree, mask: Tensor) -> None:
        """End the current episodes of the rows in `mask` (R,), which were reset outside a step."""
        both = split((observation, mask), len(self.agents))
        for agent, (mine, mine_N) in zip(self.agents, both, strict=True):
            agent.observe_reset(mine, mine_N)

    def optimize_model(self) -> dict[str, Tensor]:
        """Let every agent learn if its update is due. Returns metrics (S,)."""
        found = [agent.optimize_model() for agent in self.agents]
        settings: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
        metrics: dict[str, Tensor] = {}
        for name in dict.fromkeys(name for mine in found for name in mine):
            each = [torch.as_tensor(mine.get(name, math.nan), **settings) for mine in found]  # numbers or tensors
            metrics[name] = torch.stack([value.detach().mean() for value in each])
        return metrics

    def keep(self, kept: Sequence[int]) -> None:
        """Continue with these agents only."""
        self.agents = [self.agents[number] for number in kept]
        self._selected = None, {}, []

    def entries(self) -> list[dict[str, Any]]:
        """Return the entries of the state of each agent that are kept here instead of in the agent."""
        return [{} for _ in self.agents]

    def load_entries(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load these entries from the states of the agents."""
        self._selected = None, {}, []


def split(tree: Any, parts: int) -> list[Any]:
    """Return equal parts of the rows of a tree. Raises ValueError if there are none."""
    size = rows_of_part(tree, parts)
    return [map_tree(lambda x, i=i: x[i * size : (i + 1) * size], tree) for i in range(parts)]


def rows_of_part(tree: Any, parts: int) -> int:
    """Return the number of rows of one of equal parts of a tree. Raises ValueError if there are none."""
    rows = len(next(leaf for _, leaf in leaves(tree)))
    if rows % parts:
        raise ValueError(f"Population: {rows} rows cannot be split into {parts} equal parts")
    return rows // parts


def joined(parts: Sequence[Tree]) -> Tree:
    """Return the rows of all parts."""
    return map_tree(lambda *x: torch.cat(x), *parts)
