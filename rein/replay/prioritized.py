"""A replay that samples more often what there was more to learn from.

Shapes: B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rein.replay.priorities import Priorities
from rein.replay.replay import Replay, Sample
from rein.replay.storage import Packing


class PrioritizedReplay(Replay):
    """A `Replay` whose rows are drawn in proportion to their `Priorities`: see there for the equations.

    Whoever learns from a sample weighs its rows by `weights(sample.probability, beta)`, and says in `update` what the
    errors were.
    """

    def __init__(
        self,
        capacity: int,
        *,
        alpha: float = 0.6,
        normalize: str = "batch",
        storage: str = "memory",
        device: torch.device | str = "cpu",
    ) -> None:
        """`alpha` and `normalize` are those of `Priorities`."""
        super().__init__(capacity, storage=storage, device=device)
        self._how = {"alpha": alpha, "normalize": normalize, "device": device}
        self.priorities = Priorities(1, **self._how)  # until the rows are known

    def _take(self, packing: Packing, slots: int) -> None:
        super()._take(packing, slots)
        self.priorities = Priorities(slots * self.num_envs, **self._how)

    def written(self, index_R: Tensor, valid_R: Tensor) -> None:
        """New rows have the largest priority so far; those that are not valid have none."""
        self.priorities.append(index_R, valid_R)

    def sample(
        self,
        batch_size: int,
        generator: torch.Generator,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        replacement: bool = True,
        fields: Sequence[str] = (),
    ) -> Sample:
        """As `Replay.sample`, each row as likely as its priority is large. Raises ValueError without `replacement`."""
        if not replacement:
            raise ValueError("sample(replacement=False): rows of a prioritized replay are drawn with replacement")
        self.flush()
        index_B, probability_B = self.priorities.sample(batch_size, generator)
        found = self._found(index_B, n_step, gamma, fields)
        return found._replace(probability=probability_B)

    def weights(self, probability_B: Tensor, beta: float) -> Tensor:
        """What to multiply the losses of a sample's rows by, (B,): see `Priorities.weights`."""
        return self.priorities.weights(probability_B, beta)

    def update(self, index_B: Tensor, td_error_B: Tensor) -> None:
        """These rows were learned from, with errors of these sizes."""
        self.priorities.update(index_B, td_error_B)

    def state_dict(self) -> dict[str, Any]:
        """The rows and their priorities."""
        return {**super().state_dict(), "priorities": self.priorities.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError for that of another capacity."""
        super().load_state_dict(state)
        if state["filled"]:
            self.priorities.load_state_dict(state["priorities"])
        else:
            self.priorities = Priorities(max(1, self.slots * self.num_envs), **self._how)
