"""Base class of agents of a population that are computed together.

Shapes: S learners, B rows of a learner, F features of an observation.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rein.agents.population import SeparateAgents, rows_of_part, split
from rein.options import options_of
from rein.types import Tree


class StackedAgents(SeparateAgents, abc.ABC):
    """Agents of one class whose options are equal, except for those named in `different`."""

    different: ClassVar[Sequence[str]]
    required: ClassVar[Mapping[str, Any]] = {}  # only supported values of options

    def __init__(self, agents: Sequence[Any]) -> None:
        super().__init__(agents)
        self.first: Any = self.agents[0]
        changing = (name for name, option in options_of(type(self.first)).items() if not option.metadata["fixed"])
        self.common = [name for name in changing if name not in self.different]

    @classmethod
    def supports(cls, agents: Sequence[Any]) -> bool:
        """Return whether agents of this class can be computed together."""
        alike = [
            {name: x is None if name in cls.different else x for name, x in agent.config.items()} for agent in agents
        ]
        supported = all(getattr(agents[0], name) == value for name, value in cls.required.items())
        return (
            supported and all(options == alike[0] for options in alike) and not agents[0].networks.preprocess.has_inputs
        )

    def check_options(self) -> None:
        """Raise ValueError if an option was changed to values that cannot be computed together."""
        for name in self.common:
            values = [getattr(agent, name) for agent in self.agents]
            if any(value != self.required.get(name, values[0]) for value in values):
                raise ValueError(
                    f"Population: {name} was changed to {values}, but learners with these values cannot be computed "
                    f"together: pass them to Population({name}=...)"
                )

    def features(self, observation: Tree) -> Tensor:
        """Return preprocessed observations (S, B, F) of S B rows."""
        if self.first.normalize_observation:
            parts = zip(self.agents, split(observation, len(self.agents)), strict=True)
            return torch.stack([agent.networks.preprocess(part) for agent, part in parts])
        shape = len(self.agents), rows_of_part(observation, len(self.agents))
        return self.first.networks.preprocess(observation).unflatten(0, shape)

    def keep(self, numbers: Sequence[int]) -> None:
        """Continue with these agents only. The networks of the others keep the memory of the former stack."""
        super().keep(numbers)
        self.first = self.agents[0]
        self.stack()

    @abc.abstractmethod
    def stack(self) -> None:
        """Stack the networks and the optimizers of the agents."""
